// Answers: what is sent, what comes of it, and the same once more without trees.
import { cannotKeep, drawList, forget, keep, openChat, showWork } from "./chats.js";
import * as talk from "./conversation.js";
import { at, element, randomId } from "./dom.js";
import * as figures from "./figures.js";
import { askForKey, meet, outOfBounds, values } from "./form.js";
import { drawFoot, drawLog, drawText, mark } from "./log.js";
import * as panel from "./panel.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import { compared, cycles, cyclesOf, holdWhileWriting, interrupt, job, page, running, say, sayOf } from "./state.js";
import * as store from "./store.js";

const READING = "Reading the prompt";

export async function send(text) {
  if (job() || !text.trim()) return;
  if (page.model === null) return meet();
  const conversation = page.open, before = page.open.leaf;
  let asked;
  try {
    asked = options();
  } catch (error) {
    return say(error.message, true);
  }
  const user = talk.append(conversation, { role: "user", text });
  at("message").value = "";
  if (await answer(asked)) return;
  talk.remove(conversation, user); // nothing was answered: the message can be sent again
  conversation.leaf = before;
  if (before === null && !Object.keys(conversation.turns).length) forget(conversation);
  else keep(conversation);
  if (conversation !== page.open) return;
  const said = at("status").textContent;
  at("message").value = text;
  openChat(conversation);
  say(said, true);
}

export async function regenerate(turn) {
  if (job()) return;
  const conversation = page.open;
  try {
    const asked = options();
    conversation.leaf = turn.parent;
    if (await answer(asked)) return;
    const said = at("status").textContent;
    talk.choose(conversation, turn);
    if (conversation === page.open) await openChat(conversation);
    sayOf(conversation, said, true);
  } catch (error) {
    say(error.message, true);
  }
}

function options() {
  const wrong = outOfBounds();
  if (wrong) throw wrong;
  const asked = settings.asked(values());
  asked.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  return asked;
}

const requestOf = (conversation, turn, more = {}) => ({
  model: page.models.includes(turn.model) ? turn.model : page.model,
  messages: talk.messages(conversation, turn.parent, turn.system), ...turn.asked, ...more,
  stream: true, stream_options: { include_usage: true }, return_cycles: true, return_progress: true,
});

// Answer the turn that ends the open chat; returns whether anything was answered.
async function answer(asked) {
  const conversation = page.open;
  const turn = talk.append(conversation, {
    role: "assistant", text: "", thoughts: "", ends: [], asked, system: at("system").value.trim(), model: page.model, figures: figures.nothing(), note: "",
  });
  cycles.set(turn.id, []);
  const wrong = await write(conversation, turn, requestOf(conversation, turn));
  const answered = turn.figures.cycles > 0 || !wrong;
  if (!answered) talk.remove(conversation, turn);
  await finish(conversation, turn, answered, wrong);
  return answered;
}

// Continue an answer that was cut. Spaces at its end are said anew, as templates leave them out.
export async function goOn(turn) {
  if (job()) return;
  if (page.model === null) return meet();
  const conversation = page.open, { note } = turn;
  turn.text = turn.text.trimEnd();
  turn.ends = turn.ends.map((end) => Math.min(end, turn.text.length));
  const begun = turn.figures.cycles;
  const request = requestOf(conversation, turn, { messages: talk.messages(conversation, turn.id, turn.system), continue_final_message: true });
  const wrong = await write(conversation, turn, request);
  if (wrong && turn.figures.cycles === begun) turn.note = note;
  await finish(conversation, turn, true, wrong);
}

// Take up an answer that the server may still write, after its page was closed or loaded again.
export async function takeUp(conversation, turn) {
  const wrong = running.has(conversation.id) ? server.LOST : await write(conversation, turn, null);
  if (wrong === server.LOST) interrupt(turn);
  await finish(conversation, turn, true, wrong === server.LOST ? "" : wrong);
}

// Have the server write the turn, or go on where no request is given; returns what went wrong, or "". What has come is kept
// every second, and when the page goes.
async function write(conversation, turn, request) {
  panel.stopReplay();
  if (request) Object.assign(turn, { stream: randomId(), event: null });
  Object.assign(turn, { note: "", cut: false, live: true });
  const working = { control: new AbortController(), turn, status: "Waiting for the server", since: performance.now() };
  running.set(conversation.id, working);
  keep(conversation);
  drawLog();
  showWork();
  if (conversation === page.open) panel.show(turn);
  const key = at("key").value, { signal } = working.control;
  const save = () => page.chats.includes(conversation) && store.saveWithCycles(conversation, turn.id, cyclesOf(turn)).catch(cannotKeep);
  const saving = setInterval(save, 1000), telling = setInterval(() => tellSeconds(conversation, working), 250), letGo = holdWhileWriting(turn);
  addEventListener("pagehide", save);
  let wrong = "";
  try {
    for await (const chunk of server.chunks(request, key, signal, turn.stream, turn.event)) take(conversation, working, chunk);
  } catch (error) {
    if (error.status === 401) askForKey();
    if (!signal.aborted) wrong = error.message;
    Object.assign(turn, { note: wrong || "Stopped.", cut: true });
  }
  if (turn.event !== null || signal.aborted) server.end(turn.stream, key);
  clearInterval(saving);
  clearInterval(telling);
  removeEventListener("pagehide", save);
  letGo();
  running.delete(conversation.id);
  turn.live = false;
  delete turn.stream;
  delete turn.event;
  return wrong;
}

// Tell how long a prompt is being read, and how much of it has been. In silence it is: who waits in the queue is told so at
// once. No seconds are read aloud.
function tellSeconds(conversation, working) {
  const seconds = Math.floor((performance.now() - working.since) / 1000), line = at("status");
  if (working.since === null || seconds < 2) return;
  if (working.status !== READING) {
    working.status = READING;
    sayOf(conversation, READING);
    drawList();
  }
  if (conversation !== page.open || line.firstChild?.textContent !== READING) return;
  if (!line.lastElementChild) line.append(element("span", { "aria-hidden": true }));
  line.lastElementChild.textContent = `${working.share ? `, ${working.share} %` : ""}, ${seconds} s`;
}

// Keep an answer that has ended, and show how it ended.
async function finish(conversation, turn, answered, wrong) {
  if (page.chats.includes(conversation)) {
    if (answered) await store.saveCycles(turn.id, cyclesOf(turn)).catch(cannotKeep);
    keep(conversation);
  }
  if (conversation === page.open) {
    const log = at("log"), follows = log.scrollTop + log.clientHeight > log.scrollHeight - 60;
    if (!answered) drawLog();
    else drawText(turn);
    showWork();
    if (follows) log.scrollTop = log.scrollHeight;
    say(wrong || turn.note, wrong !== "");
    if (panel.shown.turn === turn) panel.show(answered ? turn : null, panel.shown.follows ? Infinity : panel.shown.cycle);
  }
  panel.redraw();
}

// Take what came of a stream.
function take(conversation, working, chunk) {
  const { turn } = working, told = working.status;
  const progress = chunk.prompt_progress;
  working.since = chunk.ping || progress ? working.since ?? performance.now() : null;
  working.share = progress?.processed + 1 < progress?.total ? Math.floor((100 * progress.processed) / progress.total) : null;
  turn.event = chunk.event ?? turn.event;
  if (chunk.lost) working.status = "The connection is lost: trying again";
  else if (chunk.before !== undefined) working.status = chunk.before ? `In the queue: ${chunk.before} before you` : "In the queue: you are next";
  else if (chunk.loading) working.status = "Loading the model";
  else if (chunk.ping || progress) working.status = READING;
  else {
    for (const cycle of chunk.cycles ?? []) {
      cyclesOf(turn).push(cycle);
      figures.count(turn.figures, cycle, chunk.plain_cycle_seconds);
    }
    const choice = chunk.choices[0];
    if (choice?.delta.reasoning_content) addText(conversation, turn, "thoughts", choice.delta.reasoning_content);
    if (choice?.delta.content) addText(conversation, turn, "text", choice.delta.content);
    if (choice?.finish_reason === "length") Object.assign(turn, { note: `Cut at ${turn.figures.tokens} tokens.`, cut: true });
    const speculation = chunk.usage?.metrics?.speculative_decoding ?? chunk.metrics?.speculative_decoding;
    turn.figures.reason = speculation?.plain_reason ?? turn.figures.reason;
    working.status = turn.thoughts && !turn.text ? "Thinking" : "Answering";
    if (chunk.cycles) {
      panel.follow(turn);
      drawFoot(turn);
    }
  }
  if (told !== working.status) {
    sayOf(conversation, working.status);
    drawList();
  }
}

// Add to what an answer says, or thinks.
function addText(conversation, turn, kind, text) {
  const log = at("log"), follows = log.scrollTop + log.clientHeight > log.scrollHeight - 60;
  turn[kind] += text;
  if (kind === "text") {
    const number = Math.max(cyclesOf(turn).length - 1, 0), before = turn.ends.at(-1) ?? 0;
    while (turn.ends.length < number) turn.ends.push(before);
    turn.ends[number] = turn.text.length;
  }
  if (conversation !== page.open || turn.drawn) return;
  turn.drawn = requestAnimationFrame(() => {
    delete turn.drawn;
    drawText(turn);
    panel.shown.turn === turn && mark(turn, panel.shown.cycle);
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

// The same request, decoded plainly: what it takes, and whether the text is the same.
export async function compare() {
  const turn = panel.shown.turn, conversation = page.open;
  if (job() || !turn?.figures.cycles) return;
  const working = { control: new AbortController(), turn: null, status: "Answering plainly" };
  running.set(conversation.id, working);
  const tell = (result) => {
    compared.set(turn.id, result);
    if (panel.shown.turn === turn) panel.showFigures();
  };
  tell({ text: "Answering plainly" });
  showWork();
  const plain = figures.nothing();
  let text = "", whole = false;
  try {
    for await (const chunk of server.chunks(requestOf(conversation, turn, { policy: "plain" }), at("key").value, working.control.signal)) {
      for (const cycle of chunk.cycles ?? []) figures.count(plain, cycle, null);
      const delta = chunk.choices?.[0]?.delta;
      text += (delta?.reasoning_content ?? "") + (delta?.content ?? "");
      whole = whole || Boolean(chunk.choices?.[0]?.finish_reason);
      tell({ text: `Answering plainly: ${plain.cycles} tokens` });
    }
    const told = (turn.thoughts ?? "") + turn.text;
    const same = whole && told === text ? "the same text"
      : told.startsWith(text) || text.startsWith(told) ? "the same text as far as both go" : "another text, as rounding in low precision can bring";
    compared.set(turn.id, { ratio: figures.speed(turn.figures) / figures.speed(plain), rate: figures.speed(plain), text: same });
  } catch (error) {
    compared.set(turn.id, { text: error.name === "AbortError" ? "Stopped." : error.message });
  }
  running.delete(conversation.id);
  if (conversation === page.open) showWork();
  panel.redraw();
}
