/** The view of what a node does now, and of the nodes that share its log. */
import { html } from "./vendor/htm-preact.js";
import { Action } from "./action.js";
import { bytes, count, duration, trimmed } from "./format.js";
import { History } from "./history.js";
import { Facts, Panel, State, Table, Waiting } from "./parts.js";
import { useFresh } from "./use.js";
import { warnings } from "./warnings.js";

const STAGES = ["init", "ready", "run", "post"];

export function Now() {
  const answer = useFresh("/v1/status");
  const status = answer.value;
  if (status === null) return html`<${Waiting} answer=${answer} what="Asking the node" />`;
  return html`
    <${Warnings} status=${status} />
    ${status.nodes ? html`<${Fleet} nodes=${status.nodes} />` : null}
    <div class="columns">
      <${Panel} title="Stages" note=${`${count(status.scheduler.live)} sessions are live, ${count(status.scheduler.ended)} ended`}>
        <div class="stages">
          ${STAGES.filter((name) => status.scheduler.stages[name]).map(
            (name) => html`<${Stage} key=${name} name=${name} stage=${status.scheduler.stages[name]} />`,
          )}
        </div>
      <//>
      <${Panel} title="Weights" note=${status.weights.paused ? `paused: ${status.weights.paused}` : ""}>
        <${Facts} facts=${[
          ["model", status.model.name],
          ["version", status.weights.version],
          ["updates", count(status.weights.updates)],
          ["failed updates", status.weights.failures || null],
          ["last update took", status.weights.last_seconds === null ? null : duration(status.weights.last_seconds)],
          ["context", `${count(status.model.context_length)} tokens`],
        ]} />
        ${status.ui_actions ? html`<${Generation} paused=${status.weights.paused} />` : null}
      <//>
    </div>
    <${Panel} title="Engine hosts"><${Hosts} hosts=${status.engine.hosts} /><//>
    <${History} />
    <div class="columns">
      <${Panel} title="Journal" note=${status.journal.warning}>
        <${Facts} facts=${[
          ["stored", bytes(status.journal.stored_bytes)],
          ["events", count(status.journal.last_seq)],
          ["not acknowledged", count(status.journal.unacknowledged_events)],
          ["disk free", bytes(status.journal.disk_free)],
          ["backlog", bytes(status.journal.backlog_bytes)],
        ]} />
      <//>
      <${Panel} title="Delivery"><${Delivery} status=${status} /><//>
      <${Panel} title="Machine">
        <${Facts} facts=${[
          ["containers", `${count(status.runtimes.live)} live, ${count(status.runtimes.warm)} warm`],
          ["containers failed", status.runtimes.failed || null],
          ["event loop late", `${(status.loop.p99 * 1000).toFixed(1)} ms at p99`],
          ["captures", `${status.captures.open.length} of ${status.captures.limit}`],
          ["evaluations", status.evaluations.open || null],
        ]} />
      <//>
    </div>`;
}

/** @param {{status: any}} props */
function Warnings({ status }) {
  return warnings(status).map((each) => html`<p class="failure" role="status" key=${each}>${each}</p>`);
}

/** @param {{name: string, stage: any}} props */
function Stage({ name, stage }) {
  const share = stage.limit ? Math.min(1, stage.inside / stage.limit) : 0;
  const bar = `${stage.inside} of ${stage.limit} places of ${name} are taken, ${stage.waiting} wait`;
  return html`<div class="stage">
    <span>${name}</span>
    <svg viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label=${bar}>
      <rect class="bar-room" width="100" height="8" rx="1" /><rect class="bar" width=${share * 100} height="8" rx="1" />
    </svg>
    <span class="number">${count(stage.inside)} / ${count(stage.limit)}</span>
    <span class="number quiet">${stage.waiting ? `${count(stage.waiting)} wait` : ""}</span>
  </div>`;
}

/** @param {{paused: string | null}} props */
function Generation({ paused }) {
  if (paused) return html`<${Action} name="resume" question="Go on sampling?" method="POST" path="/v1/engine/resume" body=${{}} />`;
  return html`<${Action} name="pause" question="Hold every call of every session?" method="POST" path="/v1/engine/pause" body=${{}} />`;
}

/** @param {{hosts: any[]}} props */
function Hosts({ hosts }) {
  return html`<${Table}
    rows=${hosts}
    keyOf=${(/** @type {any} */ host) => host.index}
    empty="No engine host is configured."
    columns=${[
      { head: "host", cell: (/** @type {any} */ host) => host.url ?? host.index },
      { head: "state", cell: (/** @type {any} */ host) => html`<${State} word=${host.state} />` },
      { head: "GPUs", cell: (/** @type {any} */ host) => host.gpus.join(", ") || "–" },
      { head: "running", number: true, cell: (/** @type {any} */ host) => count(host.running) },
      { head: "waiting", number: true, cell: (/** @type {any} */ host) => count(host.waiting) },
      { head: "queued calls", number: true, cell: (/** @type {any} */ host) => count(host.queued) },
      { head: "KV cache", number: true, cell: (/** @type {any} */ host) => `${trimmed(host.token_usage * 100, 1)} %` },
      { head: "restarts", number: true, cell: (/** @type {any} */ host) => count(host.restarts) },
      { head: "version", cell: (/** @type {any} */ host) => host.weight_version ?? "–" },
    ]}
  />`;
}

/** @param {{status: any}} props */
function Delivery({ status }) {
  const consumers = Object.entries(status.journal.positions);
  const last = status.journal.last_seq;
  return html`<${Facts} facts=${[
    ...consumers.map(([name, position]) => [name, `${count(last - Number(position))} events behind`]),
    ["consumers", consumers.length ? null : "none"],
    ["callbacks taken", status.callbacks.taken || null],
    ["callbacks pending", status.callbacks.owed || null],
  ]} />`;
}

/** @param {{nodes: any[]}} props */
function Fleet({ nodes }) {
  const running = nodes.reduce((sum, node) => sum + node.running, 0);
  return html`<${Panel} title="Nodes" note=${`${count(running)} sessions run on ${count(nodes.length)} nodes`}>
    <${Table}
      rows=${nodes}
      keyOf=${(/** @type {any} */ node) => node.name}
      empty="No node is known."
      columns=${[
        { head: "node", cell: (/** @type {any} */ node) => node.name },
        { head: "state", cell: (/** @type {any} */ node) => html`<${State} word=${node.draining ? "draining" : node.state} />` },
        { head: "running", number: true, cell: (/** @type {any} */ node) => count(node.running) },
        { head: "weights", cell: (/** @type {any} */ node) => node.serving[""] ?? "–" },
        { head: "release", cell: (/** @type {any} */ node) => node.version || "–" },
      ]}
    />
  <//>`;
}
