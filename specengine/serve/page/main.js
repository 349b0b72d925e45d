// The page: its modules, and what the reader does in it. Whatever comes from the server or a reader is shown as text only.
import { compare, goOn, regenerate, send, takeUp } from "./answers.js";
import * as chats from "./chats.js";
import * as talk from "./conversation.js";
import { at } from "./dom.js";
import * as files from "./files.js";
import * as form from "./form.js";
import * as log from "./log.js";
import * as panel from "./panel.js";
import * as sides from "./sides.js";
import { compared, cyclesOf, job, page, running, say } from "./state.js";

function named(turn) {
  const answers = talk.path(page.open).filter((one) => one.role === "assistant");
  return answers.length > 1 ? `Answer ${answers.indexOf(turn) + 1}, cycle` : "Cycle";
}

panel.listen({
  cycles: cyclesOf, mark: log.mark, named, reveal: log.reveal,
  compared: (turn) => compared.get(turn.id),
  isBusy: () => job() !== null,
  others: () => page.chats.filter((one) => one !== page.open && running.get(one.id)?.turn)
    .map((one) => ({ turn: running.get(one.id).turn, title: one.title, go: () => chats.openChat(one) })),
});
log.listen({ send, regenerate, goOn, remove: chats.removeTurn, choose: chats.choose });
chats.listen();
form.listen();
files.listen();
sides.listen();

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(at("message").value);
});
at("message").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !at("message").value && !job()) {
    const last = talk.path(page.open).findLast((turn) => turn.role === "user");
    if (last) {
      event.preventDefault();
      log.edit(last);
    }
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(at("message").value);
});
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", () => send(example.textContent));
at("log").addEventListener("click", (event) => {
  const piece = event.target.closest?.(".piece"), id = piece?.closest(".turn")?.dataset.turn;
  if (id && !event.target.closest("a")) panel.show(page.open.turns[id], Number(piece.dataset.cycle));
});
at("stop").addEventListener("click", () => {
  job()?.control.abort();
  at("message").focus();
});
at("undo").addEventListener("click", () => {
  const back = page.undone;
  say("");
  back?.();
});
at("compare").addEventListener("click", compare);
at("markdown").addEventListener("change", log.drawLog);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && job() && !at("settings").open) job().control.abort();
});

log.drawLog();
panel.redraw();
form.meet();
chats.remember(takeUp).catch(chats.cannotKeep);
