// The studio's page. It shows what the server knows, so that a reload loses nothing; it asks for nothing elsewhere.
"use strict";

const $ = (id) => document.getElementById(id);
const POLL_MS = 250;
const PIXEL_ART_BELOW = 200;   // sides under it are drawings, shown with hard pixel edges

let state = null;       // models, words, limits
let shown = null;       // the result of the last set
let chosen = 0;         // the candidate in the viewer
let against = "";       // what it is compared with: "base", or a candidate's index
let uploads = [];
let examples = 0;
const running = { set: null, judgement: null };

// --- talking to the server

async function call(method, path, body, raw = false) {
  const options = { method, headers: {} };
  if (body !== undefined) {
    options.body = raw ? body : JSON.stringify(body);
    options.headers["Content-Type"] = raw ? "application/octet-stream" : "application/json";
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The studio does not answer. Is the command still running?");
  }
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(content.error?.message || content.error || `the studio answered ${answer.status}`), { status: answer.status });
  return content;
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function follow(kind, id, { update, done, failed }) {
  running[kind] = id;
  for (;;) {
    let job;
    try {
      job = await call("GET", `/api/jobs/${id}`);
    } catch (error) {
      if (error.status) { running[kind] = null; return failed(error.message); }
      update({ status: "queued", phase: "", lost: true });
      await pause(4 * POLL_MS);
      continue;
    }
    if (running[kind] !== id) return;
    if (job.status === "queued" || job.status === "running") {
      update(job);
      await pause(POLL_MS);
      continue;
    }
    running[kind] = null;
    return job.status === "done" ? done(job) : failed(job.status === "cancelled" ? "" : job.error);
  }
}

function phaseOf(job) {
  if (job.lost) return "The studio does not answer; trying again";
  if (job.status === "queued") return job.waiting_for === "load" || job.waiting_for.startsWith("Loading") ? "Loading the models" : `Waiting for ${job.ahead} before it`;
  return job.phase || "Starting";
}

// --- starting

async function start() {
  try {
    state = await call("GET", "/api/state");
  } catch (error) {
    ready("not connected", "off");
    return toast(error.message);
  }
  $("models").textContent = [state.model, state.adapter && `+ ${shortName(state.adapter)}`, "· judged by", state.judge].filter(Boolean).join(" ");
  $("compareField").hidden = !state.adapter;
  $("candidates").max = state.limits.candidates;
  $("limits").textContent = `up to ${state.limits.images} images, ${Math.round(state.limits.bytes / 2 ** 20)} MB and ${state.limits.pixels / 1e6} megapixels each`;
  $("note").textContent = state.tiny.model ? "Generated and judged by tiny models that know one drawn world only. Start the studio with --model and --judge for real ones." : "";
  showWords();
  fill(state.example);
  uploads = state.uploads;
  drawUploads();
  watchModels();
  if (state.latest.set) watchSet(state.latest.set);
  if (state.latest.judgement) watchJudgement(state.latest.judgement);
}

function shortName(path) {
  return path.split("/").filter(Boolean).slice(-2).join("/");
}

async function watchModels() {
  for (let now = state; ; now = await call("GET", "/api/state").catch(() => now)) {
    if (now.fault) { ready("models failed", "off"); return toast(now.fault, true); }
    if (now.ready) return ready("ready", "on");
    ready("loading the models …");
    await pause(4 * POLL_MS);
  }
}

function ready(text, look = "") {
  $("ready").textContent = text;
  $("ready").className = `ready ${look}`;
}

function showWords() {
  const names = Object.entries(state.words);
  $("words").hidden = names.length === 0;
  $("panels").classList.toggle("fixed", names.length > 0);
  $("addPanel").hidden = names.length > 0;
  for (const [name, values] of names) {
    const buttons = values.map((value) => make("button", { type: "button", textContent: value, onclick: () => insert(value) }));
    $("words").querySelector("dl").append(make("dt", { textContent: name }), make("dd", {}, ...buttons));
  }
}

let lastField = null;
function insert(word) {
  const field = lastField || $("theme");
  field.value = [field.value.trim(), word].filter(Boolean).join(field.value.trim() ? ", " : "");
  field.focus();
}

// --- small tools

function make(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

function toast(text, stays = false) {
  $("toast").textContent = text;
  $("toast").hidden = !text;
  clearTimeout(toast.timer);
  if (!stays) toast.timer = setTimeout(() => { $("toast").hidden = true; }, 6000);
}

function say(place, text) {
  $(place).textContent = text;
  $(place).hidden = !text;
}

function matrixOf(values, { heads = [], mini = false, name = "Pairs of panels" } = {}) {
  const head = (i) => make("th", { scope: "col" }, heads[i] ? make("img", { src: heads[i], alt: `image ${i + 1}` }) : String(i + 1));
  const rows = values.map((row, i) => {
    const cells = row.map((value, j) => {
      if (i === j) return head(i);
      const cell = make("td", { textContent: number(value), title: `${i + 1} and ${j + 1}: ${value === null ? "no answer" : value.toFixed(4)}` });
      if (value === null) cell.className = "none";
      else {
        cell.style.setProperty("--v", value);
        cell.className = (value >= 0.5 ? "high " : "") + (value >= 0.72 ? "top" : "");
      }
      return cell;
    });
    return make("tr", {}, ...cells);
  });
  const table = make("table", { className: mini ? "matrix mini" : "matrix" }, ...rows);
  if (mini) table.setAttribute("aria-hidden", "true"); else table.setAttribute("aria-label", name);
  return table;
}

// --- the form of a set

function fill(example) {
  $("theme").value = example.theme;
  $("panels").replaceChildren();
  example.panels.forEach(addPanel);
}

function addPanel(text = "") {
  const field = make("textarea", { rows: 1, value: text, maxLength: 4000 });
  field.setAttribute("aria-label", `Panel ${$("panels").children.length + 1}`);
  const away = make("button", { type: "button", textContent: "×", title: "Remove this panel", onclick: () => { item.remove(); } });
  const item = make("li", {}, field, away);
  $("panels").append(item);
  return field;
}

function order() {
  const steps = $("steps").value;
  return {
    theme: $("theme").value,
    panels: [...$("panels").querySelectorAll("textarea")].map((field) => field.value).filter((text) => text.trim()),
    layout: $("layout").value.trim(),
    candidates: Number($("candidates").value) || 4,
    seed: Number($("seed").value) || 0,
    steps: steps ? Number(steps) : null,
    size: $("size").value.trim(),
    compare: $("compare").checked,
  };
}

async function generate() {
  if (running.set) return;
  say("formError", "");
  try {
    const job = await call("POST", "/api/sets", order());
    watchSet(job.id);
  } catch (error) {
    say("formError", error.message);
  }
}

function watchSet(id) {
  $("generate").disabled = true;
  follow("set", id, {
    update(job) {
      const share = job.total ? Math.min(100, (100 * job.done) / job.total) : 0;
      $("progress").hidden = false;
      $("empty").hidden = true;
      $("phase").textContent = phaseOf(job);
      $("percent").textContent = job.total ? `${Math.round(share)} %` : "";
      $("bar").className = job.total ? "" : "unsure";
      $("bar").style.width = job.total ? `${share}%` : "";
      $("bar").parentElement.setAttribute("aria-valuenow", Math.round(share));
      if (job.result && early !== id) { early = id; showSet(job); }  // ranked already; the base is still generating
    },
    done(job) { setEnded(); showSet(job, early === id); },
    failed(message) { setEnded(); say("formError", message); $("empty").hidden = Boolean(shown); },
  });
}

let early = "";         // the job whose ranking is shown before it has ended

function setEnded() {
  $("progress").hidden = true;
  $("generate").disabled = false;
}

// --- the result of a set

function showSet(job, again = false) {
  const first = shown === null;
  shown = job.result;
  if (!again) chosen = 0;
  against = shown.candidates[chosen].base ? "base" : otherThan(chosen);
  $("empty").hidden = true;
  $("made").hidden = false;
  $("texts").replaceChildren(...shown.panels.map((text) => make("li", { textContent: text })));
  $("ranks").replaceChildren(...shown.candidates.map(card));
  $("rankWords").textContent = summary(job);
  if (!again) $("wipe").value = 50;
  view();
  if (!again && !first && innerWidth <= 820) $("made").scrollIntoView();
}

function summary(job) {
  const known = (pick) => shown.candidates.map(pick).filter((value) => value !== null && value !== undefined);
  const mean = (values) => number(values.reduce((a, b) => a + b, 0) / values.length);
  const own = known((one) => one.score), base = known((one) => one.base?.score);
  const told = [`Judged by ${shown.judge}${job.seconds ? `, ${job.seconds.toFixed(1)} s` : ""}.`];
  if (base.length && own.length) told.push(`Mean of the same seeds: ${mean(base)} with the base, ${mean(own)} with the adapter.`);
  return told.join(" ");
}

function card(one, index) {
  const image = make("img", { src: one.image, alt: `candidate ${one.rank}`, className: look(one) });
  const under = make("div", { className: "under" },
    make("div", {}, make("b", { textContent: number(one.score) }), make("small", { textContent: one.error || `seed ${one.seed}` })),
    matrixOf(one.matrix, { mini: true }));
  const made = make("button", { className: "card", type: "button", onclick: () => pick(index) }, image, make("span", { className: "place", textContent: one.rank }), under);
  made.setAttribute("role", "option");
  return made;
}

const look = (one) => (Math.max(one.width, one.height) < PIXEL_ART_BELOW ? "pixels" : "");

function pick(index) {
  if (!shown || index >= shown.candidates.length) return;
  chosen = index;
  if (against === String(index)) against = shown.candidates[index].base ? "base" : otherThan(index);
  view();
}

function otherThan(index) {
  const last = shown.candidates.length - 1;
  return last === 0 ? "" : String(index === last ? 0 : last);
}

function view() {
  const one = shown.candidates[chosen];
  const other = against === "base" ? one.base : against === "" ? null : shown.candidates[Number(against)];
  const alone = !other || other === one;
  $("compareBox").classList.toggle("alone", alone);
  for (const [id, side] of [["left", alone ? one : other], ["right", one]]) {
    $(id).src = side.image;
    $(id).className = look(side);
    $(id).alt = id === "right" ? `candidate ${one.rank}` : `compared with: ${nameOf(against)}`;
  }
  $("leftTag").textContent = alone ? "" : `${nameOf(against)}, ${number(other.score)}`;
  $("rightTag").textContent = `${shown.adapter ? "adapter, " : ""}number ${one.rank}, ${number(one.score)}`;
  $("score").textContent = number(one.score);
  $("scoreWords").textContent = one.error || "mean consistency of its pairs";
  $("matrix").replaceChildren(matrixOf(one.matrix));
  $("seedLine").textContent = `Seed ${one.seed}, ${one.width} × ${one.height} px`;
  $("download").href = one.image;
  $("download").download = `pacorl-seed-${one.seed}.png`;
  [...$("ranks").children].forEach((made, i) => made.setAttribute("aria-selected", String(i === chosen)));
  drawChooser(one);
  wipe();
}

const nameOf = (what) => (what === "base" ? "base" : `number ${shown.candidates[Number(what)]?.rank}`);

function drawChooser(one) {
  const choices = [...(one.base ? ["base"] : []), ...shown.candidates.map((_, i) => String(i)).filter((i) => Number(i) !== chosen)];
  $("chooser").hidden = choices.length === 0;
  $("chooser").replaceChildren(...choices.map((what) => {
    const button = make("button", { type: "button", textContent: what === "base" ? "against the base, same seed" : `against ${nameOf(what)}`, onclick: () => { against = what; view(); } });
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", String(what === against));
    return button;
  }));
}

function wipe() {
  $("compareBox").style.setProperty("--wipe", `${$("wipe").value}%`);
}

// --- uploads and their judgement

async function handIn(files) {
  const faults = [];
  for (const file of files) {
    if (file.size > state.limits.bytes) {
      faults.push(`${file.name}: ${(file.size / 2 ** 20).toFixed(1)} MB is too large; an image may have ${Math.round(state.limits.bytes / 2 ** 20)} MB`);
      continue;
    }
    try {
      uploads.push(await call("POST", `/api/uploads?name=${encodeURIComponent(file.name)}`, file, true));
      drawUploads();
    } catch (error) {
      faults.push(error.message);
    }
  }
  $("uploadErrors").replaceChildren(...faults.map((text) => make("li", { textContent: text })));
  $("uploadErrors").hidden = faults.length === 0;
  $("files").value = "";
}

function drawUploads() {
  $("uploads").replaceChildren(...uploads.map((one) => make("li", { title: `${one.name}, ${one.width} × ${one.height}` },
    make("img", { src: one.image, alt: one.name }), one.name,
    make("button", { type: "button", textContent: "×", title: `Take ${one.name} away`, onclick: () => takeBack(one.id) }))));
  $("judgeNow").disabled = uploads.length === 0 || Boolean(running.judgement);
}

async function takeBack(id) {
  uploads = (await call("DELETE", `/api/uploads/${id}`)).uploads;
  drawUploads();
}

async function judge() {
  if (running.judgement || uploads.length === 0) return;
  say("judgeError", "");
  try {
    const job = await call("POST", "/api/judgements", {
      uploads: uploads.map((one) => one.id),
      theme: $("judgeTheme").value,
      criteria: $("criteria").value.split("\n").filter((line) => line.trim()),
      layout: $("judgeLayout").value.trim(),
      symmetric: $("symmetric").checked,
    });
    watchJudgement(job.id);
  } catch (error) {
    say("judgeError", error.message);
  }
}

function watchJudgement(id) {
  const ended = () => { $("judgeProgress").hidden = true; drawUploads(); };
  follow("judgement", id, {
    update(job) {
      $("judgeNow").disabled = true;
      $("judgeProgress").hidden = false;
      $("judgeEmpty").hidden = true;
      $("judgePhase").textContent = phaseOf(job);
    },
    done(job) { ended(); showJudgement(job); },
    failed(message) { ended(); say("judgeError", message); $("judgeEmpty").hidden = !$("judged").hidden; },
  });
}

function showJudgement(job) {
  const result = job.result;
  const images = result.names.map((_, i) => `/images/${job.id}/${i}.png`);
  $("judgeEmpty").hidden = true;
  $("judged").hidden = false;
  $("judgeScore").textContent = number(result.mean);
  const pairs = result.pairs.length;
  const odd = result.odd;
  const fits = odd ? ` ${result.names[odd.image]} fits least, ${number(odd.with_others)} with the others${odd.among_others === null ? "" : `; they reach ${number(odd.among_others)} among themselves`}.` : "";
  const unscored = result.pairs.filter((pair) => pair.p_yes === null);
  const scored = unscored.length ? `${pairs - unscored.length} of ${pairs}` : pairs;
  $("judgeWords").textContent = unscored.length === pairs ? `no score: ${unscored[0].error}.`
    : (pairs === 1 ? "that the two belong together, by " : `mean of ${scored} pairs, by `) + `${result.judge}.${fits}`;
  $("judgeStrip").replaceChildren(...result.names.map((name, i) => {
    const isOdd = odd?.image === i && odd.among_others !== null && odd.with_others < odd.among_others;
    return make("figure", { className: isOdd ? "odd" : "" }, make("img", { src: images[i], alt: name }),
      make("figcaption", {}, make("b", { textContent: `${i + 1} ` }), name, ...(isOdd ? [make("i", { textContent: " fits least" })] : [])));
  }));
  $("judgeMatrix").replaceChildren(matrixOf(result.matrix, { heads: result.matrix.length > 2 ? images : [], name: "Every image against every other" }));
  $("judgePairs").replaceChildren(pairTable(result));
  $("judgeNote").textContent = result.note;
}

function pairTable(result) {
  const several = result.questions.length > 1;
  const heads = ["Images", "P(Yes)", ...(several ? result.questions.map(([label]) => label) : [])];
  const rows = result.pairs.map((pair) => make("tr", {},
    make("td", { textContent: pair.images.map((i) => i + 1).join(" and ") }),
    make("td", {}, make("b", { textContent: pair.error || number(pair.p_yes) })),
    ...(several ? pair.by_question.map((value) => make("td", { textContent: number(value) })) : [])));
  return make("table", { className: "pairs" }, make("tr", {}, ...heads.map((text) => make("th", { textContent: text }))), ...rows);
}

// --- tabs, keys, events

function open(tab) {
  for (const [name, panel] of [["tabMake", "make"], ["tabJudge", "judge"]]) {
    $(panel).hidden = name !== tab;
    $(name).setAttribute("aria-selected", String(name === tab));
    $(name).tabIndex = name === tab ? 0 : -1;
  }
}

async function cancel(kind) {
  if (!running[kind]) return;
  await call("DELETE", `/api/jobs/${running[kind]}`).catch((error) => toast(error.message));
}

async function another() {
  examples += 1;
  fill(await call("GET", `/api/example?number=${examples}`));
  say("formError", "");
}

document.addEventListener("keydown", (event) => {
  const making = !$("make").hidden;
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
    event.preventDefault();
    return making ? $("form").requestSubmit() : $("judgeForm").requestSubmit($("judgeNow").disabled ? undefined : $("judgeNow"));
  }
  if ($("keys").open || event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest("textarea, input:not([type=range], [type=checkbox], [type=file])");
  if (event.key === "Escape") return field ? field.blur() : cancel(making ? "set" : "judgement");
  if (field) return;
  if (event.key === "?") $("keys").showModal();
  else if (event.key.toLowerCase() === "m") { open("tabMake"); $("tabMake").focus(); }
  else if (event.key.toLowerCase() === "j") { open("tabJudge"); $("tabJudge").focus(); }
  else if (!making) return;
  else if (/^[1-9]$/.test(event.key)) pick(Number(event.key) - 1);
  else if (event.key.toLowerCase() === "e") another();
  else if (event.key.toLowerCase() === "b" && shown) { against = shown.candidates[chosen].base ? "base" : otherThan(chosen); view(); }
  else if (event.key.startsWith("Arrow") && shown && document.activeElement === document.body) $("wipe").focus();
});

for (const tab of ["tabMake", "tabJudge"]) {
  $(tab).addEventListener("click", () => open(tab));
  $(tab).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tab === "tabMake" ? "tabJudge" : "tabMake";
    open(other);
    $(other).focus();
  });
}
$("form").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("judgeForm").addEventListener("submit", (event) => { event.preventDefault(); judge(); });
$("form").addEventListener("focusin", (event) => { if (event.target.matches("#theme, #panels textarea")) lastField = event.target; });
$("addPanel").addEventListener("click", () => addPanel().focus());
$("example").addEventListener("click", another);
$("cancel").addEventListener("click", () => cancel("set"));
$("judgeCancel").addEventListener("click", () => cancel("judgement"));
$("help").addEventListener("click", () => $("keys").showModal());
$("wipe").addEventListener("input", wipe);
$("files").addEventListener("change", () => handIn([...$("files").files]));
for (const name of ["dragenter", "dragover"]) $("drop").addEventListener(name, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
for (const name of ["dragleave", "drop"]) $("drop").addEventListener(name, () => $("drop").classList.remove("over"));
$("drop").addEventListener("drop", (event) => { event.preventDefault(); handIn([...event.dataTransfer.files]); });
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) { open("tabJudge"); handIn(files); }
});
start();
