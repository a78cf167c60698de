/** Hooks: a signal's value, an answer of the node, an answer that is asked again. */
import { useEffect, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { effect } from "./vendor/signals.js";
import { get, poll, token } from "./api.js";

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
