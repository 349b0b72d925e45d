// The chats: how they are kept, their list, and which is open.
import * as talk from "./conversation.js";
import { at, button, download, element } from "./dom.js";
import { drawFoot, drawLog } from "./log.js";
import * as panel from "./panel.js";
import { narrow, toggle } from "./sides.js";
import { cycles, cyclesOf, interrupt, job, leftAlone, page, running, say, showModel } from "./state.js";
import * as store from "./store.js";

export function keep(conversation) {
  if (!page.chats.includes(conversation)) page.chats.push(conversation);
  page.chats.sort((left, right) => right.changed - left.changed);
  const turn = running.get(conversation.id)?.turn; // its text and its trees are kept together
  tellOthers(conversation, turn ? store.saveWithCycles(conversation, turn.id, cyclesOf(turn)) : store.save(conversation));
  drawList();
}

// Other tabs of this page read again what is changed in one.
const tabs = new BroadcastChannel("specengine.chats");
const tellOthers = (conversation, saved) => saved.then(() => tabs.postMessage(conversation.id)).catch(cannotKeep);

tabs.addEventListener("message", async ({ data: id }) => {
  let found;
  try {
    found = await store.get(id);
  } catch {
    return; // nothing is known of it
  }
  const answering = running.get(id), here = page.chats.find((one) => one.id === id);
  if (answering && found) {
    if (here) Object.assign(here, { title: found.title, named: found.named });
    return drawList();
  }
  answering?.control.abort(); // it is deleted: nothing writes it back
  page.chats = page.chats.filter((one) => one.id !== id);
  if (found) page.chats.push(found);
  page.chats.sort((left, right) => right.changed - left.changed);
  for (const turn of Object.keys(found?.turns ?? {})) if (!cycles.get(turn)?.length) cycles.delete(turn);
  if (found && page.open.id === id && !at("log").querySelector(".edited")) openChat(found);
  else drawList();
  if (!found && here && page.open.id === id) {
    begin();
    say(`“${here.title}” was deleted in another tab.`);
  }
});

export function cannotKeep() {
  at("kept").textContent = "This browser keeps no more: export chats, and delete some.";
  at("kept").classList.add("wrong");
}

// ---- the list

export function drawList() {
  at("list").replaceChildren(...page.chats.map((one) => {
    const made = element("li", { "data-chat": one.id }), isOpen = one === page.open;
    made.append(button(one.title, () => openChat(one), { class: "title", dir: "auto", ...(isOpen ? { "aria-current": "true" } : {}) }));
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
  const input = element("input", { "aria-label": "Title", value: conversation.title, maxlength: 200, dir: "auto" });
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

// Keep the trees of turns that come back.
function keepTrees(turns) {
  for (const id of turns) if (cycles.get(id)?.length) store.saveCycles(id, cycles.get(id)).catch(cannotKeep);
}

function drop(conversation) {
  running.get(conversation.id)?.control.abort();
  page.chats = page.chats.filter((one) => one !== conversation);
  tellOthers(conversation, store.remove(conversation));
  begin();
  say(`“${conversation.title}” is deleted.`, false, () => {
    keep(conversation);
    keepTrees(Object.keys(conversation.turns));
    openChat(conversation);
  });
}

export async function openChat(conversation) {
  page.open = conversation;
  showModel();
  panel.stopReplay();
  if (narrow.matches) toggle("chats", false);
  drawLog();
  drawList();
  showWork();
  panel.show(talk.path(page.open).findLast((turn) => turn.role === "assistant") ?? null);
  const missing = Object.values(conversation.turns).filter((turn) => turn.role === "assistant" && !cycles.has(turn.id));
  await Promise.all(missing.map(async (turn) => cycles.set(turn.id, await store.cyclesOf(turn.id).catch(() => []))));
  if (page.open === conversation && missing.length) panel.show(talk.path(page.open).findLast((turn) => turn.role === "assistant") ?? null);
}

export function begin() {
  openChat({ ...talk.begun(), model: page.model });
  say("");
  at("message").focus();
}

export function showWork() {
  const working = job();
  at("send").hidden = working !== null;
  at("stop").hidden = working === null;
  at("log").setAttribute("aria-busy", working !== null);
  say(working?.status ?? "");
  for (const turn of talk.path(page.open)) drawFoot(turn);
  drawList();
}

export function removeTurn(turn) {
  const before = structuredClone(page.open), conversation = page.open;
  const gone = talk.remove(page.open, turn);
  openChat(page.open);
  keep(page.open);
  store.removeCycles(gone).catch(cannotKeep);
  say(gone.length > 1 ? `${gone.length} messages are deleted.` : "The message is deleted.", false, () => {
    Object.assign(conversation, before);
    openChat(conversation);
    keep(conversation);
    keepTrees(gone);
  });
}

export function forget(conversation) {
  page.chats = page.chats.filter((one) => one !== conversation);
  tellOthers(conversation, store.remove(conversation));
  drawList();
}

// Read what is kept, and open the latest chat where it is no older than a day. takeUp(conversation, turn): has an answer go
// on that was being written.
export async function remember(takeUp) {
  await store.sweep();
  const found = await store.all(), left = await leftAlone(found);
  for (const [, turn] of left) {
    if ((turn.event ?? null) === null) interrupt(turn);
    else cycles.set(turn.id, (await store.cyclesOf(turn.id)).slice(0, turn.figures.cycles));
  }
  page.chats = [...page.chats, ...found.filter((one) => !page.chats.some((known) => known.id === one.id))];
  page.chats.sort((left, right) => right.changed - left.changed);
  if (!(await store.isKept())) at("kept").textContent = "This browser keeps no chats: they last as long as this page.";
  if (page.chats.length && page.open.leaf === null && Date.now() - page.chats[0].changed < 86_400_000) openChat(page.chats[0]);
  else drawList();
  for (const [conversation, turn] of left) if (turn.live) takeUp(conversation, turn);
}

// Show another version of a turn.
export function choose(turn) {
  talk.choose(page.open, turn);
  openChat(page.open);
  keep(page.open);
}

export function listen() {
  at("new").addEventListener("click", begin);
  at("models").addEventListener("change", () => {
    page.model = page.open.model = at("models").value;
    if (page.chats.includes(page.open)) keep(page.open);
  });
  at("export-all").addEventListener("click", () => download("chats.json", "application/json", talk.toJson(page.chats)));
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
}
