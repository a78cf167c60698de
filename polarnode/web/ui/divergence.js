/** Where the rows of two sessions part. Pure: ids are compared, so the place is exact. */

/**
 * The first token that differs; the length of the shorter one where it is the beginning of the other.
 * @param {Int32Array} one @param {Int32Array} other
 */
export function firstDifference(one, other) {
  const length = Math.min(one.length, other.length);
  let at = 0;
  while (at < length && one[at] === other[at]) at += 1;
  return at;
}

/**
 * What follows a row's common part with another.
 * @param {import("./row.js").Row} row @param {number} common @param {number} before @param {number} after
 */
export function around(row, common, before, after) {
  return {
    before: lines(row.texts.slice(Math.max(0, common - before), common)),
    after: lines(row.texts.slice(common, common + after)),
    more: row.length > common + after,
  };
}

/** @param {string[]} texts */
function lines(texts) {
  return texts.join("").replaceAll("⏎", "⏎\n");
}

/** Which turn sampled the first different token, or was the last before it. @param {import("./row.js").Row} row @param {number} token */
export function turnAt(row, token) {
  let found = null;
  for (const span of row.turns) if (span.start <= token) found = span.turn;
  return found;
}
