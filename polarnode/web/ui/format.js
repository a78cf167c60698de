/** Numbers and times as people read them. Pure. */

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** @param {number | null | undefined} value */
export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

/** The sampled tokens that no row trains, by reason; empty where all are trained. @param {any} figures */
export function leftOut(figures) {
  const reasons = Object.entries(figures?.left_out ?? {});
  return reasons.map(([reason, turns]) => `${reason} ${count(figures.left_out_tokens?.[reason])} in ${turns} turn${turns === 1 ? "" : "s"}`).join(", ");
}

/** @param {number | null | undefined} value */
export function reward(value) {
  return value === null || value === undefined ? "–" : trimmed(value, 3);
}

/** @param {number} value @param {number} digits */
export function trimmed(value, digits) {
  return Number.isInteger(value) ? String(value) : value.toFixed(digits).replace(/0+$/, "").replace(/\.$/, "");
}

/** @param {number} value */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** A time of day, with the date where it is not today's. @param {number} epoch @param {Date} [now] */
export function clock(epoch, now = new Date()) {
  const when = new Date(epoch * 1000);
  const time = when.toTimeString().slice(0, 8);
  if (when.toDateString() === now.toDateString()) return time;
  const day = [when.getFullYear(), when.getMonth() + 1, when.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
  return `${day} ${time.slice(0, 5)}`;
}

/** @param {readonly (number | null)[]} values */
export function meanAndSpread(values) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return { mean: null, spread: null };
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  if (known.length < 2) return { mean, spread: 0 };
  const squares = known.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, spread: Math.sqrt(squares / (known.length - 1)) };
}
