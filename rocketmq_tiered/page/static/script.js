// Replaces the parts of the page that have data-live every few seconds, and says when the process does not answer.
// Without it every page works, but stands still.
"use strict";

const EVERY_MS = 5000;
const PENDING_MS = 500; // a part is not there yet
let seen = new Date();

async function refresh() {
  if (document.hidden || !document.querySelector("[data-live]")) return;
  try {
    const answer = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const newer = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = newer.getElementById(part.id);
      if (fresh && !part.contains(document.activeElement) && !part.isEqualNode(fresh)) part.replaceWith(fresh);
    }
    seen = new Date();
    tell("");
  } catch (error) {
    tell(`No answer from this process: what is shown is from ${seen.toLocaleTimeString()} (${error.message}).`);
  }
}

function tell(text) {
  const notice = document.getElementById("connection");
  notice.textContent = text;
  notice.hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

async function loop() {
  await refresh();
  setTimeout(loop, wait());
}

function wait() {
  return document.querySelector("[data-live] [data-pending]") ? PENDING_MS : EVERY_MS;
}

document.addEventListener("visibilitychange", refresh);
setTimeout(loop, wait());
