// The administrator's page: who is how far, how well people agree, and why things were skipped. Looks every 3 seconds.
"use strict";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;

const FEWEST = 30;      // shared questions; below it α says little
const LOW_SHARE = 0.8;  // of control questions passed; below it a person's rankings deserve a look

async function call(path, body) {
  const options = body && { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const answer = await fetch(path, options);
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.error), { status: answer.status });
  return content;
}

async function look() {
  try {
    show(await call("/api/admin"));
    $("toast").hidden = true;
  } catch (error) {
    toast(error);
  }
}

async function watch() {
  await look();
  setTimeout(watch, REFRESH_MS);
}

function toast(error) {
  const fix = [401, 403].includes(error.status) ? ". This page needs the administrator's link; a start with --renew admin makes a new one." : "";
  $("toast").textContent = error.message.charAt(0).toUpperCase() + error.message.slice(1) + fix;
  $("toast").hidden = false;
}

function show({ question, people, adjudicators, agreement, pairs, skips, skipped, failed, command }) {
  const sum = (key) => people.reduce((total, one) => total + one[key], 0);
  const done = sum("ranked") + sum("skipped"), meter = $("bar").parentElement;
  $("bar").style.width = `${sum("total") ? (100 * done) / sum("total") : 0}%`;
  meter.setAttribute("aria-valuenow", done);
  meter.setAttribute("aria-valuemax", sum("total"));
  $("count").textContent = `${done} of ${sum("total")}`;
  $("ranked").textContent = sum("ranked") - sum("controls_answered");
  $("controlsRanked").textContent = sum("controls_answered");
  $("of").textContent = agreement.instances < FEWEST ? `of too few shared questions: ${agreement.instances} of ${FEWEST}` : `of ${agreement.instances} shared questions`;
  $("of").className = $("alpha").className = agreement.instances < FEWEST ? "few" : "";
  $("shared").textContent = agreement.instances;
  $("kendall").textContent = agreement.kendall_w?.toFixed(3) ?? "–";
  $("alpha").textContent = agreement.krippendorff_alpha?.toFixed(3) ?? "–";
  $("chance").textContent = agreement.kendall_chance?.toFixed(2) ?? "–";
  $("command").textContent = command;
  $("question").textContent = question;
  $("alike").textContent = pairs ? percent(pairs.mean) : "–";
  $("alike").className = agreement.instances < FEWEST ? "few" : "";
  $("interval").textContent = pairs?.low == null ? "" : ` (${Math.round(100 * pairs.low)} to ${percent(pairs.high)})`;
  fill($("people"), people.map(person));
  fill($("adjudicators"), adjudicators.map((one) => [named(one), `${one.ranked} of ${one.total}`, one.skipped, actions(one)]));
  fill($("skips"), skips.reverse().map((one) => [one.annotator, one.instance, one.reason]));
  fill($("failed"), failed);
  $("failures").hidden = failed.length === 0;
  $("skippedCount").textContent = skipped || "nothing so far";
}

function person(one) {
  const done = one.ranked + one.skipped, meter = document.createElement("div"), bar = document.createElement("i");
  meter.className = "meter";
  bar.style.width = `${one.total ? (100 * done) / one.total : 0}%`;
  meter.append(bar);
  const controls = document.createElement("span");
  controls.textContent = one.controls_answered ? `${one.controls_passed} of ${one.controls_answered}` : "–";
  if (one.controls_answered && one.controls_passed / one.controls_answered < LOW_SHARE) controls.className = "low";
  const seconds = one.median_seconds === null ? "–" : `${one.median_seconds.toFixed(1)} s`;
  return [named(one), meter, `${done} of ${one.total}`, one.skipped, controls, seconds, actions(one)];
}

const percent = (share) => `${Math.round(100 * share)} %`;
const named = (one) => (one.paused ? `${one.name} (paused)` : one.name);

function actions({ name, paused }) {
  const pair = document.createElement("div");
  pair.className = "actions";
  pair.append(
    button("New link", `New link for ${name}; the old one ends`, () => newLink(name)),
    paused ? button("Resume", `Resume the work of ${name}`, () => pause(name, false))
      : button("Pause", `Pause the work of ${name}; nothing is lost`, () => pause(name, true)));
  return pair;
}

function button(text, label, act) {
  const made = document.createElement("button");
  made.className = "quiet";
  made.textContent = text;
  made.setAttribute("aria-label", label);
  made.onclick = act;
  return made;
}

async function pause(name, paused) {
  try {
    await call("/api/admin/pauses", { name, paused });
    await look();
  } catch (error) {
    toast(error);
  }
}

// Rows are made anew at each look, so the keyboard's focus goes on to the same cell of the same row.
function fill(body, rows) {
  const names = [...body.parentElement.querySelectorAll("th")].map((head) => head.textContent);
  const focused = [...body.querySelectorAll("button")].indexOf(document.activeElement);
  body.replaceChildren(...rows.map((cells) => {
    const line = document.createElement("tr");
    line.append(...cells.map((content, column) => {
      const cell = document.createElement("td");
      cell.dataset.label = names[column];
      cell.append(content);
      return cell;
    }));
    return line;
  }));
  if (focused >= 0) body.querySelectorAll("button")[focused]?.focus({ preventScroll: true });
}

async function newLink(name) {
  if (confirm(`Make a new link for ${name}? The old one ends.`)) await showLink("/api/admin/links", { name });
}

async function showLink(path, body) {
  try {
    const { name, link } = await call(path, body);
    const [text, code] = $("link").children;
    text.textContent = `${name}'s link, shown once:`;
    code.textContent = location.origin + link;
    $("copy").textContent = "Copy";
    $("link").hidden = false;
    $("copy").focus();
    await look();
    return true;
  } catch (error) {
    toast(error);
  }
}

$("add").onsubmit = async (event) => {
  event.preventDefault();
  if (await showLink("/api/admin/people", { name: $("name").value.trim(), adjudicates: Boolean($("role").value) })) $("name").value = "";
};
$("copy").onclick = async () => {
  const code = $("link").querySelector("code");
  getSelection().selectAllChildren(code);  // what can be done where the clipboard is closed: over http, from another machine
  await navigator.clipboard?.writeText(code.textContent).then(() => { $("copy").textContent = "Copied"; }, () => {});
};

watch();
