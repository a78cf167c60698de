/** Live sessions as a node tells their changes, its own and those of the nodes that share its log. Pure. */

const ENDED_MS = 8000; // a session that ended stays in the list so long, with how it ended

/**
 * @typedef {object} LiveRow
 * @property {any} status   as the node told it
 * @property {string} node
 * @property {number} heard when, in ms
 * @typedef {Map<string, LiveRow>} LiveRows
 */

/** The rows after an event of the stream. @param {LiveRows} rows @param {{node: string, sessions: any[], whole: boolean}} changes @param {number} now in ms @returns {LiveRows} */
export function changed(rows, changes, now) {
  const kept = [...rows].filter(([, row]) => row.node !== changes.node || !changes.whole || row.status.phase === "ended");
  const found = new Map(kept.filter(([, row]) => isShown(row, now)));
  for (const status of changes.sessions) found.set(keyOf(changes.node, status), { status, node: changes.node, heard: now });
  return found;
}

/** The rows of a status, for where there is no stream. @param {any} status @param {number} now in ms @returns {LiveRows} */
export function ofStatus(status, now) {
  const node = status.node ?? "";
  const captures = (status.captures?.open ?? []).map((/** @type {any} */ each) => ({ ...each, harness: "capture", phase: "run" }));
  return changed(new Map(), { node, sessions: [...(status.sessions ?? []), ...captures], whole: true }, now);
}

/** Whether a row is still to be seen. @param {LiveRow} row @param {number} now in ms */
export function isShown(row, now) {
  return row.status.phase !== "ended" || now - row.heard < ENDED_MS;
}

/** Seconds that were told, now. Those of a session that ended stand still. @param {LiveRow} row @param {"age_s" | "phase_s" | "last_turn_s"} name @param {number} now in ms */
export function seconds(row, name, now) {
  const told = row.status[name];
  if (told === null || told === undefined) return null;
  return row.status.phase === "ended" ? told : told + Math.max(0, now - row.heard) / 1000;
}

/** @param {string} node @param {any} status */
export function keyOf(node, status) {
  return `${node}/${status.session_id}`;
}
