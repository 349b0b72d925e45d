// Tests of the page's functions, run by test_page.py where there is node.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as talk from "./conversation.js";
import * as figures from "./figures.js";
import { textOf, withText } from "./files.js";
import { directionOf, parse, Rendering } from "./markdown.js";
import { Events } from "./server.js";
import { asked } from "./settings.js";
import { rowsOf, treeOf } from "./tree.js";

const kinds = (source) => parse(source).map((block) => block.kind);
const said = (node) => node.text ?? node.children.map(said).join("");
function* leaves(node) {
  if (node.text !== undefined) yield node;
  for (const child of [...(node.children ?? []), ...(node.lines ?? []), ...(node.items ?? []).flat(), ...(node.head ?? []).flat(), ...(node.rows ?? []).flat(2)]) yield* leaves(child);
}

test("blocks", () => {
  assert.deepEqual(kinds("# A\ntext\n\n- a\n- b\n\n1. c\n\n> d\n\n---\n```js\ne\n```\n| f | g |\n|---|---|\n| 1 | 2 |"),
    ["heading", "paragraph", "list", "list", "quote", "rule", "code", "table"]);
  assert.deepEqual(kinds("```\nno end"), ["code"]);
  const [code] = parse("```py\nx\n\n  # y\n```");
  assert.deepEqual([code.language, code.lines.map((line) => line.text)], ["py", ["x", "", "  # y"]]);
  const [list] = parse("3. a\n   - b\n     - c\n4. d");
  assert.deepEqual([list.number, list.items.length, list.items[0].map((one) => one.kind)], [3, 2, ["paragraph", "list"]]);
});

test("inside a line", () => {
  const [{ children }] = parse("a **b *c*** `d*e*` ~~f~~ g_h_i \\*j\\* <b>k</b>");
  assert.deepEqual(children.map((node) => node.kind ?? "").filter((kind) => kind), ["strong", "code", "del"]);
  assert.equal(children.map(said).join(""), "a b c d*e* f g_h_i *j* <b>k</b>");
});

test("formulas, and what is none", () => {
  const found = (source) => parse(source).flatMap((block) => block.children).filter((node) => node.kind === "formula").map(({ tex, display }) => [tex, display]);
  assert.deepEqual(found("a $x^2$, $$y$$ \\(z\\) \\[w\\]"), [["x^2", false], ["y", true], ["z", false], ["w", true]]);
  assert.deepEqual(found("$$\na\n- b\n+ c\n$$"), [["\na\n- b\n+ c\n", true]]);
  for (const none of ["$5 and $10", "costs $5.", "$5-$10", "`$x$`", "\\$x$", "$ x$", "$x $", "$x", "$$x", "\\(x", "\\[x"]) assert.deepEqual(found(none), [], none);
});

test("links go to the web alone", () => {
  const urls = (source) => parse(source)[0].children.filter((node) => node.kind === "link").map((node) => node.url);
  assert.deepEqual(urls("[a](https://b.c/d_(e)) ![f](http://g) https://h.i/j."), ["https://b.c/d_(e)", "http://g", "https://h.i/j"]);
  assert.deepEqual(urls("[a](javascript:alert(1)) [b](data:text/html,x) [c](/d) [e](  JAVASCRIPT:f)"), []);
});

test("leaves stand in the source, in order, whatever it is", () => {
  let seed = 7;
  const next = (most) => (seed = (seed * 48271) % 2147483647) % most;
  const parts = ["*", "**", "_", "`", "```", "~~", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "---", "[a](https://b)", "](", "\\", "$", "$$", "\\[", "\\]", " ", "    ", "word", "é", "😀", "<b>"];
  for (let round = 0; round < 3000; round += 1) {
    const source = Array.from({ length: 1 + next(25) }, () => parts[next(parts.length)]).join("");
    let end = 0;
    for (const block of parse(source)) {
      for (const leaf of leaves(block)) {
        assert.equal(source.slice(leaf.at, leaf.at + leaf.text.length), leaf.text, JSON.stringify(source));
        if (leaf.text) assert.ok(leaf.at >= end, JSON.stringify(source));
        end = leaf.at + leaf.text.length;
      }
    }
  }
});

test("long texts take no long time", () => {
  const began = performance.now();
  for (const part of ["*a ", "[", "](a", "> ", "- ", "**a** ", "`` ` ", "*a_", "- a\n", "[a](<", "$a", "$$", "$$a\n", "\\[a", "\\[a\n"]) parse(part.repeat(4000));
  assert.ok(performance.now() - began < 5000);
});

test("a conversation keeps what it was before", () => {
  const chat = talk.begun(), first = talk.append(chat, { role: "user", text: "Why?" });
  const one = talk.append(chat, { role: "assistant", text: "So." });
  chat.leaf = first.id;
  const two = talk.append(chat, { role: "assistant", text: "Thus." });
  assert.equal(chat.title, "Why?");
  assert.deepEqual(talk.siblings(chat, two), [one, two]);
  assert.deepEqual(talk.messages(chat, first.id, "Be brief."), [{ role: "system", content: "Be brief." }, { role: "user", content: "Why?" }]);
  talk.choose(chat, first);
  assert.equal(chat.leaf, two.id);
  assert.equal(talk.toMarkdown(chat), "# Why?\n\n## You\n\nWhy?\n\n## Answer\n\nThus.\n");
  talk.remove(chat, two);
  assert.deepEqual(talk.path(chat), [first, one]);
  assert.deepEqual(talk.remove(chat, first), [first.id, one.id]);
  assert.equal(chat.leaf, null);
});

test("an export can be read again", () => {
  const chat = talk.begun();
  talk.append(chat, { role: "user", text: "Why?" });
  talk.append(chat, { role: "assistant", text: "So.", ends: [3] });
  const [back] = talk.fromJson(talk.toJson([chat]));
  assert.notEqual(back.id, chat.id);
  assert.deepEqual(talk.path(back).map((turn) => turn.text), ["Why?", "So."]);
  assert.throws(() => talk.fromJson("[]"), /no export/);
  const damaged = JSON.parse(talk.toJson([chat]));
  for (const turn of Object.values(damaged.conversations[0].turns)) turn.parent = turn.id;
  assert.throws(() => talk.fromJson(JSON.stringify(damaged)), /follows itself/);
});

test("events of a stream, however it is cut", () => {
  const whole = ": 2 before\n\n: ping\n\ndata: {\"a\":1}\n\nid: 7\n: ping\n\nid: 12\ndata: id: 3\n\ndata: [DONE]\n\n";
  const found = [{ before: 2 }, { ping: true }, { data: "{\"a\":1}" }, { ping: true, id: 7 }, { data: "id: 3", id: 12 }, { data: "[DONE]" }];
  for (let cut = 0; cut <= whole.length; cut += 1) {
    const events = new Events();
    assert.deepEqual([...events.push(whole.slice(0, cut)), ...events.push(whole.slice(cut))], found);
  }
});

test("texts of files", () => {
  const bytes = (...values) => new Uint8Array(values).buffer;
  assert.equal(textOf(new TextEncoder().encode("é\r\n😀").buffer), "é\n😀");
  assert.throws(() => textOf(bytes(0xff, 0x41)), /no text in UTF-8/);
  assert.throws(() => textOf(bytes(0x41, 0, 0x42)), /no text/);
  assert.equal(withText(" \n", "a\n"), "a\n");
  assert.equal(withText("Sum this up:\n", "a"), "Sum this up:\n\na");
});

test("settings", () => {
  assert.deepEqual(asked({ temperature: "0", top_k: " 5 ", stop: "a\\nb\n\nc", policy: "", schema: " " }), { temperature: 0, top_k: 5, stop: ["a\nb", "c"] });
  assert.deepEqual(asked({ schema: "{\"type\": \"object\"}" }).response_format, { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" } } });
  assert.throws(() => asked({ schema: "{" }), /JSON schema cannot be read/);
  assert.throws(() => asked({ schema: "[]" }), /is an object/);
});

const cycle = {
  tokens: [1, 2, 3, 4], texts: ["a", "b", "c", "d"], parents: [-1, 0, 0, 1], probabilities: [1, 0.5, 0.6, 0.9],
  path_probabilities: [1, 0.5, 0.6, 0.45], kept: [0, 1, 2], accepted: [0, 1], committed: [2, 4], committed_texts: ["b", "d"],
  origins: [null, "copied", "draft", "draft"], seconds: { total: 0.02 },
};

test("the tree of a cycle", () => {
  const tree = treeOf(cycle), { order, rows } = rowsOf(tree[0], true);
  assert.deepEqual(order.map((node) => node.fate), ["root", "accepted", "own", "pruned", "rejected"]);
  assert.equal(rows, 3);
  assert.ok(order[2].missed);
  assert.deepEqual(rowsOf(tree[0], false).order.map((node) => node.id), [0, 1, null, 2]);
});

test("figures, and a sentence where drafting did not pay", () => {
  const made = figures.nothing();
  figures.count(made, cycle, 0.005);
  assert.equal(figures.line(made), "2 tokens · 100.0 tokens/s · 2.00 per pass · about 0.50× plain");
  assert.match(figures.doubt(made), /did not pay/);
  assert.equal(figures.doubt(made, 1.2), "");
  assert.match(figures.doubt(made, 0.9), /plain decoding was faster/);
  assert.equal(figures.byOrigin(made), "copied 1");
  assert.equal(figures.doubt({ ...made, plain: 0.02 }), "");
  assert.match(figures.doubt({ ...made, tokens: 1, reason: "no draft" }), /without trees: no draft/);
});

// ---- directions

// Elements without a browser: their names, directions and what is in them.
class Box {
  constructor(name) {
    Object.assign(this, { name, dir: "", inside: [] });
  }

  append(...inside) {
    this.inside.push(...inside);
  }

  insertRow() {
    const row = new Box("tr");
    this.append(row);
    return row;
  }
}

function drawn(source, formatted = true) {
  globalThis.document = { createElement: (name) => new Box(name) };
  const box = new Box("div");
  new Rendering(box, (leaf, parent) => parent.append(leaf.text), () => new Box("button")).update(source, formatted);
  const all = (one) => (one.inside ? one.inside.flatMap((inside) => [...(inside.name ? [`${inside.name} ${inside.dir}`.trim()] : []), ...all(inside)]) : []);
  return all(box);
}

test("paragraphs, headings and plain texts follow their own text", () => {
  assert.deepEqual(drawn("مرحبا بالعالم\n\nHello\n\n# עברית"), ["p auto", "p auto", "h3 auto"]);
  assert.deepEqual(drawn("مرحبا\nHello", false), ["div auto"]);
});

test("lists, quotes and tables have the side of their first letter, and their points and cells their own", () => {
  assert.deepEqual(drawn("- واحد\n- two\n  1. אחת"), ["ul rtl", "li rtl", "p auto", "li ltr", "p auto", "ol rtl", "li rtl", "p auto"]);
  assert.deepEqual(drawn("1. one\n2. اثنان"), ["ol ltr", "li ltr", "p auto", "li rtl", "p auto"]);
  assert.deepEqual(drawn("> *سلام*"), ["blockquote rtl", "p auto", "em"]);
  assert.deepEqual(drawn("| اسم | b |\n|---|---|\n| 1 | x |").slice(0, 5), ["div rtl", "table rtl", "tr", "th auto", "th auto"]);
  assert.deepEqual(drawn("| a | ب |\n|---|---|").slice(0, 2), ["div ltr", "table ltr"]);
});

test("code stays left to right, and says nothing of a text's side", () => {
  assert.deepEqual(drawn("استخدم `print(x)` هنا"), ["p auto", "code ltr"]);
  assert.deepEqual(drawn("```py\n# مرحبا\n```").slice(0, 1), ["div ltr"]);
  assert.deepEqual(drawn("- `print(x)` يطبع\n- b").slice(0, 2), ["ul rtl", "li rtl"]);
});

test("a side is that of the first letter", () => {
  for (const [text, side] of [["123 - مرحبا a", "rtl"], ["(שלום)", "rtl"], ["\u07CA", "rtl"], ["a مرحبا", "ltr"], ["中文", "ltr"], ["12 + 3", "ltr"], ["", "ltr"]]) {
    assert.equal(directionOf([{ text, at: 0 }]), side, text);
  }
});
