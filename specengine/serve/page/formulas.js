// Formulas as MathML, by KaTeX, which is loaded at the first one.
const OPTIONS = { output: "mathml", trust: false, strict: "ignore", maxExpand: 100, maxSize: 20, throwOnError: true };
let loading = null;

function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src: "page/katex.min.js" });
    script.addEventListener("load", () => resolve(globalThis.katex));
    script.addEventListener("error", () => {
      loading = null;
      reject(new Error("katex.min.js cannot be loaded"));
    });
    document.head.append(script);
  });
  return loading;
}

// Put a formula in place of what the box holds, its source; an error leaves the source there.
export async function typeset(box, formula, displayMode) {
  const made = document.createElement("span");
  try {
    (await load()).render(formula, made, { ...OPTIONS, displayMode });
    const last = box.lastElementChild; // the piece of the cycle that ended it
    last?.replaceChildren(made.querySelector("math"));
    box.replaceChildren(last ?? made.querySelector("math"));
  } catch {
    // what the box holds is shown
  }
}
