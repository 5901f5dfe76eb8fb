"use strict";
/* Trade a link's token for a cookie. It stands behind the #, which browsers send to no server and no proxy's log. */

function say(text) {
  document.getElementById("message").textContent = text;
}

async function signIn() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  if (!token && document.getElementById("message").textContent) return; // a refused page says why
  if (!token) return say("This link is incomplete: open all of it, with the characters after the #.");
  say("Opening …");
  try {
    const answer = await fetch("/join", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token }),
    });
    const body = await answer.json();
    if (answer.ok) location.replace(body.path);
    else say(`This page does not open: ${body.detail}.`);
  } catch {
    say("The server does not answer; open your link again.");
  }
}

addEventListener("hashchange", () => location.hash && signIn());
signIn();
