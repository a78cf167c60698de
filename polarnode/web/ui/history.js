/** What the node did in the last hours, a small curve for each figure. */
import { html } from "./vendor/htm-preact.js";
import { count, duration, trimmed } from "./format.js";
import { Panel } from "./parts.js";
import { series } from "./series.js";
import { usePolled } from "./use.js";

const AGAIN_S = 10; // as often as the node samples
const share = (/** @type {number} */ value) => `${trimmed(value * 100, 1)} %`;
const rate = (/** @type {number} */ value) => trimmed(value, value < 10 ? 1 : 0);
/** @type {[string, string, (value: number) => string][]} */
const FIGURES = [
  ["sampled_tokens_per_s", "sampled tokens a second", rate],
  ["running", "sessions in run", count],
  ["waiting", "sessions that wait for run", count],
  ["calls_running", "calls in the engines", count],
  ["calls_waiting", "calls that wait", count],
  ["token_usage", "KV cache", share],
  ["reread_share", "prompt tokens read again", share],
  ["loop_late_s", "event loop late, p99", (value) => `${(value * 1000).toFixed(1)} ms`],
];

export function History() {
  const found = usePolled("/v1/timeseries", AGAIN_S).value;
  if (found === null || found.at.length < 2) return null;
  const seconds = found.at.at(-1) - found.at[0];
  return html`<${Panel} title="History" note=${`the last ${duration(seconds)}`}>
    <div class="history">
      ${FIGURES.filter(([name]) => found.values[name]?.some((/** @type {number | null} */ value) => value !== null)).map(
        ([name, title, text]) => html`<${Curve} key=${name} title=${title} text=${text} line=${series(found.at, found.values[name], found.every_s)} />`,
      )}
    </div>
  <//>`;
}

/** @param {{title: string, text: (value: number) => string, line: ReturnType<typeof series>}} props */
function Curve({ title, text, line }) {
  const now = line.last === null ? "–" : text(line.last);
  const points = (/** @type {{x: number, y: number}[]} */ each) => each.map(({ x, y }) => `${(x * 300).toFixed(1)},${(2 + y * 36).toFixed(1)}`).join(" ");
  return html`<figure>
    <figcaption><span class="quiet">${title}</span><span class="number">${now}</span></figcaption>
    <svg viewBox="0 0 300 40" preserveAspectRatio="none" role="img" aria-label=${`${title}: ${now} now, at most ${text(line.most)}`}>
      <line class="axis" x1="0" x2="300" y1="38" y2="38" />
      ${line.lines.map((each, at) => html`<polyline key=${at} points=${points(each)} />`)}
    </svg>
    <p class="quiet">at most ${text(line.most)}</p>
  </figure>`;
}
