// Markdown as models write it. `parse` makes plain objects whose leaves {text, at} know their place in the source,
// `Rendering` makes elements of them. HTML in a text is text. Images are links: nothing is fetched.
import { typeset } from "./formulas.js";

const MOST_LINES = 100; // of a formula
const DEEPEST = 24; // blocks, and marks that wait for their end
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^( {0,3}#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const blank = (line) => line.text.trim() === "";
const rest = (line, from) => ({ text: line.text.slice(from), at: line.at + from });

export function parse(source) {
  let at = 0;
  const lines = source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
  return blocksOf(lines, 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (blank(lines[i])) {
      i += 1;
      continue;
    }
    const first = i, line = lines[i];
    let block;
    if (FENCE.test(line.text)) [block, i] = fenced(lines, i);
    else if (HEADING.test(line.text)) [block, i] = [heading(line), i + 1];
    else if (RULE.test(line.text)) [block, i] = [{ kind: "rule" }, i + 1];
    else if (depth < DEEPEST && QUOTE.test(line.text)) [block, i] = quoted(lines, i, depth);
    else if (depth < DEEPEST && indent(line) < 4 && ITEM.test(line.text)) [block, i] = listed(lines, i, depth);
    else if (isTable(lines, i)) [block, i] = table(lines, i);
    else [block, i] = paragraph(lines, i);
    block.start = lines[first].at;
    block.end = lines[i - 1].at + lines[i - 1].text.length;
    blocks.push(block);
  }
  return blocks;
}

const indent = (line) => line.text.length - line.text.trimStart().length;

function fenced(lines, i) {
  const [, spaces, marks, info] = lines[i].text.match(FENCE);
  const inside = [];
  for (i += 1; i < lines.length; i += 1) {
    const text = lines[i].text.trim();
    if (text.length >= marks.length && text === marks[0].repeat(text.length) && indent(lines[i]) < 4) {
      return [{ kind: "code", language: info.trim(), lines: inside }, i + 1];
    }
    inside.push(rest(lines[i], Math.min(indent(lines[i]), spaces.length)));
  }
  return [{ kind: "code", language: info.trim(), lines: inside }, i];
}

function heading(line) {
  const [, marks, text] = line.text.match(HEADING);
  const told = (text ?? "").replace(/(?:^|[ \t])#+[ \t]*$/, "").trim();
  const from = told ? line.text.indexOf(told, marks.length) : line.text.length;
  return { kind: "heading", level: marks.trim().length, children: inline([{ text: told, at: line.at + from }]) };
}

function quoted(lines, i, depth) {
  const inside = [];
  for (; i < lines.length && QUOTE.test(lines[i].text); i += 1) inside.push(rest(lines[i], lines[i].text.match(QUOTE)[0].length));
  return [{ kind: "quote", children: blocksOf(inside, depth + 1) }, i];
}

function listed(lines, i, depth) {
  const ordered = (mark) => /\d/.test(mark), kind = ordered(lines[i].text.match(ITEM)[2]);
  const items = [], outer = indent(lines[i]), number = kind ? parseInt(lines[i].text.match(ITEM)[2], 10) : null;
  let width = 0, afterBlank = false;
  for (; i < lines.length; i += 1) {
    const line = lines[i], found = RULE.test(line.text) ? null : line.text.match(ITEM), deep = indent(line);
    if (blank(line)) {
      afterBlank = true;
      items.at(-1).push({ text: "", at: line.at });
      continue;
    }
    if (items.length && deep >= outer + Math.min(width, 2)) items.at(-1).push(rest(line, Math.min(deep, outer + width)));
    else if (found && deep < outer + 4) {
      if (ordered(found[2]) !== kind || (items.length && deep < outer)) break;
      const space = found[3].length > 4 ? 1 : found[3].length || 1;
      width = deep - outer + found[2].length + space;
      items.push([rest(line, Math.min(outer + width, line.text.length))]);
    } else if (!afterBlank && !begins(line)) items.at(-1).push(line);
    else break;
    afterBlank = false;
  }
  while (blank(lines[i - 1])) i -= 1;
  return [{ kind: "list", ordered: kind, number, items: items.map((item) => blocksOf(item, depth + 1)) }, i];
}

const begins = (line) =>
  [FENCE, HEADING, RULE, QUOTE].some((one) => one.test(line.text)) || (indent(line) < 4 && /^ *(?:[-*+]|\d{1,9}[.)]) +\S/.test(line.text));

function isTable(lines, i) {
  const divider = lines[i + 1]?.text ?? "";
  return lines[i].text.includes("|") && divider.includes("-") && DIVIDER.test(divider)
    && cells(lines[i]).length === cells(lines[i + 1]).length;
}

function cells(line) {
  const found = [];
  let from = /^\s*\|/.test(line.text) ? line.text.indexOf("|") + 1 : 0;
  for (let i = from; i <= line.text.length; i += 1) {
    if (i < line.text.length && (line.text[i] !== "|" || line.text[i - 1] === "\\")) continue;
    if (i === line.text.length && line.text.slice(from).trim() === "") break;
    const cell = line.text.slice(from, i), text = cell.trim();
    found.push({ text, at: line.at + from + (text ? cell.indexOf(text) : 0) });
    from = i + 1;
  }
  return found;
}

function table(lines, i) {
  const sides = cells(lines[i + 1]).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : "left"));
  const rows = [cells(lines[i])];
  for (i += 2; i < lines.length && !blank(lines[i]) && lines[i].text.includes("|"); i += 1) rows.push(cells(lines[i]));
  const made = rows.map((row) => row.slice(0, sides.length).map((cell) => inline([cell])));
  return [{ kind: "table", sides, head: made[0], rows: made.slice(1) }, i];
}

// The line where a formula ends that begins line i, or i.
function formulaEnd(lines, i) {
  const [all, opening] = lines[i].text.match(/^\s*(\$\$|\\\[)/) ?? [];
  if (!opening) return i;
  const closing = opening === "$$" ? "$$" : "\\]";
  for (let end = i; end < Math.min(lines.length, i + MOST_LINES) && !blank(lines[end]); end += 1) {
    if (lines[end].text.includes(closing, end === i ? all.length : 0)) return end;
  }
  return i;
}

function paragraph(lines, i) {
  const inside = [];
  let through = i; // the last line of a formula, in which - and + begin no list
  do {
    const spaces = Math.min(indent(lines[i]), 3);
    inside.push(rest(lines[i], spaces));
    through = Math.max(through, formulaEnd(lines, i));
    i += 1;
  } while (i < lines.length && !blank(lines[i]) && (i <= through || (!begins(lines[i]) && !isTable(lines, i))));
  return [{ kind: "paragraph", children: inline(inside) }, i];
}

// ---- inside a block

const SPECIAL = /[\\`*_~[\]!h$]/g;
const ADDRESS = /https?:\/\/[^\s<>"'`|]+/y;
const TARGET = /\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const LETTER = /[\p{L}\p{N}]/u;
const FORMULAS = [ // of one line or more, none of them blank; a $ before a space, or before a digit at the end, is money
  /\$\$((?:[^$\\`]|\\[^])+?)\$\$/y,
  /\$(?![\s$])((?:[^$\\\n`]|\\.)+?)(?<!\s)\$(?![\d$])/y,
  /\\\[((?:[^\\]|\\[^\]])+?)\\\]/y,
  /\\\(((?:[^\\]|\\[^)])+?)\\\)/y,
];
const LONGEST_FORMULA = 5000; // letters
const isSpace = (letter) => letter === undefined || /\s/.test(letter);

// The formula that begins at a place of a text: its length, and its inside.
function formulaAt(text, place) {
  for (const form of FORMULAS) {
    form.lastIndex = place;
    const found = form.exec(text.length > place + LONGEST_FORMULA ? text.slice(0, place + LONGEST_FORMULA) : text);
    if (found) return { length: found[0].length, tex: found[1], display: /^(?:\$\$|\\\[)/.test(found[0]) };
  }
  return null;
}

// Nodes {kind: strong, em, del, code, formula or link, children} and leaves, of lines that stand one below the other.
function inline(lines) {
  const text = lines.map((line) => line.text).join("\n");
  const nodes = [], open = []; // open: marks {mark, count, place} that wait for their end
  const runs = backticks(text);
  const say = (from, to) => {
    const last = nodes.at(-1);
    if (from === to) return;
    if (last?.kind === "text" && last.to === from && !last.mark) last.to = to;
    else nodes.push({ kind: "text", from, to });
  };
  const wrap = (place, kind, more = {}) => nodes.push({ kind, ...more, children: nodes.splice(place) });
  let i = 0;
  while (i < text.length) {
    SPECIAL.lastIndex = i;
    const found = SPECIAL.exec(text), next = found ? found.index : text.length;
    say(i, next);
    if (!found) break;
    i = next;
    const letter = text[i], formula = letter === "$" || letter === "\\" ? formulaAt(text, i) : null;
    if (formula) {
      nodes.push({ kind: "formula", ...formula, children: [{ kind: "text", from: i, to: i + formula.length }] });
      i += formula.length;
    } else if (letter === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "")) {
      nodes.push({ kind: "text", from: i + 1, to: i + 2, mark: true });
      i += 2;
    } else if (letter === "`") {
      const length = runs.at.get(i), closing = runs.after(length, i);
      if (closing === undefined) say(i, i + length);
      else {
        const padded = text[i + length] === " " && text[closing - 1] === " " && text.slice(i + length, closing).trim() ? 1 : 0;
        nodes.push({ kind: "code", children: [{ kind: "text", from: i + length + padded, to: closing - padded }] });
      }
      i = (closing ?? i) + length;
    } else if (letter === "[" || (letter === "!" && text[i + 1] === "[")) {
      const length = letter === "[" ? 1 : 2;
      nodes.push({ kind: "text", from: i, to: i + length, mark: true });
      if (open.length < DEEPEST) open.push({ mark: "[", count: length, place: nodes.length - 1 });
      i += length;
    } else if (letter === "]") {
      const place = open.findLastIndex((one) => one.mark === "[");
      TARGET.lastIndex = i + 1;
      const target = place >= 0 && text[i + 1] === "(" ? TARGET.exec(text) : null;
      if (place >= 0) {
        const [start] = open.splice(place);
        if (target && /^(?:https?:\/\/|mailto:)/i.test(target[1])) {
          nodes[start.place].to = nodes[start.place].from;
          wrap(start.place, "link", { url: target[1] });
          i = TARGET.lastIndex;
          continue;
        }
      }
      say(i, i + 1);
      i += 1;
    } else if (letter === "*" || letter === "_" || letter === "~") {
      let length = 1;
      while (text[i + length] === letter) length += 1;
      mark(letter, i, length);
      i += length;
    } else if (letter === "h" && !LETTER.test(text[i - 1] ?? " ") && (ADDRESS.lastIndex = i, ADDRESS.test(text))) {
      const address = text.slice(i, ADDRESS.lastIndex).replace(/[.,;:!?*_~\])}]+$/, "");
      nodes.push({ kind: "link", url: address, children: [{ kind: "text", from: i, to: i + address.length }] });
      i += address.length;
    } else {
      say(i, i + 1);
      i += 1;
    }
  }

  function mark(letter, from, length) {
    const before = text[from - 1], after = text[from + length], least = letter === "~" ? 2 : 1;
    let opens = !isSpace(after), closes = !isSpace(before), left = length;
    if (letter === "_") [opens, closes] = [opens && !LETTER.test(before ?? " "), closes && !LETTER.test(after ?? " ")];
    while (closes && left >= least) {
      const place = open.findLastIndex((one) => one.mark === letter);
      if (place < 0) break;
      const start = open[place], strength = Math.min(start.count, left) >= 2 ? 2 : least;
      if (start.count < strength) break;
      open.length = place + 1;
      start.count -= strength;
      left -= strength;
      nodes[start.place].to -= strength;
      wrap(start.place + 1, letter === "~" ? "del" : strength === 2 ? "strong" : "em");
      if (start.count < least) open.pop();
    }
    if (!left) return;
    nodes.push({ kind: "text", from: from + length - left, to: from + length, mark: true });
    if (opens && left >= least && open.length < DEEPEST) open.push({ mark: letter, count: left, place: nodes.length - 1 });
  }

  const starts = [];
  lines.reduce((start, line) => (starts.push(start), start + line.text.length + 1), 0);
  return nodes.flatMap((node) => placed(node, lines, starts));
}

// Where each run of backticks begins, and the next of the same length.
function backticks(text) {
  const starts = new Map(), byLength = new Map();
  for (const found of text.matchAll(/`+/g)) {
    starts.set(found.index, found[0].length);
    if (!byLength.has(found[0].length)) byLength.set(found[0].length, []);
    byLength.get(found[0].length).push(found.index);
  }
  const after = (length, from) => {
    const places = byLength.get(length) ?? [];
    while (places.length && places[0] <= from) places.shift();
    return places[0];
  };
  return { at: starts, after };
}

// A node with places in the source instead of those in the joined lines; starts: of the lines, in the joined text.
function placed(node, lines, starts) {
  if (node.kind !== "text") return [{ ...node, children: node.children.flatMap((child) => placed(child, lines, starts)) }];
  const leaves = [];
  let low = 0, high = lines.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= node.from) low = middle;
    else high = middle - 1;
  }
  for (let number = low; number < lines.length && starts[number] < node.to; number += 1) {
    const line = lines[number], begin = starts[number], end = begin + line.text.length;
    const from = Math.max(node.from, begin), text = line.text.slice(from - begin, node.to - begin);
    const whole = node.to > end && number < lines.length - 1 ? `${text}\n` : text;
    if (whole) leaves.push({ text: whole, at: line.at + from - begin });
  }
  return leaves;
}

// ---- elements

// Text follows its own direction; so do lists, quotes and tables, by their first letter outside of code.
const RIGHT_TO_LEFT = /^[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Samaritan}\p{Script=Mandaic}\p{Script=Adlam}\p{Script=Hanifi_Rohingya}]/u;
const wordsOf = (node) => (node.kind === "code" || node.kind === "formula" ? "" : node.text ?? [node.children, node.items, node.head, node.rows].flat(Infinity).filter(Boolean).map(wordsOf).join(""));

export function directionOf(nodes) {
  const [letter = ""] = wordsOf({ children: nodes }).match(/\p{L}/u) ?? [];
  return RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

const INLINE = { strong: "strong", em: "em", del: "del", code: "code" };

// The text of an answer as elements. A text that grows keeps the elements of the blocks that are as they were.
// leaf(leaf, parent) puts a leaf's text into its parent; copier(text) makes a button that copies what text() returns.
export class Rendering {
  constructor(box, leaf, copier) {
    Object.assign(this, { box, leaf, copier, drawn: [] });
  }

  update(source, formatted = true) {
    const blocks = formatted ? parse(source) : [{ kind: "raw", start: 0, end: source.length, children: [{ text: source, at: 0 }] }];
    const drawn = blocks.map((block) => ({ block, source: source.slice(block.start, block.end) }));
    let same = 0;
    while (same < drawn.length && same < this.drawn.length
      && drawn[same].source === this.drawn[same].source && drawn[same].block.kind === this.drawn[same].block.kind
      && drawn[same].block.start === this.drawn[same].block.start) {
      drawn[same].made = this.drawn[same].made;
      same += 1;
    }
    for (const one of this.drawn.slice(same)) one.made.remove();
    for (const one of drawn.slice(same)) this.box.append((one.made = this.block(one.block)));
    this.drawn = drawn;
  }

  block(block) {
    const make = (name, dir) => Object.assign(document.createElement(name), { dir });
    if (block.kind === "code") return this.code(block);
    if (block.kind === "rule") return document.createElement("hr");
    if (block.kind === "heading") return this.filled(make(`h${Math.min(block.level + 2, 6)}`, "auto"), block.children);
    if (block.kind === "quote") {
      const made = make("blockquote", directionOf(block.children));
      made.append(...block.children.map((child) => this.block(child)));
      return made;
    }
    if (block.kind === "list") {
      const made = make(block.ordered ? "ol" : "ul", directionOf(block.items));
      if (block.ordered && block.number !== 1) made.start = block.number;
      for (const item of block.items) {
        const point = make("li", directionOf(item));
        point.append(...item.map((child) => this.block(child)));
        made.append(point);
      }
      return made;
    }
    if (block.kind === "table") {
      const direction = directionOf([block.head, block.rows]), box = make("div", direction), made = make("table", direction);
      box.className = "table";
      box.append(made);
      for (const [number, row] of [block.head, ...block.rows].entries()) {
        const line = made.insertRow();
        row.forEach((cell, column) => {
          const one = this.filled(make(number ? "td" : "th", "auto"), cell);
          if (block.sides[column] !== "left") one.className = block.sides[column];
          line.append(one);
        });
      }
      return box;
    }
    const made = make(block.kind === "raw" ? "div" : "p", "auto");
    if (block.kind === "raw") made.className = "raw";
    return this.filled(made, block.children);
  }

  code(block) {
    const make = (name, kind) => Object.assign(document.createElement(name), { className: kind });
    const box = make("div", "code"), bar = make("div", "bar"), language = make("span", ""), pre = make("pre", ""), code = make("code", "");
    language.textContent = block.language;
    box.dir = "ltr";
    bar.append(language, this.copier(() => block.lines.map((line) => line.text).join("\n")));
    block.lines.forEach((line, number) => {
      this.leaf(line, code);
      if (number < block.lines.length - 1) code.append("\n");
    });
    pre.append(code);
    pre.tabIndex = 0;
    box.append(bar, pre);
    return box;
  }

  formula({ tex, display, children }) {
    const made = Object.assign(document.createElement("span"), { className: display ? "formula display" : "formula", dir: "ltr" });
    this.filled(made, children);
    typeset(made, tex, display);
    return made;
  }

  filled(parent, nodes) {
    for (const node of nodes) {
      if (node.kind === undefined) this.leaf(node, parent);
      else if (node.kind === "link") parent.append(this.filled(link(node.url), node.children));
      else if (node.kind === "formula") parent.append(this.formula(node));
      else parent.append(this.filled(inlined(node.kind), node.children));
    }
    return parent;
  }
}

function inlined(kind) {
  return Object.assign(document.createElement(INLINE[kind]), kind === "code" ? { dir: "ltr" } : {});
}

function link(url) {
  return Object.assign(document.createElement("a"), { href: url, title: url, target: "_blank", rel: "noopener noreferrer" });
}
