// What the modules of the page share: the chats, the answers under way, and the line below the log.
import * as talk from "./conversation.js";
import { at, element } from "./dom.js";

// chats: the latest change first; open: the one that is shown, among the chats once something is said in it;
// models: their names, once the server has told them; model: the one that answers the open chat, null while none is known;
// undone: takes the last deletion back
export const page = { chats: [], open: talk.begun(), models: [], model: null, undone: null };
export const running = new Map(); // by conversation: {control, turn, status, since} of the answer under way
export const cycles = new Map(), compared = new Map(); // by turn

export const cyclesOf = (turn) => cycles.get(turn.id) ?? [];
export const job = () => running.get(page.open.id) ?? null;

// Take the open chat's model, else the first one, and show it; where there are several, to choose from.
export function showModel() {
  const { models, open } = page, several = models.length > 1;
  page.model = models.includes(open.model) ? open.model : models[0] ?? null;
  at("model").textContent = several ? "" : page.model ?? "";
  at("models").hidden = !several;
  at("models").replaceChildren(...models.map((name) => element("option", { value: name }, name)));
  at("models").value = page.model;
}

// Hold a lock while this tab writes a turn, so that others tell it from one that was interrupted; returns how to let it go.
// There are no locks at plain HTTP addresses of other machines.
export function holdWhileWriting(turn) {
  let letGo = () => {};
  const written = new Promise((done) => (letGo = done));
  navigator.locks?.request(`specengine.${turn.id}`, () => written);
  return letGo;
}

export const interrupt = (turn) => Object.assign(turn, { live: false, cut: true, note: "Interrupted: the page was closed or loaded again." });

// The turns whose writer is gone, each with its conversation.
export async function leftAlone(conversations) {
  const held = new Set((await navigator.locks?.query())?.held.map((lock) => lock.name));
  return conversations.flatMap((conversation) => Object.values(conversation.turns)
    .filter((turn) => turn.live && !held.has(`specengine.${turn.id}`)).map((turn) => [conversation, turn]));
}

export function say(text, wrong = false, undo = null) {
  page.undone = undo;
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
  at("undo").hidden = undo === null;
}

export function sayOf(conversation, text, wrong = false) {
  if (conversation === page.open) say(text, wrong);
}
