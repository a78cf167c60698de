/**
 * The tokens of a row as a virtual list: only the lines in view exist. One listener serves all tokens, and colours are
 * classes, so that a row of a million tokens costs as much as one of a thousand.
 */
import { lineOf } from "./row.js";

const LINE = 18; // pixels: as in page.css
const BEYOND = 20; // lines kept above and below those in view
// Chrome draws elements of some 33 million pixels at most; longer rows map the place of the scroll bar to a line
const TALLEST = 15_000_000;

export class TokenList {
  /**
   * @param {HTMLElement} box that scrolls
   * @param {(token: number) => void} chosen called for the token under the pointer, or chosen by a key
   */
  constructor(box, chosen) {
    this.box = box;
    this.chosen = chosen;
    this.room = document.createElement("div");
    this.room.className = "token-room";
    box.replaceChildren(this.room);
    /** @type {Map<number, HTMLElement>} */
    this.lines = new Map();
    this.selected = -1;
    /** @type {import("./row.js").Row | null} */
    this.row = null;
    this.starts = new Int32Array(0);
    this.paint = { prefix: "m", classes: new Int8Array(0) };
    this.waiting = 0;
    box.addEventListener("scroll", () => this.later(), { passive: true });
    this.room.addEventListener("pointermove", (event) => this.pointed(event));
    this.room.addEventListener("click", (event) => this.pointed(event));
    this.seen = new ResizeObserver(() => this.later());
    this.seen.observe(box);
  }

  close() {
    this.seen.disconnect();
    cancelAnimationFrame(this.waiting);
  }

  /** @param {import("./row.js").Row} row @param {Int32Array} starts of its lines */
  show(row, starts) {
    this.row = row;
    this.starts = starts;
    this.room.style.height = `${Math.min(TALLEST, starts.length * LINE)}px`;
    this.selected = -1;
    this.box.scrollTop = 0;
    this.redraw();
  }

  /** @param {{prefix: string, classes: Int8Array}} paint */
  colour(paint) {
    this.paint = paint;
    this.redraw();
  }

  /** Bring a token into view and select it. @param {number} token */
  go(token) {
    if (!this.row || token < 0 || token >= this.row.length) return;
    this.selected = token;
    const line = lineOf(this.starts, token);
    const top = this.topOf(line);
    const height = this.box.clientHeight;
    if (top < this.box.scrollTop + LINE || top > this.box.scrollTop + height - 2 * LINE) {
      this.box.scrollTop = Math.max(0, top - height / 3);
    }
    this.redraw();
    this.chosen(token);
  }

  /** The first token in view. */
  get first() {
    return this.starts[Math.min(this.starts.length - 1, Math.max(0, this.lineAt(this.box.scrollTop)))] ?? 0;
  }

  redraw() {
    for (const line of this.lines.values()) line.remove();
    this.lines.clear();
    this.draw();
  }

  later() {
    cancelAnimationFrame(this.waiting);
    this.waiting = requestAnimationFrame(() => this.draw());
  }

  /** How far a pixel of the scroll bar is, in pixels of lines: 1 for all but the longest rows. */
  get scale() {
    const room = this.starts.length * LINE;
    const seen = this.box.clientHeight;
    return room <= TALLEST ? 1 : (room - seen) / (TALLEST - seen);
  }

  /** @param {number} top */
  lineAt(top) {
    return Math.floor((top * this.scale) / LINE);
  }

  /** @param {number} line */
  topOf(line) {
    return (line * LINE) / this.scale;
  }

  draw() {
    if (!this.row) return;
    const from = Math.max(0, this.lineAt(this.box.scrollTop) - BEYOND);
    const to = Math.min(this.starts.length, from + Math.ceil(this.box.clientHeight / LINE) + 2 * BEYOND);
    for (const [number, line] of this.lines) {
      if (number < from || number >= to) {
        line.remove();
        this.lines.delete(number);
      }
    }
    const fresh = document.createDocumentFragment();
    const offset = this.box.scrollTop - this.box.scrollTop * this.scale;
    for (let number = from; number < to; number += 1) {
      if (!this.lines.has(number)) {
        const line = this.lineElement(number);
        this.lines.set(number, line);
        fresh.append(line);
      }
      if (this.scale !== 1 || fresh.childNodes.length) {
        const line = /** @type {HTMLElement} */ (this.lines.get(number));
        line.style.transform = `translateY(${number * LINE + offset}px)`;
      }
    }
    this.room.append(fresh);
  }

  /** @param {number} number */
  lineElement(number) {
    const row = /** @type {import("./row.js").Row} */ (this.row);
    const line = document.createElement("div");
    line.className = "token-line";
    const end = this.starts[number + 1] ?? row.length;
    for (let at = this.starts[number]; at < end; at += 1) {
      const token = document.createElement("span");
      const shade = this.paint.classes[at];
      token.className = shade < 0 ? "t" : `t ${this.paint.prefix}${shade}`;
      if (row.mask[at]) token.className += " trained";
      if (!row.texts[at]) token.className += " part";
      if (at === this.selected) token.className += " selected";
      token.dataset.i = String(at);
      token.textContent = row.texts[at] || "·";
      line.append(token);
    }
    return line;
  }

  /** @param {Event} event */
  pointed(event) {
    const token = /** @type {HTMLElement} */ (event.target).dataset?.i;
    if (token === undefined) return;
    if (event.type === "click") {
      this.selected = Number(token);
      this.redraw();
    }
    this.chosen(Number(token));
  }
}
