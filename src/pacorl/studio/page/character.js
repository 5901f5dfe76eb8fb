// My character: dropped pictures, a sheet by the editor, a LoRA of it, its gallery.
"use strict";

let people = [];        // all characters, as the server describes them
let who = "";           // the one on the screen; empty for a new one
let dropped = [];       // uploads of a character that is not saved yet
let sheet = null;       // the newest sheet
let picked = {};        // picture of the sheet → the chosen candidate
let ticked = {};        // picture of the sheet → whether a person keeps it; by its score otherwise
let suggested = "";     // the lines of a sheet as the page filled them in
let watching = false;
let changes = 0;        // counts requests that change a character: a list from before one is out of date
let saving = Promise.resolve(true);

// A folder's name has underscores in place of spaces.
const spaced = (name) => name.replaceAll("_", " ");

const person = () => people.find((one) => one.name === who);

async function listPeople() {
  const before = changes, listed = await ask("GET", "/api/characters");
  if (listed && before === changes) people = listed;
}

async function openCharacters() {
  await listPeople();
  if (!who && people.length && !dropped.length) who = people[0].name;
  drawPeople();
  drawSaving();
  if (who && !sheet) findSheet();
  if (!watching) watchTraining();
}

function drawPeople() {
  const names = [...people.map((one) => one.name), ""];
  $("people").replaceChildren(...names.map((name) => {
    const button = make("button", { type: "button", className: "quiet small", textContent: spaced(name) || "New character", onclick: () => lookAtPerson(name) });
    button.setAttribute("aria-pressed", String(name === who));
    return make("li", {}, button);
  }));
  const one = person();
  $("personName").value = one ? spaced(one.name) : $("personName").value;
  $("personName").readOnly = Boolean(one);
  if (one && $("personWords").dataset.of !== who) $("personWords").value = one.description;
  $("personWords").dataset.of = who;
  $("savePerson").textContent = one ? "Save the changes" : "Make this character";
  $("forgetPerson").hidden = !one;
  $("personEmpty").hidden = Boolean(one);
  $("personSteps").hidden = !one;
  say("personNote", one?.note || "");
  drawDropped();
  if (one) {
    drawPictures(one);
    drawSheet();
    drawTraining(one);
  }
  fillPeople();
}

async function lookAtPerson(name) {
  if (!await saveCaptions()) return;
  if (name !== who) {
    sheet = null;
    picked = {};
    ticked = {};
    suggested = "";
    $("sheetScenes").replaceChildren();
    $("personName").value = "";
    if (!name) $("personWords").value = "";
  }
  who = name;
  drawPeople();
  if (name) findSheet();
  else $("personName").focus();
}

function drawDropped() {
  $("dropped").replaceChildren(...dropped.map((one) => make("li", { title: one.name }, make("img", { src: one.image, alt: one.name }), one.name,
    remover(`Take ${one.name} away`, async () => { await takeBack(one.id); dropped = dropped.filter((other) => other.id !== one.id); drawDropped(); }))));
  enableSaving();
}

function enableSaving() {
  const one = person();
  $("savePerson").disabled = arriving > 0 || Boolean(one && !dropped.length && $("personWords").value.trim() === one.description);
}

async function savePerson() {
  say("personError", "");
  const name = who || $("personName").value.replaceAll("/", " ").trim();
  try {
    if (!name) throw new Error("give the character a name, such as hero");
    if (!who && !dropped.length) throw new Error("there is no picture yet; drop one or more");
    const now = await changePerson(name, { description: $("personWords").value, is_new: !who, uploads: dropped.map((one) => one.id) });
    uploads = uploads.filter((one) => !dropped.includes(one));
    dropped = [];
    who = now.name;
    openCharacters();
  } catch (error) {
    say("personError", error.message);
  }
}

async function changePerson(name, change) {
  changes += 1;
  const now = await call("POST", `/api/characters/${encodeURIComponent(name)}`, { description: person()?.description, ...change });
  changes += 1;
  people = [...people.filter((one) => one.name !== now.name), now].sort((a, b) => (a.name < b.name ? -1 : 1));
  return now;
}

async function forgetPerson() {
  const button = $("forgetPerson");
  if (button.textContent !== "For good?") { button.textContent = "For good?"; return; }
  const left = await ask("DELETE", `/api/characters/${encodeURIComponent(who)}`);
  button.textContent = "Delete this character";
  if (!left) return;
  people = left;
  $("personPictures").replaceChildren();
  lookAtPerson("");
}

// --- 1. pictures

function drawPictures(one) {
  $("pictureCount").textContent = `${one.pictures.length} picture${one.pictures.length === 1 ? "" : "s"}. Five to twenty, in different poses and places, teach it best. Say under each what differs: pose, place, light. Your words are saved while you write.`;
  // The practice judge has no words.
  $("describePictures").hidden = state.tiny.judge || one.pictures.every((picture) => picture.caption);
  $("describePictures").disabled = Boolean(running.captions);
  const list = $("personPictures"), old = new Map([...list.children].map((item) => [item.address, item]));
  const items = one.pictures.map((picture) => old.get(addressOf(one, picture)) || pictureItem(addressOf(one, picture), picture.file));
  for (const item of old.values()) if (!items.includes(item)) item.remove();
  items.forEach((item, i) => {
    // No item is drawn anew: the box that a person types in would lose its focus.
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] || null);
    item.show(one.pictures[i].caption, i + 1);
  });
}

const addressOf = (one, picture) => `/characters/${one.name}/${picture.file}?${picture.version}`;

function pictureItem(address, file) {
  const image = pixelated(make("img", { src: address }));
  const caption = make("textarea", { rows: 2, maxLength: 1000, placeholder: "waving, at night", onchange: saveCaptions, oninput: saveSoon });
  const away = remover("", () => savePicture({ removed: [file] }));
  const front = make("button", { type: "button", className: "quiet small", textContent: "Make this the first", onclick: () => makeFirst(file) });
  const item = make("li", { address }, image, away, caption, front);
  Object.assign(caption, { file, saved: "" });
  caption.onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); saveCaptions(); } };
  item.show = (text, number) => {
    if (caption.value.trim() === caption.saved && text !== caption.saved) caption.value = text;
    caption.saved = text;
    caption.ariaLabel = `What picture ${number} shows`;
    away.title = away.ariaLabel = `Remove picture ${number}`;
    front.ariaLabel = `Make picture ${number} the first`;
    front.hidden = number === 1;
    image.alt = text || `picture ${number}`;
  };
  return item;
}

async function makeFirst(file) {
  if (!await saveCaptions()) return;
  changes += 1;
  const now = await ask("POST", `/api/characters/${encodeURIComponent(who)}/first`, { picture: file });
  changes += 1;
  if (!now) return;
  people = people.map((one) => (one.name === now.name ? now : one));
  drawPeople();
  $("personPictures").querySelector("textarea").focus();
  $("said").textContent = "It is the first picture now.";
}

const unsaved = () => [...$("personPictures").querySelectorAll("textarea")].filter((box) => box.value.trim() !== box.saved);

function saveSoon() {
  clearTimeout(saveSoon.timer);
  saveSoon.timer = setTimeout(saveCaptions, 4 * POLL_MS);
}

// One request after the other, so that an answer is never older than the boxes; false if words could not be saved.
function saveCaptions() {
  clearTimeout(saveSoon.timer);
  saving = saving.then(async () => {
    const captions = Object.fromEntries(unsaved().map((box) => [box.file, box.value.trim()]));
    return !Object.keys(captions).length || savePicture({ captions });
  });
  return saving;
}

async function savePicture(change) {
  try {
    await changePerson(who, change);
    drawPeople();
    return true;
  } catch (error) {
    toast(error.message);
    return false;
  }
}

async function describePictures() {
  say("captionError", "");
  try {
    const job = await call("POST", `/api/characters/${encodeURIComponent(who)}/captions`);
    const ended = (text) => { $("describePictures").textContent = "Let the judge describe them"; say("captionError", text); openCharacters(); };
    $("describePictures").disabled = true;
    follow("captions", job.id, {
      update(now) { $("describePictures").textContent = `${phaseOf(now)} …`; },
      done() { ended(""); },
      failed: ended,
    });
  } catch (error) {
    say("captionError", error.message);
  }
}

// --- 2. the sheet

async function findSheet() {
  const sets = await ask("GET", "/api/history");
  const newest = sets?.find((one) => one.kind === "sheet" && one.theme === who);
  if (newest) showSheet(await ask("GET", `/api/history/${newest.id}`));
}

function showSheet(result) {
  if (!result || result.theme !== who) return;
  // Of a picture that was drawn again the best new one is shown; the choice among the others stays.
  const had = new Set((sheet?.candidates || []).map((one) => one.image));
  const fresh = result.candidates.filter((one) => !had.has(one.image));
  for (const one of fresh.reverse()) picked[one.picture] = one.image;
  sheet = result;
  suggested = "";
  fillRows("sheetScenes", result.asked.scenes, "Picture");
  drawSheet();
}

function drawSheet() {
  suggestScenes();
  say("sheetCannot", state.cannot?.edit || "");
  $("sheetPictures").replaceChildren(...(sheet ? sheet.asked.scenes.map(sheetPicture) : []));
  $("keepSheet").hidden = !sheet;
  const practises = state.editor === "tiny";
  $("sheetWorld").hidden = !practises || Boolean(state.cannot?.edit);
  const failed = sheet?.candidates.every((one) => !(one.score >= LEAST_KEPT));
  say("sheetNote", !failed ? "" : `None of these is your character. ${practises ? "The practice model can only draw heroes of its own world: for art of your own load a model under Models, and draw the sheet again."
    : "Draw 8 for each, or make another picture the first one under “1. Pictures”."}`);
  enableSheet();
  drawSaving();
}

const LEAST_KEPT = 0.5;

const marked = () => [...$("sheetPictures").querySelectorAll("input:checked")].map((box) => box.dataset.image);

// The pictures that are marked to be kept, or else the character's own.
function drawSaving() {
  const images = sheet ? marked() : [];
  $("saveSheet").hidden = !images.length && !(person()?.pictures.length > 1);
  $("saveSheet").textContent = images.length ? "Save the sheet: the first picture and the kept ones" : "Save a sheet of its own pictures";
  $("saveSheet").href = images.length ? `/sheets/${sheet.id}.png?${images.map((image) => `image=${image}`).join("&")}` : `/sheets/of/${who}.png`;
  $("saveSheet").download = `${who}-sheet.png`;
}

function enableSheet() {
  const busy = Boolean(running.sheet || state.teaching || learns(person()?.training));
  $("drawSheet").disabled = busy || Boolean(state.cannot?.edit);
  for (const button of $("sheetPictures").querySelectorAll(".again")) button.disabled = busy;
}

// Lines that do not ask for what the first picture shows, as far as the words are known; a person's own lines stay.
function suggestScenes() {
  if (rows("sheetScenes").join("\n") !== suggested || $("sheetScenes").contains(document.activeElement)) return;
  const known = Object.values(state.words).flat(), wordsOf = (text) => text.toLowerCase().split(/[^a-z-]+/).filter((word) => known.includes(word));
  const shown = wordsOf(`${person()?.description} ${person()?.pictures[0]?.caption}`);
  const lines = state.sheet.filter((line) => !wordsOf(line).some((word) => shown.includes(word))).slice(0, 4);
  if (lines.join("\n") !== suggested) fillRows("sheetScenes", lines, "Picture");
  suggested = lines.join("\n");
}

function sheetPicture(scene, i) {
  const all = sheet.candidates.filter((one) => one.picture === i), best = all.find((one) => one.image === picked[i]) || all[0];
  const url = (one) => `${sheet.images}/${one.image}.png`;
  const keep = make("input", { type: "checkbox", checked: ticked[i] ?? best.score >= LEAST_KEPT, onchange: () => { ticked[i] = keep.checked; drawSaving(); }, ariaLabel: `Keep picture ${i + 1}` });
  keep.dataset.image = best.image;
  const again = make("button", { type: "button", className: "quiet small again", textContent: "This picture again", ariaLabel: `Picture ${i + 1} again`, onclick: () => drawTheSheet(i) });
  const others = all.map((one, n) => {
    const small = make("button", { type: "button", className: "thumb", ariaLabel: `Picture ${i + 1}, number ${n + 1}, score ${number(one.score)}`, onclick: () => { picked[i] = one.image; drawSheet(); } }, pixelated(make("img", { src: url(one), alt: "" })));
    small.setAttribute("aria-pressed", String(one === best));
    return small;
  });
  return make("li", {}, pixelated(make("img", { src: url(best), alt: scene })), make("span", { className: "hint", textContent: `${scene} · score ${number(best.score)}` }),
    make("div", { className: "links" }, ...others), make("div", { className: "links" }, make("label", { className: "check" }, keep, " keep"), again));
}

async function drawTheSheet(again = null) {
  if (running.sheet) return;
  say("sheetError", "");
  const asked = { scenes: rows("sheetScenes"), candidates: Number($("sheetCandidates").value || 4) };
  try {
    const job = await call("POST", `/api/characters/${encodeURIComponent(who)}/sheet`, again === null ? asked : { ...asked, again: sheet.id, picture: again });
    watchSheet(job.id);
  } catch (error) {
    say("sheetError", error.message);
  }
}

function watchSheet(id) {
  const ended = () => { $("sheetProgress").hidden = true; drawSheet(); };
  follow("sheet", id, {
    update(job) {
      $("sheetProgress").hidden = false;
      $("drawSheet").disabled = true;
      $("sheetPhase").textContent = phaseOf(job);
      $("sheetBar").style.width = job.total ? `${(100 * job.done) / job.total}%` : "";
      $("sheetBar").parentElement.setAttribute("aria-valuenow", job.total ? Math.round((100 * job.done) / job.total) : 0);
    },
    done(job) { ended(); showSheet(job.result); $("said").textContent = `The sheet of ${job.result.theme} is drawn.`; },
    failed(message) { ended(); say("sheetError", message); },
  });
}

async function keepSheet() {
  const kept = marked();
  if (!kept.length) return say("sheetError", "No picture is marked “keep”.");
  say("sheetError", "");
  ticked = Object.fromEntries(sheet.asked.scenes.map((_, i) => [i, false]));  // each is added once
  await savePicture({ sheet: kept, of: sheet.id });
  toast(`${kept.length} pictures were added to ${who}.`);
}

// --- 3. teaching

const LEARNING = { starting: "Getting ready", learning: "Learning", stopped: "Stopped", done: "Learned", failed: "It failed" };
const learns = (training) => ["starting", "learning"].includes(training?.status);

async function watchTraining() {
  watching = true;
  while (!$("character").hidden) {
    const before = person()?.training;
    if (learns(before)) {
      await listPeople();
      const one = person();
      if (one) drawTraining(one);
      if (!learns(one?.training)) $("said").textContent = `${who}: ${LEARNING[one?.training?.status]}`;
    }
    await pause((learns(before) ? 4 : 8) * POLL_MS);
  }
  watching = false;
}

function drawTraining(one) {
  const training = one.training, alive = learns(training), short = one.least - one.pictures.length;
  const bare = one.pictures.filter((picture) => !picture.caption).length;
  say("trainHint", short > 0 ? `Add ${short} more picture${short === 1 ? "" : "s"}: at least ${one.least} are needed.`
    : bare ? `${bare} of ${one.pictures.length} pictures have no words under them: they are learned from “What it looks like” alone.` : "");
  $("train").disabled = alive || short > 0;
  enableSheet();
  const pace = training?.seconds_per_step ?? people.map((other) => other.training?.seconds_per_step).find(Boolean);
  $("trainSteps").placeholder = one.steps ? `${one.steps}${pace ? `, about ${minutes(one.steps * pace)}` : ""}` : "usual";
  $("train").textContent = alive ? "Teaching …" : training ? "Teach it anew" : "Teach it";
  $("stopTraining").hidden = !alive;
  $("resumeTraining").hidden = !training || alive || training.status === "done";
  $("resumeTraining").textContent = training ? `Go on to step ${training.steps}` : "Go on";
  $("trainProgress").hidden = !training;
  $("gallery").hidden = !training?.lora || alive;
  say("trainError", training?.error || "");
  say("useNote", one.note);
  if (!training) return;
  const share = (100 * training.done) / training.steps;
  $("trainPhase").textContent = training.status === "starting" ? "Getting ready: the model loads, and draws what it knows without your character"
    : `${LEARNING[training.status]}: step ${training.done} of ${training.steps}${alive ? timeLeft(training) : ""}`;
  const last = training.losses.at(-1), first = training.losses[0];
  $("trainLoss").textContent = last && last !== first ? `how far off it is on a picture kept aside, 0 is best: ${first[1].toFixed(3)} at first, ${last[1].toFixed(3)} now` : "";
  $("trainBar").className = training.status === "starting" ? "unsure" : "";
  $("trainBar").style.width = training.status === "starting" ? "" : `${share}%`;
  $("trainBar").parentElement.setAttribute("aria-valuenow", Math.round(share));
  if ($("gallery").hidden) return;
  const drawn = `${training.name} ${training.done}`, called = spaced(training.name);
  if ($("galleryPictures").dataset.drawn === drawn) return;
  $("galleryPictures").dataset.drawn = drawn;
  // The pictures with the LoRA are drawn after the last step.
  const whens = training.status === "done" ? ["before", "after"] : ["before"];
  $("galleryNote").textContent = training.status === "done" ? `Each pair is drawn from the words under it, and with the same seed. Left: the model as it was. Right: the same model with ${called}, the LoRA that it learned, at full strength. Click a picture to enlarge it. ${advice(training)}`
    : `Drawn without ${called}, which has learned ${training.done} of ${training.steps} steps. “Use it in Make” shows what it can do by now; “Go on” teaches the rest, and then draws these with it.`;
  $("galleryPictures").replaceChildren(...training.pictures.map((text, i) => make("figure", {}, ...whens.map((when) =>
    enlarging(`/loras/${training.name}/${when}-${i}.png?${training.done}`, `${when === "before" ? "without" : "with"} ${called}: ${text}`)), make("figcaption", { textContent: text }))));
}

function advice({ losses }) {
  const worse = losses.length > 1 && losses.at(-1)[1] >= losses[0][1];
  return `${worse ? "On the picture kept aside it did not get better: add pictures, or teach it with fewer steps. " : ""}If the right ones look worse, use it in Make and try strength 0.25.`;
}

function minutes(seconds) {
  const count = Math.ceil(seconds / 60);
  return count === 1 ? "a minute" : `${count} minutes`;
}

const timeLeft = ({ seconds_per_step: pace, done, steps }) => (pace && done >= 5 && done < steps ? `, about ${minutes((steps - done) * pace)} left` : "");

async function train(resume = "") {
  say("trainError", "");
  const steps = $("trainSteps").value;
  if (!await saveCaptions()) return;
  try {
    const now = await call("POST", `/api/characters/${encodeURIComponent(who)}/train`, { resume, steps: steps ? Number(steps) : null });
    people = people.map((one) => (one.name === who ? now : one));
    drawPeople();
    watchModels();
  } catch (error) {
    say("trainError", error.message);
  }
}

async function stopTraining() {
  $("stopTraining").disabled = true;
  await ask("POST", `/api/characters/${encodeURIComponent(who)}/stop`, {});
  $("stopTraining").disabled = false;
  openCharacters();
}

async function useLora() {
  const one = person();
  // The practice model learns single pictures, and draws pages of four: at full strength it forgets pages.
  if (!await useTrained(`loras/${one.training.name}`, state.tiny.model ? 0.5 : 1, one.loras)) return;
  open("tabMake");
  setMode("set");
  $("who").value = one.name;
  chooseWho();
}

// --- characters in Make

function fillPeople() {
  const now = $("who").value;
  for (const [id, none] of [["who", "nobody in particular"], ["keepWho", "a new character"]]) {
    $(id).replaceChildren(make("option", { value: "", textContent: none }), ...people.map((one) => make("option", { value: one.name, textContent: spaced(one.name) })));
  }
  $("who").value = known(now) ? now : "";
  drawKeeping();
  $("whoField").hidden = people.length === 0;
}

const known = (name) => people.some((one) => one.name === name);

let keeper = null;      // the set whose panels a person gave to a character, and its name

// Panels of a made page become pictures of a character, with their lines as captions.
function drawPanels(one) {
  const canKeep = Boolean(shown.id) && shown.kind !== "sheet";
  $("keepBox").hidden = !canKeep;
  $("texts").replaceChildren(...one.panels.map((text, i) => {
    const keep = make("button", { type: "button", className: "quiet small", textContent: "Keep", ariaLabel: `Keep panel ${i + 1} as a picture of the character`, onclick: () => keepPanel(i, keep) });
    const again = make("button", { type: "button", className: "quiet small", textContent: "Draw this one again", ariaLabel: `Draw panel ${i + 1} again`, onclick: () => redrawPanel(i) });
    const canRedraw = canKeep && !cannot.set && panelsOf(one).length > 1;
    return make("li", {}, make("span", { textContent: text }), ...(canKeep ? [" ", keep] : []), ...(canRedraw ? [" ", again] : []));
  }));
  drawKeeping();
}

// What a person has chosen for the shown set, or the set's own character, or the one of the last Keep.
function drawKeeping() {
  const own = keeper?.set === shown ? keeper.name : shown?.asked?.character || keeper?.name;
  $("keepWho").value = known(own) ? own : "";
  $("keepName").hidden = $("keepWho").value !== "";
}

async function keepPanel(panel, button) {
  const typed = $("keepName").value.trim(), same = people.find((one) => spaced(one.name) === spaced(typed));
  const name = $("keepWho").value || same?.name || typed, isNew = !known(name);
  if (!name) { toast("Give the new character a name first."); return $("keepName").focus(); }
  const before = people.find((one) => one.name === name), one = shown.candidates[chosen];
  button.disabled = true;
  try {
    const now = await changePerson(name, {
      description: isNew ? one.recipe.theme || shown.theme : before.description, is_new: isNew,
      of: shown.id, candidate: chosen, panels: [panel],
    });
    keeper = { set: shown, name: now.name };
    fillPeople();
    button.textContent = "Kept";
    const had = (before?.pictures || []).map((picture) => picture.file), added = now.pictures.find((picture) => !had.includes(picture.file));
    const undo = make("button", { type: "button", className: "quiet small", textContent: "Undo", onclick: () => takeOut(now.name, added.file, button) });
    toast(`Panel ${panel + 1} is picture ${now.pictures.length} of ${spaced(now.name)}. `, true, undo);
  } catch (error) {
    button.disabled = false;
    toast(error.message);
  }
}

// A character with no other picture was made by this one.
async function takeOut(name, picture, button) {
  const one = people.find((other) => other.name === name), path = `/api/characters/${encodeURIComponent(name)}`;
  try {
    if (one.pictures.length > 1) await changePerson(name, { description: one.description, removed: [picture] });
    else people = await call("DELETE", path);
    if (!known(keeper?.name)) keeper = null;
    if (!known(who)) who = "";
    button.disabled = false;
    button.textContent = "Keep";
    drawPeople();
    toast(`${spaced(name)} is as it was before.`);
  } catch (error) {
    toast(error.message);
  }
}

async function redrawPanel(panel) {
  if (running.set) return toast("Something is being drawn; wait for it, or cancel it.");
  try {
    const job = await call("POST", `/api/history/${shown.id}/panels`, { candidate: chosen, panel });
    location.hash = "";
    watchSet(job.id);
  } catch (error) {
    toast(error.message);
  }
}

function chooseWho() {
  const one = people.find((other) => other.name === $("who").value);
  if (one) $("theme").value = one.description;
  say("formError", one?.note || "");
  $("formError").scrollIntoView({ block: "nearest" });
}

$("personForm").addEventListener("submit", (event) => { event.preventDefault(); savePerson(); });
$("personWords").addEventListener("input", enableSaving);
$("forgetPerson").addEventListener("click", forgetPerson);
$("forgetPerson").addEventListener("blur", () => { $("forgetPerson").textContent = "Delete this character"; });
$("addSheetScene").addEventListener("click", () => addRow("sheetScenes", "Picture").focus());
$("describePictures").addEventListener("click", describePictures);
$("drawSheet").addEventListener("click", () => drawTheSheet());
$("sheetCancel").addEventListener("click", () => cancel("sheet"));
$("keepSheet").addEventListener("click", keepSheet);
$("train").addEventListener("click", () => train());
$("resumeTraining").addEventListener("click", () => train(person().training.name));
$("stopTraining").addEventListener("click", stopTraining);
$("sheetModels").addEventListener("click", () => open("tabModels"));
$("useLora").addEventListener("click", useLora);
$("who").addEventListener("change", chooseWho);
$("keepWho").addEventListener("change", () => { keeper = { set: shown, name: $("keepWho").value }; drawKeeping(); });
addEventListener("beforeunload", (event) => {
  if (!unsaved().length) return;
  saveCaptions();
  event.preventDefault();
});
$("startCharacter").addEventListener("click", () => { open("tabCharacter"); lookAtPerson(""); });
