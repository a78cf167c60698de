/** The view of sessions that run now. */
import { html, useState } from "./vendor/htm-preact.js";
import { count, duration } from "./format.js";
import { Panel, State, Table, Waiting } from "./parts.js";
import { sessionLink } from "./route.js";
import { usePolled } from "./use.js";

const SHOWN = 500; // rows: a table of more is not read, and slow

export function Sessions() {
  const answer = usePolled("/v1/status");
  const [wanted, want] = useState("");
  if (answer.value === null) return html`<${Waiting} answer=${answer} what="Asking the node" />`;
  if (!answer.value.sessions) return html`<p class="quiet">A fleet's front lists no sessions: open the page of one of its nodes, or a session by its id.</p>`;
  const all = [...answer.value.sessions, ...answer.value.captures.open.map(asSession)];
  const found = all
    .filter((each) => [each.session_id, each.task_id, each.harness, each.phase].some((text) => text.includes(wanted)))
    .sort((a, b) => (b.age_s ?? 0) - (a.age_s ?? 0));
  const note = found.length > SHOWN ? `the oldest ${SHOWN} of ${count(found.length)}` : `${count(found.length)} of ${count(all.length)}`;
  return html`<${Panel} title="Live sessions" note=${note}>
    <label class="filter">Filter <input type="search" value=${wanted} placeholder="id, task, harness or phase" onInput=${(/** @type {any} */ event) => want(event.target.value)} /></label>
    <${Table}
      rows=${found.slice(0, SHOWN)}
      keyOf=${(/** @type {any} */ each) => each.session_id}
      empty=${all.length ? "No live session has this text." : "No session runs now."}
      columns=${[
        { head: "session", cell: (/** @type {any} */ each) => html`<a class="id" href=${sessionLink(each.session_id)}>${each.session_id}</a>` },
        { head: "task", cell: (/** @type {any} */ each) => html`<span class="id">${each.task_id}</span>` },
        { head: "sample", number: true, cell: (/** @type {any} */ each) => each.sample_index },
        { head: "attempt", number: true, cell: (/** @type {any} */ each) => each.attempt ?? 0 },
        { head: "harness", cell: (/** @type {any} */ each) => each.harness },
        { head: "phase", cell: (/** @type {any} */ each) => html`<${State} word=${each.phase} />` },
        { head: "for", number: true, cell: (/** @type {any} */ each) => duration(each.phase_s) },
        { head: "age", number: true, cell: (/** @type {any} */ each) => duration(each.age_s) },
        { head: "turns", number: true, cell: (/** @type {any} */ each) => count(each.turns) },
        { head: "sampled", number: true, cell: (/** @type {any} */ each) => count(each.sampled_tokens) },
        { head: "last turn ago", number: true, cell: (/** @type {any} */ each) => duration(each.last_turn_s) },
      ]}
    />
  <//>`;
}

/** An open capture as a session. @param {any} capture */
function asSession(capture) {
  return { ...capture, harness: "capture", phase: "run" };
}
