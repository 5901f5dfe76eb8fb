// The administrator's table: who is how far, and how well people agree. Looks every 3 seconds, of many answers less often.
"use strict";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;
const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

async function look() {
  const start = performance.now();
  const answer = await fetch("/api/admin").catch(() => null);
  const content = await answer?.json();
  if (!answer?.ok) $("agreement").textContent = content?.detail ?? "The server does not answer; this page tries again.";
  else show(content);
  // The table of many thousand answers takes seconds, in which nobody's ranking is saved.
  setTimeout(look, Math.max(REFRESH_MS, 20 * (performance.now() - start)));
}

function show({ people, disputed }) {
  const [alike, compared] = [0, 1].map((count) => people.reduce((sum, one) => sum + one.alike[count], 0));
  const agreement = compared ? `Of the pairs of images that two people ordered, ${percent(alike / compared)} are in the same order; 50 % is chance.` : "No two people have ranked the same question yet.";
  $("agreement").textContent = agreement;
  $("disputed").textContent = disputed;
  fill($("people"), people.map((one) => [one.name, one.role, `${one.ranked + one.skipped} of ${one.total}`,
    [...new Set(one.reasons)].map((reason) => `${one.reasons.filter((each) => each === reason).length} × ${reason}`).join("; ") || "–",
    median(one.times.slice(1).map((time, index) => time - one.times[index]).sort((a, b) => a - b)),
    one.controls ? `${one.passed} of ${one.controls}` : "–", pairs(one.alike), pairs(one.upheld)]));
}

const median = (sorted) => sorted.length ? sorted[sorted.length >> 1].toFixed(1) : "–";
const pairs = ([alike, compared]) => compared ? `${alike} of ${compared} pairs, ${percent(alike / compared)}` : "–";

function fill(body, rows) {
  const labels = document.querySelectorAll("th");
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    row.childNodes.forEach((cell, column) => { cell.dataset.label = labels[column].textContent; });
    return row;
  }));
}

look();
