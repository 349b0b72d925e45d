// Elements, and what a browser gives and takes. Text goes into the page as text only.

export const at = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}
export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function button(text, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

export function copyButton(text, attributes = {}) {
  const made = button("Copy", async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, attributes);
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text); // there is none at plain HTTP addresses of other machines
    return true;
  } catch {
    const field = element("textarea", { class: "unseen" }, text), focused = document.activeElement;
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

export function download(name, kind, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function definitions(list, rows) {
  list.replaceChildren(...rows.map(([name, value, note, kind]) => {
    const told = element("dd", kind ? { class: kind } : {}, String(value));
    if (note) told.append(" ", element("small", {}, note));
    return element("div", {}, element("dt", {}, name), told);
  }));
}

const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };

// The text of a token, with signs for what cannot be seen.
export const visible = (text) =>
  text.replace(/[\p{C}\p{Z}]/gu, (letter) => SIGNS[letter] ?? `\\u{${letter.codePointAt(0).toString(16)}}`);

export const randomId = () =>
  Array.from(crypto.getRandomValues(new Uint32Array(4)), (one) => one.toString(16).padStart(8, "0")).join("");
