/** The view of a session's turns as messages. */
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { count } from "./format.js";
import { Plain } from "./parts.js";

const SHOWN = 4000; // letters of a message at first: a tool's output may have a million

/** @param {{turns: any[]}} props */
export function Conversation({ turns }) {
  const [lineage, setLineage] = useState(-1);
  const lineages = [...new Set(turns.map((turn) => turn.lineage))].sort((a, b) => a - b);
  const shown = turns.filter((turn) => lineage < 0 || turn.lineage === lineage);
  useTurnKeys(shown);
  useEffect(() => {
    const wanted = new URLSearchParams(location.hash.split("?")[1] ?? "").get("turn");
    if (wanted !== null) document.getElementById(`turn-${wanted}`)?.scrollIntoView({ block: "start" });
  }, []);
  if (!turns.length) return html`<p class="quiet">No turn yet.</p>`;
  return html`
    ${lineages.length > 1
      ? html`<label class="filter">Lineage
          <select value=${lineage} onChange=${(/** @type {any} */ event) => setLineage(Number(event.target.value))}>
            <option value="-1">all</option>
            ${lineages.map((each) => html`<option value=${each}>${each}</option>`)}
          </select></label>`
      : null}
    <p class="quiet">Keys: j and k go to the next and the previous turn.</p>
    ${shown.map((turn) => html`<${Turn} key=${turn.index} turn=${turn} />`)}`;
}

/** @param {{turn: any}} props */
function Turn({ turn }) {
  return html`<article class="turn-card" id=${`turn-${turn.index}`} tabindex="-1">
    <header>
      <b>turn ${turn.index}</b>
      <span class="quiet">lineage ${turn.lineage}${turn.parent === null ? "" : `, after ${turn.parent}`}, ${turn.kind}${turn.role === "main" ? "" : `, ${turn.role}`}${turn.reason ? `: ${turn.reason}` : ""}</span>
      <span class="quiet">${count(turn.sampled_length)} sampled</span>
      ${turn.left_out ? html`<span class="tag">left out: ${turn.left_out}</span>` : null}
    </header>
    ${turn.notes.map((/** @type {string} */ note) => html`<p class="quiet"><${Plain} text=${note} /></p>`)}
    ${turn.heard == null ? html`<p class="quiet">Only the ids of its prompt are known.</p>` : turn.heard.messages.map((/** @type {any} */ message) => html`<${Message} message=${message} />`)}
    ${turn.answer == null ? html`<p class="quiet">${turn.answer === undefined ? "The file has no answers: write it with full turns." : `There is no answer: ${turn.state}.`}</p>` : html`<${Answer} answer=${turn.answer} />`}
  </article>`;
}

/** @param {{message: any}} props */
function Message({ message }) {
  return html`<div class=${`message from-${message.role}`}>
    <span class="from">${message.role}${message.call_id ? html` <span class="id">${message.call_id}</span>` : null}</span>
    <div class="said">
      ${message.thinking ? html`<${Thinking} text=${message.thinking} />` : null}
      ${message.text ? html`<${Long} text=${message.text} />` : null}
      ${(message.calls ?? []).map((/** @type {any} */ call) => html`<${Call} call=${call} />`)}
    </div>
  </div>`;
}

/** @param {{answer: any}} props */
function Answer({ answer }) {
  return html`<div class="message from-assistant sampled">
    <span class="from">assistant</span>
    <div class="said">
      ${answer.parts.map((/** @type {any} */ part) => {
        if (part.type === "thinking") return html`<${Thinking} text=${part.text} />`;
        if (part.type === "tool_call") return html`<${Call} call=${part} />`;
        return html`<${Long} text=${part.text} />`;
      })}
      ${answer.malformed_calls ? html`<p class="failure">${answer.malformed_calls} malformed calls</p>` : null}
      ${answer.finish_reason === "stop" || answer.finish_reason === "tool_calls" ? null : html`<span class="tag">${answer.finish_reason}</span>`}
    </div>
  </div>`;
}

/** @param {{text: string}} props */
function Thinking({ text }) {
  return html`<details class="thinking"><summary>thinking, ${count(text.length)} letters</summary><${Long} text=${text} /></details>`;
}

/** @param {{call: any}} props */
function Call({ call }) {
  return html`<div class="call"><span class="tag">${call.name}</span> <span class="id">${call.id}</span><${Long} text=${indented(call.arguments)} /></div>`;
}

/** JSON with line ends where it is JSON. @param {string} text */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {{text: string}} props */
function Long({ text }) {
  const [whole, setWhole] = useState(false);
  const cut = !whole && text.length > SHOWN * 1.2;
  return html`<pre class="text"><${Plain} text=${cut ? text.slice(0, SHOWN) : text} /></pre>
    ${cut ? html`<button onClick=${() => setWhole(true)}>${count(text.length - SHOWN)} more letters</button>` : null}`;
}

/** j and k go through the turns. @param {any[]} turns */
function useTurnKeys(turns) {
  useEffect(() => {
    let at = -1;
    const pressed = (/** @type {KeyboardEvent} */ event) => {
      if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey) return;
      if (event.key !== "j" && event.key !== "k") return;
      at = Math.min(turns.length - 1, Math.max(0, at + (event.key === "j" ? 1 : -1)));
      const card = document.getElementById(`turn-${turns[at]?.index}`);
      card?.scrollIntoView({ block: "start" });
      card?.focus({ preventScroll: true });
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [turns.length]);
}
