// Files that are dropped on the page: their text goes into the message.
import { at } from "./dom.js";
import { say } from "./state.js";

const MOST = 2_000_000; // bytes of a file

// The text of a file's bytes; throws an Error that says why it has none.
export function textOf(bytes) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("it is no text in UTF-8");
  }
  if (text.includes("\0")) throw new Error("it is no text");
  return text.replaceAll("\r\n", "\n");
}

// A message with a text behind what it says already.
export const withText = (message, text) => (message.trim() ? `${message.replace(/\n*$/, "")}\n\n${text}` : text);

async function take(files) {
  const message = at("message");
  for (const file of files) {
    try {
      if (file.size > MOST) throw new Error(`it is larger than ${MOST / 1e6} MB`);
      const text = textOf(await file.arrayBuffer());
      message.value = withText(message.value, text);
      say(`The text of ${file.name} is in the message.`);
    } catch (error) {
      say(`${file.name} cannot be taken: ${error.message}.`, true);
    }
  }
  message.focus();
  message.scrollTop = message.scrollHeight;
}

const holdsFiles = (event) => event.dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]");

export function listen() {
  const show = (isOver) => at("composer").classList.toggle("over", isOver);
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault(); // else the browser would open the file
    event.dataTransfer.dropEffect = "copy";
    show(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && show(false));
  document.addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    show(false);
    take([...event.dataTransfer.files]);
  });
}
