"use strict";
// Steps through the cycles of the trace in the element #data. Whatever comes from there is shown as text only.
(() => {
  const { runs, queries } = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const MARKS = { root: "●", accepted: "✓", rejected: "×", pruned: "·", own: "+" };
  const WORDS = {
    root: "root, the token committed last before",
    accepted: "accepted",
    rejected: "verified, not accepted",
    pruned: "pruned, never verified",
    own: "the target's own token",
  };
  const LETTER = 7.3, PADDING = 8, GAP = 34, LONGEST = 18; // pixels and letters of a box
  let query = 0, cycle = 0, nodes = [], current = 0;

  // ---- text

  const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
  const visible = (text) =>
    text.replace(/[\p{C}\p{Z}]/gu, (letter) => SIGNS[letter] ?? `\\u{${letter.codePointAt(0).toString(16)}}`);
  // Running text keeps its spaces and lines, and shows what would turn or hide the text around it.
  const readable = (text) => text.replace(/[^\P{C}\n\t]/gu, visible);
  const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]|\p{Extended_Pictographic}/u;
  const columns = (text) => Array.from(text).reduce((sum, letter) => sum + (WIDE.test(letter) ? 2 : 1), 0);
  const shorten = (text, longest = LONGEST) => {
    const letters = Array.from(text);
    return letters.length <= longest ? text : letters.slice(0, longest - 1).join("") + "…";
  };
  const brief = (p) => (p >= 0.995 ? "1.0" : p < 0.01 ? "<.01" : p.toFixed(2).slice(1));
  const exact = (p) => (p >= 0.001 ? p.toFixed(4) : p.toExponential(2));
  const milliseconds = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);

  function element(name, attributes = {}, text = null) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }
  function drawn(name, attributes = {}, text = null) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }

  // ---- the tree of a cycle

  // Its nodes as drafted, then the target's own token as one more child of the last accepted node.
  function treeOf(shown, texts) {
    const kept = shown.k && new Set(shown.k), accepted = new Set(shown.a);
    const tree = shown.t.map((token, id) => ({
      id, token, text: texts[token] ?? "", parent: shown.p[id], p: shown.e[id], children: [],
      state: id === 0 ? "root" : accepted.has(id) ? "accepted" : !kept || kept.has(id) ? "rejected" : "pruned",
    }));
    for (const node of tree) {
      const parent = tree[node.parent];
      node.depth = parent ? parent.depth + 1 : 0;
      node.path = parent ? parent.path * node.p : 1;
      if (parent) parent.children.push(node);
    }
    const onPath = (node) => node.state === "accepted";
    for (const node of tree) {
      node.children.sort((left, right) => right.p - left.p || left.id - right.id);
      node.children.forEach((child, index) => (child.rank = index + 1));
      node.children.sort((left, right) => onPath(right) - onPath(left)); // so the accepted path is the first row
    }
    if (shown.c.length < shown.a.length) return tree; // it ends with a drafted end token
    const parent = tree[shown.a[shown.a.length - 1]], token = shown.c[shown.c.length - 1];
    const own = { id: null, token, text: texts[token] ?? "", depth: parent.depth + 1, children: [], state: "own" };
    own.parent = parent.id;
    own.missed = parent.children.some((child) => child.state === "pruned" && child.token === token);
    parent.children.unshift(own);
    return tree;
  }

  // Left to right: a column per depth, a row per leaf; a node stands in the row of its first child.
  function layOut(root, withPruned) {
    const order = [], widths = [], stack = [root];
    let rows = 0;
    while (stack.length) {
      const node = stack.pop();
      node.shown = node.children.filter((child) => withPruned || child.state !== "pruned");
      node.row = rows;
      if (!node.shown.length) rows += 1;
      node.label = shorten(visible(node.text) || `#${node.token}`);
      node.figure = node.state === "root" || node.state === "own" ? "" : brief(node.p);
      const letters = 2 + columns(node.label) + (node.figure ? node.figure.length + 1 : 0);
      node.width = letters * LETTER + 2 * PADDING;
      widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
      order.push(node);
      for (let index = node.shown.length - 1; index >= 0; index--) stack.push(node.shown[index]);
    }
    const height = rows > 200 ? 24 : 28, lefts = [];
    widths.reduce((left, width, depth) => ((lefts[depth] = left), left + width + GAP), 12);
    for (const node of order) {
      node.x = lefts[node.depth];
      node.y = 8 + node.row * height;
      node.boxHeight = height - 6;
    }
    const last = widths.length - 1;
    return { order, width: lefts[last] + widths[last] + 12, height: rows * height + 16 };
  }

  function drawTree(tree) {
    const svg = at("tree"), hadFocus = svg.contains(document.activeElement);
    const { order, width, height } = layOut(tree[0], at("pruned").checked);
    svg.replaceChildren();
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    nodes = order;
    const edges = order.flatMap((node) => node.shown.map((child) => edge(node, child)));
    svg.append(...edges.filter((one) => !one.matches(".accepted")), ...edges.filter((one) => one.matches(".accepted")));
    order.forEach((node, index) => svg.append((node.drawing = box(node, index))));
    const accepted = order.filter((node) => node.state === "accepted");
    const end = accepted[accepted.length - 1] ?? order[0];
    choose(order.indexOf(end), hadFocus);
    const stage = at("stage");
    stage.scrollTop = Math.max(0, end.y - stage.clientHeight / 2);
    stage.scrollLeft = Math.max(0, end.x + end.width + 160 - stage.clientWidth);
  }

  function edge(node, child) {
    const x0 = node.x + node.width, y0 = node.y + node.boxHeight / 2, x1 = child.x, y1 = child.y + child.boxHeight / 2;
    const bend = child.x - GAP * 0.75;
    const d = y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}H${bend}V${y1 - 6}Q${bend} ${y1} ${bend + 6} ${y1}H${x1}`;
    return drawn("path", { class: `edge ${child.state}`, d });
  }

  function box(node, index) {
    const group = drawn("g", { class: `node state-${node.state}`, transform: `translate(${node.x} ${node.y})`, role: "img", tabindex: -1, "aria-label": spoken(node) });
    const middle = node.boxHeight / 2 + 4, mark = MARKS[node.state];
    group.append(drawn("rect", { class: `box ${node.state}`, width: node.width, height: node.boxHeight, rx: 5 }));
    group.append(drawn("text", { class: "mark", x: PADDING, y: middle, "aria-hidden": true }, mark));
    group.append(drawn("text", { x: PADDING + 2 * LETTER, y: middle, "aria-hidden": true }, node.label));
    if (node.figure) {
      const x = node.width - PADDING;
      group.append(drawn("text", { x, y: middle, "text-anchor": "end", "aria-hidden": true }, node.figure));
      group.append(drawn("rect", { class: "likely", x: 3, y: node.boxHeight - 3.5, height: 2.5, width: Math.max(1, node.p * (node.width - 6)) }));
    }
    group.addEventListener("mouseenter", () => describe(node));
    group.addEventListener("mouseleave", () => describe(nodes[current]));
    group.addEventListener("click", () => choose(index, true));
    group.addEventListener("focus", () => choose(index, false));
    return group;
  }

  function spoken(node) {
    const named = `token ${visible(node.text) || node.token}, ${become(node)}, depth ${node.depth}`;
    return node.figure ? `${named}, rank ${node.rank}, probability ${exact(node.p)}, of the path ${exact(node.path)}` : named;
  }

  const become = (node) => WORDS[node.state] + (node.missed ? "; it had been drafted, and was pruned" : "");

  function choose(index, withFocus) {
    nodes[current]?.drawing?.classList.remove("chosen");
    nodes[current]?.drawing?.setAttribute("tabindex", -1);
    current = index;
    nodes[current].drawing.classList.add("chosen");
    nodes[current].drawing.setAttribute("tabindex", 0);
    describe(nodes[current]);
    if (withFocus) nodes[current].drawing.focus({ preventScroll: false });
  }

  function describe(node) {
    const known = node.figure !== "";
    fill("of-node", [
      ["token", visible(node.text) || "(no text)"],
      ["id", node.token],
      ["state", `${MARKS[node.state]} ${become(node)}`],
      ["depth", node.depth],
      ["rank among siblings", known ? node.rank : "–"],
      ["probability of the edge", known ? exact(node.p) : "–"],
      ["of the path", known ? exact(node.path) : "–"],
    ]);
  }

  // ---- around the tree

  function fill(id, rows) {
    at(id).replaceChildren(...rows.map(([name, value]) => {
      const row = element("tr");
      row.append(element("th", { scope: "row" }, name), element("td", {}, String(value)));
      return row;
    }));
  }

  function showAnswer(all) {
    const committed = (from, to) => readable(all.slice(from, to).map((one) => one.s).join(""));
    const mark = element("mark", {}, committed(cycle, cycle + 1));
    at("answer").replaceChildren(
      element("span", {}, committed(0, cycle)), mark, element("span", { class: "later" }, committed(cycle + 1)),
    );
    at("answer").scrollTop = Math.max(0, mark.offsetTop - at("answer").offsetTop - 60);
  }

  function showFigures(all, shown, texts) {
    const verified = (one) => (one.k ?? one.t).length;
    const parts = ["draft", "policy", "verify", "walk", "commit"].filter((part) => part in shown.sec);
    fill("of-cycle", [
      ["committed", shown.c.map((token) => visible(texts[token] ?? "") || `#${token}`).join("  ")],
      ["accepted", `${shown.a.length - 1} of ${verified(shown) - 1} verified draft nodes`],
      ["drafted", `${shown.t.length - 1} nodes in ${shown.d} passes, ${shown.t.length - verified(shown)} pruned`],
      ["time", milliseconds(shown.sec.total ?? 0)],
      ["of it", parts.map((part) => `${part} ${(1000 * shown.sec[part]).toFixed(1)}`).join(", ")],
    ]);
    fill("of-query", [
      ["acceptance length τ", mean(all.map((one) => one.c.length)).toFixed(2)],
      ["draft passes δ", mean(all.map((one) => one.d)).toFixed(2)],
      ["verified per cycle", `${mean(all.map(verified)).toFixed(1)} nodes with the root`],
      ["drafted per cycle", `${mean(all.map((one) => one.t.length - 1)).toFixed(1)} nodes`],
      ["tokens, cycles", `${all.reduce((sum, one) => sum + one.c.length, 0)}, ${all.length}`],
      ["ended by", queries[query].end ?? "(stopped before its end)"],
    ]);
  }

  function drawOverview(all) {
    const svg = at("overview"), most = Math.max(...all.map((one) => one.c.length));
    svg.setAttribute("viewBox", `0 0 ${all.length * 10} 44`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-label", `Tokens committed in each of ${all.length} cycles, ${most} at most`);
    svg.replaceChildren(...all.flatMap((one, index) => {
      const unit = 40 / most, drafted = (one.a.length - 1) * unit, own = one.c.length * unit - drafted, x = index * 10 + 1;
      return [
        drawn("rect", { class: "drafted", x, y: 42 - drafted, width: 8, height: drafted }),
        drawn("rect", { class: "last", x, y: 42 - drafted - own, width: 8, height: own }),
      ];
    }));
    svg.append(drawn("rect", { class: "here", id: "here", y: 1, width: 10, height: 42 }));
  }

  function show() {
    const all = queries[query].cycles, run = runs[queries[query].run], shown = all[cycle];
    at("cycle").value = cycle + 1;
    at("position").textContent = `${all.length ? cycle + 1 : 0} of ${all.length}`;
    at("previous").disabled = cycle === 0;
    at("next").disabled = cycle >= all.length - 1;
    if (!shown) {
      at("said").textContent = "This query has no cycle.";
      for (const id of ["of-cycle", "of-query", "of-node", "answer", "tree"]) at(id).replaceChildren();
      return;
    }
    at("here").setAttribute("x", cycle * 10);
    showAnswer(all);
    showFigures(all, shown, run.texts);
    drawTree(treeOf(shown, run.texts));
    at("said").textContent =
      `Cycle ${cycle + 1} of ${all.length}: ${shown.a.length - 1} draft tokens accepted; committed ${readable(shown.s)}`;
  }

  function openQuery(index) {
    query = index;
    cycle = 0;
    const { cycles, prompt, seed, run } = queries[query], of = runs[run];
    const versions = Object.entries(of.versions).map((entry) => entry.join(" ")).join(", ");
    at("run").textContent = readable(
      `${of.model} · draft ${of.draft} · policy ${of.policy} · ${seed === null ? "no seed" : `seed ${seed}`} · ${versions}` +
      (of.truncated ? ` · ${of.file} ends in the middle of a line, which was left out` : ""),
    );
    at("prompt").textContent = readable(prompt);
    at("cycle").max = Math.max(1, cycles.length);
    at("overview").replaceChildren();
    if (cycles.length) drawOverview(cycles);
    show();
  }

  function step(by) {
    const next = Math.min(Math.max(cycle + by, 0), queries[query].cycles.length - 1);
    if (next === cycle || next < 0) return;
    cycle = next;
    show();
  }

  // ---- what the reader does

  queries.forEach(({ title, run, cycles }, index) => {
    const label = `${index + 1}: ${shorten(readable(title), 50)} (${runs[run].file}, ${cycles.length} cycles)`;
    at("query").append(element("option", { value: index }, label));
  });
  at("query").addEventListener("change", (event) => openQuery(Number(event.target.value)));
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  at("cycle").addEventListener("input", (event) => step(Number(event.target.value) - 1 - cycle));
  at("pruned").addEventListener("change", show);
  at("overview").addEventListener("click", (event) => {
    const bounds = at("overview").getBoundingClientRect();
    step(Math.floor(((event.clientX - bounds.left) / bounds.width) * queries[query].cycles.length) - cycle);
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select, input[type=range]")) return;
    if (event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowLeft") step(-1);
    else if (event.target.closest?.(".node") && event.key === "ArrowDown") choose(Math.min(current + 1, nodes.length - 1), true);
    else if (event.target.closest?.(".node") && event.key === "ArrowUp") choose(Math.max(current - 1, 0), true);
    else return;
    event.preventDefault();
  });

  // ---- start

  if (queries.length) openQuery(0);
  else at("run").textContent = "The trace holds no query.";
})();
