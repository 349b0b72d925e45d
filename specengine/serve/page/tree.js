// The tree of a cycle: as data, as a large drawing that can be walked, and as a small one.
import { at, definitions, drawn, visible } from "./dom.js";

const FATES = {
  root: "the token committed last before",
  accepted: "accepted",
  rejected: "rejected: the model read it, and chose another",
  pruned: "pruned: drafted, never read by the model",
  own: "the model’s own token, which ends every cycle",
};
const ORIGINS = {
  draft: "the draft: a head or a small model",
  copied: "copied from this text or an earlier one",
  recycled: "recycled: what the model said after this token before",
  forced: "forced by the grammar",
  null: "not noted: the tree grew on the device",
};
export const SHAPES = { // around 0 0
  draft: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z",
  copied: "M-4 -4H4V4H-4Z",
  recycled: "M0 -5.4L5.4 0L0 5.4L-5.4 0Z",
  forced: "M0 -5L5 4H-5Z",
  root: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z",
  null: "M-4.5 -1.5H4.5V1.5H-4.5Z",
  own: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
};
const LETTER = 7.25, MARK = 15, GAP = 26, ROW = 21, MOST_ROW = 30, LONGEST = 16; // pixels, and letters of a label
const LEAST_SCALE = 0.75; // of a tree that is fitted to its panel: smaller letters cannot be read
const SMALL = { step: 16, row: 7 };
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]|\p{Extended_Pictographic}/u;

const columns = (text) => Array.from(text).reduce((sum, letter) => sum + (WIDE.test(letter) ? 2 : 1), 0);
const shorten = (text) => {
  const letters = Array.from(text);
  return letters.length <= LONGEST ? text : letters.slice(0, LONGEST - 1).join("") + "…";
};
const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.01 ? `${(100 * p).toFixed(1)} %` : `${(100 * p).toPrecision(2)} %`);

// The nodes of a record as drafted, then the model's own token as one more child of the last accepted node.
export function treeOf(record) {
  const kept = new Set(record.kept), accepted = new Set(record.accepted);
  const tree = record.tokens.map((token, id) => ({
    id, token, text: record.texts[id], p: record.probabilities[id], path: record.path_probabilities[id],
    origin: record.origins?.[id] ?? null, parent: null, children: [],
    fate: id === 0 ? "root" : accepted.has(id) ? "accepted" : kept.has(id) ? "rejected" : "pruned",
  }));
  const hang = (node, parent) => {
    node.parent = parent;
    parent.children.push(node);
  };
  tree.slice(1).forEach((node) => hang(node, tree[record.parents[node.id]]));
  const last = record.committed.length - 1, end = tree[record.accepted.at(-1)];
  const has = record.committed.length === record.accepted.length; // no: it ends with a drafted end token
  const own = { id: null, token: record.committed[last], text: record.committed_texts[last], origin: "own", children: [], fate: "own" };
  own.missed = end.children.some((child) => child.fate === "pruned" && child.token === own.token);
  if (has) hang(own, end);
  const place = (node) => (node.fate === "accepted" ? 0 : node.fate === "own" ? 1 : 2);
  for (const node of tree) node.children.sort((left, right) => place(left) - place(right) || right.p - left.p);
  return tree;
}

// Left to right, depth first: a row per leaf; a node stands in the row of its first child.
export function rowsOf(root, withPruned) {
  const order = [], stack = [root];
  let rows = 0;
  root.depth = 0;
  while (stack.length) {
    const node = stack.pop();
    node.below = node.children.filter((child) => withPruned || child.fate !== "pruned");
    node.row = rows;
    if (!node.below.length) rows += 1;
    order.push(node);
    for (const child of node.below.toReversed()) {
      child.depth = node.depth + 1;
      stack.push(child);
    }
  }
  return { order, rows };
}

// Where the cycle ends: the model's own token, or the drafted end token that is the last accepted node.
export const endOf = (order) => order.findLastIndex((node) => node.fate !== "rejected" && node.fate !== "pruned");

function layOut(root, withPruned, space) {
  const { order, rows } = rowsOf(root, withPruned), widths = [], lefts = [];
  for (const node of order) {
    node.label = shorten(visible(node.text) || `#${node.token}`);
    node.width = MARK + columns(node.label) * LETTER;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const width = widths.reduce((left, one, depth) => ((lefts[depth] = left), left + one + GAP), 18);
  const pitch = Math.min(Math.max(ROW, (space - 30) / rows), MOST_ROW);
  for (const node of order) Object.assign(node, { x: lefts[node.depth], y: 22 + pitch * node.row });
  return { order, width: width - GAP + 14, height: pitch * (rows - 1) + 44 };
}

// A small drawing without words, for a cycle of another answer.
export function miniature(record) {
  const { order, rows } = rowsOf(treeOf(record)[0], false), deepest = Math.max(...order.map((node) => node.depth));
  const x = (node) => 6 + SMALL.step * node.depth, y = (node) => 6 + SMALL.row * node.row;
  const width = 12 + SMALL.step * deepest, height = 12 + SMALL.row * (rows - 1);
  const made = drawn("svg", { class: "miniature", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const node of order.slice(1)) {
    made.append(drawn("path", { class: `edge ${node.fate}`, d: `M${x(node.parent)} ${y(node.parent)}L${x(node)} ${y(node)}` }));
  }
  for (const node of order) made.append(drawn("circle", { class: `dot ${node.fate}`, cx: x(node), cy: y(node), r: 2.2 }));
  return made;
}

// ---- the large drawing

let nodes = [], current = 0;

// Draw a record's tree; null: none. growing: let the nodes appear.
export function draw(record, growing) {
  const svg = at("tree"), hadFocus = svg.contains(document.activeElement);
  svg.classList.toggle("growing", growing);
  svg.replaceChildren();
  nodes = [];
  at("none").hidden = record !== null;
  if (record === null) {
    svg.setAttribute("width", 0);
    svg.setAttribute("height", 0);
    return definitions(at("node"), []);
  }
  const { order, width, height } = layOut(treeOf(record)[0], at("pruned").checked, at("stage").clientHeight);
  const stage = at("stage"), fit = Math.min(stage.clientWidth / width, stage.clientHeight / height);
  const scale = Math.min(1, Math.max(LEAST_SCALE, fit));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", Math.floor(width * scale));
  svg.setAttribute("height", Math.floor(height * scale));
  nodes = order;
  for (const node of order.slice(1)) svg.append((node.edge = edge(node)));
  order.forEach((node, index) => svg.append((node.drawing = box(node, index))));
  const end = endOf(order);
  choose(end, hadFocus);
  stage.scrollLeft = Math.max(0, scale * (order[end].x + order[end].width + 40) - stage.clientWidth);
  stage.scrollTop = Math.max(0, scale * order[end].y - stage.clientHeight / 2);
}

function edge({ parent, x, y, p, fate, depth }) {
  const x0 = parent.x + parent.width + 1, x1 = x - 8, bend = Math.max(x0, x1 - GAP), middle = (bend + x1) / 2;
  const d = y === parent.y ? `M${x0} ${y}H${x1}` : `M${x0} ${parent.y}H${bend}C${middle} ${parent.y} ${middle} ${y} ${x1} ${y}`;
  const made = drawn("path", { class: `edge ${fate}`, d });
  if (fate === "rejected") made.setAttribute("stroke-opacity", Math.max(0.6, Math.sqrt(p)).toFixed(2));
  made.style.setProperty("--depth", depth);
  return made;
}

function box(node, index) {
  const group = drawn("g", {
    class: `node ${node.fate}`, transform: `translate(${node.x} ${node.y})`, role: "treeitem", tabindex: -1,
    "aria-level": node.depth + 1, "aria-label": spoken(node), "data-node": node.id ?? "own", "data-origin": String(node.origin),
  });
  group.append(drawn("rect", { class: "back", x: -9, y: -ROW / 2 + 1, width: node.width + 7, height: ROW - 2, rx: 5 }));
  group.append(drawn("path", { class: "shape", d: SHAPES[node.id === 0 ? "root" : node.origin] }));
  group.append(drawn("text", { x: 10, y: 4, "aria-hidden": true }, node.label));
  group.style.setProperty("--depth", node.depth);
  group.addEventListener("mouseenter", () => describe(node));
  group.addEventListener("mouseleave", () => describe(nodes[current]));
  group.addEventListener("click", () => choose(index, true));
  group.addEventListener("focus", () => choose(index, false));
  return group;
}

const fateOf = (node) => FATES[node.fate] + (node.missed ? "; it had been drafted, and was pruned" : "");
const known = (node) => node.fate !== "root" && node.fate !== "own";

function spoken(node) {
  const named = `${visible(node.text) || node.token}: ${fateOf(node)}`;
  return known(node) ? `${named}; probability ${percent(node.p)}; ${ORIGINS[node.origin]}` : named;
}

function choose(index, withFocus) {
  nodes[current]?.drawing?.classList.remove("chosen");
  nodes[current]?.drawing?.setAttribute("tabindex", -1);
  current = index;
  nodes[current].drawing.classList.add("chosen");
  nodes[current].drawing.setAttribute("tabindex", 0);
  describe(nodes[current]);
  if (withFocus) nodes[current].drawing.focus();
}

function describe(node) {
  if (!node) return;
  for (const traced of at("tree").querySelectorAll(".edge.traced")) traced.classList.remove("traced");
  for (let one = node; one.parent; one = one.parent) one.edge.classList.add("traced");
  definitions(at("node"), [
    ["Token", visible(node.text) || "(no text)", `id ${node.token}`, "token"],
    ["Probability", known(node) ? percent(node.p) : "–", known(node) ? `of the path ${percent(node.path)}` : ""],
    ["Origin", known(node) ? ORIGINS[node.origin] : node.fate === "own" ? "the model" : "–"],
    ["Outcome", fateOf(node)],
  ]);
}

// Go to another node by a key; returns whether the key means one.
function walk(key) {
  const node = nodes[current], index = nodes.indexOf.bind(nodes);
  const next = {
    ArrowDown: Math.min(current + 1, nodes.length - 1), ArrowUp: Math.max(current - 1, 0), Home: 0, End: nodes.length - 1,
    ArrowLeft: node.parent ? index(node.parent) : current, ArrowRight: node.below.length ? index(node.below[0]) : current,
  }[key];
  if (next !== undefined) choose(next, true);
  return next !== undefined;
}

export function listen() {
  at("tree").addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !nodes.length) return;
    if (walk(event.key)) event.preventDefault();
  });
  for (const shape of document.querySelectorAll("path[data-shape]")) shape.setAttribute("d", SHAPES[shape.dataset.shape]);
}
