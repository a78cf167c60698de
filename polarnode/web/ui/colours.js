/** What colours a token: one class name for each token and mode, and the legend. Pure. */
import { spanAt } from "./row.js";

export const MODES = ["mask", "probability", "version", "turn", "advantage"];
const HUES = 8; // of versions and turns, which repeat
const STEPS = 12; // of a probability: more cannot be told apart

/**
 * The class of each token as a number of CSS classes `NAME0 …`; -1 for none.
 * @param {string} mode @param {import("./row.js").Row} row @param {number | null} advantage of the session
 * @returns {{prefix: string, classes: Int8Array}}
 */
export function colours(mode, row, advantage) {
  const classes = new Int8Array(row.length).fill(-1);
  if (mode === "mask") classes.forEach((_, at) => (classes[at] = row.mask[at] ? 0 : -1));
  if (mode === "probability") {
    for (const span of row.turns) for (let at = span.start; at < span.end; at += 1) classes[at] = step(row.logprobs[at]);
  }
  if (mode === "version") paint(classes, row.versions, numbers(row.versions.map((span) => span.version)));
  if (mode === "turn") paint(classes, row.turns, row.turns.map((_, at) => at));
  if (mode === "advantage" && advantage !== null) {
    const strength = Math.min(3, Math.round(Math.abs(advantage) * 2));
    const level = advantage === 0 ? 3 : advantage > 0 ? 3 + strength : 3 - strength;
    for (let at = 0; at < row.length; at += 1) if (row.mask[at]) classes[at] = level;
  }
  return { prefix: { mask: "m", probability: "p", version: "h", turn: "h", advantage: "a" }[mode] ?? "m", classes };
}

/** 0 for certain to STEPS - 1 for p below 0.004. @param {number} logprob */
export function step(logprob) {
  return Math.min(STEPS - 1, Math.max(0, Math.floor(-logprob * 2)));
}

/** @param {Int8Array} classes @param {readonly import("./row.js").Span[]} spans @param {readonly number[]} names */
function paint(classes, spans, names) {
  spans.forEach((span, at) => classes.fill(names[at] % HUES, span.start, span.end));
}

/** Each name by the order in which it first came. @param {readonly string[]} names */
export function numbers(names) {
  const order = [...new Set(names)];
  return names.map((name) => order.indexOf(name));
}

/**
 * What the classes of a mode mean.
 * @param {string} mode @param {import("./row.js").Row} row @param {number | null} advantage
 * @returns {{name: string, text: string}[]}
 */
export function legend(mode, row, advantage) {
  if (mode === "mask") return [{ name: "m0", text: "trained" }, { name: "", text: "context" }];
  if (mode === "probability")
    return [0, 2, 4, 7, 11].map((at) => ({ name: `p${at}`, text: `p ${at === 11 ? "<" : "≈"} ${Math.exp(-at / 2).toPrecision(1)}` }));
  if (mode === "version") {
    const names = [...new Set(row.versions.map((span) => span.version))];
    return names.slice(0, HUES).map((name, at) => ({ name: `h${at}`, text: name || "unknown" }));
  }
  if (mode === "turn") return row.turns.slice(0, HUES).map((span, at) => ({ name: `h${at}`, text: `turn ${span.turn}` }));
  if (advantage === null) return [{ name: "", text: "no advantage: the session is not in a finished group, or has no usable reward" }];
  return [{ name: "a6", text: "better than its group" }, { name: "a3", text: "equal" }, { name: "a0", text: "worse" }];
}

/** What the details say of a token. @param {import("./row.js").Row} row @param {number} at */
export function factsOf(row, at) {
  const turn = spanAt(row.turns, at);
  const version = spanAt(row.versions, at);
  return {
    position: at + (row.trace.offset ?? 0),
    id: row.ids[at],
    trained: row.mask[at] === 1,
    sampled: turn !== null,
    logprob: turn === null ? null : row.logprobs[at],
    probability: turn === null ? null : Math.exp(row.logprobs[at]),
    turn: turn?.turn ?? null,
    version: version === null ? null : version.version || "unknown",
  };
}
