/** The points of a time series in a box of width 1 and height 1. Pure. */

/**
 * A line that breaks where there is no value, or where the node did not sample.
 * @param {readonly number[]} at seconds since the epoch, in order
 * @param {readonly (number | null)[]} values
 * @param {number} everySeconds between two samples
 * @returns {{lines: {x: number, y: number}[][], most: number, last: number | null}} y is 0 at `most`, the top, and 1 at 0
 */
export function series(at, values, everySeconds) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(0, ...known);
  const last = values.at(-1) ?? null;
  const begin = at[0];
  const length = (at.at(-1) ?? 0) - begin;
  /** @type {{x: number, y: number}[][]} */
  const lines = [];
  if (!(length > 0)) return { lines, most, last };
  let open = false;
  values.forEach((value, index) => {
    const torn = index > 0 && at[index] - at[index - 1] > 3 * everySeconds;
    if (value === null) {
      open = false;
      return;
    }
    if (!open || torn) lines.push([]);
    open = true;
    lines.at(-1)?.push({ x: (at[index] - begin) / length, y: most > 0 ? 1 - value / most : 1 });
  });
  return { lines, most, last };
}
