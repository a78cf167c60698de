/** The page: its head, the token if the node wants one, and the view that the address names. */
import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { signal } from "./vendor/signals.js";
import { bundled, locked, trouble, unlock } from "./api.js";
import { Groups } from "./groups.js";
import { Logs } from "./logs.js";
import { Now } from "./now.js";
import { readRoute, sessionLink, VIEWS } from "./route.js";
import { Session } from "./session.js";
import { Sessions } from "./sessions.js";
import { useSignal } from "./use.js";

const views = bundled ? ["groups"] : VIEWS;
const route = signal(readRoute(location.hash, views));
addEventListener("hashchange", () => (route.value = readRoute(location.hash, views)));

function Page() {
  const at = useSignal(route);
  const problem = useSignal(trouble);
  const asks = useSignal(locked);
  useEffect(() => {
    document.title = at.view === "session" ? `${at.id} · polarnode` : `${at.view} · polarnode`;
  }, [at]);
  return html`
    <header class="head">
      <a class="name" href=${`#/${views[0]}`}>polarnode</a>
      <nav aria-label="views">${views.map((view) => html`<a href=${`#/${view}`} aria-current=${view === at.view ? "page" : undefined}>${view}</a>`)}</nav>
      <form class="open" onSubmit=${openSession}><input type="search" name="id" placeholder="session id" aria-label="open a session by its id" autocomplete="off" /></form>
    </header>
    <main>
      ${problem ? html`<p class="failure" role="alert">${problem}</p>` : null}
      ${asks ? html`<${TokenForm} />` : html`<${View} key=${`${at.view} ${at.id}`} route=${at} />`}
    </main>`;
}

/** @param {{route: import("./route.js").Route}} props */
function View({ route: at }) {
  if (at.view === "session") return html`<${Session} route=${at} />`;
  if (at.view === "sessions") return html`<${Sessions} />`;
  if (at.view === "logs") return html`<${Logs} route=${at} />`;
  if (at.view === "groups") return html`<${Groups} />`;
  return html`<${Now} />`;
}

/** @param {any} event */
function openSession(event) {
  event.preventDefault();
  const id = new FormData(event.target).get("id");
  if (typeof id === "string" && id.trim()) location.hash = sessionLink(id.trim());
}

function TokenForm() {
  const [given, give] = useState("");
  const send = (/** @type {any} */ event) => {
    event.preventDefault();
    if (given.trim()) unlock(given.trim());
  };
  return html`<form class="token-form" onSubmit=${send}>
    <h1>This node wants its token</h1>
    <p>It is the value of POLARNODE_TOKEN where the node runs. It stays in this tab.</p>
    <input type="password" value=${given} autocomplete="off" aria-label="token" autofocus onInput=${(/** @type {any} */ event) => give(event.target.value)} />
    <button>Open</button>
  </form>`;
}

render(html`<${Page} />`, document.getElementById("page"));
