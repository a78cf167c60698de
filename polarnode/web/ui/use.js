/** Hooks: a signal's value, an answer of the node, an answer that is asked again, live sessions. */
import { useEffect, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { effect } from "./vendor/signals.js";
import { follow, get, locked, poll, token } from "./api.js";
import { changed, ofStatus } from "./live.js";

const LIVE = "/v1/sessions/live";
const QUIET_MS = 10_000; // between questions where no session changes
const BUSY_MS = 2000; // where they change all the time
const SOON_MS = 250; // after a change: others come with it

/** @template T @param {import("./vendor/signals.js").Signal<T>} source @returns {T} */
export function useSignal(source) {
  const [, again] = useState(0);
  useLayoutEffect(
    () =>
      effect(() => {
        void source.value;
        again((number) => number + 1);
      }),
    [source],
  );
  return source.peek();
}

/** @typedef {{value: any, error: string}} Answer */

/** The answer at a path, asked once; `value` is null until it is there. @param {string | null} path @returns {Answer} */
export function useAnswer(path) {
  const [found, set] = useState({ path: "", value: null, error: "" });
  const key = useSignal(token);
  useEffect(() => {
    if (path === null) return undefined;
    const abort = new AbortController();
    get(path, abort.signal).then(
      (value) => set({ path, value, error: "" }),
      (error) => abort.signal.aborted || set({ path, value: null, error: error.message }),
    );
    return () => abort.abort();
  }, [path, key]);
  return found.path === path ? found : { value: null, error: "" };
}

/** The answer at a path, asked again every `seconds`. @param {string} path @param {number} [seconds] @returns {Answer} */
export function usePolled(path, seconds = 2) {
  const [found, set] = useState({ path: "", value: null, error: "" });
  const key = useSignal(token);
  useEffect(
    () =>
      poll(
        path,
        (value) => set({ path, value, error: "" }),
        (error) => set((before) => ({ ...before, error: error.message })),
        seconds,
      ),
    [path, key, seconds],
  );
  return found.path === path || found.error ? found : { value: null, error: "" };
}

/** The answer at a path, asked again when a session changed, and every QUIET_MS; where the stream of changes fails, as often as it is opened again. @param {string} path @returns {Answer} */
export function useFresh(path) {
  const [found, set] = useState({ path: "", value: null, error: "" });
  const key = useSignal(token);
  useEffect(() => {
    const abort = new AbortController();
    let [timer, asked, asking, stale] = [0, 0, false, false];
    const plan = () => {
      clearTimeout(timer);
      timer = setTimeout(ask, stale ? Math.max(SOON_MS, asked + BUSY_MS - Date.now()) : QUIET_MS);
    };
    const ask = async () => {
      asked = Date.now();
      if (document.hidden || locked.value) return plan();
      [asking, stale] = [true, false];
      try {
        set({ path, value: await get(path, abort.signal), error: "" });
      } catch (error) {
        if (!abort.signal.aborted) set((before) => ({ ...before, error: /** @type {Error} */ (error).message }));
      }
      asking = false;
      if (!abort.signal.aborted) plan();
    };
    const look = () => {
      stale = true;
      if (!asking) plan();
    };
    ask();
    const end = follow(LIVE, look, { failed: look });
    return () => (clearTimeout(timer), abort.abort(), end());
  }, [path, key]);
  return found.path === path || found.error ? found : { value: null, error: "" };
}

/** The live sessions, by node and id; asked for in the status where their stream fails. @returns {{rows: import("./live.js").LiveRows | null, error: string}} */
export function useLive() {
  const [found, set] = useState(/** @type {{rows: import("./live.js").LiveRows | null, error: string}} */ ({ rows: null, error: "" }));
  useEffect(() => {
    const take = (/** @type {string} */ kind, /** @type {any} */ data) => {
      if (kind === "sessions") set((before) => ({ rows: changed(before.rows ?? new Map(), data, Date.now()), error: "" }));
    };
    const failed = () =>
      get("/v1/status").then(
        (status) => status.sessions && set({ rows: ofStatus(status, Date.now()), error: "" }),
        (error) => set((before) => ({ ...before, error: error.message })),
      );
    return follow(LIVE, take, { failed });
  }, []);
  return found;
}

/** The time in ms, every second. */
export function useSeconds() {
  const [now, set] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => set(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
