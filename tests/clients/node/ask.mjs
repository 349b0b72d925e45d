// Asks a server by Vercel's AI SDK and prints what came back, as JSON: node ask.mjs ADDRESS PROVIDER
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [address, provider] = process.argv.slice(2)
const baseURL = `${address}/v1`
const makers = {
  compatible: () =>
    createOpenAICompatible({ name: 'local', baseURL, includeUsage: true, supportsStructuredOutputs: true })('any'),
  responses: () => createOpenAI({ baseURL, apiKey: 'any' })('any'),
}
const base = { model: makers[provider](), prompt: 'Hello', maxOutputTokens: 200, maxRetries: 0 }
const called = []
const look_up = tool({
  description: 'Look a river up',
  inputSchema: z.object({ river: z.enum(['Nile', 'Po']) }),
  execute: async ({ river }) => {
    called.push(river)
    return 'wet'
  },
})
const schema = z.object({ river: z.enum(['Nile', 'Po']) })

async function whole(options) {
  const { text, finishReason, usage, steps } = await generateText({ ...base, ...options })
  return { text, finishReason, output: usage.outputTokens, steps: steps.length }
}

async function streamed(options) {
  const parts = []
  const result = streamText({ ...base, ...options, onError: ({ error }) => { throw error } })
  for await (const part of result.textStream) parts.push(part)
  const [text, finishReason, usage, steps] = await Promise.all([result.text, result.finishReason, result.usage, result.steps])
  return { text, finishReason, output: usage.outputTokens, steps: steps.length, parts }
}

async function structured(options) {
  const format = { output: Output.object({ schema }) }
  const partial = streamText({ ...base, ...format, ...options })
  for await (const _ of partial.partialOutputStream);
  return [(await generateText({ ...base, ...format, ...options })).output, await partial.output]
}

const tools = { tools: { look_up }, stopWhen: stepCountIs(3) }
console.log(JSON.stringify({
  whole: await whole({}),
  streamed: await streamed({}),
  loop: await whole(tools),
  loopStreamed: await streamed(tools),
  forced: (await generateText({ ...base, tools: { look_up }, toolChoice: 'required' })).toolCalls.map(({ input }) => input),
  structured: await structured({}),
  structuredLoop: await structured(tools),
  called,
}))
