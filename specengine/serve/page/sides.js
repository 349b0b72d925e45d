// The two sides of the page, the list of chats and the panel of trees, which can be folded away.
import { at } from "./dom.js";
import { kept } from "./form.js";
import * as panel from "./panel.js";

export const narrow = matchMedia("(max-width: 60rem)");

export function toggle(name, isOpen) {
  at(name).hidden = !isOpen;
  at(`open-${name}`).setAttribute("aria-expanded", isOpen);
  document.body.classList.toggle(`with-${name}`, isOpen);
  if (name === "trees") panel.redraw();
}

export function listen() {
  for (const name of ["chats", "trees"]) {
    const remembered = narrow.matches ? null : kept(name);
    toggle(name, remembered === null ? name === "trees" && !narrow.matches : remembered === "true");
    at(`open-${name}`).addEventListener("click", () => {
      toggle(name, at(name).hidden);
      if (!narrow.matches) localStorage.setItem(`specengine.${name}`, !at(name).hidden);
      if (narrow.matches && !at(name).hidden) at(name).scrollTop = 0;
    });
  }
}
