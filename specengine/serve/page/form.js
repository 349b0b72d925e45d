// The dialog of settings, and the first words with the server: its model's name, and whether it asks for a key.
import { at, element } from "./dom.js";
import * as server from "./server.js";
import * as settings from "./settings.js";
import { page, say, showModel } from "./state.js";

const field = (name) => at(name === "stop" ? "stop-at" : name);
export const values = () => Object.fromEntries(settings.FIELDS.map((name) => [name, name === "markdown" ? String(field(name).checked) : field(name).value]));
export const kept = (name) => localStorage.getItem(`specengine.${name}`);

function fill() {
  for (const name of settings.FIELDS) {
    const value = kept(name) ?? settings.DEFAULTS[name] ?? "";
    if (name === "markdown") field(name).checked = value === "true";
    else field(name).value = value;
  }
  checkSchema();
  settings.NUMBERS.forEach(checkNumber);
}

// Say at the field what is wrong with a number.
function checkNumber(name) {
  const { validationMessage, nextElementSibling: told } = at(name);
  told.textContent = validationMessage;
}

// The first number that its field does not take, as an Error; null where there is none.
export function outOfBounds() {
  const wrong = settings.NUMBERS.map(at).find((one) => !one.validity.valid);
  return wrong ? new Error(`Settings: ${wrong.labels[0].firstChild.textContent.trim()}: ${wrong.validationMessage}`) : null;
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

export function askForKey() {
  at("asks-for-key").hidden = false;
  at("settings-title").after(at("access"));
  if (!at("settings").open) at("settings").showModal();
  at("key").focus();
}

export async function meet() {
  for (;;) {
    try {
      page.models = (await server.models(at("key").value)).map((one) => one.id);
      showModel();
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

// Fill the fields with what is kept, and keep what is typed.
export function listen() {
  for (const name of settings.NUMBERS) {
    at(name).after(element("span", { class: "problem wrong", role: "status" }));
    at(name).addEventListener("input", () => checkNumber(name));
  }
  fill();
  at("open-settings").addEventListener("click", () => at("settings").showModal());
  at("settings").addEventListener("close", () => {
    if (page.model === null || !at("asks-for-key").hidden) meet();
  });
  at("key").value = sessionStorage.getItem("specengine.key") ?? "";
  at("key").addEventListener("input", () => {
    page.models = [];
    page.model = null;
    sessionStorage.setItem("specengine.key", at("key").value);
  });
  for (const name of settings.FIELDS) {
    field(name).addEventListener("input", () => localStorage.setItem(`specengine.${name}`, values()[name]));
  }
  at("schema").addEventListener("input", checkSchema);
  at("reset-settings").addEventListener("click", () => {
    for (const name of settings.FIELDS) localStorage.removeItem(`specengine.${name}`);
    fill();
  });
}
