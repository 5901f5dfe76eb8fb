// The page on which one person ranks. What is on the screen is the server's; what was sent and not yet acknowledged
// waits in this browser and is sent again, under the same request id, until the server says that it has it.
"use strict";

const $ = (id) => document.getElementById(id);
const WAITING = "pacorl.waiting";
const RETRY_MS = 3000;

let task = null;      // what the server asks
let order = [];       // slots in the order of rank; null for an empty place
let shownAt = 0;
let busy = false;

// --- talking to the server

async function call(method, path, body) {
  const options = { method, headers: {} };
  if (body) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const answer = await fetch(path, options);           // rejects when the server cannot be reached
  const content = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw Object.assign(new Error(content.error), { status: answer.status });
  return content;
}

async function change(path, body) {
  if (busy) return;
  const waiting = { path, person: $("person").textContent, body: { ...body, request: newId() } };
  localStorage.setItem(WAITING, JSON.stringify(waiting));
  await deliver(waiting);
}

async function deliver(waiting) {
  busy = true;
  $("submit").disabled = true;
  for (;;) {
    try {
      const next = await call("POST", waiting.path, waiting.body);
      localStorage.removeItem(WAITING);
      busy = false;
      saved("Saved");
      return show(next);
    } catch (error) {
      if (error.status === 401) { busy = false; return ended(error.message, true); }  // it stays here until a new link is opened
      if (error.status && error.status < 500) {
        localStorage.removeItem(WAITING);
        busy = false;
        toast(error.message);
        return load();
      }
      saved("Not saved yet", true);
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

async function load() {
  try {
    show(await call("GET", "/api/task"));
  } catch (error) {
    if (error.status === 401) return ended(error.message);
    message("No connection", "The server does not answer. This page tries again by itself; nothing that was saved is lost.");
    setTimeout(load, RETRY_MS);
  }
}

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));  // randomUUID needs https
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// --- showing

function show(state) {
  const { progress, person } = state;
  const done = progress.ranked + progress.skipped;
  $("bar").style.width = `${progress.total ? (100 * done) / progress.total : 0}%`;
  $("bar").parentElement.setAttribute("aria-valuenow", done);
  $("bar").parentElement.setAttribute("aria-valuemax", progress.total);
  $("count").textContent = `${done} of ${progress.total}`;
  $("person").textContent = person;
  $("undo").disabled = done === 0;
  task = state.task;
  if (!task) {
    message(progress.total ? "All done. Thank you!" : "Nothing to rank yet",
      progress.total ? `You ranked ${progress.ranked} and skipped ${progress.skipped}. You may close this page.` : "Come back later.");
    $("back").hidden = done === 0;
    return;
  }
  $("message").hidden = true;
  $("work").hidden = false;
  order = task.previous ? [...task.previous] : task.candidates.map(() => null);
  shownAt = performance.now();
  $("theme").textContent = task.theme;
  showCriteria(task.criteria);
  showReference();
  document.documentElement.style.setProperty("--columns", Math.min(task.candidates.length, 5));
  draw();
  for (const address of state.ahead) new Image().src = address;
}

function showReference() {
  const image = $("reference").firstElementChild;
  image.onerror = () => { image.alt = "The reference is missing: skip this one"; task.broken = true; draw(); };
  image.src = task.reference;
}

function showCriteria(criteria) {
  const list = $("criteria").querySelector("ul");
  const items = Object.entries(criteria).flatMap(([dimension, named]) => Object.values(named).map((text) => [dimension, text]));
  list.replaceChildren(...items.map(([dimension, text]) => {
    const item = document.createElement("li"), name = document.createElement("b");
    name.textContent = `${dimension}: `;
    item.append(name, text);
    return item;
  }));
  $("criteria").hidden = items.length === 0;
}

function draw() {
  const cards = task.candidates.map((address, slot) => card(address, slot));
  $("slots").replaceChildren(...order.map((slot, place) => {
    const box = document.createElement("li"), label = document.createElement("span");
    box.className = slot === null ? "slot" : "slot filled";
    box.dataset.place = place;
    label.className = "place";
    label.textContent = place + 1;
    box.append(label);
    if (slot !== null) box.append(cards[slot]);
    return box;
  }));
  const left = cards.filter((_, slot) => !order.includes(slot));
  $("pool").replaceChildren(...left);
  $("poolTitle").hidden = $("pool").hidden = left.length === 0;
  $("submit").disabled = busy || order.includes(null) || Boolean(task.broken);
}

const images = new Map();  // by address, so that an image is not loaded again at each drawing

function card(address, slot) {
  const box = document.createElement("div");
  box.className = "card";
  box.dataset.slot = slot;
  box.tabIndex = 0;
  box.setAttribute("role", "button");
  box.setAttribute("aria-label", `Candidate ${slot + 1}`);
  const name = document.createElement("span");
  name.className = "name";
  name.textContent = slot + 1;
  const look = document.createElement("button");
  look.className = "look";
  look.textContent = "⤢";
  look.tabIndex = -1;
  look.title = "Look closer";
  box.append(imageAt(address, slot), name, look);
  if (imageAt(address, slot).dataset.missing) {
    box.classList.add("missing");
    box.replaceChildren(name, "This image is missing. Skip this one.");
  }
  return box;
}

function imageAt(address, slot) {
  if (!images.has(address)) {
    if (images.size > 200) images.clear();
    const image = new Image();
    image.alt = `Candidate ${slot + 1}`;
    image.draggable = false;
    image.onerror = () => { image.dataset.missing = "1"; if (task) { task.broken = true; draw(); } };
    image.src = address;
    images.set(address, image);
  }
  return images.get(address);
}

// --- ranking

function place(slot) {
  const free = order.indexOf(null);
  if (free < 0 || order.includes(slot)) return;
  order[free] = slot;
  finishIfOneIsLeft();
  draw();
}

function finishIfOneIsLeft() {
  const free = order.indexOf(null);
  const left = task.candidates.map((_, slot) => slot).filter((slot) => !order.includes(slot));
  if (left.length === 1 && order.length > 1) order[free] = left[0];
}

function takeBack(slot) {
  order = order.map((other) => (other === slot ? null : other));
  draw();
}

function takeLastBack() {
  for (let place = order.length - 1; place >= 0; place--) {
    if (order[place] !== null) { order[place] = null; return draw(); }
  }
}

function dropOn(slot, target) {
  const before = order.indexOf(slot);
  if (target === null) { if (before >= 0) takeBack(slot); return; }
  const there = order[target];
  if (before >= 0) order[before] = there;   // two places swap
  order[target] = slot;
  if (before < 0) finishIfOneIsLeft();
  draw();
}

function submit() {
  if (!task || $("submit").disabled) return;
  change("/api/rankings", { instance: task.instance, order, seconds: Math.round(performance.now() - shownAt) / 1000 });
}

const undo = () => change("/api/undo", {});

// --- dragging, with a mouse, a pen or a finger

let drag = null;

document.addEventListener("pointerdown", (event) => {
  const box = event.target.closest(".card");
  if (!box || event.button > 0 || event.target.closest(".look")) return;
  drag = { box, slot: Number(box.dataset.slot), x: event.clientX, y: event.clientY, ghost: null, id: event.pointerId };
});

document.addEventListener("pointermove", (event) => {
  if (!drag || event.pointerId !== drag.id) return;
  if (!drag.ghost && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 8) return;
  if (!drag.ghost) lift();
  drag.ghost.style.left = `${event.clientX}px`;
  drag.ghost.style.top = `${event.clientY}px`;
  mark(under(event));
});

document.addEventListener("pointerup", (event) => {
  if (!drag || event.pointerId !== drag.id) return;
  const { slot, ghost } = drag, target = ghost && under(event);
  lower();
  if (!ghost) return order.includes(slot) ? takeBack(slot) : place(slot);
  if (target) dropOn(slot, target.dataset.place === undefined ? null : Number(target.dataset.place));
});

document.addEventListener("pointercancel", () => drag && lower());

function lift() {
  const { width, height } = drag.box.getBoundingClientRect();
  drag.ghost = drag.box.cloneNode(true);
  drag.ghost.classList.add("ghost");
  Object.assign(drag.ghost.style, { width: `${width}px`, height: `${height}px` });
  document.body.append(drag.ghost);
  drag.box.classList.add("lifted");
}

function lower() {
  drag.ghost?.remove();
  drag.box.classList.remove("lifted");
  mark(null);
  drag = null;
}

const under = (event) => document.elementFromPoint(event.clientX, event.clientY)?.closest(".slot, .pool") ?? null;

function mark(target) {
  for (const box of document.querySelectorAll(".over")) box.classList.remove("over");
  target?.classList.add("over");
}

// --- keys and buttons

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || event.altKey || event.metaKey) return;
  const undoing = event.ctrlKey && event.key.toLowerCase() === "z";
  if (event.ctrlKey && !undoing) return;
  const focused = document.activeElement?.closest?.(".card");
  if (undoing) { if (!$("undo").disabled || !$("back").hidden) undo(); }
  else if (event.key === "?") $("keys").showModal();
  else if (!task) return;
  else if (/^[1-9]$/.test(event.key) && Number(event.key) <= task.candidates.length) toggle(Number(event.key) - 1);
  else if (event.key === "Backspace") takeLastBack();
  else if ((event.key === "Enter" || event.key === " ") && focused) toggle(Number(focused.dataset.slot));
  else if (event.key === "Enter" && document.activeElement?.tagName !== "BUTTON") submit();
  else if (event.key.toLowerCase() === "s") openSkip();
  else if (event.key.toLowerCase() === "z") closer(null);
  else return;
  event.preventDefault();
});

const toggle = (slot) => (order.includes(slot) ? takeBack(slot) : place(slot));

function closer(slot) {
  $("closerReference").src = task.reference;
  $("closerCandidate").parentElement.hidden = slot === null;
  if (slot !== null) {
    $("closerCandidate").src = task.candidates[slot];
    $("closerName").textContent = `Candidate ${slot + 1}`;
  }
  $("closer").showModal();
}

function openSkip() {
  $("reason").value = "";
  for (const button of document.querySelectorAll(".reason")) button.classList.remove("chosen");
  $("skipping").showModal();
}

function skipNow() {
  const chosen = document.querySelector(".reason.chosen")?.textContent ?? "";
  const reason = $("reason").value.trim() || chosen;
  if (!reason) return $("reason").focus();
  $("skipping").close();
  change("/api/skips", { instance: task.instance, reason });
}

document.addEventListener("click", (event) => {
  const look = event.target.closest(".look");
  if (look) closer(Number(look.closest(".card").dataset.slot));
});
$("reference").onclick = () => closer(null);
$("submit").onclick = submit;
$("undo").onclick = $("back").onclick = undo;
$("skip").onclick = openSkip;
$("skipNow").onclick = skipNow;
$("clear").onclick = () => { order = order.map(() => null); draw(); };
$("help").onclick = () => $("keys").showModal();
$("reason").onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); skipNow(); } };
for (const button of document.querySelectorAll(".reason")) {
  button.onclick = () => {
    for (const other of document.querySelectorAll(".reason")) other.classList.toggle("chosen", other === button);
  };
}

// --- telling

function message(title, text) {
  task = null;
  $("work").hidden = true;
  $("message").hidden = false;
  $("back").hidden = true;
  $("message").querySelector("h1").textContent = title;
  $("message").querySelector("p").textContent = text;
}

function ended(text, unsaved) {
  const kept = unsaved ? " Your last ranking is kept in this browser and will be saved when you open the new link here." : "";
  message("This link does not open the page", `${text}.${kept}`);
}

let fading = 0;

function saved(text, waiting = false) {
  $("saved").textContent = text;
  $("saved").classList.toggle("waiting", waiting);
  clearTimeout(fading);
  if (!waiting) fading = setTimeout(() => { $("saved").textContent = ""; }, 1500);
}

function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  setTimeout(() => { $("toast").hidden = true; }, 5000);
}

async function start() {
  const waiting = JSON.parse(localStorage.getItem(WAITING) ?? "null");
  if (!waiting) return load();
  try {
    const state = await call("GET", "/api/task");
    return state.person === waiting.person ? deliver(waiting) : show(state);  // another person's waits for its owner
  } catch {
    return load().then(() => task && start());
  }
}

start();
