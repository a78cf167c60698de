/** The view of one session: its head, and tabs. */
import { html } from "./vendor/htm-preact.js";
import { Action } from "./action.js";
import { clock, count, duration, leftOut, reward } from "./format.js";
import { Facts, Panel, Plain, State, Table, Waiting } from "./parts.js";
import { sessionLink, TABS } from "./route.js";
import { Compare } from "./compare.js";
import { Conversation } from "./conversation.js";
import { Lineage } from "./lineage.js";
import { Log } from "./log.js";
import { timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";
import { bundled } from "./api.js";
import { useAnswer, usePolled } from "./use.js";

const SHOWN = bundled ? TABS.filter((tab) => tab !== "log") : TABS;

/** @param {{route: import("./route.js").Route}} props */
export function Session({ route }) {
  const path = `/v1/sessions/${encodeURIComponent(route.id)}?arrays=base64`;
  const first = useAnswer(path);
  if (first.value === null) return html`<${Waiting} answer=${first} what="Reading the session" />`;
  const over = first.value.trajectory !== null;
  return over
    ? html`<${Whole} route=${route} found=${first.value} />`
    : html`<${Live} route=${route} path=${path} found=${first.value} />`;
}

/** A session that runs: asked again. @param {{route: import("./route.js").Route, path: string, found: any}} props */
function Live({ route, path, found }) {
  const answer = usePolled(path);
  const acts = useAnswer("/v1/status").value?.ui_actions;
  const task = `/v1/tasks/${encodeURIComponent(found.session.task_id)}`;
  return html`
    <${Whole} route=${route} found=${answer.value ?? found} />
    ${acts && !answer.value?.trajectory
      ? html`<${Action} name="cancel the task" question="End all sessions of this task? They keep their turns." method="DELETE" path=${task} />`
      : null}`;
}

/** @param {{route: import("./route.js").Route, found: any}} props */
function Whole({ route, found }) {
  const { session, turns, trajectory } = found;
  return html`
    <div class="title">
      <h1 class="id">${session.session_id}</h1>
      <${State} word=${session.status} />
      <span class="reward" title="reward">${reward(session.reward)}</span>
    </div>
    <nav class="tabs" aria-label="parts of the session">
      ${SHOWN.map((tab) => html`<a href=${sessionLink(session.session_id, tab)} aria-current=${tab === route.tab ? "page" : undefined}>${tab}</a>`)}
    </nav>
    ${route.tab === "overview" ? html`<${Overview} session=${session} turns=${turns} trajectory=${trajectory} />` : null}
    ${route.tab === "conversation" ? html`<${Conversation} turns=${turns} />` : null}
    ${route.tab === "tokens" ? html`<${Tokens} route=${route} session=${session} />` : null}
    ${route.tab === "lineage" ? html`<${Lineage} id=${session.session_id} turns=${turns} />` : null}
    ${route.tab === "compare" ? html`<${Compare} session=${session} />` : null}
    ${route.tab === "log" ? html`<${Log} path=${`/v1/sessions/${encodeURIComponent(session.session_id)}/log`} />` : null}`;
}

/** @param {{session: any, turns: any[], trajectory: any}} props */
function Overview({ session, turns, trajectory }) {
  const outcome = session.outcome;
  return html`
    ${outcome?.reason ? html`<p class=${session.status === "completed" ? "quiet" : "failure"}><${Plain} text=${outcome.reason} /></p>` : null}
    <div class="columns">
      <${Panel} title="Session">
        <${Facts} facts=${[
          ["task", html`<span class="id">${session.task_id}</span>`],
          ["sample", `${session.sample_index}${session.attempt ? `, attempt ${session.attempt}` : ""}`],
          ["forked from", session.forked_from && html`<${Parent} fork=${trajectory?.forked_from ?? session.forked_from} />`],
          ["retried as", session.retried_as && html`<a class="id" href=${sessionLink(session.retried_as)}>${session.retried_as}</a>`],
          ["harness", trajectory && `${trajectory.harness.name} ${trajectory.harness.version ?? ""}`],
          ["model", trajectory?.model.name],
          ["node", trajectory?.node],
          ["ended", session.finished && clock(session.finished)],
          ["clock", outcome?.clock],
          ["exit code", outcome?.exit_code],
          ["at fault", outcome?.boundary],
        ]} />
      <//>
      <${Panel} title="Tokens">
        <${Facts} facts=${[
          ["turns", count(turns.length)],
          ["sampled", count(session.sampled_tokens)],
          ["trained", trajectory && count(trajectory.metrics.trainable_tokens)],
          ["left out", trajectory && leftOut(trajectory.metrics.lineage)],
          ["rows", trajectory && count(trajectory.metrics.traces)],
          ["staleness", trajectory?.staleness],
          ["weights", trajectory?.model.weight_versions.join(", ")],
        ]} />
      <//>
      <${Panel} title="Evaluation">
        <${Facts} facts=${evaluationFacts(session, trajectory)} />
      <//>
    </div>
    <${Forks} id=${session.session_id} />
    <${Panel} title="Timeline"><${Timeline} id=${session.session_id} timing=${trajectory?.timing ?? null} turns=${turns} /><//>
    ${outcome?.log_tail ? html`<${Panel} title="End of the log"><pre class="log"><${Plain} text=${outcome.log_tail} /></pre><//>` : null}
    <${Panel} title="Turns"><${Turns} id=${session.session_id} turns=${turns} /><//>
    ${trajectory && Object.keys(trajectory.metadata).length
      ? html`<${Panel} title="Metadata"><pre class="log"><${Plain} text=${JSON.stringify(trajectory.metadata, null, 2)} /></pre><//>`
      : null}`;
}

/** The state in which a fork began, and where it left the record before that. @param {{fork: any}} props */
function Parent({ fork }) {
  return html`<a class="id" href=${sessionLink(fork.session_id, "conversation", { turn: fork.turn })}>${fork.session_id}</a> before turn ${fork.turn}, by ${fork.by}
    ${fork.differs ? html`<span class="reason">, in another state from turn ${fork.got} on: <${Plain} text=${fork.differs} /></span>` : null}`;
}

/** The forks of a session; nothing where it has none. @param {{id: string}} props */
function Forks({ id }) {
  const forks = useAnswer(`/v1/sessions/${encodeURIComponent(id)}/forks`).value?.forks ?? [];
  if (!forks.length) return null;
  return html`<${Panel} title="Forks" note=${count(forks.length)}>
    <${Table}
      rows=${forks}
      keyOf=${(/** @type {any} */ each) => each.session_id}
      empty=""
      columns=${[
        { head: "session", cell: (/** @type {any} */ each) => html`<a class="id" href=${sessionLink(each.session_id)}>${each.session_id}</a>` },
        { head: "task", cell: (/** @type {any} */ each) => html`<span class="id">${each.task_id}</span>` },
        { head: "before turn", number: true, cell: (/** @type {any} */ each) => each.forked_from.turn },
        { head: "by", cell: (/** @type {any} */ each) => each.forked_from.by },
        { head: "status", cell: (/** @type {any} */ each) => html`<${State} word=${each.status} />` },
        { head: "turns", number: true, cell: (/** @type {any} */ each) => count(each.turns) },
        { head: "sampled", number: true, cell: (/** @type {any} */ each) => count(each.sampled_tokens) },
        { head: "reward", number: true, cell: (/** @type {any} */ each) => reward(each.reward) },
      ]}
    />
  <//>`;
}

/** @param {any} session @param {any} trajectory @returns {[string, any][]} */
function evaluationFacts(session, trajectory) {
  const found = trajectory?.metrics.evaluation;
  const own = found && typeof found === "object" ? Object.entries(found) : [];
  return [
    ["reward", reward(session.reward)],
    ...own.map(([name, value]) => /** @type {[string, any]} */ ([name, html`<${Plain} text=${typeof value === "string" ? value : JSON.stringify(value)} />`])),
  ];
}

const LANE = 16;
const LEGEND = [
  ["role-main", "main"],
  ["role-subagent", "sub-agent"],
  ["role-auxiliary", "auxiliary"],
  ["role-compaction", "compaction"],
  ["first-token", "until the first token"],
  ["seam", "another weight version"],
];

/** @param {{id: string, timing: any, turns: any[]}} props */
function Timeline({ id, timing, turns }) {
  const found = timeline(timing, turns);
  const height = 26 + Math.max(1, found.lanes) * LANE;
  const x = (/** @type {number} */ share) => `${(share * 100).toFixed(3)}%`;
  return html`
    <div class="scroll"><svg class="timeline" width="100%" height=${height} role="group" aria-label=${`timeline of ${duration(found.seconds)}`}>
      ${found.phases.map(
        (phase) => html`<g key=${phase.name}>
          <rect class=${`phase phase-${phase.name}`} x=${x(phase.x)} width=${x(phase.width)} y="0" height="14"><title>${phase.name}: ${duration(phase.seconds)}</title></rect>
          ${phase.width > 0.06 ? html`<text x=${x(phase.x + phase.width / 2)} y="10.5">${phase.name} ${duration(phase.seconds)}</text>` : null}
        </g>`,
      )}
      ${found.turns.map(
        (bar) => html`<a key=${bar.turn} href=${sessionLink(id, "conversation", { turn: bar.turn })} aria-label=${`turn ${bar.turn}`}>
          <rect class=${`turn role-${bar.role} turn-${bar.state}`} x=${x(bar.x)} width=${x(Math.max(bar.width, 0.0015))} y=${22 + bar.lane * LANE} height="10" rx="1">
            <title>turn ${bar.turn}, ${bar.role}, ${bar.state}: ${duration(bar.seconds)}; weights ${bar.versions.join(", ") || "none"}</title>
          </rect>
          ${bar.first === null ? null : html`<rect class="first-token" x=${x(bar.x)} width=${x(bar.first)} y=${22 + bar.lane * LANE} height="10" rx="1" />`}
        </a>`,
      )}
      ${found.seams.map((at) => html`<line class="seam" x1=${x(at)} x2=${x(at)} y1="17" y2=${height}><title>another weight version</title></line>`)}
    </svg></div>
    <p class="legend">${LEGEND.map(([name, text]) => html`<span key=${name}><span class=${`key ${name}`}></span>${text}</span>`)}</p>`;
}

/** @param {{id: string, turns: any[]}} props */
function Turns({ id, turns }) {
  return html`<${Table}
    rows=${turns}
    keyOf=${(/** @type {any} */ turn) => turn.index}
    empty="No turn yet."
    columns=${[
      { head: "turn", number: true, cell: (/** @type {any} */ turn) => html`<a href=${sessionLink(id, "conversation", { turn: turn.index })}>${turn.index}</a>` },
      { head: "lineage", number: true, cell: (/** @type {any} */ turn) => turn.lineage },
      { head: "parent", number: true, cell: (/** @type {any} */ turn) => turn.parent ?? "–" },
      { head: "kind", cell: (/** @type {any} */ turn) => turn.kind },
      { head: "reason", cell: (/** @type {any} */ turn) => html`<span class="reason">${turn.reason}</span>` },
      { head: "role", cell: (/** @type {any} */ turn) => turn.role },
      { head: "state", cell: (/** @type {any} */ turn) => (turn.state === "complete" ? turn.state : html`<${State} word=${turn.state} />`) },
      { head: "prompt", number: true, cell: (/** @type {any} */ turn) => count(turn.prompt_length) },
      { head: "sampled", number: true, cell: (/** @type {any} */ turn) => count(turn.sampled_length) },
      { head: "first token", number: true, cell: (/** @type {any} */ turn) => duration(turn.timing.first_token_s) },
      { head: "took", number: true, cell: (/** @type {any} */ turn) => duration(turn.timing.ended_s) },
      { head: "finish", cell: (/** @type {any} */ turn) => turn.finish_reason },
      { head: "weights", cell: (/** @type {any} */ turn) => turn.weight_versions.join(", ") },
      { head: "left out", cell: (/** @type {any} */ turn) => turn.left_out ?? "" },
    ]}
  />`;
}
