/** The view of finished groups: their rewards as dots, and why what is unusable is so. */
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { bundled, follow, get } from "./api.js";
import { clock, count, duration, meanAndSpread, reward } from "./format.js";
import { Panel, State, Table, Waiting } from "./parts.js";
import { RewardCurve } from "./reward_curve.js";
import { sessionLink } from "./route.js";
import { tally } from "./tally.js";
import { useAnswer } from "./use.js";

const PAGE = 100; // groups asked for at once
const STATES = ["", "complete", "partial", "early", "dropped"];

export function Groups() {
  const [state, setState] = useState("");
  const [groups, setGroups] = useState(/** @type {any[] | null} */ (null));
  const [more, setMore] = useState(false);
  const [error, setError] = useState("");
  const path = `/v1/groups?limit=${PAGE}${state ? `&state=${state}` : ""}`;
  const load = async (/** @type {any[]} */ before) => {
    try {
      const until = before.length ? `&until=${before.at(-1).ended}` : "";
      const found = (await get(path + until)).groups;
      const known = new Set(before.map((each) => each.task_id));
      setMore(!bundled && found.length === PAGE);
      setGroups([...before, ...found.filter((/** @type {any} */ each) => !known.has(each.task_id))]);
      setError("");
    } catch (failure) {
      setError(/** @type {Error} */ (failure).message);
    }
  };
  useEffect(() => {
    load([]);
  }, [path]);
  useNewGroups(() => load([]));
  if (groups === null) return html`<${Waiting} answer=${{ value: null, error }} what="Reading the journal" />`;
  const keys = [...new Set(groups.flatMap((group) => Object.keys(group.metadata)))].slice(0, 6);
  const all = groups.flatMap((group) => group.rewards).filter((value) => value !== null);
  const range = { low: Math.min(0, ...all), high: Math.max(1, ...all) };
  return html`<${Panel} title="Finished groups" note=${tally(groups)}>
    <label class="filter">State
      <select value=${state} onChange=${(/** @type {any} */ event) => setState(event.target.value)}>
        ${STATES.map((name) => html`<option value=${name}>${name || "any"}</option>`)}
      </select>
    </label>
    <${RewardCurve} groups=${groups} range=${range} />
    <${Table}
      rows=${groups}
      keyOf=${(/** @type {any} */ group) => group.task_id}
      empty="No group has ended yet."
      columns=${[
        { head: "task", cell: (/** @type {any} */ group) => html`<span class="id">${group.task_id}</span>` },
        { head: `rewards, ${reward(range.low)} to ${reward(range.high)}`, cell: (/** @type {any} */ group) => html`<${Dots} group=${group} range=${range} />` },
        { head: "mean", number: true, cell: (/** @type {any} */ group) => reward(meanAndSpread(group.rewards).mean) },
        { head: "spread", number: true, cell: (/** @type {any} */ group) => reward(meanAndSpread(group.rewards).spread) },
        { head: "usable", number: true, cell: (/** @type {any} */ group) => `${group.usable} / ${group.sessions.length}` },
        { head: "state", cell: (/** @type {any} */ group) => (group.state ? html`<${State} word=${group.state} />` : "–") },
        { head: "reason", cell: (/** @type {any} */ group) => html`<span class="reason">${group.reason ?? ""}</span>` },
        ...keys.map((key) => ({ head: key, cell: (/** @type {any} */ group) => short(group.metadata[key]) })),
        { head: "took", number: true, cell: (/** @type {any} */ group) => duration(group.submitted && group.ended - group.submitted) },
        { head: "ended", number: true, cell: (/** @type {any} */ group) => (group.ended === null ? "–" : clock(group.ended)) },
      ]}
    />
    ${more ? html`<button onClick=${() => load(groups)}>Older groups</button>` : null}
    ${error ? html`<p class="failure" role="alert">${error}</p>` : null}
  <//>`;
}

/** Call `changed` when a group ended: the stream is followed under no name, so it holds nothing back. @param {() => void} changed */
function useNewGroups(changed) {
  const status = useAnswer("/v1/status").value;
  const last = status?.journal?.last_seq;
  useEffect(() => {
    if (last === undefined) return undefined;
    return follow("/v1/trajectories/stream?kinds=group", (kind) => kind === "group" && changed(), { after: last });
  }, [last]);
}

const HEIGHT = 18;
const WIDE = 160;
const LEFT = 19; // where the lowest reward stands; what has none stands before it

/** Each session of a group where its reward stands; hollow where it is unusable, a diamond where it is a fork. @param {{group: any, range: {low: number, high: number}}} props */
function Dots({ group, range }) {
  const scale = (/** @type {number} */ value) => LEFT + ((value - range.low) / (range.high - range.low)) * (WIDE - LEFT - 7);
  const taken = new Map();
  return html`<svg class="dots" width=${WIDE} height=${HEIGHT} viewBox=${`0 0 ${WIDE} ${HEIGHT}`} role="group" aria-label=${`rewards of ${group.task_id}`}>
    <line x1=${LEFT} x2=${WIDE - 7} y1=${HEIGHT / 2} y2=${HEIGHT / 2} />
    ${group.sessions.map((/** @type {any} */ member) => {
      const x = member.reward === null ? 5 : scale(member.reward);
      const beside = taken.get(Math.round(x)) ?? 0;
      taken.set(Math.round(x), beside + 1);
      const y = HEIGHT / 2 + (beside % 2 ? -1 : 1) * Math.ceil(beside / 2) * 2;
      const fork = member.forked_from;
      const from = fork ? `; fork of ${fork.session_id} before turn ${fork.turn}` : "";
      const said = `sample ${member.sample_index}: ${member.status}, reward ${reward(member.reward)}${member.why ? `; unusable: ${member.why}` : ""}${from}`;
      return html`<a key=${member.session_id} href=${sessionLink(member.session_id)} aria-label=${said}>
        <${Dot} kind=${member.usable ? "usable" : "unusable"} fork=${fork} x=${x} y=${Math.min(HEIGHT - 4, Math.max(4, y))} said=${said} />
      </a>`;
    })}
  </svg>`;
}

/** A session: a circle, or a square that stands on its corner where it is a fork. @param {{kind: string, fork: any, x: number, y: number, said: string}} props */
function Dot({ kind, fork, x, y, said }) {
  if (fork) return html`<path class=${`fork ${kind}`} d=${`M${x - 4} ${y}l4 -4l4 4l-4 4z`}><title>${said}</title></path>`;
  return html`<circle class=${kind} cx=${x} cy=${y} r="3.5"><title>${said}</title></circle>`;
}

/** @param {any} value of a task's metadata */
function short(value) {
  if (value === undefined || value === null) return "";
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 40 ? `${text.slice(0, 39)}…` : text;
}
