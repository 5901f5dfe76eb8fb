"use strict";
/* Trade a link's token for a cookie. It stands behind the #, which browsers send to no server and no proxy's log. */

const button = document.getElementById("open");
let token = "";

function say(text, asks = false) {
  document.getElementById("message").textContent = text;
  button.hidden = !asks;
}

async function signIn() {
  say("Opening …");
  try {
    const answer = await fetch("/join", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token }),
    });
    const body = await answer.json();
    if (answer.ok) location.replace(body.path);
    else say(`This page does not open: ${body.error}.`);
  } catch {
    say("The server does not answer; open your link again.");
  }
}

function start(asks) {
  token = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  if (!token) say("This link is incomplete: open all of it, with the characters after the #.");
  else if (asks) say("This link is a password. It stays open in this browser.", true);
  else signIn();
}

button.addEventListener("click", signIn);
// A link opened in this tab changes only the hash, and another site's page could have done that too.
addEventListener("hashchange", () => start(true));
start(document.querySelector("main").dataset.asks === "yes");
