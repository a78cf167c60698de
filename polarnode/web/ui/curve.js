/** Where rewards and weight updates stand on one time axis. Pure: numbers from 0 to 1, for any size. */
import { meanAndSpread } from "./format.js";

const SMOOTH = 10; // groups of a moving mean

/**
 * @param {readonly any[]} groups in any order, with `ended` and `rewards`
 * @param {readonly {version: string, at: number}[]} updates
 * @param {{low: number, high: number}} range of rewards
 */
export function curve(groups, updates, range) {
  const points = groups
    .map((group) => ({ group, at: group.ended, mean: meanAndSpread(group.rewards).mean }))
    .filter((point) => point.at !== null && point.mean !== null)
    .sort((a, b) => a.at - b.at);
  if (points.length < 2 || points[0].at === points.at(-1)?.at) return null;
  const [begin, end] = [points[0].at, /** @type {any} */ (points.at(-1)).at];
  const x = (/** @type {number} */ at) => (at - begin) / (end - begin);
  const y = (/** @type {number} */ value) => 1 - (value - range.low) / (range.high - range.low);
  const means = points.map((point) => /** @type {number} */ (point.mean));
  return {
    begin,
    end,
    dots: points.map((point) => ({ task: point.group.task_id, mean: point.mean, x: x(point.at), y: y(/** @type {number} */ (point.mean)) })),
    line: points.map((point, at) => ({ x: x(point.at), y: y(meanAndSpread(means.slice(Math.max(0, at - SMOOTH + 1), at + 1)).mean ?? 0) })),
    updates: updates.filter((update) => update.at >= begin && update.at <= end).map((update) => ({ version: update.version, x: x(update.at) })),
  };
}
