// Figures of an answer, from its cycles.

const sum = (values) => values.reduce((total, value) => total + value, 0);
const ORIGINS = ["draft", "copied", "recycled", "forced", "not noted"];

export const nothing = () => ({ tokens: 0, cycles: 0, seconds: 0, accepted: {}, plain: null, reason: "" });

// Add a cycle to the figures; plain: seconds of a plain cycle, where they are known.
export function count(figures, cycle, plain) {
  figures.tokens += cycle.committed.length;
  figures.cycles += 1;
  figures.seconds += cycle.seconds.total;
  figures.plain = plain ?? figures.plain;
  for (const node of cycle.accepted.slice(1)) {
    const origin = cycle.origins?.[node] ?? "not noted";
    figures.accepted[origin] = (figures.accepted[origin] ?? 0) + 1;
  }
}

export const ofCycles = (cycles) => cycles.reduce((made, cycle) => (count(made, cycle, null), made), nothing());
export const speed = (figures) => figures.tokens / figures.seconds;
export const perPass = (figures) => figures.tokens / figures.cycles;
export const againstPlain = (figures) => (figures.plain ? speed(figures) * figures.plain : null);
export const acceptedDrafts = (figures) => sum(Object.values(figures.accepted));
export const byOrigin = (figures) =>
  ORIGINS.filter((name) => figures.accepted[name]).map((name) => `${name} ${figures.accepted[name]}`).join(", ");

// The line under an answer; measured: how many times plain decoding's speed, where both were run.
export function line(figures, measured = null) {
  if (!figures.cycles) return "";
  const told = [
    `${figures.tokens} token${figures.tokens === 1 ? "" : "s"}`,
    `${speed(figures).toFixed(1)} tokens/s`,
    `${perPass(figures).toFixed(2)} per pass`,
  ];
  const ratio = measured ?? againstPlain(figures);
  if (ratio) told.push(`${measured ? "" : "about "}${ratio.toFixed(2)}× plain`);
  return told.join(" · ");
}

// A sentence where drafting did not pay; "" where it did, or nothing is known.
export function doubt(figures, measured = null) {
  if (measured) return measured < 1 ? "Measured: plain decoding was faster here. The draft guessed too little." : "";
  if (figures.cycles && figures.cycles === figures.tokens && figures.reason) return `Decoded without trees: ${figures.reason}.`;
  const ratio = againstPlain(figures);
  if (!ratio || ratio >= 1) return "";
  return "By the estimate, drafting did not pay here. The estimate knows a plain pass on an idle machine: "
    + "other work, or other answers at once, make it look worse than it is. Compare to measure both.";
}
