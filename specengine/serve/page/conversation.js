// A conversation: turns that know the turn before them, so that an edited message or another answer takes nothing away.
// {id, title, named, created, changed, leaf, turns: {id: {id, parent, role, text, ...}}}; leaf ends what is shown.
import { randomId } from "./dom.js";

export const FORMAT = "specengine conversations 1";
const TITLE = 60; // letters

export function begun() {
  const now = Date.now();
  return { id: randomId(), title: "New chat", named: false, created: now, changed: now, leaf: null, turns: {} };
}

export function append(conversation, turn) {
  const made = { id: randomId(), parent: conversation.leaf, ...turn };
  conversation.turns[made.id] = made;
  conversation.leaf = made.id;
  conversation.changed = Date.now();
  if (made.role === "user" && !conversation.named && made.parent === null) conversation.title = titleOf(made.text);
  return made;
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0], letters = Array.from(line);
  return letters.length <= TITLE ? line || "New chat" : `${letters.slice(0, TITLE - 1).join("")}…`;
}

// The turns up to one, the first one first.
export function path(conversation, end = conversation.leaf) {
  const turns = [];
  for (let id = end; id !== null; id = conversation.turns[id].parent) turns.unshift(conversation.turns[id]);
  return turns;
}

const below = (conversation, parent) => Object.values(conversation.turns).filter((turn) => turn.parent === parent);

export const siblings = (conversation, turn) => below(conversation, turn.parent);

// Show a turn, and of what follows it the newest.
export function choose(conversation, turn) {
  for (let next = turn; next; next = below(conversation, next.id).at(-1)) conversation.leaf = next.id;
}

// Take a turn away with all that follows it, and return their ids.
export function remove(conversation, turn) {
  const gone = [turn.id];
  for (let i = 0; i < gone.length; i += 1) gone.push(...below(conversation, gone[i]).map((one) => one.id));
  const left = siblings(conversation, turn).filter((one) => one !== turn).at(-1);
  for (const id of gone) delete conversation.turns[id];
  if (!left) conversation.leaf = turn.parent;
  else choose(conversation, left);
  conversation.changed = Date.now();
  return gone;
}

// The messages of a request whose answer follows the turn.
export function messages(conversation, end, system) {
  const told = path(conversation, end).filter((turn) => turn.text !== "").map(({ role, text }) => ({ role, content: text }));
  return system ? [{ role: "system", content: system }, ...told] : told;
}

export function toMarkdown(conversation) {
  const said = { user: "You", assistant: "Answer" };
  const turns = path(conversation).map((turn) => `## ${said[turn.role]}\n\n${turn.text.trim()}\n`);
  return [`# ${conversation.title}\n`, ...turns].join("\n");
}

export const toJson = (conversations) => `${JSON.stringify({ format: FORMAT, conversations }, null, 1)}\n`;

// Conversations of an exported text, under ids of their own; throws an Error that says why it is none.
export function fromJson(text) {
  const told = JSON.parse(text);
  if (told?.format !== FORMAT || !Array.isArray(told.conversations)) throw new Error("It is no export of this page.");
  return told.conversations.map((one) => {
    const ids = new Map(Object.keys(one.turns).map((id) => [id, randomId()]));
    const known = (id) => (id === null ? null : ids.get(id));
    const turns = {};
    for (const turn of Object.values(one.turns)) {
      const ready = ["user", "assistant"].includes(turn.role) && typeof turn.text === "string";
      if (!ready || known(turn.parent) === undefined) throw new Error("A turn of it is damaged.");
      turns[known(turn.id)] = { ...turn, id: known(turn.id), parent: known(turn.parent), live: false };
    }
    const made = { ...begun(), title: titleOf(String(one.title)), named: true, turns };
    made.leaf = known(one.leaf) ?? null;
    for (const turn of Object.values(turns)) if (loops(turns, turn)) throw new Error("A turn of it follows itself.");
    return made;
  });
}

function loops(turns, turn) {
  const seen = new Set();
  for (let id = turn.id; id !== null; id = turns[id].parent) {
    if (seen.has(id)) return true;
    seen.add(id);
  }
  return false;
}
