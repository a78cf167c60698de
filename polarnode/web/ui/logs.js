/** The view of the node's own logs, its engines' and those of images it built; of a fleet, of every node. */
import { html, useState } from "./vendor/htm-preact.js";
import { bytes, count } from "./format.js";
import { Log } from "./log.js";
import { Waiting } from "./parts.js";
import { logLink } from "./route.js";
import { usePolled } from "./use.js";

const AGAIN_S = 10; // an engine that starts has a log of its own
const SHOWN = 100; // names: a fleet has hundreds, and a field to choose among them

/** @param {{route: import("./route.js").Route}} props */
export function Logs({ route }) {
  const answer = usePolled("/v1/logs", AGAIN_S);
  const [wanted, want] = useState("");
  if (answer.value === null) return html`<${Waiting} answer=${answer} what="Asking the node" />`;
  const logs = answer.value.logs;
  if (!logs.length) return html`<p class="quiet">No log was written yet.</p>`;
  const chosen = route.id || logs[0].name;
  const found = logs.filter((/** @type {any} */ each) => each.name.includes(wanted));
  const path = `/v1/logs/${chosen.split("/").map(encodeURIComponent).join("/")}`;
  return html`
    ${logs.length > SHOWN / 4 ? html`<label class="filter">Filter <input type="search" value=${wanted} placeholder="node or engine" onInput=${(/** @type {any} */ event) => want(event.target.value)} /></label>` : null}
    <nav class="rows" aria-label="logs">
      ${found.slice(0, SHOWN).map(
        (/** @type {any} */ each) => html`<a key=${each.name} href=${logLink(each.name)} aria-current=${each.name === chosen ? "page" : undefined}>${each.name} <span class="quiet">${bytes(each.size)}</span></a>`,
      )}
    </nav>
    ${found.length > SHOWN ? html`<p class="quiet">${SHOWN} of ${count(found.length)} are shown.</p>` : null}
    <${Log} key=${path} title=${chosen} path=${path} />`;
}
