// The administrator's page: who is how far, how well people agree, and why things were skipped. Looks every 3 seconds.
"use strict";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;
const LOW_SHARE = 0.8;  // of control questions passed; below it a person's rankings deserve a look

async function look() {
  try {
    const answer = await fetch("/api/admin");
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error);
    show(content);
    $("toast").hidden = true;
  } catch (error) {
    $("toast").textContent = error.message;
    $("toast").hidden = false;
  }
  setTimeout(look, REFRESH_MS);
}

function show({ people, agreement, skips, skipped }) {
  const sum = (key) => people.reduce((total, one) => total + one[key], 0);
  const done = sum("ranked") + sum("skipped");
  $("bar").style.width = `${sum("total") ? (100 * done) / sum("total") : 0}%`;
  $("count").textContent = `${done} of ${sum("total")}`;
  $("ranked").textContent = sum("ranked");
  $("shared").textContent = agreement.instances;
  $("kendall").textContent = agreement.kendall_w?.toFixed(3) ?? "–";
  $("alpha").textContent = agreement.krippendorff_alpha?.toFixed(3) ?? "–";
  $("people").replaceChildren(...people.map(person));
  $("skips").replaceChildren(...skips.reverse().map((one) => row([one.annotator, one.instance, one.reason])));
  $("skippedCount").textContent = skipped || "nothing so far";
}

function person(one) {
  const meter = document.createElement("div"), bar = document.createElement("i"), renew = document.createElement("button");
  meter.className = "meter";
  bar.style.width = `${one.total ? (100 * (one.ranked + one.skipped)) / one.total : 0}%`;
  meter.append(bar);
  renew.className = "quiet";
  renew.textContent = "New link";
  renew.title = "Makes a fresh link; the old one ends";
  renew.onclick = () => newLink(one.name);
  const controls = one.controls_answered ? `${one.controls_passed} of ${one.controls_answered}` : "–";
  const seconds = one.median_seconds === null ? "–" : `${one.median_seconds.toFixed(1)} s`;
  const cells = row([one.name, meter, `${one.ranked + one.skipped} of ${one.total}`, one.skipped, controls, seconds, renew]);
  if (one.controls_answered && one.controls_passed / one.controls_answered < LOW_SHARE) cells.children[4].className = "low";
  return cells;
}

function row(cells) {
  const line = document.createElement("tr");
  line.append(...cells.map((content) => {
    const cell = document.createElement("td");
    cell.append(content);
    return cell;
  }));
  return line;
}

async function newLink(name) {
  if (!confirm(`Make a new link for ${name}? The old one ends.`)) return;
  const options = { method: "POST", body: JSON.stringify({ name }), headers: { "Content-Type": "application/json" } };
  const content = await (await fetch("/api/admin/people", options)).json();
  $("link").textContent = content.error ?? `${name}: ${location.origin}${content.link}`;
  $("link").hidden = false;
}

look();
