/** Requests to the node that served this page, and to nobody else. */
import { fileOf, filtered, isBundle } from "./bundle.js";
import { signal } from "./vendor/signals.js";

const KEPT = "polarnode-token"; // in sessionStorage: gone with the tab
const AGAIN_S = 2;
const SILENT_S = 20; // of a stream: the node sends a sign of life every 8 s

export const bundled = isBundle(document.documentElement);
export const token = signal(sessionStorage.getItem(KEPT) ?? "");
/** Set when an answer was 401: the page asks for the token. */
export const locked = signal(false);
/** Why the last request failed; "" when it did not. */
export const trouble = signal("");

/** @param {string} given */
export function unlock(given) {
  sessionStorage.setItem(KEPT, given);
  token.value = given;
  locked.value = false;
}

export class Refusal extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @param {string} path @param {AbortSignal} [abort] @param {{method?: string, body?: object}} [order] */
async function ask(path, abort, { method = "GET", body } = {}) {
  /** @type {Record<string, string>} */
  const headers = token.value ? { Authorization: `Bearer ${token.value}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const content = body && JSON.stringify(body);
  let answer;
  try {
    answer = await fetch(path, { method, body: content, headers, signal: abort, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (!abort?.aborted) trouble.value = "Nothing answers here. Does it still run, and is the tunnel open?";
    throw error;
  }
  trouble.value = "";
  if (answer.ok) return answer;
  if (answer.status === 401) locked.value = true;
  const refusal = await answer.json().catch(() => ({}));
  throw new Refusal(answer.status, refusal.error?.message ?? `status ${answer.status}`);
}

/** @param {string} path @param {AbortSignal} [abort] @returns {Promise<any>} */
export async function get(path, abort) {
  if (bundled) return filtered(path, await (await ask(fileOf(path).file, abort)).json());
  return (await ask(path, abort)).json();
}

/** Change something on the node. @param {string} method @param {string} path @param {object} [body] @returns {Promise<any>} */
export async function send(method, path, body) {
  return (await ask(path, undefined, { method, body })).json();
}

/**
 * Call `take` with the answer now and every two seconds, while the tab is seen. Gives the function that ends it.
 * @param {string} path @param {(value: any) => void} take @param {(error: unknown) => void} [failed]
 */
export function poll(path, take, failed = () => {}, seconds = AGAIN_S) {
  const abort = new AbortController();
  const pause = () => new Promise((resolve) => setTimeout(resolve, seconds * 1000));
  (async () => {
    while (!abort.signal.aborted) {
      if (!document.hidden && !locked.value) {
        try {
          take(await get(path, abort.signal));
        } catch (error) {
          if (!abort.signal.aborted) failed(error);
        }
      }
      await pause();
    }
  })();
  return () => abort.abort();
}

/**
 * Call `take` for each event of a stream of the node; opened again where it ended, after the last event that had an
 * id, and `failed` is called before. EventSource cannot send a token, so the stream is read with fetch. Gives the
 * function that ends it.
 * @param {string} path @param {(kind: string, data: any) => void} take @param {{after?: number | string, failed?: () => void}} [options]
 */
export function follow(path, take, { after = "", failed = () => {} } = {}) {
  const stop = new AbortController();
  if (bundled) return () => {}; // nothing comes
  let last = String(after);
  (async () => {
    while (!stop.signal.aborted) {
      if (!locked.value) {
        const from = last && `${path.includes("?") ? "&" : "?"}after=${encodeURIComponent(last)}`;
        await followOnce(path + from, stop.signal, (event) => {
          last = event.id || last;
          if (event.data) take(event.kind, JSON.parse(event.data));
        });
        if (!stop.signal.aborted) failed();
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_S * 1000));
    }
  })();
  return () => stop.abort();
}

/** Read a stream until it ends, is refused or cut, or is silent: a proxy may hold it, and a tunnel die. @param {string} path @param {AbortSignal} stop @param {(event: ReturnType<typeof readEvent>) => void} take */
async function followOnce(path, stop, take) {
  const cut = new AbortController();
  const end = () => cut.abort();
  stop.addEventListener("abort", end);
  let silence = setTimeout(end, SILENT_S * 1000);
  try {
    const heard = () => (clearTimeout(silence), (silence = setTimeout(end, SILENT_S * 1000)));
    for await (const event of events(await ask(path, cut.signal), heard)) take(event);
  } catch {
    // the caller opens it again
  } finally {
    clearTimeout(silence);
    stop.removeEventListener("abort", end);
  }
}

/** @param {Response} answer @param {() => void} heard called for each piece */
async function* events(answer, heard) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop() ?? "";
    yield* blocks.map(readEvent);
  }
}

/** One block of a server-sent stream. @param {string} block */
export function readEvent(block) {
  const event = { kind: "message", id: "", data: "" };
  for (const line of block.split("\n")) {
    const [name, value] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()];
    if (name === "event") event.kind = value;
    if (name === "id") event.id = value;
    if (name === "data") event.data += value;
  }
  return event;
}
