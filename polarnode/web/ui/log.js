/** The view of what a session's harness printed: the end first, and what comes while it runs. */
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { bytes } from "./format.js";
import { Panel, Plain } from "./parts.js";
import { withoutEscapes } from "./text.js";

const LINES = 500; // of the end at first
const KEPT = 400_000; // letters that are shown: more makes a browser slow
const AGAIN_MS = 2000;

/** @param {{id: string}} props */
export function Log({ id }) {
  const [found, set] = useState({ text: "", size: 0, running: false, error: "", there: false });
  const end = useRef(/** @type {HTMLElement | null} */ (null));
  const path = `/v1/sessions/${encodeURIComponent(id)}/log`;
  useEffect(() => {
    const abort = new AbortController();
    let next = -1;
    const read = async () => {
      try {
        const piece = await get(next < 0 ? `${path}?tail=${LINES}` : `${path}?offset=${next}`, abort.signal);
        next = piece.next_offset;
        set((before) => ({
          text: (before.text + piece.text).slice(-KEPT),
          size: piece.size,
          running: !piece.ended,
          error: "",
          there: true,
        }));
        if (!piece.ended || piece.next_offset < piece.size) setTimeout(read, piece.next_offset < piece.size ? 0 : AGAIN_MS);
      } catch (failure) {
        if (!abort.signal.aborted) set((before) => ({ ...before, error: /** @type {Error} */ (failure).message }));
      }
    };
    read();
    return () => abort.abort();
  }, [path]);
  useEffect(() => {
    if (found.running) end.current?.scrollIntoView({ block: "end" });
  }, [found.text]);
  const note = found.there ? `${bytes(found.size)}${found.running ? ", it grows" : ""}` : "";
  return html`<${Panel} title="Log" note=${note}>
    ${found.error ? html`<p class="failure" role="alert">${found.error}</p>` : null}
    <pre class="log whole"><${Plain} text=${withoutEscapes(found.text)} /><span ref=${end}></span></pre>
    ${found.there && !found.text ? html`<p class="quiet">Nothing was printed.</p>` : null}
  <//>`;
}
