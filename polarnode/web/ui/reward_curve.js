/** The mean rewards of groups over time, with the weight updates between them. */
import { html } from "./vendor/htm-preact.js";
import { curve } from "./curve.js";
import { clock, reward } from "./format.js";
import { useAnswer } from "./use.js";

const HIGH = 110;

/** @param {{groups: any[], range: {low: number, high: number}}} props */
export function RewardCurve({ groups, range }) {
  const weights = useAnswer("/v1/weights").value;
  const found = curve(groups, weights?.history ?? [], range);
  if (found === null) return null;
  const x = (/** @type {number} */ share) => 4 + share * 992;
  const y = (/** @type {number} */ share) => 6 + share * (HIGH - 12);
  return html`<figure class="curve">
    <svg viewBox=${`0 0 1000 ${HIGH}`} preserveAspectRatio="none" role="img" aria-label="mean reward of groups over time">
      <line class="axis" x1="0" x2="1000" y1=${y(1)} y2=${y(1)} /><line class="axis" x1="0" x2="1000" y1=${y(0)} y2=${y(0)} />
      ${found.updates.map((update) => html`<line key=${update.version} class="seam" x1=${x(update.x)} x2=${x(update.x)} y1="0" y2=${HIGH}><title>weights ${update.version}</title></line>`)}
      <polyline class="mean" points=${found.line.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join(" ")} />
      ${found.dots.map((dot) => html`<path key=${dot.task} class="dot" d=${`M ${x(dot.x).toFixed(1)} ${y(dot.y).toFixed(1)} h 0`}><title>${dot.task}: mean ${reward(dot.mean)}</title></path>`)}
    </svg>
    <figcaption class="legend"><span>${clock(found.begin)} to ${clock(found.end)}; rewards ${reward(range.low)} to ${reward(range.high)}</span>
      <span><span class="key usable-key"></span>mean of a group</span><span><span class="key mean-key"></span>of the last ten</span><span><span class="key seam"></span>new weights</span></figcaption>
  </figure>`;
}
