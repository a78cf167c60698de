/** What a status tells that somebody should look at, each once. Pure. */

/** @param {any} status @returns {string[]} */
export function warnings(status) {
  const stale = status.weights.stale ?? [];
  const found = [
    status.log?.away && `the log is away (${status.log.away}): sessions go on, and tasks are refused until it answers`,
    stale.length > 0 && `not the current weights, so they take no sessions: ${stale.join(", ")}`,
    status.journal.warning,
    status.weights.warning,
    ...Object.values(status.scheduler.stages).map((/** @type {any} */ stage) => stage.held_back),
    ...status.engine.hosts.map((/** @type {any} */ host) => host.last_error && `engine host ${host.index}: ${host.last_error}`),
    ...Object.entries(status.callbacks.trouble).map(([url, why]) => `callbacks to ${url}: ${why}`),
  ];
  return [...new Set(found.filter(Boolean))];
}
