/** A button that does something to the node, once it was pressed and confirmed. */
import { html, useState } from "./vendor/htm-preact.js";
import { send } from "./api.js";
import { Plain } from "./parts.js";

/** @param {{name: string, question: string, method: string, path: string, body?: object}} props */
export function Action({ name, question, method, path, body }) {
  const [step, go] = useState("rest");
  const [failure, fail] = useState("");
  const act = () => {
    go("sent");
    send(method, path, body).then(
      () => (fail(""), go("rest")),
      (error) => (fail(error.message), go("rest")),
    );
  };
  return html`<span class="action">
    ${step === "asked"
      ? html`<span>${question}</span> <button type="button" class="sure" onClick=${act}>${name}</button> <button type="button" onClick=${() => go("rest")}>no</button>`
      : html`<button type="button" disabled=${step === "sent"} onClick=${() => go("asked")}>${name}</button>`}
    ${failure ? html`<span class="failure" role="alert"><${Plain} text=${failure} /></span>` : null}
  </span>`;
}
