/** Where the turns of a session stand in the drawing of their tree. Pure. */

export const MOST = 300; // turns drawn one by one; of more, runs of `extend` are one node

/**
 * @typedef {{turn: any, last: any, count: number, column: number, lane: number, parent: number | null}} Node
 * Nodes by column (depth) and lane (one for each leaf, as in a commit graph). A node is a turn, or a run of turns that
 * only extend each other.
 * @param {readonly any[]} turns
 * @returns {{nodes: Node[], lanes: number, columns: number}}
 */
export function tree(turns) {
  const children = new Map();
  for (const turn of turns) if (turn.parent !== null) children.set(turn.parent, [...(children.get(turn.parent) ?? []), turn]);
  const known = new Set(turns.map((turn) => turn.index));
  const folded = turns.length > MOST;
  /** @type {Node[]} */
  const nodes = [];
  let lanes = 0;
  let columns = 0;
  // a stack, not recursion: a line of turns may be thousands long
  const waiting = turns.filter((turn) => turn.parent === null || !known.has(turn.parent)).reverse().map((turn) => ({ turn, column: 0, lane: -1, parent: /** @type {number | null} */ (null) }));
  while (waiting.length) {
    const { turn, column, lane, parent } = /** @type {any} */ (waiting.pop());
    const own = lane < 0 ? lanes++ : lane;
    let last = turn;
    let count = 1;
    while (folded && children.get(last.index)?.length === 1 && plain(children.get(last.index)[0])) {
      last = children.get(last.index)[0];
      count += 1;
    }
    const at = nodes.push({ turn, last, count, column, lane: own, parent }) - 1;
    columns = Math.max(columns, column + 1);
    const next = children.get(last.index) ?? [];
    next.slice().reverse().forEach((child, from) => {
      waiting.push({ turn: child, column: column + 1, lane: from === next.length - 1 ? own : -1, parent: at });
    });
  }
  return { nodes, lanes, columns };
}

/** @param {any} turn */
function plain(turn) {
  return turn.kind === "extend" && turn.left_out === null && turn.state === "complete";
}
