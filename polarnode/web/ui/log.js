/** A log of a session or of the node: the end first, and what comes while it is followed. */
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get, Refusal } from "./api.js";
import { bytes } from "./format.js";
import { Panel, Plain } from "./parts.js";
import { linesWith, withoutEscapes } from "./text.js";

const LINES = 500; // of the end at first
const KEPT = 400_000; // letters that are shown: more makes a browser slow
const AGAIN_MS = 2000;
const NEAR = 40; // px from the end: who reads further up is not moved

/** @param {{path: string, title?: string}} props */
export function Log({ path, title = "Log" }) {
  const [followed, follow] = useState(true);
  const [wanted, want] = useState("");
  const found = useLog(path, followed);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const atEnd = useRef(true);
  const shown = linesWith(withoutEscapes(found.text), wanted);
  useEffect(() => {
    if (box.current && followed && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown, followed]);
  const look = (/** @type {any} */ { target }) => (atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR);
  const grows = found.running ? (found.wrapped ? ", it grows; its middle is written over until it ends" : ", it grows") : "";
  return html`<${Panel} title=${title} note=${found.there ? `${bytes(found.size)}${grows}` : ""}>
    <label class="filter">Lines with <input type="search" value=${wanted} placeholder="text" onInput=${(/** @type {any} */ event) => want(event.target.value)} /></label>
    ${found.running ? html`<label class="filter"><input type="checkbox" checked=${followed} onChange=${(/** @type {any} */ event) => follow(event.target.checked)} /> follow</label>` : null}
    ${found.error ? html`<p class="failure" role="alert">${found.error}</p>` : null}
    <pre class="log whole" tabindex="0" aria-label=${`text of ${title}`} ref=${box} onScroll=${look}><${Plain} text=${shown} /></pre>
    ${found.there && !shown ? html`<p class="quiet">${found.text ? "No line has this text." : "Nothing was printed."}</p>` : null}
  <//>`;
}

/** The end of a log, and what is written while it is `followed`. @param {string} path @param {boolean} followed */
function useLog(path, followed) {
  const [found, set] = useState({ text: "", size: 0, running: false, wrapped: false, error: "", there: false });
  const next = useRef(-1);
  useEffect(() => {
    if (!followed) return undefined;
    const abort = new AbortController();
    const later = (/** @type {number} */ ms) => setTimeout(() => (document.hidden ? later(AGAIN_MS) : read()), ms);
    const read = async () => {
      try {
        const piece = await get(next.current < 0 ? `${path}?tail=${LINES}` : `${path}?offset=${next.current}`, abort.signal);
        next.current = piece.next_offset;
        set((before) => ({
          text: (before.text + piece.text).slice(-KEPT),
          size: piece.size,
          running: !piece.ended,
          wrapped: piece.wrapped,
          error: "",
          there: true,
        }));
        const more = piece.next_offset < piece.size;
        if (!piece.ended || more) later(more ? 0 : AGAIN_MS);
      } catch (failure) {
        if (abort.signal.aborted) return;
        set((before) => ({ ...before, error: /** @type {Error} */ (failure).message }));
        if (!(failure instanceof Refusal)) later(AGAIN_MS);
      }
    };
    read();
    return () => abort.abort();
  }, [path, followed]);
  return found;
}
