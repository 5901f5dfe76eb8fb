// The sets that the studio keeps: a grid of them, each opened again by a click or by its address.
"use strict";

const when = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

let drawn = "";
let kept = [];          // the sets, as the server lists them

async function drawHistory(sets = null) {
  try {
    sets ??= await call("GET", "/api/history");
  } catch (error) {
    return toast(error.message);
  }
  kept = sets;
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), starred = $("onlyFavourites").checked;
  const found = sets.filter((one) => (one.favourite || !starred) && words.every((word) => `${one.theme} ${one.words}`.toLowerCase().includes(word)));
  const content = JSON.stringify(found);
  if (content === drawn) return;  // a card that is made anew would lose the focus and its "For good?"
  drawn = content;
  $("historyHint").textContent = sets.length
    ? `${found.length === sets.length ? "" : `${found.length} found. `}${sets.length} of at most ${state.limits.sets}, newest first. They stay on this machine, and outlast the studio; favourites are never removed for newer ones.`
    : "Nothing yet. Every set that you make is kept here, and outlasts the studio.";
  $("sets").replaceChildren(...found.map(setCard));
}

const COUNTED = { set: "candidate", edit: "candidate", storyboard: "page", sheet: "picture" };

function setCard(one) {
  const image = pixelated(make("img", { src: `/sets/${one.id}/${one.image}.png`, alt: "", loading: "lazy" }));
  const counted = `${one.count} ${COUNTED[one.kind]}${one.count === 1 ? "" : "s"}`;
  const link = make("a", { href: `#set-${one.id}`, title: one.theme }, image,
    make("span", { className: "what", textContent: one.theme }),
    make("span", { className: "hint", textContent: `${number(one.score)} · ${counted} · ${when.format(new Date(one.made))}` }));
  const away = make("button", { type: "button", className: "quiet small", textContent: "Delete" });
  away.setAttribute("aria-label", `Delete ${one.theme}`);
  away.onclick = () => {
    // Asked for twice, on the button itself, which falls back if it is left.
    if (away.textContent === "Delete") { away.textContent = "For good?"; return; }
    forget(one.id);
  };
  away.onblur = () => { away.textContent = "Delete"; };
  const star = starButton(one.favourite, `Favourite: ${one.theme}`, (on) => mark(one.id, on));
  return make("li", {}, link, make("div", { className: "links" }, star, away));
}

function starButton(on, name, change) {
  const button = make("button", { type: "button", className: "quiet small star", textContent: on ? "★" : "☆", onclick: () => change(!on) });
  button.setAttribute("aria-label", name);
  button.setAttribute("aria-pressed", String(on));
  return button;
}

async function mark(id, favourite) {
  const sets = await ask("POST", `/api/history/${id}`, { favourite });
  if (!sets) return;
  const onStar = document.activeElement?.matches("#sets .star");
  drawHistory(sets);
  drawFavourite();
  // The cards are made anew: the focus goes to the same star, or if its card is gone to the filter.
  if (onStar) ($("sets").querySelector(`a[href="#set-${id}"]`)?.closest("li").querySelector(".star") || $("onlyFavourites")).focus();
}

async function drawFavourite() {
  const id = shown?.id, one = kept.find((other) => other.id === id);
  $("favourite").hidden = !id;
  $("favourite").setAttribute("aria-pressed", String(Boolean(one?.favourite)));
  $("favourite").textContent = one?.favourite ? "★ Favourite" : "☆ Favourite";
}

// Earlier prompts of this mode, each once, newest first.
async function fillEarlier() {
  kept = await ask("GET", "/api/history") || kept;
  const seen = new Set(), of = kept.filter((one) => one.kind === mode() && !seen.has(one.words) && seen.add(one.words)).slice(0, 50);
  $("earlierField").hidden = of.length === 0;
  $("earlier").replaceChildren(make("option", { value: "", textContent: "choose one" }), ...of.map((one) => make("option", { value: one.id, textContent: `${one.theme}`.slice(0, 90) })));
  drawFavourite();
}

async function takeEarlier() {
  const result = $("earlier").value && await ask("GET", `/api/history/${$("earlier").value}`);
  $("earlier").value = "";
  if (result) fillFrom(result);
}

async function forget(id) {
  try {
    drawHistory(await call("DELETE", `/api/history/${id}`));
  } catch (error) {
    toast(error.message);
  }
}

async function openSet(id) {
  try {
    const result = await call("GET", `/api/history/${id}`);
    open("tabMake", "");
    awaited = true;
    showSet({ result });
  } catch (error) {
    toast(error.message);
  }
}

addEventListener("hashchange", openAddress);

$("search").addEventListener("input", () => drawHistory(kept));
$("onlyFavourites").addEventListener("change", () => drawHistory(kept));
$("favourite").addEventListener("click", () => mark(shown.id, $("favourite").getAttribute("aria-pressed") !== "true"));
$("earlier").addEventListener("change", takeEarlier);
for (const choice of document.querySelectorAll("input[name=mode]")) choice.addEventListener("change", fillEarlier);
