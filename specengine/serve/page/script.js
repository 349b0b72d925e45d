"use strict";
// A chat, and the tree of each of its cycles. Whatever comes from the server or a reader is shown as text only.
(() => {
  const at = (id) => document.getElementById(id);
  const FATES = {
    root: "the token committed last before",
    accepted: "accepted",
    rejected: "rejected: the model read it, and chose another",
    pruned: "pruned: drafted, never read by the model",
    own: "the model’s own token, which ends every cycle",
  };
  const ORIGINS = {
    draft: "the draft: a head or a small model",
    copied: "copied from the text so far",
    recycled: "recycled: what the model said after this token before",
    forced: "forced by the grammar",
    null: "not noted: the tree grew on the device",
  };
  const SHAPES = { // around 0 0
    draft: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z",
    copied: "M-4 -4H4V4H-4Z",
    recycled: "M0 -5.4L5.4 0L0 5.4L-5.4 0Z",
    forced: "M0 -5L5 4H-5Z",
    root: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z",
    null: "M-4.5 -1.5H4.5V1.5H-4.5Z",
    own: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
  };
  const LETTER = 7.25, MARK = 15, GAP = 26, ROW = 21, MOST_ROW = 30, LONGEST = 16; // pixels, and letters of a label
  const LEAST_BARS = 40;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");

  // ---- text and elements

  const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
  const visible = (text) =>
    text.replace(/[\p{C}\p{Z}]/gu, (letter) => SIGNS[letter] ?? `\\u{${letter.codePointAt(0).toString(16)}}`);
  const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]|\p{Extended_Pictographic}/u;
  const columns = (text) => Array.from(text).reduce((sum, letter) => sum + (WIDE.test(letter) ? 2 : 1), 0);
  const shorten = (text) => {
    const letters = Array.from(text);
    return letters.length <= LONGEST ? text : letters.slice(0, LONGEST - 1).join("") + "…";
  };
  const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.01 ? `${(100 * p).toFixed(1)} %` : `${(100 * p).toPrecision(2)} %`);
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function element(name, attributes = {}, text = null) {
    return filled(document.createElement(name), attributes, text);
  }
  function drawn(name, attributes = {}, text = null) {
    return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
  }
  function filled(made, attributes, text) {
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }
  function list(id, rows) {
    at(id).replaceChildren(...rows.map(([name, value, note, kind]) => {
      const pair = element("div"), told = element("dd", kind ? { class: kind } : {}, String(value));
      if (note) told.append(" ", element("small", {}, note));
      pair.append(element("dt", {}, name), told);
      return pair;
    }));
  }

  // ---- settings, which last as long as the tab

  const FIELDS = ["key", "system", "temperature", "max_tokens", "seed"];
  for (const name of FIELDS) {
    at(name).value = sessionStorage.getItem(`specengine.${name}`) ?? (name === "max_tokens" ? "512" : "");
    at(name).addEventListener("input", () => sessionStorage.setItem(`specengine.${name}`, at(name).value));
  }
  const number = (name) => (at(name).value.trim() === "" ? undefined : Number(at(name).value));

  function askForKey() {
    at("asks-for-key").hidden = false;
    if (!at("settings").open) at("settings").showModal();
    at("key").focus();
  }

  // ---- the server

  const headers = () => (at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {});
  let model = null;

  async function meet() {
    for (;;) {
      try {
        const answer = await fetch("v1/models", { headers: headers() });
        if (answer.status === 401) {
          say("This server asks for a key: Settings.", true);
          return askForKey();
        }
        const told = await answer.json();
        if (answer.ok) {
          model = told.data[0].id;
          at("model").textContent = model;
          at("asks-for-key").hidden = true;
          return say("");
        }
        say(told.error.message);
        if (told.error.code !== "loading") return;
      } catch {
        say("The server does not answer; trying again.", true);
      }
      await new Promise((done) => setTimeout(done, 1500));
    }
  }

  // Chunks of a streamed answer; throws an Error with what the server says.
  async function* chunks(body, signal) {
    const options = { method: "POST", signal, headers: { ...headers(), "Content-Type": "application/json" } };
    const answer = await fetch("v1/chat/completions", { ...options, body: JSON.stringify(body) });
    if (!answer.ok) {
      if (answer.status === 401) askForKey();
      const told = await answer.json().catch(() => ({}));
      throw new Error(told.error?.message ?? `The server answers with status ${answer.status}.`);
    }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.startsWith("data: ") ? event.slice(6) : null;
        if (data === "[DONE]") return;
        if (data === null) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  }

  // ---- the conversation

  let turns = []; // {role, text}, an answer's also with its request, cycles and pieces
  let running = null;

  function say(text, wrong = false) {
    at("status").textContent = text;
    at("status").classList.toggle("wrong", wrong);
  }

  function addTurn(role, text = "") {
    const turn = { role, text, drawing: element("div", { class: `turn ${role}` }, text) };
    if (role === "assistant") Object.assign(turn, { cycles: [], pieces: [], plain: null, compared: null });
    at("welcome").hidden = true;
    at("log").append(turn.drawing);
    turns.push(turn);
    return turn;
  }

  function add(turn, text) {
    const number = Math.max(turn.cycles.length - 1, 0);
    const log = at("log"), follows = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
    turn.text += text;
    if (!turn.pieces[number]) {
      turn.pieces[number] = element("span", { class: "piece" });
      turn.pieces[number].addEventListener("click", () => show(turn, number));
      turn.drawing.append(turn.pieces[number]);
    }
    turn.pieces[number].textContent += text;
    if (follows) log.scrollTop = log.scrollHeight;
  }

  const asked = (seed) => {
    const messages = turns.filter((turn) => turn.text !== "").map(({ role, text }) => ({ role, content: text }));
    if (at("system").value.trim()) messages.unshift({ role: "system", content: at("system").value });
    const made = { model, messages, temperature: number("temperature"), max_tokens: number("max_tokens"), seed };
    return { ...made, stream: true, return_cycles: true };
  };

  function working(control) {
    running = control;
    at("send").hidden = control !== null;
    at("stop").hidden = control === null;
    at("log").setAttribute("aria-busy", control !== null);
    if (shown.turn) showFigures();
  }

  async function send(text) {
    if (running || !text.trim()) return;
    if (model === null) return meet();
    stopReplay();
    const user = addTurn("user", text);
    const body = asked(number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0]);
    const turn = addTurn("assistant");
    turn.body = body;
    at("message").value = "";
    at("log").scrollTop = at("log").scrollHeight;
    show(turn, -1);
    working(new AbortController());
    say("Answering");
    let ended = "";
    try {
      for await (const chunk of chunks(body, running.signal)) {
        turn.cycles.push(...(chunk.cycles ?? []));
        turn.plain = chunk.plain_cycle_seconds ?? turn.plain;
        const choice = chunk.choices[0];
        if (choice?.delta.content) add(turn, choice.delta.content);
        ended = choice?.finish_reason ?? ended;
        if (chunk.cycles && shown.turn === turn) follow();
      }
      say(ended === "length" ? "The answer was cut at its most tokens." : "");
    } catch (error) {
      if (error.name === "AbortError") say("Stopped.");
      else {
        say(error.message, true);
        if (!turn.cycles.length) { // nothing was answered: the message can be sent again
          turns.splice(turns.indexOf(user), 2);
          user.drawing.remove();
          turn.drawing.remove();
          at("message").value = text;
          shown.turn = turns.findLast((one) => one.cycles) ?? null;
        }
      }
    } finally {
      working(null);
    }
    if (shown.turn === turn) show(turn, shown.follows ? turn.cycles.length - 1 : shown.cycle);
    else redraw();
  }

  function begin() {
    running?.abort();
    stopReplay();
    turns = [];
    for (const turn of at("log").querySelectorAll(".turn")) turn.remove();
    at("welcome").hidden = false;
    Object.assign(shown, { turn: null, cycle: -1, follows: true });
    say("");
    redraw();
    at("message").focus();
  }

  // The same request, decoded plainly: what it takes, and whether the text is the same.
  async function compare() {
    const turn = shown.turn;
    if (running || !turn?.cycles.length) return;
    working(new AbortController());
    turn.compared = { text: "Answering plainly" };
    const cycles = [];
    let text = "", whole = false;
    try {
      for await (const chunk of chunks({ ...turn.body, policy: "plain" }, running.signal)) {
        cycles.push(...(chunk.cycles ?? []));
        text += chunk.choices[0]?.delta.content ?? "";
        whole = whole || chunk.choices[0]?.finish_reason;
        turn.compared = { text: `Answering plainly: ${cycles.length} tokens` };
        if (shown.turn === turn) showFigures();
      }
      const same = whole && turn.text === text ? "the same text" : turn.text.startsWith(text) || text.startsWith(turn.text) ? "the same text as far as both go" : "another text, as rounding in low precision can bring";
      turn.compared = { ratio: rate(turn.cycles) / rate(cycles), rate: rate(cycles), text: same };
    } catch (error) {
      turn.compared = { text: error.name === "AbortError" ? "Stopped." : error.message };
    } finally {
      working(null);
    }
  }

  // ---- which cycle is shown

  const shown = { turn: null, cycle: -1, follows: true };
  let nodes = [], current = 0, waiting = null, drawnAt = 0;

  function show(turn, cycle) {
    shown.turn = turn;
    shown.cycle = Math.min(Math.max(cycle, 0), turn.cycles.length - 1);
    shown.follows = shown.cycle === turn.cycles.length - 1;
    redraw(true);
  }

  // A cycle has come: the last one is shown, as often as an eye can follow.
  function follow() {
    if (!shown.follows) shown.late = true;
    else shown.cycle = shown.turn.cycles.length - 1;
    if (waiting !== null) return;
    const pause = calm.matches ? 1000 : 150;
    waiting = setTimeout(() => {
      waiting = null;
      redraw();
    }, Math.max(0, drawnAt + pause - performance.now()));
  }

  function step(by) {
    if (!shown.turn?.cycles.length) return;
    show(shown.turn, shown.cycle + by);
    shown.turn.pieces[shown.cycle]?.scrollIntoView({ block: "nearest" });
  }

  function redraw(growing = false) {
    drawnAt = performance.now();
    const { turn, cycle } = shown, record = turn?.cycles[cycle];
    for (const marked of document.querySelectorAll(".piece.at, .turn.shown")) marked.classList.remove("at", "shown");
    turn?.drawing.classList.add("shown");
    turn?.pieces[cycle]?.classList.add("at");
    drawOverview(turn?.cycles ?? [], cycle);
    at("previous").disabled = !record || cycle === 0;
    at("next").disabled = !record || cycle === turn.cycles.length - 1;
    at("replay").disabled = !record;
    const answers = turns.filter((one) => one.cycles), named = answers.length > 1 ? `Answer ${answers.indexOf(turn) + 1}, cycle` : "Cycle";
    const committed = record ? `${record.committed.length} token${record.committed.length > 1 ? "s" : ""}` : "";
    at("position").textContent = record ? `${named} ${cycle + 1} of ${turn.cycles.length}: ${committed}` : "No cycle yet";
    const slider = { min: record ? 1 : 0, max: turn?.cycles.length ?? 0, now: cycle + 1, text: at("position").textContent };
    for (const [name, value] of Object.entries(slider)) at("cycle").setAttribute(`aria-value${name}`, value);
    at("tree").classList.toggle("growing", growing);
    drawTree(record ? treeOf(record) : []);
    showFigures();
  }

  // ---- the tree

  // The nodes of a record as drafted, then the model's own token as one more child of the last accepted node.
  function treeOf(record) {
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
    const own = { id: null, token: record.committed[last], text: record.committed_texts[last], origin: "own", children: [], fate: "own" };
    own.missed = end.children.some((child) => child.fate === "pruned" && child.token === own.token);
    hang(own, end);
    const place = (node) => (node.fate === "accepted" ? 0 : node.fate === "own" ? 1 : 2);
    for (const node of tree) node.children.sort((left, right) => place(left) - place(right) || right.p - left.p);
    return tree;
  }

  // Left to right: a column per depth, a row per leaf; a node stands in the row of its first child.
  function layOut(root) {
    const order = [], widths = [], stack = [root], withPruned = at("pruned").checked;
    let rows = 0;
    root.depth = 0;
    while (stack.length) {
      const node = stack.pop();
      node.below = node.children.filter((child) => withPruned || child.fate !== "pruned");
      node.row = rows;
      if (!node.below.length) rows += 1;
      node.label = shorten(visible(node.text) || `#${node.token}`);
      node.width = MARK + columns(node.label) * LETTER;
      widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
      order.push(node);
      for (const child of node.below.toReversed()) {
        child.depth = node.depth + 1;
        stack.push(child);
      }
    }
    const lefts = [];
    const width = widths.reduce((left, one, depth) => ((lefts[depth] = left), left + one + GAP), 18);
    const pitch = Math.min(Math.max(ROW, (at("stage").clientHeight - 30) / rows), MOST_ROW);
    for (const node of order) Object.assign(node, { x: lefts[node.depth], y: 22 + pitch * node.row });
    return { order, width: width - GAP + 14, height: pitch * (rows - 1) + 44 };
  }

  function drawTree(tree) {
    const svg = at("tree"), hadFocus = svg.contains(document.activeElement);
    svg.replaceChildren();
    nodes = [];
    at("none").hidden = tree.length > 0;
    if (!tree.length) {
      svg.setAttribute("width", 0);
      svg.setAttribute("height", 0);
      return list("node", []);
    }
    const { order, width, height } = layOut(tree[0]);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    nodes = order;
    for (const node of order.slice(1)) {
      node.edge = edge(node);
      svg.append(node.edge);
    }
    order.forEach((node, index) => svg.append((node.drawing = box(node, index))));
    const end = order.findIndex((node) => node.fate === "own");
    choose(end, hadFocus);
    const stage = at("stage");
    stage.scrollLeft = Math.max(0, order[end].x + order[end].width + 40 - stage.clientWidth);
    stage.scrollTop = Math.max(0, order[end].y - stage.clientHeight / 2);
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
    for (const traced of document.querySelectorAll(".edge.traced")) traced.classList.remove("traced");
    for (let one = node; one.parent; one = one.parent) one.edge.classList.add("traced");
    list("node", [
      ["Token", visible(node.text) || "(no text)", `id ${node.token}`, "token"],
      ["Probability", known(node) ? percent(node.p) : "–", known(node) ? `of the path ${percent(node.path)}` : ""],
      ["Origin", known(node) ? ORIGINS[node.origin] : node.fate === "own" ? "the model" : "–"],
      ["Fate", fateOf(node)],
    ]);
  }

  function walk(key) {
    const node = nodes[current], index = nodes.indexOf.bind(nodes);
    const next = {
      ArrowDown: Math.min(current + 1, nodes.length - 1), ArrowUp: Math.max(current - 1, 0), Home: 0, End: nodes.length - 1,
      ArrowLeft: node.parent ? index(node.parent) : current, ArrowRight: node.below.length ? index(node.below[0]) : current,
    }[key];
    if (next !== undefined) choose(next, true);
    return next !== undefined;
  }

  // ---- figures

  const rate = (cycles) => sum(cycles.map((one) => one.committed.length)) / sum(cycles.map((one) => one.seconds.total));

  function drawOverview(cycles, here) {
    const most = Math.max(4, ...cycles.map((one) => one.committed.length)), width = 10 * Math.max(LEAST_BARS, cycles.length);
    at("overview").setAttribute("viewBox", `0 0 ${width} 50`);
    at("overview").replaceChildren(...cycles.flatMap((one, index) => {
      const unit = 46 / most, accepted = (one.committed.length - 1) * unit, chosen = index === here ? " at" : "";
      const bars = chosen ? [drawn("rect", { class: "here", x: 10 * index, y: 0, width: 10, height: 50 })] : [];
      bars.push(drawn("rect", { class: `bar${chosen}`, x: 10 * index + 1.5, y: 50 - unit, width: 7, height: unit }));
      bars.push(drawn("rect", { class: `bar accepted${chosen}`, x: 10 * index + 1.5, y: 50 - unit - accepted, width: 7, height: accepted }));
      return bars;
    }));
  }

  function showFigures() {
    const turn = shown.turn, cycles = turn?.cycles ?? [], compared = turn?.compared;
    at("compare").disabled = running !== null || !cycles.length;
    at("compared").textContent = "";
    if (compared?.ratio) {
      at("compared").append(element("strong", {}, `${compared.ratio.toFixed(2)}×, measured`));
      at("compared").append(`: plainly ${compared.rate.toFixed(1)} tokens/s, ${compared.text}.`);
    } else if (compared) at("compared").textContent = compared.text;
    if (!cycles.length) return list("figures", []);
    const tokens = sum(cycles.map((one) => one.committed.length)), counts = {};
    for (const one of cycles) {
      for (const node of one.accepted.slice(1)) {
        const origin = one.origins?.[node] ?? "not noted";
        counts[origin] = (counts[origin] ?? 0) + 1;
      }
    }
    const from = ["draft", "copied", "recycled", "forced", "not noted"].filter((name) => counts[name]).map((name) => `${name} ${counts[name]}`).join(", ");
    const plain = turn.plain, estimate = plain ? rate(cycles) * plain : null;
    list("figures", [
      ["Tokens per pass", (tokens / cycles.length).toFixed(2), `${tokens} tokens in ${cycles.length} cycles`],
      ["Accepted drafts", sum(Object.values(counts)), from],
      ["Speed", `${rate(cycles).toFixed(1)} tokens/s`, "of the cycles alone"],
      estimate
        ? ["Against plain", `${estimate.toFixed(2)}×`, `estimated: by the measured costs a plain pass takes ${(1000 * plain).toFixed(1)} ms`]
        : ["Against plain", "–", "no measured cost of a plain pass"],
    ]);
  }

  // ---- replay

  let playing = null;

  function stopReplay() {
    clearInterval(playing);
    playing = null;
    at("replay").setAttribute("aria-pressed", false);
  }

  function replay() {
    if (playing !== null) return stopReplay();
    const cycles = shown.turn.cycles;
    if (shown.cycle === cycles.length - 1) show(shown.turn, 0);
    at("replay").setAttribute("aria-pressed", true);
    playing = setInterval(() => (shown.cycle < cycles.length - 1 ? step(1) : stopReplay()), 900);
  }

  // ---- what the reader does

  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(at("message").value);
  });
  at("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(at("message").value);
  });
  for (const button of document.querySelectorAll(".example")) button.addEventListener("click", () => send(button.textContent));
  at("stop").addEventListener("click", () => {
    running?.abort();
    at("message").focus();
  });
  at("new").addEventListener("click", begin);
  at("compare").addEventListener("click", compare);
  at("replay").addEventListener("click", replay);
  at("previous").addEventListener("click", () => (stopReplay(), step(-1)));
  at("next").addEventListener("click", () => (stopReplay(), step(1)));
  at("pruned").addEventListener("change", () => redraw());
  at("open-settings").addEventListener("click", () => at("settings").showModal());
  at("settings").addEventListener("close", () => meet());

  const slider = at("cycle");
  slider.addEventListener("keydown", (event) => {
    const all = shown.turn?.cycles.length ?? 0;
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -all, End: all }[event.key];
    if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    stopReplay();
    step(by);
  });
  const point = (event) => {
    const bounds = slider.getBoundingClientRect(), all = shown.turn?.cycles.length ?? 0;
    stopReplay();
    step(Math.floor(((event.clientX - bounds.left) / bounds.width) * Math.max(LEAST_BARS, all)) - shown.cycle);
  };
  slider.addEventListener("pointerdown", (event) => {
    slider.setPointerCapture(event.pointerId);
    point(event);
  });
  slider.addEventListener("pointermove", (event) => slider.hasPointerCapture(event.pointerId) && point(event));
  at("tree").addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !nodes.length) return;
    if (walk(event.key)) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !at("settings").open) running.abort();
  });

  for (const shape of document.querySelectorAll("path[data-shape]")) shape.setAttribute("d", SHAPES[shape.dataset.shape]);
  redraw();
  meet();
})();
