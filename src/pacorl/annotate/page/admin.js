// The administrator's table: who is how far, and how well people agree. Looks every 3 seconds.
"use strict";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;
const percent = (share) => `${Math.round(100 * share)} %`;

async function look() {
  const answer = await fetch("/api/admin").catch(() => null);
  const content = await answer?.json();
  if (!answer?.ok) $("agreement").textContent = content?.detail ?? "The server does not answer; this page tries again.";
  else show(content);
  setTimeout(look, REFRESH_MS);
}

function show({ question, people, agreement, disputed, command }) {
  const interval = agreement?.low == null ? "; too few shared questions for an interval" : ` (${percent(agreement.low)} to ${percent(agreement.high)})`;
  const alike = agreement ? `Of the pairs that two people ordered, in ${agreement.groups} shared questions, ${percent(agreement.mean)}${interval} are in the same order; 50 % is chance, and a judge's accuracy is measured alike.` : "No two people have ranked the same question yet.";
  $("agreement").textContent = `${alike} ${disputed} questions wait to be settled by one more person.`;
  $("question").textContent = question;
  $("command").textContent = command;
  fill($("people"), people.map((one) => [one.name, one.role, `${one.ranked + one.skipped} of ${one.total}`, one.skipped,
    one.controls ? `${one.passed} of ${one.controls}` : "–"]));
}

function fill(body, rows) {
  body.replaceChildren(...rows.map((cells) => {
    const line = document.createElement("tr");
    line.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return line;
  }));
}

look();
