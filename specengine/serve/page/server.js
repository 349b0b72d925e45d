// The server's endpoints.

// Splits what comes of a stream into events; each is {data}, or {before: a place in the queue}, or {ping: true}.
export class Events {
  #rest = "";

  push(text) {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop();
    return parts.map(eventOf).filter((event) => event !== null);
  }
}

function eventOf(text) {
  if (text.startsWith("data: ")) return { data: text.slice(6) };
  const place = text.match(/^: (\d+) before$/);
  if (place) return { before: Number(place[1]) };
  return text.startsWith(":") ? { ping: true } : null;
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

// The chunks of a streamed answer, and {before} and {ping} while there are none. Throws Refused.
export async function* chunks(body, key, signal) {
  const headers = { ...headersFor(key), "Content-Type": "application/json" };
  const answer = await fetch("v1/chat/completions", { method: "POST", signal, headers, body: JSON.stringify(body) });
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const lost = (error) => {
    throw error.name === "AbortError" ? error : new Refused("The connection ended in the middle of the answer.");
  };
  const events = new Events();
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) lost(new Error());
    for (const event of events.push(value)) {
      if (event.data === undefined) {
        yield event;
        continue;
      }
      if (event.data === "[DONE]") return;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Refused(chunk.error.message);
      yield chunk;
    }
  }
}
