/** Where the page is: the hash of its address, read and written. Pure. */

/**
 * @typedef {object} Route
 * @property {string} view  now, sessions, groups, logs or session
 * @property {string} id    of a session, the name of a log; "" elsewhere
 * @property {string} tab   of a session
 * @property {Record<string, string>} query
 */

export const VIEWS = ["now", "sessions", "groups", "logs"];
export const TABS = ["overview", "conversation", "tokens", "lineage", "compare", "log"];

/** @param {string} hash @param {string[]} [views] the first is where an address without one leads @returns {Route} */
export function readRoute(hash, views = VIEWS) {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split("?", 2);
  const [view, id = "", tab = ""] = path.split("/").map(decoded);
  const query = Object.fromEntries(new URLSearchParams(search));
  if (view === "s" && id) return { view: "session", id, tab: TABS.includes(tab) ? tab : TABS[0], query };
  return { view: views.includes(view) ? view : views[0], id: view === "logs" && views.includes(view) ? id : "", tab: "", query };
}

/** The address of a log of the node. @param {string} name */
export function logLink(name) {
  return `#/logs/${encodeURIComponent(name)}`;
}

/** The address of a session's tab. @param {string} id @param {string} [tab] @param {Record<string, string | number>} [query] */
export function sessionLink(id, tab = TABS[0], query = {}) {
  const search = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)])).toString();
  return `#/s/${encodeURIComponent(id)}/${tab}${search ? `?${search}` : ""}`;
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a % that encodes nothing
  }
}
