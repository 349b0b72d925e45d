// What the modules of the page share: the chats, the answers under way, and the line below the log.
import * as talk from "./conversation.js";
import { at } from "./dom.js";

// chats: the latest change first; open: the one that is shown, among the chats once something is said in it;
// model: its name, once the server has told it; undone: takes the last deletion back
export const page = { chats: [], open: talk.begun(), model: null, undone: null };
export const running = new Map(); // by conversation: {control, turn, status} of the answer under way
export const cycles = new Map(), compared = new Map(); // by turn

export const cyclesOf = (turn) => cycles.get(turn.id) ?? [];
export const job = () => running.get(page.open.id) ?? null;

export function say(text, wrong = false, undo = null) {
  page.undone = undo;
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
  at("undo").hidden = undo === null;
}

export function sayOf(conversation, text, wrong = false) {
  if (conversation === page.open) say(text, wrong);
}
