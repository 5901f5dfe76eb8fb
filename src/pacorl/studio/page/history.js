// The sets that the studio keeps: a grid of them, each opened again by a click or by its address.
"use strict";

const when = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

let drawn = "";

async function drawHistory(sets = null) {
  try {
    sets ??= await call("GET", "/api/history");
  } catch (error) {
    return toast(error.message);
  }
  const content = JSON.stringify(sets);
  if (content === drawn) return;  // a card that is made anew would lose the focus and its "For good?"
  drawn = content;
  $("historyHint").textContent = sets.length
    ? `${sets.length} of at most ${state.limits.sets}, newest first. They stay on this machine, and outlast the studio.`
    : "Nothing yet. Every set that you make is kept here, and outlasts the studio.";
  $("sets").replaceChildren(...sets.map(setCard));
}

const COUNTED = { set: "candidate", edit: "candidate", storyboard: "page" };

function setCard(one) {
  const image = make("img", { src: `/sets/${one.id}/${one.image}.png`, alt: "", loading: "lazy" });
  image.onload = () => image.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) < PIXEL_ART_BELOW);
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
  return make("li", {}, link, away);
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
    open("tabMake");
    showSet({ result });
  } catch (error) {
    toast(error.message);
  }
}

addEventListener("hashchange", () => { if (location.hash.startsWith("#set-")) openSet(location.hash.slice(5)); });
