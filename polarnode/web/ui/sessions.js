/** The view of sessions that run now. */
import { html, useState } from "./vendor/htm-preact.js";
import { count, duration } from "./format.js";
import { isShown, keyOf, seconds } from "./live.js";
import { Panel, State, Table, Waiting } from "./parts.js";
import { sessionLink } from "./route.js";
import { useLive, useSeconds } from "./use.js";

const SHOWN = 500; // rows: a table of more is not read, and slow

/** @typedef {import("./live.js").LiveRow} LiveRow */

export function Sessions() {
  const { rows, error } = useLive();
  const now = useSeconds();
  const [wanted, want] = useState("");
  if (rows === null) return html`<${Waiting} answer=${{ value: null, error }} what="Asking the node" />`;
  const all = [...rows.values()].filter((row) => isShown(row, now));
  const live = all.filter((row) => row.status.phase !== "ended").length;
  const found = all
    .filter(({ status, node }) => [status.session_id, status.task_id, status.harness, status.phase, node].some((text) => text.includes(wanted)))
    .sort((a, b) => (seconds(b, "age_s", now) ?? 0) - (seconds(a, "age_s", now) ?? 0));
  const many = new Set(all.map((row) => row.node)).size > 1;
  const note = found.length > SHOWN ? `the oldest ${SHOWN} of ${count(found.length)}` : wanted ? `${count(found.length)} of ${count(all.length)}` : count(live);
  return html`<${Panel} title="Live sessions" note=${note}>
    <label class="filter">Filter <input type="search" value=${wanted} placeholder="id, task, harness, phase or node" onInput=${(/** @type {any} */ event) => want(event.target.value)} /></label>
    <${Table}
      rows=${found.slice(0, SHOWN)}
      keyOf=${(/** @type {LiveRow} */ row) => keyOf(row.node, row.status)}
      empty=${all.length ? "No live session has this text." : "No session runs now."}
      columns=${[
        { head: "session", cell: (/** @type {LiveRow} */ { status }) => html`<a class="id" href=${sessionLink(status.session_id)}>${status.session_id}</a>` },
        ...(many ? [{ head: "node", cell: (/** @type {LiveRow} */ row) => row.node }] : []),
        { head: "task", cell: (/** @type {LiveRow} */ { status }) => html`<span class="id">${status.task_id}</span>` },
        { head: "sample", number: true, cell: (/** @type {LiveRow} */ { status }) => status.sample_index },
        { head: "attempt", number: true, cell: (/** @type {LiveRow} */ { status }) => status.attempt ?? 0 },
        { head: "harness", cell: (/** @type {LiveRow} */ { status }) => status.harness },
        { head: "phase", cell: (/** @type {LiveRow} */ { status }) => html`<${State} word=${status.outcome ?? status.phase} />` },
        { head: "for", number: true, cell: (/** @type {LiveRow} */ row) => duration(seconds(row, "phase_s", now)) },
        { head: "age", number: true, cell: (/** @type {LiveRow} */ row) => duration(seconds(row, "age_s", now)) },
        { head: "turns", number: true, cell: (/** @type {LiveRow} */ { status }) => count(status.turns) },
        { head: "sampled", number: true, cell: (/** @type {LiveRow} */ { status }) => count(status.sampled_tokens) },
        { head: "last turn ago", number: true, cell: (/** @type {LiveRow} */ row) => duration(seconds(row, "last_turn_s", now)) },
      ]}
    />
  <//>`;
}
