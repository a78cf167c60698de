/**
 * One training row, ready to be shown: the text of each token, and lines of tokens. Pure; nothing here touches the
 * document. A row of a million tokens is a handful of typed arrays and one array of shared strings.
 */
import { floats, ints, mask } from "./arrays.js";
import { visibleText } from "./text.js";

/**
 * @typedef {{start: number, end: number}} Span
 * @typedef {Span & {turn: number, reward: number | null}} TurnSpan
 * @typedef {Span & {version: string}} VersionSpan
 * @typedef {object} Row
 * @property {number} length
 * @property {Int32Array} ids
 * @property {Uint8Array} mask       1 where trained
 * @property {Float32Array} logprobs 0 where nothing was sampled
 * @property {string[]} texts        by token; "" within a letter that several tokens spell
 * @property {TurnSpan[]} turns
 * @property {VersionSpan[]} versions
 * @property {any} trace             the JSON of the row
 */

export const WIDTH = 110; // columns of a line: what fits beside the details on a laptop

/** @param {any} trace @param {number} index @param {any} pieces @returns {Row} */
export function readRow(trace, index, pieces) {
  const ids = ints(trace.token_ids);
  /** @type {Map<number, string>} */
  const known = new Map();
  for (const [id, text] of Object.entries(pieces.tokens)) known.set(Number(id), shown(/** @type {string} */ (text)));
  const texts = new Array(ids.length);
  for (let at = 0; at < ids.length; at += 1) texts[at] = known.get(ids[at]) ?? "";
  for (const cluster of pieces.clusters) {
    if (cluster.trace !== index) continue;
    texts[cluster.start] = shown(cluster.text);
    texts.fill("", cluster.start + 1, cluster.end);
  }
  return {
    length: ids.length,
    ids,
    mask: mask(trace.loss_mask),
    logprobs: floats(trace.logprobs),
    texts,
    turns: trace.turn_spans,
    versions: trace.version_spans,
    trace,
  };
}

/** A token's text as it is drawn: line ends and tabs have a sign. @param {string} text */
function shown(text) {
  return visibleText(text.replaceAll("\n", "⏎").replaceAll("\t", "⇥"));
}

/**
 * The first token of each line. A line ends at a line feed, or where the next token does not fit into `width`.
 * @param {readonly string[]} texts @param {number} [width] @returns {Int32Array}
 */
export function cutLines(texts, width = WIDTH) {
  const starts = new Int32Array(texts.length + 1);
  let lines = 0;
  let column = width; // begins a line with the first token
  for (let at = 0; at < texts.length; at += 1) {
    const columns = Math.max(1, columnsOf(texts[at]));
    if (column + columns > width) {
      starts[lines] = at;
      lines += 1;
      column = 0;
    }
    column += columns;
    if (texts[at].endsWith("⏎")) column = width;
  }
  return starts.slice(0, lines);
}

/** Columns of a text in a fixed-width font: East Asian letters and emoji take two. @param {string} text */
function columnsOf(text) {
  let columns = text.length;
  for (let at = 0; at < text.length; at += 1) if (text.charCodeAt(at) >= 0x1100) columns += 1;
  return columns;
}

/** The line that holds a token. @param {Int32Array} starts @param {number} token */
export function lineOf(starts, token) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The span that holds a token; null between spans. @template {Span} T @param {readonly T[]} spans @param {number} token @returns {T | null} */
export function spanAt(spans, token) {
  let low = 0;
  let high = spans.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (token < spans[middle].start) high = middle - 1;
    else if (token >= spans[middle].end) low = middle + 1;
    else return spans[middle];
  }
  return null;
}

/** The sampled token with the lowest probability; -1 where nothing was sampled. @param {Row} row */
export function leastLikely(row) {
  let found = -1;
  for (let at = 0; at < row.length; at += 1) {
    if (row.mask[at] && (found < 0 || row.logprobs[at] < row.logprobs[found])) found = at;
  }
  return found;
}

/** Tokens where another weight version begins to sample. @param {Row} row @returns {number[]} */
export function seams(row) {
  return row.versions.filter((span, at) => at > 0 && span.version !== row.versions[at - 1].version).map((span) => span.start);
}

/** The next place of `places` (ascending) after a token, or the first. @param {readonly number[]} places @param {number} token */
export function nextPlace(places, token) {
  if (!places.length) return -1;
  return places.find((place) => place > token) ?? places[0];
}

/** The first token at or after `from` whose text, with those after it, begins `words`; around the end. @param {Row} row @param {string} words @param {number} from */
export function findText(row, words, from) {
  const wanted = words.toLowerCase();
  if (!wanted) return -1;
  const whole = row.texts.join("").toLowerCase();
  const offsets = new Int32Array(row.length + 1);
  for (let at = 0; at < row.length; at += 1) offsets[at + 1] = offsets[at] + row.texts[at].length;
  const begin = offsets[Math.min(Math.max(from, 0), row.length)];
  let hit = whole.indexOf(wanted, begin);
  if (hit < 0) hit = whole.indexOf(wanted);
  if (hit < 0) return -1;
  let token = lineOf(offsets.subarray(0, row.length), hit);
  while (token + 1 < row.length && offsets[token + 1] <= hit) token += 1;
  return token;
}
