/** A bundle: the page over files in place of a node. Which file has the answer to a path of the API. Pure. */

/** Whether this page reads files. @param {{dataset: DOMStringMap} | undefined} root of the document */
export function isBundle(root) {
  return root?.dataset.bundle !== undefined;
}

/** @param {string} path of the API, with its query */
export function fileOf(path) {
  const [place, search = ""] = path.split("?", 2);
  return { file: `${place.replace(/^\/v1\//, "data/")}.json`, query: new URLSearchParams(search) };
}

/** What a node's filters would leave of an answer. @param {string} path @param {any} answer */
export function filtered(path, answer) {
  const { query } = fileOf(path);
  if (!answer.groups) return answer;
  const keep = (/** @type {any} */ group) =>
    (!query.has("task_id") || group.task_id === query.get("task_id")) && (!query.has("state") || group.state === query.get("state"));
  return { groups: answer.groups.filter(keep) };
}
