// The studio's page. It shows what the server knows, so that a reload loses nothing; it asks for nothing elsewhere.
"use strict";

const $ = (id) => document.getElementById(id);
const POLL_MS = 250;
const PIXEL_ART_BELOW = 200;   // sides under it are drawings, shown with hard pixel edges

let started = null;     // resolves once `state` is here
let state = null;       // models, words, limits
let shown = null;       // the result of the last set
let chosen = 0;         // the candidate in the viewer
let against = "";       // what it is compared with: "base", a source, or a candidate's index; empty to see it whole
let uploads = [];       // to be judged
let arriving = 0;       // images that are still being handed in to be judged
let sources = [];       // to start from
const SOURCES = "pacorl.sources";
let examples = 0;
const running = { set: null, judgement: null, sheet: null, fit: null, captions: null };

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
    lost = true;
    ready("not connected", "off");
    throw new Error("The studio does not answer. Is the command still running?");
  }
  if (lost) { lost = false; watchModels(); }
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(content.error?.message || content.error || `the studio answered ${answer.status}`), { status: answer.status });
  return content;
}

// The answer, or null after a message.
async function ask(method, path, body) {
  try {
    return await call(method, path, body);
  } catch (error) {
    toast(error.message);
    return null;
  }
}

let lost = false;       // whether the last request had no answer

// The header says so too while nothing else is asked for.
setInterval(() => {
  if (!state || document.hidden) return;
  call("GET", "/api/state").catch((error) => { if (error.status) { lost = true; ready("not connected", "off"); } });
}, 20 * POLL_MS);

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function follow(kind, id, { update, done, failed }) {
  const ended = () => { running[kind] = null; showUnderWay(kind, null); };
  running[kind] = id;
  for (;;) {
    let job;
    try {
      job = await call("GET", `/api/jobs/${id}`);
    } catch (error) {
      if (error.status) { ended(); return failed(error.message); }
      update({ status: "queued", phase: "", lost: true });
      await pause(4 * POLL_MS);
      continue;
    }
    if (running[kind] !== id) return;
    if (job.status === "queued" || job.status === "running") {
      update(job);
      showUnderWay(kind, job);
      await pause(POLL_MS);
      continue;
    }
    ended();
    return job.status === "done" ? done(job) : failed(job.status === "cancelled" ? "" : job.error, job);
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
  drawNames();
  $("candidates").max = $("mostCandidates").textContent = state.limits.candidates;
  $("limits").textContent = `up to ${state.limits.images} images, ${Math.round(state.limits.bytes / 2 ** 20)} MB and ${state.limits.pixels / 1e6} megapixels each`;
  if (state.calibrated) $("least").placeholder = "as calibrated";
  showWords();
  fillExample(state.example);
  const chosen = JSON.parse(sessionStorage.getItem(SOURCES) || "[]");
  sources = state.uploads.filter((one) => chosen.includes(one.id));
  uploads = state.uploads.filter((one) => !chosen.includes(one.id));
  drawUploads();
  enableMaking();
  watchModels();
  const form = JSON.parse(sessionStorage.getItem(FORM) || "null");
  if (form) fillForm(form);
  ask("GET", "/api/characters").then((listed) => {
    people = listed || [];
    fillPeople();
    if (form && people.some((one) => one.name === form.fields.who)) $("who").value = form.fields.who;
  });
  fillEarlier();
  openAddress();
  if (location.hash.startsWith("#set-")) awaited = true;
  else if (state.latest.set) watchSet(state.latest.set);
  if (state.latest.judgement) watchJudgement(state.latest.judgement);
  if (state.latest.sheet) watchSheet(state.latest.sheet);
}

function drawNames() {
  $("note").textContent = state.tiny.model ? "Drawn by the practice model, which knows one drawn world and its words only. Choose another under Models." : "";
  const names = state.tiny.model && state.tiny.judge ? ["drawn by the practice models"] : ["drawn by", plain(state.model), "· judged by", plain(state.judge)];
  for (const [id, tiny, real] of PLACEHOLDERS) $(id).placeholder = state.tiny.model ? tiny : real;
  const loras = Object.entries(state.loras).map(([name, strength]) => `${shortName(name)} ${number(strength)}`).join(", ");
  $("models").textContent = [...names, loras && `+ ${loras}`].filter(Boolean).join(" ");
  $("lorasOn").textContent = `${loras}; all of them times this`;
  $("compareField").hidden = $("strengthField").hidden = !hasLoras();
}

// Words that the model knows.
const PLACEHOLDERS = [
  ["sentence", "Four images of a red round hero with a crown at night: waving by a flag, jumping by a boat, …", "Four images of a fox: it runs, it sleeps, …"],
  ["personWords", "red round hero, crown, night", "a young dentist in light-blue scrubs with round glasses"],
];

const hasLoras = () => Object.keys(state?.loras || {}).length > 0;

// Folders of a run say nothing to a person.
function shortName(path) {
  return path.split("/").filter((part) => part && !["run", "best", "adapter"].includes(part)).at(-1) || path;
}

let watcher = null;

function watchModels() {
  watcher ??= untilReady().finally(() => { watcher = null; });
  return watcher;
}

async function untilReady() {
  for (;; await pause(4 * POLL_MS)) {
    const now = await call("GET", "/api/state").catch(() => null);
    if (!now) continue;
    if (now.fault) { ready("models failed", "off"); return toast(now.fault, true); }
    if (now.teaching !== state.teaching) { state.teaching = now.teaching; enableMaking(); }
    if (now.teaching) ready(`teaching ${now.teaching}`);
    else if (now.ready) { ready("ready", "on"); return setCannot(now.cannot); }
    else ready("loading the models …");
  }
}

// --- modes: a set, from a picture, a storyboard

let cannot = {};        // mode → why the generator cannot do it

const mode = () => document.querySelector("input[name=mode]:checked").value;

function setCannot(reasons) {
  cannot = reasons || {};
  if (cannot[mode()]) setMode(["set", "edit", "storyboard"].find((name) => !cannot[name]));
  else drawMode();
}

function setMode(name) {
  document.querySelector(`input[name=mode][value=${name}]`).checked = true;
  say("formError", "");
  drawMode();
}

function drawMode() {
  const now = mode();
  for (const part of document.querySelectorAll("[data-mode]")) part.hidden = part.dataset.mode !== now || Boolean(cannot[now]);
  say("cannot", cannot[now] || "");
  enableMaking();
  $("layout").closest("label").hidden = now === "edit";
  $("compareField").hidden = !hasLoras() || now === "storyboard";
  if (shown) $("startFrom").hidden = Boolean(cannot.edit);
  const known = (now === "edit" ? state?.edit_options : state?.options) || [];
  for (const field of document.querySelectorAll("[data-option]")) field.hidden = !known.includes(field.dataset.option);
  $("strengthField").hidden = !hasLoras() || (now === "edit" && state.editor !== state.model);
}

function enableMaking() {
  $("generate").disabled = Boolean(running.set || cannot[mode()] || state?.teaching);
  if (state) enableSheet();
  say("busy", state?.teaching ? `${state.teaching} is being taught, and has the machine. Stop it to draw; it can go on later.` : "");
}

function ready(text, look = "") {
  $("ready").textContent = text;
  $("ready").className = `ready ${look}${Object.values(under).some(Boolean) ? " unseen" : ""}`;
}

// The header is always on the screen. Its bar is for eyes: the tab's own bar is read aloud.
const under = {};       // kind → the job that is under way

function showUnderWay(kind, job) {
  under[kind] = job;
  const now = Object.values(under).find(Boolean), share = now?.total ? Math.min(100, Math.round((100 * now.done) / now.total)) : null;
  $("underWay").hidden = !now;
  $("ready").classList.toggle("unseen", Boolean(now));
  if (!now) return;
  $("underWayText").textContent = phaseOf(now) + (share === null ? "" : `, ${share} %`);
  $("underWayBar").className = share === null ? "unsure" : "";
  $("underWayBar").style.width = share === null ? "" : `${share}%`;
}

function showWords() {
  const known = Object.keys(state.words).length > 0;
  $("panels").classList.toggle("fixed", known);
  $("addPanel").hidden = known;
  listWords("words", state.words, insert);
  listWords("editWords", state.instructions, (text) => { $("instruction").value = text; });
  listWords("sheetWords", state.instructions, (text) => addRow("sheetScenes", "Picture", text));
}

function listWords(id, groups, take) {
  $(id).hidden = Object.keys(groups).length === 0;
  $(id).querySelector("dl").replaceChildren(...Object.entries(groups).flatMap(([name, values]) => {
    const buttons = values.map((value) => make("button", { type: "button", textContent: value, onclick: () => take(value) }));
    return [make("dt", { textContent: name }), make("dd", {}, ...buttons)];
  }));
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

function toast(text, stays = false, ...buttons) {
  const close = make("button", { type: "button", className: "quiet small", textContent: "×", ariaLabel: "Close this message", onclick: () => { $("toast").hidden = true; } });
  $("toast").replaceChildren(text, ...buttons, ...(stays ? [close] : []));
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
  $("theme").value = example.theme ?? $("theme").value;
  if (example.panels) fillRows("panels", example.panels, "Panel");
  $("instruction").value = example.instruction ?? $("instruction").value;
  if (example.board) fillBoard(example.board);
}

// The form outlasts a reload, in this tab of the browser alone.
const FORM = "pacorl.form";
const formFields = () => [...document.querySelectorAll("#form :is(input, textarea, select)[id]:not([type=file], #earlier, #keepWho)")];

function keepForm() {
  if (!state) return;
  const fields = Object.fromEntries(formFields().map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]));
  sessionStorage.setItem(FORM, JSON.stringify({ mode: mode(), fields, panels: rows("panels"), scenes: rows("scenes"), cast: castNow(), example: exampleWords }));
}

function fillForm(form) {
  setMode(form.mode);
  for (const field of formFields()) {
    const value = form.fields[field.id];
    if (field.type === "checkbox") field.checked = value ?? field.checked;
    else field.value = value ?? field.value;
  }
  fillRows("panels", form.panels, "Panel");
  fillRows("scenes", form.scenes, "Scene");
  $("characters").replaceChildren();
  for (const [name, text] of form.cast) addCharacter(name, text);
  exampleWords = form.example;
  drawStrength();
}

const castNow = () => [...$("characters").children].map((item) => [...item.querySelectorAll("input")].map((one) => one.value.trim()));

function fillBoard(board) {
  $("boardTitle").value = board.title;
  $("boardStyle").value = board.style || "";
  $("characters").replaceChildren();
  for (const [name, text] of Object.entries(board.characters)) addCharacter(name, text);
  fillRows("scenes", board.scenes, "Scene");
}

function fillRows(list, texts, name) {
  $(list).replaceChildren();
  for (const text of texts) addRow(list, name, text);
}

function addRow(list, name, text = "") {
  const field = make("textarea", { rows: 1, value: text, maxLength: 4000 });
  const item = make("li", {}, field, remover(`Remove this ${name.toLowerCase()}`, () => { item.remove(); renumber(); }));
  const renumber = () => [...$(list).querySelectorAll("textarea")].forEach((one, i) => one.setAttribute("aria-label", `${name} ${i + 1}`));
  $(list).append(item);
  renumber();
  return field;
}

const remover = (title, onclick) => make("button", { type: "button", textContent: "×", title, ariaLabel: title, onclick });

function addCharacter(name = "", text = "") {
  const called = make("input", { value: name, maxLength: 60, placeholder: "name", ariaLabel: "Name" });
  const described = make("input", { value: text, maxLength: 4000, placeholder: "what they look like", ariaLabel: "Description" });
  const item = make("li", {}, called, described, remover("Remove this character", () => item.remove()));
  $("characters").append(item);
  return called;
}

const rows = (list) => [...$(list).querySelectorAll("textarea")].map((field) => field.value).filter((text) => text.trim());

const REQUESTS = {
  set: ["/api/sets", () => ({ theme: $("theme").value, panels: rows("panels"), layout: $("layout").value.trim(), character: $("who").value })],
  edit: ["/api/edits", () => ({ instruction: $("instruction").value, sources: sources.map((one) => one.id) })],
  storyboard: ["/api/storyboards", () => ({
    title: $("boardTitle").value, style: $("boardStyle").value, layout: $("layout").value.trim() || "2x2", scenes: rows("scenes"),
    characters: Object.fromEntries(castNow().filter(([name]) => name)),
  })],
};

function sampling() {
  const steps = $("steps").value;
  return {
    candidates: $("candidates").value === "" ? 4 : Number($("candidates").value),
    seed: Number($("seed").value),
    steps: steps ? Number(steps) : null,
    size: $("size").value.trim(),
    lora_scale: $("strengthField").hidden ? 1 : Number($("strength").value),
    compare: $("compare").checked,
    ...Object.fromEntries([...document.querySelectorAll("[data-option]:not([hidden]) input")].filter((one) => one.value.trim()).map((one) => [one.id, one.type === "number" ? Number(one.value) : one.value])),
  };
}

async function generate() {
  const [path, fields] = REQUESTS[mode()];
  if (running.set || cannot[mode()]) return;
  say("formError", "");
  try {
    if (mode() === "edit" && !sources.length) throw new Error("there is no picture to start from; drop or choose one");
    const job = await call("POST", path, { ...fields(), ...sampling() });
    address("#make");
    awaited = true;
    watchSet(job.id);
  } catch (error) {
    say("formError", error.message);
    if (/^(candidates|seed|steps|size|layout|guidance_scale|true_cfg_scale|negative_prompt)\b|pixels|layout/.test(error.message)) $("settings").open = true;
  }
}

async function writePanels() {
  say("formError", "");
  try {
    const draft = await call("POST", "/api/panels", { text: $("sentence").value });
    fill(draft);
    say("panelNote", draft.note);
    say("formError", draft.fault);
    $("formError").scrollIntoView({ block: "nearest" });
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
    done(job) {
      const untouched = scrollY === scrolledTo;
      setEnded();
      showSet(job, early === id);
      if (untouched) scrollToPicture();  // the bar above it is gone
      fillEarlier();
      $("said").textContent = `${$("rankTitle").textContent}: the first has ${number(shown.candidates[0].score)}.`;
    },
    failed(message) { setEnded(); say("formError", message); $("empty").hidden = Boolean(shown); },
  });
}

let early = "";         // the job whose ranking is shown before it has ended

function setEnded() {
  $("progress").hidden = true;
  enableMaking();
}

// --- the result of a set

const TITLES = { set: "Candidates, best first", edit: "Candidates, best first", sheet: "Pictures of the sheet", storyboard: "Pages, in order" };

function showSet(job, again = false) {
  shown = job.result;
  if (!again) chosen = 0;
  against = "";
  $("empty").hidden = true;
  $("made").hidden = false;
  $("rankTitle").textContent = TITLES[shown.kind];
  $("ranks").setAttribute("aria-label", TITLES[shown.kind]);
  $("ranks").replaceChildren(...shown.candidates.map(card));
  $("rankWords").textContent = summary(job);
  $("keptLine").textContent = shown.note || "";
  drawFavourite();
  $("startFrom").hidden = Boolean(cannot.edit);
  if (!again) $("wipe").value = 50;
  view();
  if (awaited && innerWidth <= 820) scrollToPicture();
  awaited = false;
}

let scrolledTo = -1;    // where the page was scrolled to for a picture

function scrollToPicture() {
  $("made").scrollIntoView();
  scrolledTo = scrollY;
}

let awaited = false;    // whether a person waits for the next result, which a phone scrolls to

const file = (name) => `${shown.images}/${name}.png`;

function summary(job) {
  const known = (pick) => shown.candidates.map(pick).filter((value) => value !== null && value !== undefined);
  const mean = (values) => number(values.reduce((a, b) => a + b, 0) / values.length);
  const own = known((one) => one.score), base = known((one) => one.base?.score);
  const told = [`Judged by ${shown.judge.startsWith("tiny") ? "the practice judge" : shown.judge}${job.seconds ? `, ${job.seconds.toFixed(1)} s` : ""}.`];
  if (tie(shown.candidates[0])) told.push(`The first ${shown.candidates[0].tied} are a tie: the judge does not tell such near scores apart.`);
  if (base.length && own.length) told.push(`Mean of the same seeds: ${mean(base)} without the LoRA, ${mean(own)} with it.`);
  if (shown.adapter && shown.lora_scale !== 1) told.push(`LoRA strength ${shown.lora_scale}.`);
  return told.join(" ");
}

const tie = (one) => (!["storyboard", "sheet"].includes(shown.kind) && one.tied > 1 ? ", tie" : "");

function card(one, index) {
  const image = make("img", { src: file(one.image), alt: "", className: look(one), loading: "lazy" });
  const under = make("div", { className: "under" },
    make("div", {}, make("b", { textContent: number(one.score) }), make("small", { textContent: one.error || `${seedOf(one)}${tie(one)}` })),
    matrixOf(one.matrix, { mini: true }));
  const made = make("button", { className: "card", type: "button", onclick: () => pick(index) }, image, make("span", { className: "place", textContent: placeOf(one) }), under);
  made.setAttribute("role", "option");
  made.setAttribute("aria-label", `${unit()} ${placeOf(one)}, ${one.error || `score ${number(one.score)}${tie(one)}`}`);
  return made;
}

const seedOf = (one) => (one.seed === null ? "redrawn" : `seed ${one.seed}`);

// A picture that a click shows large.
function enlarging(src, alt) {
  const button = make("button", { type: "button", className: "enlarge", ariaLabel: `Enlarge: ${alt}`, onclick: () => {
    $("largeImage").replaceChildren(pixelated(make("img", { src, alt })));
    $("largeTitle").textContent = alt;
    $("large").showModal();
  } }, pixelated(make("img", { src, alt: "" })));
  return button;
}

function pixelated(image) {
  image.onload = () => image.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) < PIXEL_ART_BELOW);
  return image;
}

const look = (one) => (Math.max(one.width, one.height) < PIXEL_ART_BELOW ? "pixels" : "");

// Pictures of a sheet are ranked among those of the same line: here they are counted.
const placeOf = (one) => (shown.kind === "sheet" ? shown.candidates.indexOf(one) + 1 : one.rank);

const unit = () => (shown.kind === "storyboard" ? "page" : "number");

function pick(index) {
  if (!shown || index < 0 || index >= shown.candidates.length) return;
  const inList = $("ranks").contains(document.activeElement);
  chosen = index;
  if (against === String(index) || (against === "base" && !shown.candidates[index].base)) against = "";
  view();
  $("ranks").children[chosen].scrollIntoView({ block: "nearest" });
  if (inList) $("ranks").children[chosen].focus();
}

function compared(index) {
  if (shown.candidates[index].base) return "base";
  if (shown.sources.length) return shown.sources[0];
  const last = shown.candidates.length - 1;
  return last === 0 ? "" : String(index === last ? 0 : last);
}

function view() {
  const one = shown.candidates[chosen];
  const other = against === "" ? null : against === "base" ? one.base : shown.sources.includes(against) ? { ...one, image: against } : shown.candidates[against];
  const alone = !other || other === one;
  $("compareBox").classList.toggle("alone", alone);
  for (const [id, side] of [["left", alone ? one : other], ["right", one]]) {
    $(id).src = file(side.image);
    $(id).className = look(side);
    $(id).alt = id === "right" || alone ? `${unit()} ${placeOf(one)}` : `compared with: ${nameOf(against)}`;
  }
  $("leftTag").textContent = alone ? "" : shown.sources.includes(against) ? nameOf(against) : `${nameOf(against)}, ${number(other.score)}`;
  $("rightTag").textContent = `${against === "base" && shown.lora_scale ? "with LoRA, " : ""}${unit()} ${placeOf(one)}, ${number(one.score)}`;
  $("score").textContent = number(one.score);
  $("scoreWords").textContent = one.error || (["edit", "sheet"].includes(shown.kind) ? "kept and followed" : "of 1: how well its panels belong together, the mean of its pairs") + tie(one);
  $("matrix").replaceChildren(...(one.matrix.length ? [matrixOf(one.matrix)] : []));
  $("matrixHint").hidden = !one.matrix.length;
  drawPanels(one);
  $("seedLine").textContent = `${one.seed === null ? "Redrawn" : `Seed ${one.seed}`}, ${one.width} × ${one.height} px`;
  $("download").href = file(one.image);
  $("download").download = `pacorl-${seedOf(one).replace(" ", "-")}.png`;
  $("export").hidden = !shown.id;
  $("checkMade").hidden = panelsOf(one).length < 2;
  $("export").href = `/sets/${shown.id}/${chosen}.zip`;
  [...$("ranks").children].forEach((made, i) => {
    made.setAttribute("aria-selected", String(i === chosen));
    made.tabIndex = i === chosen ? 0 : -1;  // one stop for Tab; arrows go from card to card
  });
  drawChooser(one);
  wipe();
}

function nameOf(what) {
  if (what === "base") return "without LoRA";
  if (shown.sources.includes(what)) return shown.kind === "set" ? "the page before" : shown.sources.length > 1 ? `picture ${what.split("-")[1]}` : "the picture";
  return `${unit()} ${placeOf(shown.candidates[Number(what)])}`;
}

function drawChooser(one) {
  const choices = [...(one.base ? ["base"] : []), ...shown.sources, ...shown.candidates.map((_, i) => String(i)).filter((i) => Number(i) !== chosen)];
  $("chooser").hidden = choices.length === 0;
  $("against").replaceChildren(...["", ...choices].map((what) => make("option", { value: what, textContent: what === "" ? "nothing" : what === "base" ? "without LoRA, same seed" : nameOf(what) })));
  $("against").value = against;
}

function wipe() {
  $("compareBox").style.setProperty("--wipe", `${$("wipe").value}%`);
}

// --- uploads and their judgement

async function handIn(files, where = "judge") {
  const faults = [], judged = where === "judge";
  if (judged) say("judgeError", "");  // it was of the images before
  arriving += files.length;
  drawUploads();
  for (const file of files) {
    try {
      ({ judge: uploads, source: sources, person: dropped })[where].push(await upload(file));
    } catch (error) {
      faults.push(error.message);
    }
    arriving -= 1;
    drawUploads();
  }
  if (where === "source") say("formError", faults.join(" "));
  else if (where === "person") say("personError", faults.join(" "));
  else {
    $("uploadErrors").replaceChildren(...faults.map((text) => make("li", { textContent: text })));
    $("uploadErrors").hidden = faults.length === 0;
  }
  $("files").value = $("sourceFiles").value = $("personFiles").value = "";
}

async function upload(file) {
  if (file.size > state.limits.bytes) {
    throw new Error(`${file.name}: ${(file.size / 2 ** 20).toFixed(1)} MB is too large; an image may have ${Math.round(state.limits.bytes / 2 ** 20)} MB`);
  }
  return call("POST", `/api/uploads?name=${encodeURIComponent(file.name)}`, file, true);
}

function drawUploads() {
  for (const [list, images] of [["uploads", uploads], ["sources", sources]]) {
    $(list).replaceChildren(...images.map((one) => make("li", { title: `${one.name}, ${one.width} × ${one.height}` },
      make("img", { src: one.image, alt: one.name }), one.name, remover(`Take ${one.name} away`, () => takeBack(one.id)))));
  }
  sessionStorage.setItem(SOURCES, JSON.stringify(sources.map((one) => one.id)));
  say("arriving", arriving ? `${arriving} more ${arriving === 1 ? "image is" : "images are"} on the way; Judge waits for all of them.` : "");
  drawDropped();
  enableJudging(uploads.length > 0 && arriving === 0 && !running.judgement);
}

function enableJudging(on) {
  for (const id of ["judgeNow", "checkNow", "repairNow"]) $(id).disabled = !on;
}

async function takeBack(id) {
  await call("DELETE", `/api/uploads/${id}`).catch((error) => toast(error.message));
  uploads = uploads.filter((one) => one.id !== id);
  sources = sources.filter((one) => one.id !== id);
  drawUploads();
}

async function imageFile(one) {
  return new File([await (await fetch(file(one.image))).blob()], `${seedOf(one).replace(" ", "-")}.png`);
}

async function startFrom() {
  const content = await imageFile(shown.candidates[chosen]);
  setMode("edit");
  await handIn([content], "source");
  $("instruction").focus();
}

async function checkMade() {
  const one = shown.candidates[chosen], content = await imageFile(one);
  open("tabJudge");
  $("checkNow").focus();
  for (const other of [...uploads]) await takeBack(other.id);
  await handIn([content]);
  $("judgeLayout").value = one.layout;
  $("judgeTexts").value = panelsOf(one).join("\n");
  $("judgeTheme").value = one.recipe.theme || "";
  $("judgeTheme").dataset.theme = $("judgeTheme").value;
  $("judgeTheme").dataset.shared = one.shared || "";
  judge("/api/checks", gate());
}

// What each panel shows in full, as the image's recipe has it.
function panelsOf(one) {
  const theme = one.recipe.theme || "";
  const full = (text) => (text.includes(theme) ? text : `${theme.replace(/\.$/, "")}. ${text}`);
  return JSON.parse(one.recipe.panels || "[]").map((text) => full(text).replace(/\s+/g, " "));
}

const lines = (id) => $(id).value.split("\n").filter((line) => line.trim());

function gate() {
  const least = $("least").value, plain = !$("judgeTheme").value.trim() && !lines("criteria").length;
  // A calibration's threshold is of the plain question.
  return { least: least === "" ? (state.calibrated && plain ? null : 0.5) : Number(least) };
}

// The question of the ranking in Make, as long as the shared words and the layout are those of the made page.
function sharedWords() {
  const { theme, shared } = $("judgeTheme").dataset;
  return shared && $("judgeTheme").value === theme && $("judgeLayout").value.trim() ? shared : "";
}

const repairing = () => ({ ...gate(), texts: lines("judgeTexts"), tries: Number($("tries").value || 4) });

async function judge(path = "/api/judgements", more = {}) {
  if (running.judgement || arriving || uploads.length === 0) return;
  say("judgeError", "");
  try {
    const job = await call("POST", path, {
      uploads: uploads.map((one) => one.id),
      theme: $("judgeTheme").value,
      shared: sharedWords(),
      criteria: lines("criteria"),
      layout: $("judgeLayout").value.trim(),
      symmetric: $("symmetric").checked,
      ...more,
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
      enableJudging(false);
      $("judgeProgress").hidden = false;
      $("judgeEmpty").hidden = true;
      $("judgePhase").textContent = phaseOf(job);
      if (job.result) showCheck(job);
    },
    done(job) {
      ended();
      if (job.result.verdict) showCheck(job);
      else showJudgement(job);
    },
    failed(message, job) {
      ended();
      // The verdict of earlier images would look like this one's.
      $("judged").hidden = $("checked").hidden = true;
      drawnCheck = "";
      if (job?.result) showCheck(job);
      say("judgeError", message);
      $("judgeEmpty").hidden = !$("checked").hidden;
    },
  });
}

function showJudgement(job) {
  const result = job.result;
  const images = result.names.map((_, i) => `/images/${job.id}/${i}.png`);
  $("judgeEmpty").hidden = true;
  $("judged").hidden = false;
  $("checked").hidden = true;
  $("judgeScore").textContent = number(result.mean);
  const pairs = result.pairs.length;
  const odd = result.odd;
  const fits = odd ? ` ${result.names[odd.image]} fits least, median ${number(odd.with_others)} with the others${odd.among_others === null ? "" : `; they reach ${number(odd.among_others)} among themselves`}.` : "";
  const unscored = result.pairs.filter((pair) => pair.p_yes === null);
  const scored = unscored.length ? `${pairs - unscored.length} of ${pairs}` : pairs;
  $("judgeWords").textContent = unscored.length === pairs ? `no score: ${unscored[0].error}.`
    : (pairs === 1 ? "that the two belong together, by " : `mean of ${scored} pairs, by `) + `${result.judge}.${fits}`;
  $("judgeStrip").replaceChildren(...result.names.map((name, i) => {
    const isOdd = odd?.image === i && odd.among_others !== null && odd.with_others < odd.among_others;
    return figure(images[i], i + 1, name, isOdd ? " fits least" : "", isOdd);
  }));
  $("judgeMatrix").replaceChildren(matrixOf(result.matrix, { heads: result.matrix.length > 2 ? images : [], name: "Every image against every other" }));
  $("judgePairs").replaceChildren(pairTable(result));
  $("judgeNote").textContent = result.note;
}

function figure(src, head, name, verdict, isOdd, ...more) {
  const title = name === `panel ${head}` ? [`Panel ${head} `, ""] : [`${head} `, name];
  return make("figure", { className: isOdd ? "odd" : "" }, make("img", { src, alt: name }),
    make("figcaption", {}, make("b", { textContent: title[0] }), title[1], make("i", { textContent: verdict }), ...more));
}

let drawnCheck = "";         // the job and the number of tries on the page: a running repair is drawn again after each try

function showCheck(job) {
  const result = job.result, tries = result.tries, now = `${job.id} ${tries.length} ${job.status}`;
  if (drawnCheck === now) return;
  drawnCheck = now;
  const url = (name) => `/images/${job.id}/${name}.png`;
  $("judgeEmpty").hidden = $("judged").hidden = true;
  $("checked").hidden = false;
  $("checkVerdict").textContent = result.verdict[0];
  const mean = result.mean === null ? [] : [`The mean of all pairs is ${number(result.mean)}.`];
  $("checkWords").textContent = [...result.verdict.slice(1), ...mean, result.calibrated ? "The least score was measured on pairs that people had judged." : "The least score is a rule of thumb, not measured for this judge.", result.note].join(" ");
  $("checkMatrix").replaceChildren(matrixOf(result.matrix, { name: "Every image against every other" }));
  $("checkStrip").replaceChildren(...result.panels.map((panel, i) => {
    const isOdd = result.odd === i, several = Object.keys(result.questions).length > 1;
    const verdict = panel.passed ? ` belongs: ${number(panel.score)}` : ` ${isOdd ? "fits least" : `below ${result.least}`}: ${number(panel.score)}${several ? `, lowest for “${panel.lowest_question}”` : ""}`;
    const save = result.images[i].startsWith("try-") ? [make("a", { href: url(result.images[i]), download: `panel-${i + 1}.png`, textContent: " Save the new image" })] : [];
    return figure(url(result.images[i]), i + 1, panel.image, verdict, isOdd, ...save);
  }));
  const better = tries.some((one) => one.accepted);
  $("repairedLinks").hidden = !better;
  $("saveRepaired").href = better ? url("page") : "";
  $("lookAtRepaired").hidden = !result.kept;
  $("lookAtRepaired").href = `#set-${result.kept}`;
  $("exportRepaired").hidden = !result.kept;
  $("exportRepaired").href = `/sets/${result.kept}/0.zip`;
  $("tryBox").hidden = tries.length === 0;
  $("tryStrip").replaceChildren(...tries.map((one) => figure(url(one.image), `Try ${one.try}`, result.panels[one.panel - 1].image, `: ${one.verdict}`, false)));
  const last = tries[tries.length - 1];
  $("said").textContent = job.status === "running" && last ? `Try ${last.try}, ${result.panels[last.panel - 1].image}: ${last.verdict}` : result.verdict[0];
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

const TABS = { tabMake: "make", tabCharacter: "character", tabJudge: "judge", tabHistory: "history", tabModels: "modelsTab" };
const TAB_KEYS = { m: "tabMake", c: "tabCharacter", j: "tabJudge", h: "tabHistory", o: "tabModels" };

// A tab has its label as its address, as a set has its number: Back and a reload return to it.
const addressOfTab = (tab) => `#${tab.slice(3).toLowerCase()}`;

function address(hash) {
  if (location.hash !== hash) history.pushState(null, "", hash);
}

function openAddress() {
  if (location.hash.startsWith("#set-")) return openSet(location.hash.slice(5));
  const named = Object.keys(TABS).find((tab) => addressOfTab(tab) === location.hash);
  open(named || "tabMake", "");
}

async function open(tab, hash = addressOfTab(tab)) {
  if (hash) address(hash);
  for (const [name, panel] of Object.entries(TABS)) {
    $(panel).hidden = name !== tab;
    $(name).setAttribute("aria-selected", String(name === tab));
    $(name).tabIndex = name === tab ? 0 : -1;
  }
  $(tab).scrollIntoView({ block: "nearest", inline: "center" });  // on a phone the tabs are wider than the screen
  scrollTo(0, 0);
  await started;  // a key may be pressed before the server has answered
  if (!state) return;
  if (tab === "tabHistory") drawHistory();
  if (tab === "tabCharacter") openCharacters();
  if (tab === "tabModels") openModels();
}

const tabNow = () => Object.keys(TABS).find((tab) => !$(TABS[tab]).hidden);

async function cancel(kind) {
  if (!running[kind]) return;
  await call("DELETE", `/api/jobs/${running[kind]}`).catch((error) => toast(error.message));
}

const REPLACE = "Replace your words?";
const wordsNow = () => [...document.querySelectorAll("#form [data-mode] textarea:not(#sentence), #form [data-mode] input:not([type])")].map((field) => field.value).join("\n");
let exampleWords = "";  // the form as an example filled it in

async function another() {
  const button = $("example");
  // A person's own words are asked for twice, on the button itself, which falls back if it is left.
  if (wordsNow() !== exampleWords && button.textContent !== REPLACE) {
    button.textContent = REPLACE;
    return button.focus();
  }
  examples += 1;
  fillExample(await call("GET", `/api/example?number=${examples}`));
  say("formError", "");
}

function fillExample(example) {
  fill(example);
  exampleWords = wordsNow();
  $("example").textContent = "New example";
}

function askAgain() {
  if (shown.kind === "sheet") return lookAtSheet();
  fillFrom(shown);
  $("form").scrollIntoView({ block: "nearest" });
}

function fillFrom(result) {
  const asked = result.asked;
  setMode(result.kind);
  if (result.kind === "storyboard") fillBoard(asked);
  else fill(asked);
  for (const name of ["candidates", "seed", "steps", "size", "layout", "guidance_scale", "true_cfg_scale", "negative_prompt"]) $(name).value = asked[name] ?? "";
  $("who").value = people.some((one) => one.name === asked.character) ? asked.character : "";
  $("strength").value = asked.lora_scale;
  $("compare").checked = asked.compare;
  drawStrength();
}

function lookAtSheet() {
  who = shown.theme;
  open("tabCharacter");
  showSheet({ ...shown });
}

const drawStrength = () => { $("strengthValue").textContent = Number($("strength").value).toFixed(2); };

const MAKING_KEYS = {
  ",": () => pick(chosen - 1),
  ".": () => pick(chosen + 1),
  e: another,
  f: () => { if (shown?.id) $("favourite").click(); },
  b: () => { if (shown) { against = against ? "" : compared(chosen); view(); } },
};

const FIELD = "select, textarea, input:not([type=range], [type=checkbox], [type=file], [type=radio])";
let typedIn = null;     // the text box that had the focus last, until a person goes elsewhere
document.addEventListener("focusin", (event) => { typedIn = event.target.closest(FIELD); });
document.addEventListener("pointerdown", () => { typedIn = null; });

document.addEventListener("keydown", (event) => {
  const tab = tabNow(), key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
    event.preventDefault();
    if (tab === "tabMake") $("form").requestSubmit();
    else if (tab === "tabJudge" && !$("judgeNow").disabled) $("judgeForm").requestSubmit();
    return;
  }
  if (document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest(FIELD);
  if (event.key === "Escape") return field ? field.blur() : cancel({ tabMake: "set", tabCharacter: "sheet" }[tab] || "judgement");
  if (field) return;
  // A box that vanished under a person's hands: what follows are words, not shortcuts.
  if (typedIn && !typedIn.checkVisibility()) return;
  if (event.key === "?") $("keys").showModal();
  else if (TAB_KEYS[key]) { open(TAB_KEYS[key]); $(TAB_KEYS[key]).focus(); }
  else if (tab !== "tabMake") return;
  else if (/^[1-9]$/.test(event.key)) pick(Number(event.key) - 1);
  else if (MAKING_KEYS[key]) MAKING_KEYS[key]();
  else if (event.key.startsWith("Arrow") && shown && document.activeElement === document.body) $("wipe").focus();
});

$("ranks").addEventListener("keydown", (event) => {
  const to = { ArrowRight: chosen + 1, ArrowDown: chosen + 1, ArrowLeft: chosen - 1, ArrowUp: chosen - 1, Home: 0, End: shown.candidates.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  pick(to);
});

for (const tab of Object.keys(TABS)) {
  $(tab).addEventListener("click", () => open(tab));
  $(tab).addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const names = Object.keys(TABS), to = names[(names.indexOf(tab) + step + names.length) % names.length];
    open(to);
    $(to).focus();
  });
}
$("form").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("judgeForm").addEventListener("submit", (event) => { event.preventDefault(); judge(); });
$("form").addEventListener("focusin", (event) => { if (event.target.matches("#theme, #panels textarea")) lastField = event.target; });
$("writePanels").addEventListener("click", writePanels);
$("addPanel").addEventListener("click", () => addRow("panels", "Panel").focus());
$("addScene").addEventListener("click", () => addRow("scenes", "Scene").focus());
$("addPeople").addEventListener("click", () => { for (const one of people) addCharacter(one.name, one.description); });
$("addCharacter").addEventListener("click", () => addCharacter().focus());
$("example").addEventListener("click", another);
$("example").addEventListener("blur", () => { $("example").textContent = "New example"; });
$("cancel").addEventListener("click", () => cancel("set"));
$("judgeCancel").addEventListener("click", () => cancel("judgement"));
$("help").addEventListener("click", () => $("keys").showModal());
addEventListener("pagehide", keepForm);
document.addEventListener("visibilitychange", keepForm);
$("leave").addEventListener("click", async () => {
  try {
    await call("POST", "/leave");
  } catch (error) {
    return toast(error.message);
  }
  state = null;
  sessionStorage.clear();
  location.assign("/");  // which says how to come back
});
$("wipe").addEventListener("input", wipe);
$("strength").addEventListener("input", drawStrength);
$("against").addEventListener("change", () => { against = $("against").value; view(); });
$("startFrom").addEventListener("click", startFrom);
$("checkMade").addEventListener("click", checkMade);
$("checkNow").addEventListener("click", () => judge("/api/checks", gate()));
$("repairNow").addEventListener("click", () => judge("/api/repairs", repairing()));
$("askAgain").addEventListener("click", askAgain);
for (const choice of document.querySelectorAll("input[name=mode]")) choice.addEventListener("change", () => setMode(mode()));
$("files").addEventListener("change", () => handIn([...$("files").files]));
$("sourceFiles").addEventListener("change", () => handIn([...$("sourceFiles").files], "source"));
$("personFiles").addEventListener("change", () => handIn([...$("personFiles").files], "person"));
for (const target of document.querySelectorAll("[data-drop]")) {
  for (const name of ["dragenter", "dragover"]) target.addEventListener(name, (event) => { event.preventDefault(); target.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) target.addEventListener(name, () => target.classList.remove("over"));
  target.addEventListener("drop", (event) => { event.preventDefault(); handIn([...event.dataTransfer.files], target.dataset.drop); });
}
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  const where = tabNow() === "tabCharacter" ? "person" : tabNow() === "tabMake" && mode() === "edit" ? "source" : "judge";
  if (where === "judge") open("tabJudge");
  handIn(files, where);
});
// After the other scripts, whose functions it calls.
document.addEventListener("DOMContentLoaded", () => { started = start(); });
