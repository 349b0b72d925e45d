// The server's endpoints.

// Splits what comes of a stream into events; each is {data}, or {before: a place in the queue}, {loading: true} or
// {ping: true}; with an id: the event's number, where the server keeps the stream.
export class Events {
  #rest = "";

  push(text) {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop();
    return parts.map(eventOf).filter((event) => event !== null);
  }
}

function eventOf(event) {
  const numbered = event.match(/^id: (\d+)\n/), text = numbered ? event.slice(numbered[0].length) : event;
  const id = numbered ? { id: Number(numbered[1]) } : {};
  if (text.startsWith("data: ")) return { data: text.slice(6), ...id };
  const place = text.match(/^: (\d+) before$/);
  if (place) return { before: Number(place[1]), ...id };
  if (text === ": loading") return { loading: true, ...id };
  return text.startsWith(":") ? { ping: true, ...id } : null;
}

export class Refused extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const headersFor = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function refusal(answer) {
  const told = await answer.json().catch(() => ({}));
  return new Refused(told.error?.message ?? `The server answers with status ${answer.status}.`, answer.status, told.error?.code);
}

export async function models(key) {
  const answer = await fetch("v1/models", { headers: headersFor(key) });
  if (!answer.ok) throw await refusal(answer);
  return (await answer.json()).data;
}

const TRIES_SECONDS = 60; // as long as the server keeps a stream that nobody reads
export const LOST = "The connection ended in the middle of the answer.";

// The chunks of a streamed answer, and {before}, {loading} and {ping} while there are none; with the event's number where the server
// keeps the stream under this name. A kept stream is taken up again where its connection ends: {lost: true}. Without a
// body it is taken up from the event after the last one. Throws Refused.
export async function* chunks(body, key, signal, name = null, last = null) {
  const headers = { ...headersFor(key), "Content-Type": "application/json", ...(name ? { "X-Stream-Id": name } : {}) };
  let answer = body && await fetch("v1/chat/completions", { method: "POST", signal, headers, body: JSON.stringify(body) });
  let kept = !body, since = performance.now();
  for (;;) {
    answer ??= await takenUp(name, last, key, signal);
    if (answer && !answer.ok) throw await refusal(answer);
    try {
      for await (const event of answer ? eventsOf(answer) : []) {
        since = performance.now();
        kept ||= event.id !== undefined;
        last = event.id ?? last;
        if (event.data === "[DONE]") return;
        const chunk = event.data === undefined ? event : JSON.parse(event.data);
        if (chunk.error) throw new Refused(chunk.error.message);
        yield Object.assign(chunk, { event: event.id });
      }
    } catch (error) {
      if (signal.aborted || error instanceof Refused) throw error;
    }
    if (!kept || performance.now() - since > 1000 * TRIES_SECONDS) throw new Refused(LOST);
    yield { lost: true };
    await new Promise((done) => setTimeout(done, 500));
    answer = null;
  }
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(), events = new Events();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield* events.push(part.value);
}

// A kept stream from the event after the last one on; null where the server does not answer.
async function takenUp(name, last, key, signal) {
  const headers = { ...headersFor(key), "Last-Event-ID": last };
  const answer = await fetch(`v1/stream/${name}`, { signal, headers, cache: "no-store" }).catch((error) => {
    if (signal.aborted) throw error;
    return null;
  });
  if (answer?.status === 404) throw new Refused(LOST);
  return answer;
}

// Have the server keep a stream no longer, and write it no further.
export const end = (name, key) => fetch(`v1/stream/${name}`, { method: "DELETE", headers: headersFor(key), keepalive: true }).catch(() => {});
