/** The view of a session's turns as a tree: which prompt extends which, and why one does not. */
import { html } from "./vendor/htm-preact.js";
import { count } from "./format.js";
import { Panel } from "./parts.js";
import { sessionLink } from "./route.js";
import { tree } from "./tree.js";

const WIDE = 92;
const TALL = 46;
const EDGE = 28;

/** @param {{id: string, turns: any[]}} props */
export function Lineage({ id, turns }) {
  if (!turns.length) return html`<p class="quiet">No turn yet.</p>`;
  const { nodes, lanes, columns } = tree(turns);
  const place = (/** @type {import("./tree.js").Node} */ node) => ({ x: EDGE + node.column * WIDE, y: EDGE + node.lane * TALL });
  const reasons = turns.filter((turn) => turn.reason || turn.left_out);
  return html`
    <${Panel} title="Lineages" note=${`${count(turns.length)} turns; a line goes from the turn whose prompt and sample a prompt extends`}>
      <div class="scroll">
        <svg class="tree" width=${EDGE * 2 + (columns - 1) * WIDE + 40} height=${EDGE * 2 + (lanes - 1) * TALL} role="group" aria-label="tree of turns">
          ${nodes.map((node, at) => {
            if (node.parent === null) return null;
            const from = place(nodes[node.parent]);
            const to = place(node);
            return html`<path key=${at} class=${`edge edge-${node.turn.kind}`} d=${`M ${from.x} ${from.y} C ${from.x + WIDE / 2} ${from.y}, ${to.x - WIDE / 2} ${to.y}, ${to.x} ${to.y}`} />`;
          })}
          ${nodes.map((node) => {
            const { x, y } = place(node);
            const said = `turn ${node.turn.index}${node.count > 1 ? ` to ${node.last.index}` : ""}: ${node.turn.kind}, ${node.turn.role}${node.turn.reason ? `, ${node.turn.reason}` : ""}${node.turn.left_out ? `, left out: ${node.turn.left_out}` : ""}`;
            return html`<a key=${node.turn.index} href=${sessionLink(id, "conversation", { turn: node.turn.index })} aria-label=${said}>
              <circle class=${`node role-${node.turn.role}${node.turn.left_out ? " left-out" : ""}`} cx=${x} cy=${y} r=${node.count > 1 ? 9 : 7}><title>${said}</title></circle>
              <text x=${x} y=${y - 12}>${node.count > 1 ? `${node.turn.index}–${node.last.index}` : node.turn.index}</text>
              <text class="quiet" x=${x} y=${y + 20}>+${count(node.last.sampled_length)}</text>
            </a>`;
          })}
        </svg>
      </div>
      <p class="legend">Below a turn: its sampled tokens. Hollow: left out of the training rows.</p>
    <//>
    ${reasons.length
      ? html`<${Panel} title="Reasons">
          <dl class="facts">${reasons.map((turn) => html`<div key=${turn.index}><dt>turn ${turn.index}, ${turn.kind}</dt><dd>${[turn.reason, turn.left_out && `left out: ${turn.left_out}`].filter(Boolean).join("; ")}</dd></div>`)}</dl>
        <//>`
      : null}`;
}
