// You are the reward: groups of images are ranked here, and a trainer beside the studio learns from it.
"use strict";

let run = null;         // where the run that is shown stands, as the server says it
let shownGroup = "";    // the group on the screen
let tiers = [];         // lists of images by their place; images of one list are equal
let joins = false;      // whether the next image joins the last list
let polling = false;

const WAITING = {
  starting: "The models are loading. The first group comes in a moment.",
  sampling: "The next group of this round is being sampled.",
  learning: "The model learns from your round and samples the next one.",
};
const isAlive = (one) => one?.status === "ranking" || one?.status in WAITING;

async function openTeaching() {
  if (polling) return;
  polling = true;
  while (!$("teach").hidden) {
    const of = isAlive(run) ? "" : run?.name || "";  // an earlier run that somebody looks at
    const before = shownGroup;
    const answer = await ask("GET", `/api/taste?name=${encodeURIComponent(of)}&group=${encodeURIComponent(before)}`);
    if (answer && before === shownGroup) {  // else a ranking was sent meanwhile, and this is of the time before it
      if (!$("tastePrompts").value) $("tastePrompts").value = answer.example.join("\n");
      drawRuns(answer.runs);
      drawRun(answer.current);
    }
    await pause((isAlive(run) ? 2 : 8) * POLL_MS);
  }
  polling = false;
}

async function ask(method, path, body) {
  try {
    return await call(method, path, body);
  } catch (error) {
    toast(error.message);
    return null;
  }
}

function drawRuns(names) {
  $("runsBox").hidden = names.length === 0;
  if ([...$("runs").children].map((item) => item.textContent).join() === names.join()) return;
  $("runs").replaceChildren(...names.map((name) => make("li", {}, make("button", { type: "button", className: "quiet small", textContent: name, onclick: () => lookAt(name) }))));
}

async function lookAt(name) {
  if (isAlive(run)) return toast(`${run.name} is being taught; stop it to look at another`);
  const answer = await ask("GET", `/api/taste?name=${encodeURIComponent(name)}`);
  if (answer) drawRun(answer.current);
}

function drawRun(now) {
  run = now;
  $("teachEmpty").hidden = Boolean(run);
  $("teaching").hidden = !run;
  if (!run) return;
  const alive = isAlive(run), done = run.status === "done";
  $("teach").classList.toggle("busy", alive);
  if (alive && !state.teaching) watchModels();
  $("teachStop").hidden = !alive;
  $("teachOn").hidden = alive || done;
  $("roundLine").textContent = `${run.name}: ${done ? "done" : `round ${Math.min(run.done + 1, run.rounds)} of ${run.rounds}`}`;
  $("roundRight").textContent = `${run.ranked} ranking${run.ranked === 1 ? "" : "s"}`;
  $("roundBar").style.width = `${(100 * run.done) / run.rounds}%`;
  const meter = $("roundBar").parentElement;
  meter.setAttribute("aria-valuemax", run.rounds);
  meter.setAttribute("aria-valuenow", run.done);
  if (run.error) say("teachError", run.error);
  $("waiting").hidden = !WAITING[run.status];
  $("waitingLine").textContent = WAITING[run.status] || "";
  $("ranking").hidden = !run.task;
  drawTaught(!alive);
  if (!run.task) shownGroup = "";
  else if (run.task.group !== shownGroup) showGroup(run.task);
}

function drawTaught(ended) {
  $("taught").hidden = !ended || !run.adapter || !run.pictures;
  if ($("taught").hidden) return;
  $("taughtPath").textContent = `The LoRA: ${run.adapter}`;
  const drawn = `${run.name} ${run.done}`;
  if ($("pictures").dataset.drawn === drawn) return;
  $("pictures").dataset.drawn = drawn;
  $("pictures").replaceChildren(...["before", "after"].flatMap((when) => Array.from({ length: run.pictures }, (_, i) => {
    const image = enlarging(`/loras/taste/${run.name}/${when}-${i}.png?${run.done}`, `${when}, line ${i + 1}`);
    return make("figure", {}, image, make("figcaption", { textContent: when }));
  })));
}

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

// --- a group

function showGroup(task) {
  shownGroup = task.group;
  joins = false;
  // What was ranked before comes back, when a group is mended.
  const places = [...new Set(task.ranks)].sort((a, b) => a - b);
  tiers = places.map((place) => task.ranks.flatMap((own, i) => (own === place ? [i] : [])));
  $("tastePrompt").textContent = [task.theme || task.prompt, ...task.panels.map((text) => text.replace(`${task.theme}, `, ""))].join(" · ");
  $("tasteQuestion").textContent = `Which do you like best? Group ${run.asked.indexOf(task.group) + 1} of ${run.groups}`;
  $("shots").replaceChildren(...task.images.map(shotCard));
  $("said").textContent = `${task.images.length} images to rank. ${$("tasteQuestion").textContent}`;
  drawRanks();
}

function shotCard(address, index) {
  // No button: Firefox does not let one be dragged.
  const card = make("div", { className: "shot", draggable: true, tabIndex: 0, role: "button", onclick: () => toggle(index) },
    pixelated(make("img", { src: address, alt: "", draggable: false })), make("span", { className: "name", textContent: index + 1 }), make("b", { className: "rank" }));
  card.addEventListener("dragstart", (event) => event.dataTransfer.setData("text/plain", String(index)));
  card.addEventListener("dragover", (event) => { event.preventDefault(); card.classList.add("over"); });
  card.addEventListener("dragleave", () => card.classList.remove("over"));
  card.addEventListener("drop", (event) => {
    event.preventDefault();
    card.classList.remove("over");
    placeBefore(Number(event.dataTransfer.getData("text/plain")), index);
  });
  return make("li", {}, card);
}

const without = (index) => tiers.map((tier) => tier.filter((one) => one !== index)).filter((tier) => tier.length);

function toggle(index) {
  if (!run?.task || index >= run.task.images.length) return;
  if (tiers.flat().includes(index)) tiers = without(index);
  else if (joins && tiers.length) tiers.at(-1).push(index);
  else tiers.push([index]);
  joins = false;
  drawRanks();
}

function placeBefore(dragged, target) {
  if (dragged === target || !run.task.images[dragged]) return;
  tiers = without(dragged);
  const at = tiers.findIndex((tier) => tier.includes(target));
  if (at >= 0) tiers.splice(at, 0, [dragged]);
  else tiers.push([dragged], [target]);
  drawRanks();
}

function takeLastBack() {
  if (tiers.length) tiers = without(tiers.at(-1).at(-1));
  drawRanks();
}

function ranksNow() {
  const ranks = run.task.images.map(() => tiers.length + 1);
  tiers.forEach((tier, place) => tier.forEach((index) => { ranks[index] = place + 1; }));
  return ranks;
}

function drawRanks() {
  const ranks = ranksNow();
  [...$("shots").querySelectorAll(".shot")].forEach((card, index) => {
    const isRanked = ranks[index] <= tiers.length;
    card.classList.toggle("ranked", isRanked);
    card.querySelector(".rank").textContent = isRanked ? ranks[index] : "";
    card.setAttribute("aria-label", `Image ${index + 1}, ${isRanked ? `place ${ranks[index]}` : "not ranked"}`);
  });
  for (const name of ["sendRanks", "undoRank", "equal"]) $(name).disabled = tiers.length === 0;
  $("equal").setAttribute("aria-pressed", String(joins));
  $("backGroup").hidden = run.asked.indexOf(shownGroup) <= 0;
}

async function send(ranks) {
  if (!run?.task) return;
  const next = await ask("POST", `/api/taste/${run.name}/ranks`, { group: run.task.group, ranks });
  if (!next) return;
  shownGroup = "";
  drawRun(next);
}

async function groupBefore() {
  const before = run?.asked[run.asked.indexOf(shownGroup) - 1];
  const answer = before && await ask("GET", `/api/taste?group=${encodeURIComponent(before)}`);
  if (answer?.current?.task) drawRun(answer.current);
}

const allAlike = () => send(run.task.images.map(() => 1));
const joinNext = () => { joins = !joins && tiers.length > 0; drawRanks(); };
const RANKING_KEYS = { 0: allAlike, "=": joinNext, backspace: takeLastBack, b: groupBefore };

function rankByKey(event) {
  if (!run?.task) return;
  const key = event.key.toLowerCase(), on = document.activeElement;
  const shot = [...$("shots").querySelectorAll(".shot")].indexOf(on);
  // Enter on a button is that button's; anywhere else it goes on.
  if (key === "enter" && !on?.closest("button") && tiers.length) send(ranksNow());
  else if (key === " " && shot >= 0) toggle(shot);
  else if (/^[1-9]$/.test(key)) toggle(Number(key) - 1);
  else if (RANKING_KEYS[key]) RANKING_KEYS[key]();
  else return;
  event.preventDefault();
}

// --- the run

async function startTeaching() {
  say("teachError", "");
  try {
    drawRun(await call("POST", "/api/taste", {
      name: $("tasteName").value.trim(),
      prompts: $("tastePrompts").value.split("\n").filter((line) => line.trim()),
      rounds: Number($("rounds").value),
      groups: Number($("groups").value),
      group_size: Number($("groupSize").value),
      judge_share: Number($("judgeShare").value),
    }));
  } catch (error) {
    say("teachError", error.message);
  }
}

const useTaught = async () => { if (await useTrained(`taste/${run.name}`)) open("tabMake"); };

const SURE = "Really stop?";

async function stopTeaching() {
  const button = $("teachStop");
  // Asked for twice, on the button itself, which falls back if it is left.
  if (button.textContent !== SURE) { button.textContent = SURE; return; }
  button.disabled = true;
  button.textContent = "Stopping …";
  await change("stop");
  button.disabled = false;
  button.textContent = "Stop";
}

async function change(what) {
  say("teachError", "");
  const now = await ask("POST", `/api/taste/${run.name}/${what}`, {});
  if (now) drawRun(now);
}

$("teachForm").addEventListener("submit", (event) => { event.preventDefault(); startTeaching(); });
$("judgeShare").addEventListener("input", () => { $("judgeShareValue").textContent = `${Math.round(100 * $("judgeShare").value)} %`; });
$("teachStop").addEventListener("click", stopTeaching);
$("teachStop").addEventListener("blur", () => { if ($("teachStop").textContent === SURE) $("teachStop").textContent = "Stop"; });
$("teachOn").addEventListener("click", () => change("continue"));
$("alike").addEventListener("click", allAlike);
$("equal").addEventListener("click", joinNext);
$("undoRank").addEventListener("click", takeLastBack);
$("backGroup").addEventListener("click", groupBefore);
$("sendRanks").addEventListener("click", () => send(ranksNow()));
$("useTaught").addEventListener("click", useTaught);
