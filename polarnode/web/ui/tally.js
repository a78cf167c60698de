/** What groups came to, in one sentence. Pure. */

/** @param {readonly any[]} groups */
export function tally(groups) {
  if (!groups.length) return "";
  const states = new Map();
  let uniform = 0;
  for (const group of groups) {
    states.set(group.state ?? "unknown", (states.get(group.state ?? "unknown") ?? 0) + 1);
    uniform += Number(isUniform(group));
  }
  const parts = [...states].map(([state, number]) => `${number} ${state}`);
  return `${groups.length} groups: ${parts.join(", ")}; ${uniform} with equal rewards, which teach nothing`;
}

/** Whether all usable sessions of a group have one reward. @param {any} group */
export function isUniform(group) {
  const rewards = group.sessions.filter((/** @type {any} */ member) => member.usable).map((/** @type {any} */ member) => member.reward);
  return rewards.length > 1 && rewards.every((/** @type {any} */ value) => value === rewards[0]);
}
