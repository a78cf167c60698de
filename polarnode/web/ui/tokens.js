/** The view of a session's training rows, token by token. */
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { colours, factsOf, legend, MODES } from "./colours.js";
import { count, trimmed } from "./format.js";
import { drawMinimap } from "./minimap.js";
import { Facts, Waiting } from "./parts.js";
import { sessionLink } from "./route.js";
import { cutLines, findText, leastLikely, nextPlace, readRow, seams } from "./row.js";
import { TokenList } from "./token_list.js";
import { useAnswer } from "./use.js";

/** @param {{route: import("./route.js").Route, session: any}} props */
export function Tokens({ route, session }) {
  const over = session.outcome !== null;
  const answer = useAnswer(over ? `/v1/trajectories/${encodeURIComponent(session.session_id)}?arrays=base64&pieces=true` : null);
  const group = useAnswer(over ? `/v1/groups?task_id=${encodeURIComponent(session.task_id)}&limit=1` : null);
  if (!over) return html`<p class="quiet">Training rows are built when the session is over.</p>`;
  if (answer.value === null) return html`<${Waiting} answer=${answer} what="Reading the rows" />`;
  const { traces, pieces } = answer.value;
  if (!traces.length) return html`<p class="quiet">This session has no training row.</p>`;
  const index = Math.min(traces.length - 1, Math.max(0, Number(route.query.row) || 0));
  return html`
    <${RowChoice} id=${session.session_id} traces=${traces} index=${index} />
    <${RowView} key=${index} trace=${traces[index]} index=${index} pieces=${pieces} begin=${Number(route.query.t ?? -1)} advantage=${advantageOf(group.value, session.session_id)} />`;
}

/** @param {any} answer of GET /v1/groups @param {string} id @returns {number | null} */
function advantageOf(answer, id) {
  const group = answer?.groups[0];
  const at = group?.sessions.findIndex((/** @type {any} */ member) => member.session_id === id) ?? -1;
  return at < 0 ? null : group.advantages[at];
}

/** @param {{id: string, traces: any[], index: number}} props */
function RowChoice({ id, traces, index }) {
  return html`<nav class="rows" aria-label="training rows">
    ${traces.map((trace, at) => {
      const part = trace.parts > 1 ? `, part ${trace.part + 1} of ${trace.parts}` : "";
      return html`<a href=${sessionLink(id, "tokens", { row: at })} aria-current=${at === index ? "true" : undefined}>row ${at}<span class="quiet"> lineage ${trace.lineage}${trace.role === "main" ? "" : `, ${trace.role}`}${part}</span></a>`;
    })}
  </nav>`;
}

/** @param {{trace: any, index: number, pieces: any, begin: number, advantage: number | null}} props */
function RowView({ trace, index, pieces, begin, advantage }) {
  const row = useMemo(() => readRow(trace, index, pieces), [trace]);
  const starts = useMemo(() => cutLines(row.texts), [row]);
  const [mode, setMode] = useState(MODES[0]);
  const [token, setToken] = useState(begin);
  const [missing, setMissing] = useState(false);
  const box = useRef(null);
  const map = useRef(null);
  const list = useRef(/** @type {TokenList | null} */ (null));
  const trained = useMemo(() => row.mask.reduce((sum, each) => sum + each, 0), [row]);
  const turnStarts = row.turns.map((span) => span.start);

  useEffect(() => {
    const made = new TokenList(box.current, setToken);
    list.current = made;
    made.paint = colours(mode, row, advantage);
    made.show(row, starts);
    if (begin >= 0) made.go(begin);
    const redraw = () => drawMinimap(map.current, row, made.first);
    redraw();
    box.current.addEventListener("scroll", redraw, { passive: true });
    addEventListener("resize", redraw);
    return () => {
      removeEventListener("resize", redraw);
      made.close();
    };
  }, [row]);
  useEffect(() => list.current?.colour(colours(mode, row, advantage)), [mode, row, advantage]);

  const go = (/** @type {number} */ place) => list.current?.go(place);
  const search = (/** @type {string} */ words) => {
    const found = findText(row, words, token + 1);
    setMissing(words !== "" && found < 0);
    go(found);
  };
  /** @type {Record<string, () => void>} */
  const keys = {
    ArrowRight: () => go(Math.min(row.length - 1, token + 1)),
    ArrowLeft: () => go(Math.max(0, token - 1)),
    t: () => go(nextPlace(turnStarts, token)),
    l: () => go(leastLikely(row)),
    v: () => go(nextPlace(seams(row), token)),
    c: () => setMode(MODES[(MODES.indexOf(mode) + 1) % MODES.length]),
  };
  const pressed = (/** @type {KeyboardEvent} */ event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  };
  return html`
    <div class="token-bar">
      <div role="radiogroup" aria-label="colour by" class="modes">
        ${MODES.map((name) => html`<label class=${name === mode ? "chosen" : ""}><input type="radio" name="mode" value=${name} checked=${name === mode} onChange=${() => setMode(name)} />${name}</label>`)}
      </div>
      <span class="jumps">
        <button onClick=${keys.t} disabled=${!turnStarts.length} title="key t">next turn</button>
        <button onClick=${keys.l} disabled=${!trained} title="key l">least likely</button>
        <button onClick=${keys.v} disabled=${!seams(row).length} title="key v">next version</button>
      </span>
      <input type="search" placeholder="search text, Enter for the next" aria-label="search the row" onKeyDown=${(/** @type {any} */ event) => event.key === "Enter" && search(event.target.value)} />
      ${missing ? html`<span class="failure" role="status">not in this row</span>` : null}
    </div>
    <p class="legend">
      ${legend(mode, row, advantage).map((each) => html`<span><span class=${`key ${each.name}`}></span>${each.text}</span>`)}
      <span class="quiet">${count(row.length)} tokens, ${count(trained)} trained${row.trace.offset ? `, the first is number ${count(row.trace.offset)} of its sequence` : ""}</span>
    </p>
    <div class="token-view">
      <div class="token-box" ref=${box} tabindex="0" role="region" aria-label="tokens of the row" onKeyDown=${pressed}></div>
      <canvas class="minimap" ref=${map} aria-hidden="true" onClick=${(/** @type {any} */ event) => go(Math.floor((event.offsetY / event.target.clientHeight) * row.length))}></canvas>
      <aside aria-live="polite"><${Details} row=${row} token=${token} advantage=${advantage} /></aside>
    </div>`;
}

/** @param {{row: import("./row.js").Row, token: number, advantage: number | null}} props */
function Details({ row, token, advantage }) {
  if (token < 0 || token >= row.length) {
    return html`<p class="quiet">Point at a token, or go through them with ← and →. Keys: t next turn, l least likely, v next version, c colours.</p>`;
  }
  const facts = factsOf(row, token);
  return html`
    <p class="token-text">${row.texts[token] || "(a part of the letter before)"}</p>
    <${Facts} facts=${[
      ["token", count(facts.position)],
      ["id", facts.id],
      ["trained", facts.trained ? "yes" : "no"],
      ["turn", facts.turn],
      ["probability", facts.probability === null ? null : facts.probability.toPrecision(3)],
      ["logprob", facts.logprob === null ? null : trimmed(facts.logprob, 4)],
      ["weights", facts.version],
      ["reward", row.trace.reward],
      ["advantage", facts.trained && advantage !== null ? trimmed(advantage, 3) : null],
    ]} />`;
}
