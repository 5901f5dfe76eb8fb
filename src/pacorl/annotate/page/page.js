// The page on which one person ranks. What is on the screen is the server's; what was sent and not yet acknowledged
// waits in this browser and is sent again, under the same request id, until the server says that it has it.
"use strict";

const $ = (id) => document.getElementById(id);
const WAITING = "pacorl.waiting";
const RETRY_MS = 3000;
const LATER_MS = 5000;

let task = null;      // what the server asks
let order = [];       // slots in the order of rank; null for an empty place
let tied = [];        // by place: whether its image is as good as the one before
let filledIn = -1;    // the slot that the page placed by itself, as the last one left; its key does not take it back
let cards = [];       // a candidate's box, by slot
let busy = false;
let awaiting = false; // whether the server is asked again and again for something to do
let keys = false;     // whether the last input came from the keyboard: only then the focus is led on

// --- talking to the server

async function call(method, path, body) {
  const options = { method, headers: {} };
  if (body) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const answer = await fetch(path, options);           // rejects when the server cannot be reached
  const content = await answer.json().catch(() => ({ detail: `the server answered ${answer.status}` }));
  if (!answer.ok) throw Object.assign(new Error(content.detail), { status: answer.status });
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
      saved("Not saved yet: the server does not answer, and the page sends it again by itself", true);
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

// For an adjudicator who has nothing to do: people may come to disagree on more.
async function waitForMore() {
  awaiting = true;
  await new Promise((done) => setTimeout(done, LATER_MS));
  const next = await call("GET", "/api/task").catch(() => null);
  awaiting = false;
  if (task) return;
  if (next?.task) show(next); else waitForMore();
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
    const verb = state.adjudicates ? "decided" : "ranked";
    message(progress.total ? "All done. Thank you!" : "Nothing to rank yet",
      progress.total ? `You ${verb} ${progress.ranked} and skipped ${progress.skipped}. You may close this page.` : "Come back later.");
    $("back").hidden = done === 0;
    if (state.adjudicates && !awaiting) waitForMore();
    return;
  }
  $("message").hidden = true;
  $("work").hidden = false;
  setOrder(task.previous ?? task.candidates.map(() => null));
  cards = task.candidates.map(card);
  showTheme(task.theme);
  showCriteria(task.criteria);
  showReference();
  showOpinions(task.opinions ?? []);
  document.documentElement.style.setProperty("--columns", Math.min(task.candidates.length, 5));
  draw(nextStop());
}

// An order as the server has it: a list within it is a tie.
function setOrder(ranking) {
  order = ranking.flat();
  tied = ranking.flatMap((tier) => [tier].flat().map((_, index) => index > 0));
  filledIn = -1;
}

const ranking = () => order.reduce((tiers, slot, place) => {
  if (tied[place]) tiers.push([tiers.pop(), slot].flat()); else tiers.push(slot);
  return tiers;
}, []);

// Show an image; only after some attempts it is missing, since a network or a server may be away for a moment.
function showImage(image, address, missing, attempts = 5) {
  image.onerror = () => {
    if (attempts) setTimeout(showImage, 3000, image, address, missing, attempts - 1); else missing();
  };
  image.src = address;
}

function showReference() {
  const image = $("reference").firstElementChild;
  showImage(image, task.reference, () => {
    image.alt = "The reference is missing: skip this one";
    task.broken = true;
    draw();
  });
}

// For an adjudicator: everybody's order, each with a button that takes it over.
function showOpinions(opinions) {
  $("opinions").hidden = $("dispute").hidden = opinions.length === 0;
  $("opinions").querySelector("ul").replaceChildren(...opinions.map((opinion) => {
    const item = document.createElement("li"), take = document.createElement("button");
    item.append(opinion.name, take);
    if (opinion.reason) {
      take.replaceWith(Object.assign(document.createElement("span"), { textContent: opinion.reason }));
      return item;
    }
    const letters = opinion.order.map((tier) => [tier].flat().map(letter).join(" = ")).join(" ");
    take.className = "quiet";
    take.append(...opinion.order.flatMap((tier) => [tier].flat().flatMap((slot, index) => {
      const image = Object.assign(new Image(), { alt: letter(slot) });
      showImage(image, task.candidates[slot], () => {});
      return index ? ["=", image] : [image];
    })));
    take.setAttribute("aria-label", `${opinion.name}: ${letters}. Take this order`);
    take.onclick = () => {
      setOrder(opinion.order);
      tell(`The order is ${letters}`);
      draw(nextStop());
      nextStop().focus();  // so that Enter saves, after a click too
    };
    return item;
  }));
}

function showTheme(text) {
  $("theme").textContent = text;
  $("asked").hidden = !text;
  $("theme").classList.remove("whole");
  $("more").setAttribute("aria-expanded", false);
  $("more").textContent = "Show all of it";
  $("more").hidden = $("theme").scrollHeight <= $("theme").clientHeight + 1;
}

function showCriteria(criteria) {
  const items = Object.entries(criteria).flatMap(([dimension, named]) => Object.values(named).map((text) => [dimension, text]));
  $("criteria").querySelector("ul").replaceChildren(...items.map(([dimension, text]) => {
    const item = document.createElement("li"), name = document.createElement("b");
    name.textContent = `${dimension}: `;
    item.append(name, text);
    return item;
  }));
  $("criteria").hidden = items.length === 0;
}

const letter = (slot) => (slot < 26 ? String.fromCharCode(65 + slot) : String(slot + 1));

function ordinal(place) {
  const number = place + 1, teen = number % 100 > 10 && number % 100 < 14;
  return number + (teen ? "th" : { 1: "st", 2: "nd", 3: "rd" }[number % 10] ?? "th");
}

// The rank of a place, as people read it: tied images share the first of their places.
const rank = (place, equal = "equal") => (tied[place] ? `${equal} ${ordinal(tied.lastIndexOf(false, place))}` : ordinal(place));

// Puts every card where it belongs. The cards are moved and never made again, since a new node has no focus.
function draw(focus = document.activeElement) {
  $("slots").replaceChildren(...order.map((slot, place) => {
    const box = document.createElement("li"), label = document.createElement("span");
    box.className = slot === null ? "slot" : "slot filled";
    box.dataset.place = place;
    label.className = "place";
    label.textContent = rank(place, "=");
    box.append(label);
    if (slot !== null) box.append(cards[slot]);
    return box;
  }));
  // A ranked candidate leaves a gap: the others must not slide under the pointer.
  $("pool").replaceChildren(...cards.map((box, slot) => (order.includes(slot) ? gap() : box)));
  $("poolTitle").hidden = $("pool").hidden = unranked().length === 0;
  $("submit").disabled = busy || order.includes(null) || Boolean(task.broken);
  for (const [slot, box] of cards.entries()) {
    const place = order.indexOf(slot);
    box.firstElementChild.setAttribute("aria-label", `Candidate ${letter(slot)}, ${place < 0 ? "not ranked" : `${rank(place)} of ${order.length}`}`);
  }
  $("tie").disabled = tiePlace() < 1;
  $("tie").setAttribute("aria-pressed", Boolean(tied[tiePlace()]));
  if (keys) (focus?.disabled || !focus?.isConnected || focus === document.body ? nextStop() : focus)?.focus({ preventScroll: focus === nextStop() });
}

const gap = () => Object.assign(document.createElement("div"), { className: "gap" });

const unranked = () => task.candidates.map((_, slot) => slot).filter((slot) => !order.includes(slot));

// Where the keyboard goes on: to the next candidate, or to the button that saves.
function nextStop(after = -1) {
  const left = unranked();
  const slot = left.find((other) => other > after) ?? left[0];
  if (slot !== undefined) return cards[slot].firstElementChild;
  return $("submit").disabled && (busy || task.broken) ? $("skip") : $("submit");
}

function card(address, slot) {
  const box = document.createElement("div"), pick = document.createElement("button");
  const image = new Image(), name = document.createElement("span"), look = document.createElement("button");
  box.className = "card";
  box.dataset.slot = slot;
  pick.className = "pick";
  image.alt = "";
  image.draggable = false;
  showImage(image, address, () => {
    box.classList.add("missing");
    image.replaceWith("This image is missing. Skip this one.");
    if (!cards.includes(box)) return;  // of a question that has been answered
    task.broken = true;
    draw();
  });
  name.className = "name";
  name.textContent = letter(slot);
  look.className = "look";
  look.textContent = "⤢";
  look.setAttribute("aria-label", `Look closer at candidate ${letter(slot)}`);
  pick.append(image, name);
  box.append(pick, look);
  return box;
}

// --- ranking

function place(slot) {
  const free = order.indexOf(null);
  if (free < 0 || order.includes(slot)) return;
  order[free] = slot;
  finishIfOneIsLeft();
  tell(`Candidate ${letter(slot)} is ${rank(free)}`);
  draw();
  if (keys) nextStop(slot).focus();
}

function finishIfOneIsLeft() {
  const left = unranked();
  if (left.length !== 1 || order.length < 2) return;
  filledIn = left[0];
  order[order.indexOf(null)] = filledIn;
}

// The place that a tie is about: the next one to be filled, or the last once all are.
const tiePlace = () => (order.includes(null) ? order.indexOf(null) : order.length - 1);

function tie(place = tiePlace()) {
  if (place < 1) return;
  tied[place] = !tied[place];
  tell(`${order[place] === null ? "The next candidate" : `Candidate ${letter(order[place])}`} is ${rank(place)}`);
  draw();
}

function takeBack(slot) {
  const left = order.indexOf(slot);
  tied = tied.map((is, place) => is && place !== left && place !== left + 1);
  order = order.map((other) => (other === slot ? null : other));
  if (slot === filledIn) filledIn = -1;
  tell(`Candidate ${letter(slot)} is taken back`);
  draw(cards[slot].firstElementChild);
}

function takeLastBack() {
  const last = order.findLast((slot) => slot !== null);
  if (last !== undefined) takeBack(last);
}

function dropOn(slot, target) {
  const before = order.indexOf(slot);
  if (target === null) { if (before >= 0) takeBack(slot); return; }
  const there = order[target];
  if (slot === filledIn) filledIn = -1;     // placed by the person now
  if (before >= 0) order[before] = there;   // two places swap
  order[target] = slot;
  if (before < 0) finishIfOneIsLeft();
  tell(`Candidate ${letter(slot)} is ${rank(target)}`);
  draw();
}

// An arrow moves a ranked candidate by a place, and goes from one unranked candidate to the next.
function arrow(slot, step) {
  const before = order.indexOf(slot), left = unranked();
  if (before < 0) return cards[left.at((left.indexOf(slot) + step) % left.length)].firstElementChild.focus();
  if (before + step >= 0 && before + step < order.length) dropOn(slot, before + step);
}

function submit() {
  if (!task || $("submit").disabled) return;
  change("/api/rankings", { instance: task.instance, order: ranking() });
}

async function undo() {
  if (busy) return;
  await change("/api/undo", {});
  if (task) nextStop().focus({ preventScroll: true });  // after a click too: Enter on "Undo last" would undo one more
}

// --- dragging, with a mouse, a pen or a finger

let drag = null;
let dragged = -Infinity;  // when the last drag ended: the click that follows it is none

document.addEventListener("pointerdown", (event) => {
  keys = false;
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
  if (!ghost) return;  // a tap, which is a click
  dragged = event.timeStamp;
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
  keys = true;
  if (document.querySelector("dialog[open]") || event.altKey || event.metaKey) return;
  const undoing = event.ctrlKey && event.key.toLowerCase() === "z";
  if (event.ctrlKey && !undoing) return;
  const focused = document.activeElement?.closest?.(".card");
  const named = task ? candidateOf(event.key) : -1;
  if (undoing) { if (!$("undo").disabled || !$("back").hidden) undo(); }
  else if (event.key === "?") $("keys").showModal();
  else if (!task) return;
  else if (named >= 0) {
    if (order.join() === task.previous?.flat().join()) startOver();
    if (named !== filledIn) toggle(named);  // who types all letters confirms the last one
  }
  else if (event.key === "Backspace") takeLastBack();
  else if (event.key === "=") tie(focused && order.includes(Number(focused.dataset.slot)) ? order.indexOf(Number(focused.dataset.slot)) : tiePlace());
  else if (event.key === "Enter" && document.activeElement === document.body) submit();
  else if (/^Arrow(Left|Right)$/.test(event.key) && focused) arrow(Number(focused.dataset.slot), event.key === "ArrowLeft" ? -1 : 1);
  else if (event.key.toLowerCase() === "s") openSkip();
  else if (event.key.toLowerCase() === "z") closer(focused ? Number(focused.dataset.slot) : null);
  else return;
  event.preventDefault();
});

// The slot that a key names, by its letter or its number; -1 for none. Beyond I, letters are commands.
function candidateOf(key) {
  const slot = /^[1-9]$/.test(key) ? Number(key) - 1 : "abcdefghi".indexOf(key.toLowerCase());
  return key.length === 1 && slot < task.candidates.length ? slot : -1;
}

function startOver() {
  task.previous = null;
  setOrder(order.map(() => null));
}

const toggle = (slot) => (order.includes(slot) ? takeBack(slot) : place(slot));

let closerSlot = null;

function closer(slot) {
  $("closerReference").src = task.reference;
  closerSlot = slot;
  $("closerCandidate").parentElement.hidden = slot === null;
  if (slot !== null) {
    $("closerCandidate").src = task.candidates[slot];
    $("closerCandidate").alt = $("closerName").textContent = `Candidate ${letter(slot)}`;
  }
  if (!$("closer").open) $("closer").showModal();
}

function turn(step) {
  const count = task.candidates.length;
  closer(closerSlot === null ? (step > 0 ? 0 : count - 1) : (closerSlot + step + count) % count);
}

const skipForm = $("skipping").querySelector("form");

function openSkip() {
  skipForm.reset();
  needReason();
  $("skipping").showModal();
}

// Own words take the place of a reason from the list.
function needReason() {
  skipForm.elements.reason[0].required = !$("words").value.trim();
}

function skipNow() {
  change("/api/skips", { instance: task.instance, reason: $("words").value.trim() || skipForm.elements.reason.value });
}

document.addEventListener("click", (event) => {
  const box = event.target.closest(".card");
  if (!box || event.timeStamp - dragged < 50) return;
  if (event.target.closest(".look")) closer(Number(box.dataset.slot));
  else toggle(Number(box.dataset.slot));
});
$("more").onclick = () => {
  const whole = $("theme").classList.toggle("whole");
  $("more").setAttribute("aria-expanded", whole);
  $("more").textContent = whole ? "Show less" : "Show all of it";
};
$("reference").onclick = () => closer(null);
$("earlier").onclick = () => turn(-1);
$("later").onclick = () => turn(1);
$("closer").onkeydown = (event) => {
  if (/^Arrow(Left|Right)$/.test(event.key)) turn(event.key === "ArrowLeft" ? -1 : 1);
};
$("submit").onclick = submit;
$("undo").onclick = $("back").onclick = undo;
$("skip").onclick = openSkip;
$("stay").onclick = () => $("skipping").close();
$("words").oninput = needReason;
skipForm.onsubmit = skipNow;
skipForm.onkeydown = (event) => {
  const reason = event.target === $("words") ? null : skipForm.elements.reason[event.key - 1];
  if (reason) { reason.checked = true; reason.focus(); }
};
$("clear").onclick = () => { startOver(); draw(); };
$("tie").onclick = () => tie();
$("help").onclick = () => $("keys").showModal();

// --- telling

function message(title, text) {
  task = null;
  $("work").hidden = true;
  $("message").hidden = false;
  $("back").hidden = true;
  $("message").querySelector("h1").textContent = title;
  $("message").querySelector("p").textContent = text;
  if (keys) $("message").querySelector("h1").focus();
}

function ended(text, unsaved) {
  const kept = unsaved ? " Your last ranking is kept in this browser and will be saved when you open the new link here." : "";
  message("This link does not open the page", `${sentence(text)}.${kept}`);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const tell = (text) => { $("news").textContent = `${text}. ${unranked().length} left.`; };

let fading = 0;

function saved(text, waiting = false) {
  $("saved").textContent = text;
  $("saved").classList.toggle("waiting", waiting);
  clearTimeout(fading);
  if (!waiting) fading = setTimeout(() => { $("saved").textContent = ""; }, 1500);
}

function toast(text) {
  $("toast").textContent = sentence(text);
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

$("criteria").open = innerWidth > 820;  // on a phone it would push the candidates below the fold
start();
