// The panel of trees: which cycle of which answer is shown, its figures, and the answers of other chats beside it.
import { at, button, definitions, drawn, element } from "./dom.js";
import { acceptedDrafts, againstPlain, byOrigin, doubt, perPass, speed } from "./figures.js";
import * as tree from "./tree.js";

const LEAST_BARS = 40;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export const shown = { turn: null, cycle: -1, follows: true };
let of = null, waiting = null, drawnAt = 0, playing = null;

const cycles = () => (shown.turn ? of.cycles(shown.turn) : []);

export function show(turn, cycle = Infinity) {
  const last = turn ? of.cycles(turn).length - 1 : -1;
  Object.assign(shown, { turn, cycle: Math.min(Math.max(cycle, 0), last) });
  shown.follows = shown.cycle === last;
  redraw(true);
}

// A cycle has come, of this answer or another: what is shown follows, as often as an eye can.
export function follow(turn) {
  if (turn === shown.turn && shown.follows) shown.cycle = cycles().length - 1;
  if (waiting !== null) return;
  const pause = calm.matches ? 1000 : 150;
  waiting = setTimeout(() => {
    waiting = null;
    redraw();
  }, Math.max(0, drawnAt + pause - performance.now()));
}

export function redraw(growing = false) {
  drawnAt = performance.now();
  const all = cycles(), { turn, cycle } = shown, record = all[cycle] ?? null;
  of.mark(turn, cycle);
  if (at("trees").hidden) return;
  drawOverview(all, cycle);
  at("previous").disabled = !record || cycle === 0;
  at("next").disabled = !record || cycle === all.length - 1;
  at("replay").disabled = !record;
  const committed = record ? `${record.committed.length} token${record.committed.length > 1 ? "s" : ""}` : "";
  at("position").textContent = record ? `${of.named(turn)} ${cycle + 1} of ${all.length}: ${committed}` : "No cycle yet";
  const slider = { min: record ? 1 : 0, max: all.length, now: cycle + 1, text: at("position").textContent };
  for (const [name, value] of Object.entries(slider)) at("cycle").setAttribute(`aria-value${name}`, value);
  tree.draw(record, growing);
  showFigures();
  showOthers();
}

function step(by) {
  if (!cycles().length) return;
  show(shown.turn, shown.cycle + by);
  of.reveal(shown.turn, shown.cycle);
}

function drawOverview(all, here) {
  const most = Math.max(4, ...all.map((one) => one.committed.length)), width = 10 * Math.max(LEAST_BARS, all.length);
  at("overview").setAttribute("viewBox", `0 0 ${width} 50`);
  at("overview").replaceChildren(...all.flatMap((one, index) => {
    const unit = 46 / most, accepted = (one.accepted.length - 1) * unit, own = one.committed.length * unit - accepted, chosen = index === here ? " at" : "";
    const bars = chosen ? [drawn("rect", { class: "here", x: 10 * index, y: 0, width: 10, height: 50 })] : [];
    bars.push(drawn("rect", { class: `bar${chosen}`, x: 10 * index + 1.5, y: 50 - own, width: 7, height: own }));
    bars.push(drawn("rect", { class: `bar accepted${chosen}`, x: 10 * index + 1.5, y: 50 - own - accepted, width: 7, height: accepted }));
    return bars;
  }));
}

export function showFigures() {
  const turn = shown.turn, figures = turn?.figures, compared = turn && of.compared(turn);
  at("compare").disabled = !turn || of.isBusy() || !figures?.cycles;
  at("compared").textContent = "";
  if (compared?.ratio) {
    at("compared").append(element("strong", {}, `${compared.ratio.toFixed(2)}×, measured`));
    at("compared").append(`: plainly ${compared.rate.toFixed(1)} tokens/s, ${compared.text}.`);
  } else if (compared) at("compared").textContent = compared.text;
  const doubtful = figures?.cycles ? doubt(figures, compared?.ratio) : "";
  at("doubt").textContent = doubtful;
  at("doubt").hidden = doubtful === "";
  if (!figures?.cycles) return definitions(at("figures"), []);
  const estimate = againstPlain(figures);
  definitions(at("figures"), [
    ["Tokens per pass", perPass(figures).toFixed(2), `${figures.tokens} tokens in ${figures.cycles} cycles`],
    ["Accepted drafts", acceptedDrafts(figures), byOrigin(figures)],
    ["Speed", `${speed(figures).toFixed(1)} tokens/s`, "of the cycles alone"],
    estimate
      ? ["Against plain", `${estimate.toFixed(2)}×`, `estimated: by the measured costs a plain pass takes ${(1000 * figures.plain).toFixed(1)} ms`]
      : ["Against plain", "–", "no measured cost of a plain pass"],
  ]);
}

// The latest tree of each other answer that is under way.
function showOthers() {
  const others = of.others().filter(({ turn }) => of.cycles(turn).length), focused = document.activeElement?.dataset?.other;
  at("others").hidden = !others.length;
  at("others").replaceChildren(...others.map(({ turn, title, go }) => {
    const made = button(title, go, { "data-other": turn.id, dir: "auto", "aria-label": `Go to ${title}, which is being answered` });
    made.append(element("small", {}, `${speed(turn.figures).toFixed(1)} tokens/s`), tree.miniature(of.cycles(turn).at(-1)));
    return element("li", {}, made);
  }));
  if (focused) at("others").querySelector(`[data-other="${focused}"]`)?.focus();
}

export function stopReplay() {
  clearInterval(playing);
  playing = null;
  at("replay").setAttribute("aria-pressed", false);
}

function replay() {
  if (playing !== null) return stopReplay();
  if (shown.cycle === cycles().length - 1) show(shown.turn, 0);
  at("replay").setAttribute("aria-pressed", true);
  playing = setInterval(() => (shown.cycle < cycles().length - 1 ? step(1) : stopReplay()), 900);
}

// source: {cycles(turn), mark(turn, cycle), reveal(turn, cycle), named(turn), compared(turn), isBusy(), others()}
export function listen(source) {
  of = source;
  tree.listen();
  at("replay").addEventListener("click", replay);
  at("previous").addEventListener("click", () => (stopReplay(), step(-1)));
  at("next").addEventListener("click", () => (stopReplay(), step(1)));
  at("pruned").addEventListener("change", () => redraw());
  const slider = at("cycle");
  slider.addEventListener("keydown", (event) => {
    const all = cycles().length;
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -all, End: all }[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    stopReplay();
    step(by);
  });
  const point = (event) => {
    const bounds = slider.getBoundingClientRect();
    stopReplay();
    step(Math.floor(((event.clientX - bounds.left) / bounds.width) * Math.max(LEAST_BARS, cycles().length)) - shown.cycle);
  };
  slider.addEventListener("pointerdown", (event) => {
    slider.setPointerCapture(event.pointerId);
    point(event);
  });
  slider.addEventListener("pointermove", (event) => slider.hasPointerCapture(event.pointerId) && point(event));
}
