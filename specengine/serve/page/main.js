// The page: chats, the log of the one that is open, answers under way, settings. Whatever comes from the server or a
// reader is shown as text only.
import * as talk from "./conversation.js";
import { at, button, copyButton, download, element } from "./dom.js";
import * as figures from "./figures.js";
import { Rendering } from "./markdown.js";
import * as panel from "./panel.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

let chats = []; // the conversations, the latest change first
let open = talk.begun(); // the one that is shown; it is among the chats once something is said in it
let model = null;
let undone = null; // takes the last deletion back
const running = new Map(); // by conversation: {control, turn, status} of the answer under way
const cycles = new Map(), compared = new Map(), drawings = new Map(); // by turn
const narrow = matchMedia("(max-width: 60rem)");

const cyclesOf = (turn) => cycles.get(turn.id) ?? [];
const job = () => running.get(open.id) ?? null;

// ---- settings

const field = (name) => at(name === "stop" ? "stop-at" : name);
const values = () => Object.fromEntries(settings.FIELDS.map((name) => [name, name === "markdown" ? String(field(name).checked) : field(name).value]));
const kept = (name) => localStorage.getItem(`specengine.${name}`);

function fill() {
  for (const name of settings.FIELDS) {
    const value = kept(name) ?? settings.DEFAULTS[name] ?? "";
    if (name === "markdown") field(name).checked = value === "true";
    else field(name).value = value;
  }
  checkSchema();
}

function checkSchema() {
  let problem = "";
  try {
    settings.asked({ schema: at("schema").value });
  } catch (error) {
    problem = error.message.replace("Settings: ", "");
  }
  at("schema-problem").textContent = problem || "Tokens that the schema forces are triangles in the tree.";
  at("schema-problem").classList.toggle("wrong", problem !== "");
}

function askForKey() {
  at("asks-for-key").hidden = false;
  if (!at("settings").open) at("settings").showModal();
  at("key").focus();
}

// ---- what is said below the log

function say(text, wrong = false, undo = null) {
  undone = undo;
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
  at("undo").hidden = undo === null;
}

function sayOf(conversation, text, wrong = false) {
  if (conversation === open) say(text, wrong);
}

async function meet() {
  for (;;) {
    try {
      model = (await server.models(at("key").value))[0].id;
      at("model").textContent = model;
      at("asks-for-key").hidden = true;
      return say("");
    } catch (error) {
      if (error.status === 401) {
        say("This server asks for a key: Settings.", true);
        return askForKey();
      }
      say(error.status ? error.message : "The server does not answer; trying again.", true);
      if (error.status && error.code !== "loading") return;
    }
    await new Promise((done) => setTimeout(done, 1500));
  }
}

// ---- keeping

function keep(conversation) {
  if (!chats.includes(conversation)) chats.push(conversation);
  chats.sort((left, right) => right.changed - left.changed);
  tellOthers(conversation, store.save(conversation));
  drawList();
}

// Other tabs of this page read again what is changed in one.
const tabs = new BroadcastChannel("specengine.chats");
const tellOthers = (conversation, saved) => saved.then(() => tabs.postMessage(conversation.id)).catch(cannotKeep);

tabs.addEventListener("message", async ({ data: id }) => {
  const found = await store.get(id).catch(() => undefined);
  if (running.has(id)) return;
  chats = chats.filter((one) => one.id !== id);
  if (found) chats.push(found);
  chats.sort((left, right) => right.changed - left.changed);
  for (const turn of Object.keys(found?.turns ?? {})) if (!cycles.get(turn)?.length) cycles.delete(turn);
  if (found && open.id === id && !at("log").querySelector(".edited")) openChat(found);
  else drawList();
});

function cannotKeep() {
  at("kept").textContent = "This browser keeps no more: export chats, and delete some.";
  at("kept").classList.add("wrong");
}

// ---- the list of chats

function drawList() {
  at("list").replaceChildren(...chats.map((one) => {
    const made = element("li", { "data-chat": one.id }), isOpen = one === open;
    made.append(button(one.title, () => openChat(one), { class: "title", ...(isOpen ? { "aria-current": "true" } : {}) }));
    const answering = running.get(one.id);
    if (answering) made.append(element("small", { class: "going" }, answering.status || "answering"));
    if (isOpen) {
      made.append(element("div", { class: "buttons" },
        button("Rename", () => rename(one, made)),
        button("Markdown", () => download(`${fileOf(one)}.md`, "text/markdown", talk.toMarkdown(one)), { "aria-label": "Export as Markdown" }),
        button("JSON", () => download(`${fileOf(one)}.json`, "application/json", talk.toJson([one])), { "aria-label": "Export as JSON" }),
        button("Delete", () => drop(one), { "aria-label": "Delete this chat" })));
    }
    return made;
  }));
}

const fileOf = (conversation) => conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat";

function rename(conversation, row) {
  const input = element("input", { "aria-label": "Title", value: conversation.title, maxlength: 200 });
  const end = (take) => {
    if (take && input.value.trim()) {
      Object.assign(conversation, { title: input.value.trim(), named: true });
      keep(conversation);
    }
    drawList();
    at("list").querySelector("[aria-current]")?.focus();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    event.preventDefault();
    end(event.key === "Enter");
  });
  row.querySelector(".title").replaceWith(input);
  input.select();
}

function drop(conversation) {
  running.get(conversation.id)?.control.abort();
  chats = chats.filter((one) => one !== conversation);
  tellOthers(conversation, store.remove(conversation));
  begin();
  say(`“${conversation.title}” is deleted.`, false, () => {
    for (const id of Object.keys(conversation.turns)) if (cycles.has(id)) store.saveCycles(id, cycles.get(id)).catch(cannotKeep);
    keep(conversation);
    openChat(conversation);
  });
}

async function openChat(conversation) {
  open = conversation;
  panel.stopReplay();
  if (narrow.matches) toggle("chats", false);
  drawLog();
  drawList();
  showWork();
  panel.show(talk.path(open).findLast((turn) => turn.role === "assistant") ?? null);
  const missing = Object.values(conversation.turns).filter((turn) => turn.role === "assistant" && !cycles.has(turn.id));
  await Promise.all(missing.map(async (turn) => cycles.set(turn.id, await store.cyclesOf(turn.id).catch(() => []))));
  if (open === conversation && missing.length) panel.show(talk.path(open).findLast((turn) => turn.role === "assistant") ?? null);
}

function begin() {
  openChat(talk.begun());
  say("");
  at("message").focus();
}

// ---- the log

function drawLog() {
  drawings.clear();
  for (const turn of at("log").querySelectorAll(".turn")) turn.remove();
  for (const turn of talk.path(open)) drawTurn(turn);
  at("welcome").hidden = open.leaf !== null;
  at("log").scrollTop = at("log").scrollHeight;
}

function drawTurn(turn) {
  const text = element("div", { class: "text" }), foot = element("div", { class: "foot" });
  const box = element("div", { class: `turn ${turn.role}`, "data-turn": turn.id }, text, foot);
  const rendering = new Rendering(text, (leaf, parent) => putLeaf(turn, leaf, parent), (told) => copyButton(told));
  drawings.set(turn.id, { box, foot, rendering });
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

function drawText(turn) {
  drawings.get(turn.id)?.rendering.update(turn.text, turn.role === "assistant" && at("markdown").checked);
}

function drawFoot(turn) {
  const drawing = drawings.get(turn.id);
  if (!drawing) return;
  const working = job()?.turn === turn, rows = [];
  if (turn.role === "assistant") {
    const ratio = compared.get(turn.id)?.ratio ?? null, doubtful = working ? "" : figures.doubt(turn.figures, ratio);
    rows.push(element("span", { class: "figures" }, figures.line(turn.figures, ratio)));
    if (turn.note) rows.push(element("span", { class: "note" }, turn.note));
    if (doubtful) rows.push(element("span", { class: "note doubt" }, doubtful.split(". ")[0].replace(/\.?$/, ".")));
  }
  const buttons = element("div", { class: "buttons" }), all = talk.siblings(open, turn), place = all.indexOf(turn);
  if (all.length > 1) {
    const go = (by) => () => {
      talk.choose(open, all[place + by]);
      openChat(open);
      keep(open);
    };
    const older = button("‹", go(-1), { "aria-label": "Version before" }), newer = button("›", go(1), { "aria-label": "Version after" });
    older.disabled = place === 0 || job() !== null;
    newer.disabled = place === all.length - 1 || job() !== null;
    buttons.append(element("span", { class: "versions" }, older, `${place + 1}/${all.length}`, newer));
  }
  if (!working) {
    buttons.append(copyButton(() => turn.text, { "aria-label": turn.role === "user" ? "Copy the message" : "Copy the answer" }));
    const change = turn.role === "user" ? button("Edit", () => edit(turn)) : button("Regenerate", () => regenerate(turn));
    const away = button("Delete", () => removeTurn(turn), { "aria-label": "Delete this and what follows" });
    change.disabled = away.disabled = job() !== null;
    buttons.append(change, away);
  }
  drawing.foot.replaceChildren(...rows, buttons);
}

function showWork() {
  const working = job();
  at("send").hidden = working !== null;
  at("stop").hidden = working === null;
  at("log").setAttribute("aria-busy", working !== null);
  say(working?.status ?? "");
  for (const turn of talk.path(open)) drawFoot(turn);
  drawList();
}

function removeTurn(turn) {
  const before = structuredClone(open), conversation = open;
  const gone = talk.remove(open, turn);
  openChat(open);
  keep(open);
  say(gone.length > 1 ? `${gone.length} messages are deleted.` : "The message is deleted.", false, () => {
    Object.assign(conversation, before);
    openChat(conversation);
    keep(conversation);
  });
}

function edit(turn) {
  const drawing = drawings.get(turn.id), area = element("textarea", { "aria-label": "Edited message", rows: 3 });
  area.value = turn.text;
  const end = () => (drawLog(), at("message").focus());
  const take = () => {
    if (!area.value.trim() || job()) return;
    open.leaf = turn.parent;
    send(area.value);
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

// ---- answers

async function send(text) {
  if (job() || !text.trim()) return;
  if (model === null) return meet();
  const conversation = open, before = open.leaf;
  let asked;
  try {
    asked = options();
  } catch (error) {
    return say(error.message, true);
  }
  const user = talk.append(conversation, { role: "user", text });
  at("message").value = "";
  if (await answer(asked)) return;
  talk.remove(conversation, user); // nothing was answered: the message can be sent again
  conversation.leaf = before;
  if (before === null && !Object.keys(conversation.turns).length) forget(conversation);
  else keep(conversation);
  if (conversation !== open) return;
  const said = at("status").textContent;
  at("message").value = text;
  openChat(conversation);
  say(said, true);
}

function forget(conversation) {
  chats = chats.filter((one) => one !== conversation);
  tellOthers(conversation, store.remove(conversation));
  drawList();
}

async function regenerate(turn) {
  if (job()) return;
  const conversation = open;
  try {
    const asked = options();
    conversation.leaf = turn.parent;
    if (await answer(asked)) return;
    const said = at("status").textContent;
    talk.choose(conversation, turn);
    if (conversation === open) await openChat(conversation);
    sayOf(conversation, said, true);
  } catch (error) {
    say(error.message, true);
  }
}

function options() {
  const asked = settings.asked(values());
  asked.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  return asked;
}

const requestOf = (conversation, turn, more = {}) => ({
  model, messages: talk.messages(conversation, turn.parent, turn.system), ...turn.asked, ...more,
  stream: true, stream_options: { include_usage: true }, return_cycles: true,
});

// Answer the turn that ends the open chat; returns whether anything was answered.
async function answer(asked) {
  panel.stopReplay();
  const conversation = open;
  const turn = talk.append(conversation, {
    role: "assistant", text: "", ends: [], asked, system: at("system").value.trim(), model, figures: figures.nothing(), note: "", live: true,
  });
  cycles.set(turn.id, []);
  const working = { control: new AbortController(), turn, status: "Waiting for the server" };
  running.set(conversation.id, working);
  keep(conversation);
  drawLog();
  showWork();
  panel.show(turn);
  const saving = setInterval(() => store.save(conversation).catch(cannotKeep), 2000);
  let wrong = "";
  try {
    for await (const chunk of server.chunks(requestOf(conversation, turn), at("key").value, working.control.signal)) take(conversation, working, chunk);
  } catch (error) {
    if (error.status === 401) askForKey();
    if (error.name !== "AbortError") wrong = error.message;
    turn.note = wrong || "Stopped.";
  }
  clearInterval(saving);
  running.delete(conversation.id);
  turn.live = false;
  const answered = turn.figures.cycles > 0 || !wrong;
  if (!answered) talk.remove(conversation, turn);
  if (chats.includes(conversation)) {
    await store.saveCycles(turn.id, cyclesOf(turn)).catch(cannotKeep);
    keep(conversation);
  }
  if (conversation === open) {
    const log = at("log"), follows = log.scrollTop + log.clientHeight > log.scrollHeight - 60;
    if (!answered) drawLog();
    else drawText(turn);
    showWork();
    if (follows) log.scrollTop = log.scrollHeight;
    say(turn.note, wrong !== "");
    if (panel.shown.turn === turn) panel.show(answered ? turn : null, panel.shown.follows ? Infinity : panel.shown.cycle);
  }
  panel.redraw();
  return answered;
}

// Take what came of a stream.
function take(conversation, working, chunk) {
  const { turn } = working, told = working.status;
  if (chunk.before !== undefined) working.status = chunk.before ? `In the queue: ${chunk.before} before you` : "In the queue: you are next";
  else if (chunk.ping) working.status = "Reading the prompt";
  else {
    for (const cycle of chunk.cycles ?? []) {
      cyclesOf(turn).push(cycle);
      figures.count(turn.figures, cycle, chunk.plain_cycle_seconds);
    }
    const choice = chunk.choices[0];
    if (choice?.delta.content) addText(conversation, turn, choice.delta.content);
    if (choice?.finish_reason === "length") turn.note = "The answer was cut at its most tokens.";
    const speculation = chunk.usage?.metrics?.speculative_decoding ?? chunk.metrics?.speculative_decoding;
    turn.figures.reason = speculation?.plain_reason ?? turn.figures.reason;
    working.status = "Answering";
    if (chunk.cycles) {
      panel.follow(turn);
      drawFoot(turn);
    }
  }
  if (told !== working.status) {
    sayOf(conversation, working.status);
    drawList();
  }
}

function addText(conversation, turn, text) {
  const log = at("log"), follows = log.scrollTop + log.clientHeight > log.scrollHeight - 60;
  turn.text += text;
  const number = Math.max(cyclesOf(turn).length - 1, 0), before = turn.ends.at(-1) ?? 0;
  while (turn.ends.length < number) turn.ends.push(before);
  turn.ends[number] = turn.text.length;
  if (conversation !== open || turn.drawn) return;
  turn.drawn = requestAnimationFrame(() => {
    delete turn.drawn;
    drawText(turn);
    panel.shown.turn === turn && mark(turn, panel.shown.cycle);
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

// The same request, decoded plainly: what it takes, and whether the text is the same.
async function compare() {
  const turn = panel.shown.turn, conversation = open;
  if (job() || !turn?.figures.cycles) return;
  const working = { control: new AbortController(), turn: null, status: "Answering plainly" };
  running.set(conversation.id, working);
  const tell = (result) => {
    compared.set(turn.id, result);
    if (panel.shown.turn === turn) panel.showFigures();
  };
  tell({ text: "Answering plainly" });
  showWork();
  const plain = figures.nothing();
  let text = "", whole = false;
  try {
    for await (const chunk of server.chunks(requestOf(conversation, turn, { policy: "plain" }), at("key").value, working.control.signal)) {
      for (const cycle of chunk.cycles ?? []) figures.count(plain, cycle, null);
      text += chunk.choices?.[0]?.delta.content ?? "";
      whole = whole || Boolean(chunk.choices?.[0]?.finish_reason);
      tell({ text: `Answering plainly: ${plain.cycles} tokens` });
    }
    const same = whole && turn.text === text ? "the same text"
      : turn.text.startsWith(text) || text.startsWith(turn.text) ? "the same text as far as both go" : "another text, as rounding in low precision can bring";
    compared.set(turn.id, { ratio: figures.speed(turn.figures) / figures.speed(plain), rate: figures.speed(plain), text: same });
  } catch (error) {
    compared.set(turn.id, { text: error.name === "AbortError" ? "Stopped." : error.message });
  }
  running.delete(conversation.id);
  if (conversation === open) showWork();
  panel.redraw();
}

// ---- the panel of trees

function mark(turn, cycle) {
  for (const marked of at("log").querySelectorAll(".piece.at, .turn.shown")) marked.classList.remove("at", "shown");
  const box = turn && drawings.get(turn.id)?.box;
  box?.classList.add("shown");
  for (const piece of box?.querySelectorAll(`[data-cycle="${cycle}"]`) ?? []) piece.classList.add("at");
}

function named(turn) {
  const answers = talk.path(open).filter((one) => one.role === "assistant");
  return answers.length > 1 ? `Answer ${answers.indexOf(turn) + 1}, cycle` : "Cycle";
}

panel.listen({
  cycles: cyclesOf, mark, named,
  reveal: (turn, cycle) => drawings.get(turn.id)?.box.querySelector(`[data-cycle="${cycle}"]`)?.scrollIntoView({ block: "nearest" }),
  compared: (turn) => compared.get(turn.id),
  isBusy: () => job() !== null,
  others: () => chats.filter((one) => one !== open && running.get(one.id)?.turn)
    .map((one) => ({ turn: running.get(one.id).turn, title: one.title, go: () => openChat(one) })),
});

// ---- what the reader does

function toggle(name, isOpen) {
  at(name).hidden = !isOpen;
  at(`open-${name}`).setAttribute("aria-expanded", isOpen);
  document.body.classList.toggle(`with-${name}`, isOpen);
  if (name === "trees") panel.redraw();
}

for (const name of ["chats", "trees"]) {
  const remembered = narrow.matches ? null : kept(name);
  toggle(name, remembered === null ? name === "trees" && !narrow.matches : remembered === "true");
  at(`open-${name}`).addEventListener("click", () => {
    toggle(name, at(name).hidden);
    if (!narrow.matches) localStorage.setItem(`specengine.${name}`, !at(name).hidden);
    if (narrow.matches && !at(name).hidden) at(name).scrollTop = 0;
  });
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(at("message").value);
});
at("message").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !at("message").value && !job()) {
    const last = talk.path(open).findLast((turn) => turn.role === "user");
    if (last) {
      event.preventDefault();
      edit(last);
    }
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(at("message").value);
});
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", () => send(example.textContent));
at("log").addEventListener("click", (event) => {
  const piece = event.target.closest?.(".piece"), id = piece?.closest(".turn")?.dataset.turn;
  if (id && !event.target.closest("a")) panel.show(open.turns[id], Number(piece.dataset.cycle));
});
at("stop").addEventListener("click", () => {
  job()?.control.abort();
  at("message").focus();
});
at("undo").addEventListener("click", () => {
  const back = undone;
  say("");
  back?.();
});
at("new").addEventListener("click", begin);
at("compare").addEventListener("click", compare);
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("settings").addEventListener("close", () => {
  if (model === null || !at("asks-for-key").hidden) meet();
});
at("key").value = sessionStorage.getItem("specengine.key") ?? "";
at("key").addEventListener("input", () => {
  model = null;
  sessionStorage.setItem("specengine.key", at("key").value);
});
for (const name of settings.FIELDS) {
  field(name).addEventListener("input", () => localStorage.setItem(`specengine.${name}`, values()[name]));
}
at("schema").addEventListener("input", checkSchema);
at("markdown").addEventListener("change", drawLog);
at("reset-settings").addEventListener("click", () => {
  for (const name of settings.FIELDS) localStorage.removeItem(`specengine.${name}`);
  fill();
});
at("export-all").addEventListener("click", () => download("chats.json", "application/json", talk.toJson(chats)));
at("import").addEventListener("click", () => at("import-file").click());
at("import-file").addEventListener("change", async () => {
  try {
    for (const one of talk.fromJson(await at("import-file").files[0].text())) keep(one);
    say("Imported.");
  } catch (error) {
    say(`The file cannot be imported: ${error.message}`, true);
  }
  at("import-file").value = "";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && job() && !at("settings").open) job().control.abort();
});

fill();
drawLog();
panel.redraw();
meet();
store.all().then(async (found) => {
  for (const one of found) for (const turn of Object.values(one.turns)) turn.live = false;
  chats = [...chats, ...found.filter((one) => !chats.some((known) => known.id === one.id))];
  chats.sort((left, right) => right.changed - left.changed);
  if (!(await store.isKept())) at("kept").textContent = "This browser keeps no chats: they last as long as this page.";
  if (chats.length && open.leaf === null && Date.now() - chats[0].changed < 86_400_000) openChat(chats[0]);
  else drawList();
}).catch(cannotKeep);
