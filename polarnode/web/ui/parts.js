/** Small parts that several views draw. */
import { html } from "./vendor/htm-preact.js";
import { visible } from "./text.js";

/** Text of an agent: hidden characters by name, each in a box. @param {{text: string}} props */
export function Plain({ text }) {
  return visible(text ?? "").map((part) =>
    typeof part === "string" ? part : html`<span class="hidden-letter" title="a character without a shape">${part.mark}</span>`,
  );
}

/** @param {{title: string, note?: any, children?: any}} props */
export function Panel({ title, note, children }) {
  return html`<section class="panel">
    <header><h2>${title}</h2>${note ? html`<span class="note">${note}</span>` : null}</header>
    ${children}
  </section>`;
}

/** What stands in place of a view without data. @param {{answer: import("./use.js").Answer, what: string}} props */
export function Waiting({ answer, what }) {
  if (answer.error) return html`<p class="failure" role="alert">${answer.error}</p>`;
  return html`<p class="quiet">${what} …</p>`;
}

/** A table. Columns: head, cell of a row, whether it holds numbers. @param {{columns: {head: string, cell: (row: any) => any, number?: boolean}[], rows: any[], keyOf: (row: any) => string | number, empty: string}} props */
export function Table({ columns, rows, keyOf, empty }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<div class="scroll"><table>
    <thead><tr>${columns.map((column) => html`<th class=${column.number ? "number" : ""} scope="col">${column.head}</th>`)}</tr></thead>
    <tbody>
      ${rows.map(
        (row) => html`<tr key=${keyOf(row)}>
          ${columns.map((column) => html`<td class=${column.number ? "number" : ""}>${column.cell(row)}</td>`)}
        </tr>`,
      )}
    </tbody>
  </table></div>`;
}

/** Names and values. @param {{facts: [string, any][]}} props */
export function Facts({ facts }) {
  return html`<dl class="facts">
    ${facts
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** A word of a closed set, coloured by what it means. @param {{word: string}} props */
export function State({ word }) {
  return html`<span class=${`state state-${GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : "even"}`}>${word}</span>`;
}

const GOOD = new Set(["ready", "completed", "complete", "up", "run"]);
const BAD = new Set(["error", "failed", "dead", "dropped", "interrupted", "gone", "silent"]);
