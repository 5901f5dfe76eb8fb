// Models: what draws, what changes pictures and what judges; LoRAs with strengths; downloads.
"use strict";

const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(1)} GB`;
const plain = (name) => (name === "tiny" ? "practice model" : name);
const OTHER = "another of the hub …";
let catalogue = null;   // what can be chosen, as the server says it
let following = false;

async function openModels() {
  catalogue = await ask("GET", "/api/models");
  if (!catalogue) return;
  drawChoice();
  drawOffers();
  if (catalogue.download?.runs && !following) followDownload();
}

function drawChoice() {
  const chosen = catalogue.chosen, here = (one) => one.name === "tiny" || one.bytes > 0;
  const named = (one) => [one.name, plain(one.name) + (one.name === "tiny" ? ", built in" : here(one) ? "" : " – not here yet")];
  options("chooseModel", catalogue.offers.filter((one) => one.sets).map(named), chosen.model);
  options("chooseEditor", [["", "none"], ...catalogue.offers.filter((one) => one.edits).map(named)], chosen.editor);
  options("chooseJudge", catalogue.offers.filter((one) => one.judges).map(named), chosen.judge);
  options("chooseMemory", [["auto", "by the card"], ["normal", "all of it"], ["low", "less, and slower"], ["lowest", "least, and slowest"]], chosen.memory);
  options("chooseWriter", catalogue.writers.map((name) => [name, name === "template" ? "built in, without a model" : name]), chosen.writer);
  $("loras").replaceChildren();
  for (const [name, strength] of Object.entries(chosen.loras)) addLora(name, strength);
  options("knownLoras", ["", ...catalogue.loras, OTHER].map((name) => [name, name || "choose one"]), "");
  say("noLoras", catalogue.loras.length ? "" : "None was made here yet. The tab Character makes them.");
}

function options(id, pairs, value) {
  const known = pairs.some(([name]) => name === value);
  $(id).replaceChildren(...(known ? pairs : [[value, plain(value)], ...pairs]).map(([name, text]) => make("option", { value: name, textContent: text })));
  $(id).value = value;
}

function addLora(name, strength = 1) {
  const called = name === OTHER ? make("input", { placeholder: "OWNER/NAME of the hub", ariaLabel: "Name of a LoRA of the hub", maxLength: 200 }) : make("span", { textContent: name, className: "what" });
  const shown = make("output", { textContent: Number(strength).toFixed(2) });
  const range = make("input", { type: "range", min: -2, max: 2, step: 0.05, value: strength, ariaLabel: `Strength of ${name}` });
  range.oninput = () => { shown.textContent = Number(range.value).toFixed(2); };
  const item = make("li", {}, called, shown, remover(`Take ${name} away`, () => item.remove()), range);
  item.lora = () => [(called.value ?? name).trim(), Number(range.value)];
  $("loras").append(item);
  if (called.focus && name === OTHER) called.focus();
}

const choice = () => ({
  model: $("chooseModel").value, editor: $("chooseEditor").value, judge: $("chooseJudge").value,
  memory: $("chooseMemory").value, writer: $("chooseWriter").value,
  loras: Object.fromEntries([...$("loras").children].map((item) => item.lora()).filter(([name]) => name)),
});

async function checkMemory() {
  say("modelsError", "");
  say("fit", "Checking …");
  try {
    const job = await call("POST", "/api/models", { ...choice(), check: true });
    follow("fit", job.id, {
      update(now) { say("fit", `${phaseOf(now)} …`); },
      done(now) { say("fit", fitLine(now.result)); },
      failed(message) { say("fit", ""); say("modelsError", message); },
    });
  } catch (error) {
    say("fit", "");
    say("modelsError", error.message);
  }
}

function fitLine(fit) {
  if (!fit.needed) return "The practice models fit every machine.";
  const missing = fit.absent.length ? ` Not here yet: ${fit.absent.join(", ")}, about ${gib(fit.disk)} on the disk, of which ${gib(catalogue.free)} are free.` : "";
  const slow = { normal: "", low: ", with little memory", lowest: ", with the least memory, which is slow" }[fit.memory];
  return (fit.fits ? `It fits: ${gib(fit.needed)} of ${gib(fit.room)}${slow}.` : `It does not fit: it needs ${gib(fit.needed)} even with the least memory, and this machine has ${gib(fit.room)}. Choose a smaller model.`) + missing;
}

async function loadModels() {
  say("modelsError", "");
  try {
    await call("POST", "/api/models", choice());
    await refreshModels();
  } catch (error) {
    say("modelsError", error.message);
  }
}

// A LoRA that was trained here is added to the ones in use, in place of the former ones of the same character.
async function useTrained(name, strength = 1, former = []) {
  const chosen = (await ask("GET", "/api/models"))?.chosen;
  if (!chosen) return false;
  const replaced = Object.keys(chosen.loras).filter((other) => other !== name && former.includes(other));
  for (const other of replaced) delete chosen.loras[other];
  chosen.loras[name] = strength;
  if (!await ask("POST", "/api/models", chosen)) return false;
  if (replaced.length) toast(`${shortName(name)} is used in place of ${replaced.map(shortName).join(", ")}.`);
  refreshModels();
  return true;
}

async function refreshModels() {
  state = await call("GET", "/api/state");
  $("panels").classList.toggle("fixed", Object.keys(state.words).length > 0);
  showWords();
  drawNames();
  setCannot(state.cannot);
  return watchModels();
}

// --- models to fetch

function drawOffers() {
  $("freeDisk").textContent = `${gib(catalogue.free)} are free on the disk. Models are fetched from huggingface.co, and stay here. Cards are planned, not measured: for a page of four and the published judge beside the model.`;
  $("startRule").hidden = !catalogue.offers.some((one) => one.start);
  $("offers").replaceChildren(...catalogue.offers.filter((one) => one.name !== "tiny").sort((a, b) => b.start - a.start).map(offer));
}

function offer(one) {
  const does = [one.sets && "draws pages from words", one.edits && "changes pictures, and draws more of your character", one.judges && "judges which pictures belong together",
    one.learns && `learns your character on a card of ${one.learns} GB`].filter(Boolean).join(", ");
  const size = one.bytes ? `${gib(one.bytes)} on the disk` : `not here yet, download ${one.download ? `about ${gib(one.download)}` : "of unknown size"}`;
  const licence = one.licence ? ` · licence ${one.licence}${one.gated ? ", to be asked for" : ""}` : "";
  const item = make("li", {}, make("b", { textContent: one.name }, ...(one.start ? [make("span", { className: "start", textContent: "start here" })] : [])),
    make("span", { className: "hint", textContent: `${does}.` }), make("span", { className: "hint", textContent: `${cardLine(one)} · ${size}${licence}` }));
  if (!one.bytes) {
    const button = make("button", { type: "button", className: "quiet small", textContent: "Download", ariaLabel: `Download ${one.name}` });
    button.onclick = () => askLicence(one);
    item.append(button);
  }
  return item;
}

function cardLine({ cards, judges }) {
  const [all, least] = [cards.normal, cards.lowest];
  if (judges) return "counted in the cards of the other models";
  if (!least) return "smallest card unknown";
  return `smallest card ${least} GB, ${all ? `${all} GB to hold it whole` : "no card holds it whole"}`;
}

function askLicence(one) {
  $("licenceTitle").textContent = `Download ${one.name}`;
  $("licenceLink").href = `https://huggingface.co/${one.name}`;
  $("licenceLink").textContent = `huggingface.co/${one.name}`;
  $("licenceWords").textContent = one.gated ? `It is given to people who have signed in there and accepted “${one.licence}”. Then make an access token there, and paste it here; it is used for this download and kept nowhere.`
    : `Its licence is ${one.licence || "its own"}. Read it there.`;
  $("tokenField").hidden = !one.gated;
  $("accepted").checked = false;
  $("startDownload").disabled = true;
  say("licenceError", "");
  $("licence").dataset.model = one.name;
  $("licence").showModal();
}

async function startDownload() {
  try {
    await call("POST", "/api/downloads", { model: $("licence").dataset.model, accepted: $("accepted").checked, token: $("token").value.trim() });
  } catch (error) {
    return say("licenceError", error.message);
  } finally {
    $("token").value = "";
  }
  $("licence").close();
  followDownload();
}

async function followDownload() {
  following = true;
  for (;;) {
    const now = (await ask("GET", "/api/models"))?.download;
    $("fetching").hidden = !now;
    if (now) {
      const share = now.total ? Math.min(100, (100 * now.done) / now.total) : 0;
      $("fetchName").textContent = now.runs ? `Downloading ${now.name}` : now.fault || `${now.name} is here`;
      $("fetchShare").textContent = now.total ? `${gib(now.done)} of ${gib(now.total)}` : "";
      $("fetchBar").style.width = `${share}%`;
      $("fetchBar").parentElement.setAttribute("aria-valuenow", Math.round(share));
      $("stopFetching").hidden = !now.runs;
    }
    if (!now?.runs) break;
    await pause(4 * POLL_MS);
  }
  following = false;
  openModels();
}

$("modelsForm").addEventListener("submit", (event) => { event.preventDefault(); loadModels(); });
$("checkMemory").addEventListener("click", checkMemory);
$("knownLoras").addEventListener("change", () => { if ($("knownLoras").value) addLora($("knownLoras").value); $("knownLoras").value = ""; });
$("accepted").addEventListener("change", () => { $("startDownload").disabled = !$("accepted").checked; });
$("licenceForm").addEventListener("submit", (event) => { if (event.submitter?.id === "startDownload") { event.preventDefault(); startDownload(); } });
$("stopFetching").addEventListener("click", () => ask("DELETE", "/api/downloads"));
$("otherModel").addEventListener("click", () => { const name = $("otherName").value.trim(); if (name) askLicence({ name, gated: true, licence: "its own" }); });
