/**
 * Text that agents wrote, made visible. Pure.
 *
 * Control characters, marks that change the direction of text, and characters without a shape are shown by name, so
 * that a prompt cannot look like another one. Nothing is interpreted: the page writes text nodes alone.
 */

// C0 but tab and line feed, DEL, C1, soft hyphen, Arabic letter mark, zero width, directions, separators, BOM, tags
const HIDDEN =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\udb40[\udc00-\udc7f]/g;

// of C0: many fonts lack the signs of Unicode's Control Pictures
const NAMES =
  "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

/**
 * @typedef {string | {mark: string}} Segment  plain text, or a character that is shown by name
 * @param {string} text
 * @returns {Segment[]}
 */
export function visible(text) {
  /** @type {Segment[]} */
  const found = [];
  let from = 0;
  for (const hit of text.matchAll(HIDDEN)) {
    if (hit.index > from) found.push(text.slice(from, hit.index));
    found.push({ mark: nameOf(hit[0]) });
    from = hit.index + hit[0].length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

/**
 * A log as a terminal would show it, without colours: escape sequences are taken out, and a line that was written over
 * (a progress bar) has its last text.
 * @param {string} text
 */
export function withoutEscapes(text) {
  // eslint-disable-next-line no-control-regex
  return text.replace(/\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\^_])/g, "").replace(/[^\n]*\r(?!\n)/g, "").replaceAll("\r\n", "\n");
}

/** The lines that have a text, in upper or lower case. @param {string} text @param {string} wanted */
export function linesWith(text, wanted) {
  if (!wanted) return text;
  const small = wanted.toLowerCase();
  return text.split("\n").filter((line) => line.toLowerCase().includes(small)).join("\n");
}

/** One string, for titles and canvases. @param {string} text */
export function visibleText(text) {
  return visible(text).map((part) => (typeof part === "string" ? part : `‹${part.mark}›`)).join("");
}

/** @param {string} letter */
function nameOf(letter) {
  const code = letter.codePointAt(0) ?? 0;
  if (code < NAMES.length) return NAMES[code];
  if (code === 0x7f) return "DEL";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}
