/** Where the bars of a session's timeline stand. Pure: numbers from 0 to 1, for any width. */

/**
 * @typedef {{name: string, x: number, width: number, seconds: number}} PhaseBar
 * @typedef {{turn: number, lane: number, x: number, width: number, first: number | null, role: string, state: string, versions: string[], seconds: number}} TurnBar
 * @param {any} timing of the trajectory; null while the session runs
 * @param {readonly any[]} turns
 * @returns {{seconds: number, phases: PhaseBar[], turns: TurnBar[], lanes: number, seams: number[]}}
 */
export function timeline(timing, turns) {
  const started = turns.filter((turn) => turn.timing.started > 0);
  const begin = Math.min(...started.map((turn) => turn.timing.started));
  const end = Math.max(...started.map((turn) => turn.timing.started + turn.timing.ended_s));
  const calls = started.length ? end - begin : 0;
  const run = Math.max(timing?.run_s ?? 0, calls);
  const before = (timing?.init_s ?? 0) + (timing?.ready_s ?? 0);
  const seconds = before + run + (timing?.post_s ?? 0) || 1;
  /** @type {PhaseBar[]} */
  const phases = [];
  let at = 0;
  for (const [name, spent] of [["init", timing?.init_s], ["ready", timing?.ready_s], ["run", run], ["post", timing?.post_s]]) {
    if (spent) phases.push({ name, x: at / seconds, width: spent / seconds, seconds: spent });
    at += spent || 0;
  }
  // the harness starts some time after RUN began: its calls are put where RUN ends with the last one at the latest
  const slack = Math.max(0, run - calls) / 2;
  const lanes = [...new Set(started.map((turn) => turn.lineage))].sort((a, b) => a - b);
  const bars = started.map((turn) => ({
    turn: turn.index,
    lane: lanes.indexOf(turn.lineage),
    x: (before + slack + turn.timing.started - begin) / seconds,
    width: turn.timing.ended_s / seconds,
    first: turn.timing.first_token_s === null ? null : turn.timing.first_token_s / seconds,
    role: turn.role,
    state: turn.state,
    versions: turn.weight_versions,
    seconds: turn.timing.ended_s,
  }));
  return { seconds, phases, turns: bars, lanes: lanes.length, seams: seamsOf(bars) };
}

/** Where a turn was sampled by weights that the one before was not. @param {readonly TurnBar[]} bars */
function seamsOf(bars) {
  const ordered = [...bars].sort((a, b) => a.x - b.x);
  return ordered
    .filter((bar, at) => bar.versions.length > 1 || (at > 0 && bar.versions[0] !== ordered[at - 1].versions.at(-1)))
    .filter((bar) => bar.versions.length > 0)
    .map((bar) => bar.x);
}
