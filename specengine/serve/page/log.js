// The log of the open chat: its turns, their texts in pieces of a cycle each, and what can be done with them.
import * as talk from "./conversation.js";
import { at, button, copyButton, element } from "./dom.js";
import * as figures from "./figures.js";
import { Rendering } from "./markdown.js";
import { compared, job, page } from "./state.js";

const drawings = new Map(); // by turn
let acts = null;

export function drawLog() {
  drawings.clear();
  for (const turn of at("log").querySelectorAll(".turn")) turn.remove();
  for (const turn of talk.path(page.open)) drawTurn(turn);
  at("welcome").hidden = page.open.leaf !== null;
  at("log").scrollTop = at("log").scrollHeight;
}

function drawTurn(turn) {
  const text = element("div", { class: "text" }), foot = element("div", { class: "foot" });
  const thoughts = turn.role === "assistant" ? thoughtsOf(turn) : null;
  const box = element("div", { class: `turn ${turn.role}`, "data-turn": turn.id }, thoughts, text, foot);
  const rendering = new Rendering(text, (leaf, parent) => putLeaf(turn, leaf, parent), (told) => copyButton(told));
  drawings.set(turn.id, { box, foot, rendering, thoughts });
  at("log").append(box);
  at("welcome").hidden = true;
  drawText(turn);
  drawFoot(turn);
}

// An answer's text in pieces, one per cycle.
function putLeaf(turn, { text, at: place }, parent) {
  if (turn.role === "user" || !turn.ends.length) return parent.append(text);
  let low = 0, high = turn.ends.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (turn.ends[middle] > place) high = middle;
    else low = middle + 1;
  }
  for (let from = 0; from < text.length; low += 1) {
    const to = low === turn.ends.length - 1 ? text.length : Math.min(turn.ends[low] - place, text.length);
    if (to > from) parent.append(element("span", { class: "piece", "data-cycle": low }, text.slice(from, to)));
    from = Math.max(to, from);
  }
}

// What a model thinks before it answers: open until the answer begins, unless the reader folds it.
function thoughtsOf(turn) {
  const title = element("summary", {}), made = element("details", { class: "thoughts" }, title, element("div", { dir: "auto" }));
  title.addEventListener("click", () => (made.dataset.touched = ""));
  return made;
}

function drawThoughts(turn, box) {
  const thinks = turn.live && turn.text === "";
  box.hidden = !turn.thoughts;
  box.firstChild.textContent = thinks ? "Thinking …" : "Thoughts";
  box.lastChild.textContent = turn.thoughts ?? "";
  if (box.dataset.touched === undefined) box.open = thinks;
}

export function drawText(turn) {
  const thoughts = drawings.get(turn.id)?.thoughts;
  if (thoughts) drawThoughts(turn, thoughts);
  drawings.get(turn.id)?.rendering.update(turn.text, turn.role === "assistant" && at("markdown").checked);
}

export function drawFoot(turn) {
  const drawing = drawings.get(turn.id);
  if (!drawing) return;
  const working = job()?.turn === turn, rows = [];
  if (turn.role === "assistant") {
    const ratio = compared.get(turn.id)?.ratio ?? null, doubtful = working ? "" : figures.doubt(turn.figures, ratio);
    rows.push(element("span", { class: "figures" }, figures.line(turn.figures, ratio)));
    if (turn.live && !working) rows.push(element("span", { class: "note" }, "Another tab is writing this."));
    if (turn.note) rows.push(element("span", { class: "note" }, turn.note));
    if (doubtful) rows.push(element("span", { class: "note doubt" }, doubtful.split(". ")[0].replace(/\.?$/, ".")));
  }
  const buttons = element("div", { class: "buttons" }), all = talk.siblings(page.open, turn), place = all.indexOf(turn);
  if (all.length > 1) {
    const go = (by) => () => acts.choose(all[place + by]);
    const older = button("‹", go(-1), { "aria-label": "Version before" }), newer = button("›", go(1), { "aria-label": "Version after" });
    older.disabled = place === 0 || job() !== null;
    newer.disabled = place === all.length - 1 || job() !== null;
    buttons.append(element("span", { class: "versions" }, older, `${place + 1}/${all.length}`, newer));
  }
  if (!working && turn.cut && turn.text.trim() && !turn.asked.response_format) { // a schema would begin anew
    const further = button("Continue", () => acts.goOn(turn));
    further.disabled = job() !== null;
    buttons.append(further);
  }
  if (!working) {
    buttons.append(copyButton(() => turn.text, { "aria-label": turn.role === "user" ? "Copy the message" : "Copy the answer" }));
    const change = turn.role === "user" ? button("Edit", () => edit(turn)) : button("Regenerate", () => acts.regenerate(turn));
    const away = button("Delete", () => acts.remove(turn), { "aria-label": "Delete this and what follows" });
    change.disabled = away.disabled = job() !== null;
    buttons.append(change, away);
  }
  drawing.foot.replaceChildren(...rows, buttons);
}

export function edit(turn) {
  const drawing = drawings.get(turn.id), area = element("textarea", { "aria-label": "Edited message", rows: 3, dir: "auto" });
  area.value = turn.text;
  const end = () => (drawLog(), at("message").focus());
  const take = () => {
    if (!area.value.trim() || job()) return;
    page.open.leaf = turn.parent;
    acts.send(area.value);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.stopPropagation();
    if (event.key === "Escape") end();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      take();
    }
  });
  const buttons = element("div", { class: "buttons" }, button("Cancel", end), button("Send", take, { class: "chief" }));
  drawing.box.replaceChildren(area, buttons);
  drawing.box.classList.add("edited");
  area.focus();
}

export function mark(turn, cycle) {
  for (const marked of at("log").querySelectorAll(".piece.at, .turn.shown")) marked.classList.remove("at", "shown");
  const box = turn && drawings.get(turn.id)?.box;
  box?.classList.add("shown");
  for (const piece of box?.querySelectorAll(`[data-cycle="${cycle}"]`) ?? []) piece.classList.add("at");
}

export const reveal = (turn, cycle) =>
  drawings.get(turn.id)?.box.querySelector(`[data-cycle="${cycle}"]`)?.scrollIntoView({ block: "nearest" });

// given: what the buttons do: {send(text), regenerate(turn), goOn(turn), remove(turn), choose(turn)}
export function listen(given) {
  acts = given;
}
