/** The view of the samples of a group side by side: where each parts from the first, exactly. */
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { around, firstDifference, turnAt } from "./divergence.js";
import { count, reward } from "./format.js";
import { Panel, State, Waiting } from "./parts.js";
import { sessionLink } from "./route.js";
import { readRow } from "./row.js";

const MOST = 4; // side by side: more are not read
const BEFORE = 60; // tokens of what is common
const AFTER = 220;

/** @param {{session: any}} props */
export function Compare({ session }) {
  const [found, set] = useState(/** @type {{sides: any[] | null, error: string}} */ ({ sides: null, error: "" }));
  useEffect(() => {
    const abort = new AbortController();
    load(session, abort.signal).then(
      (sides) => set({ sides, error: "" }),
      (error) => abort.signal.aborted || set({ sides: null, error: error.message }),
    );
    return () => abort.abort();
  }, [session.session_id]);
  if (found.sides === null) return html`<${Waiting} answer=${{ value: null, error: found.error }} what="Reading the samples of the group" />`;
  if (found.sides.length < 2) return html`<p class="quiet">No other sample of its group has a training row.</p>`;
  const [first, ...others] = found.sides;
  const commons = others.map((side) => firstDifference(first.row.ids, side.row.ids));
  const common = Math.max(...commons);
  return html`<div class="sides">
    <${Side} side=${first} common=${common} note=${`compared with ${others.length === 1 ? "the other" : "the others"}`} />
    ${others.map((side, at) => html`<${Side} key=${side.id} side=${side} common=${commons[at]} note=${commons[at] === side.row.length && commons[at] === first.row.length ? "all tokens are the same" : `the first ${count(commons[at])} tokens are the same`} />`)}
  </div>`;
}

/** The first row of the session and of other samples of its group. @param {any} session @param {AbortSignal} abort */
async function load(session, abort) {
  const task = await get(`/v1/tasks/${encodeURIComponent(session.task_id)}`, abort);
  const others = task.sessions.filter((/** @type {any} */ each) => each.session_id !== session.session_id && each.outcome !== null);
  const sides = await Promise.all(
    [session, ...others].slice(0, MOST).map(async (each) => {
      const found = await get(`/v1/trajectories/${encodeURIComponent(each.session_id)}?arrays=base64&pieces=true`, abort);
      return { id: each.session_id, session: each, row: found.traces.length ? readRow(found.traces[0], 0, found.pieces) : null };
    }),
  );
  return sides.filter((side) => side.row !== null);
}

/** @param {{side: any, common: number, note: string}} props */
function Side({ side, common, note }) {
  const { row, session, id } = side;
  const text = around(row, common, BEFORE, AFTER);
  const turn = turnAt(row, common);
  const title = html`<a class="id" href=${sessionLink(id, "tokens", { row: 0, t: Math.min(common, row.length - 1) })}>${id}</a>`;
  return html`<${Panel} title=${title} note=${html`<${State} word=${session.status} /> reward ${reward(session.reward)}, ${count(row.length)} tokens`}>
    <p class="quiet">${note}${turn === null || common >= row.length ? "" : `; they part in or after turn ${turn}`}</p>
    <pre class="text side"><span class="quiet">${text.before}</span><span class="seam-mark" title="the first token that differs"></span>${text.after}${text.more ? " …" : ""}</pre>
  <//>`;
}
