// The administrator's table: who is how far, and how well people agree. Looks every 3 seconds, of many answers less often.
"use strict";

const $ = (id) => document.getElementById(id);
const REFRESH_MS = 3000;
let listed = "[]";  // the questions on the screen; opened ones close only when they change
const percent = (share) => `${Math.round(100 * share)} %`;

async function look() {
  const start = performance.now();
  const answer = await fetch("/api/admin").catch(() => null);
  const content = await answer?.json();
  if (!answer?.ok) $("agreement").textContent = content?.detail ?? "The server does not answer; this page tries again.";
  else show(content);
  // The table of many thousand answers takes seconds, in which nobody's ranking is saved.
  setTimeout(look, Math.max(REFRESH_MS, 20 * (performance.now() - start)));
}

function show({ question, people, agreement, disputed, questions, command }) {
  const interval = agreement?.low == null ? " (too few for an interval)" : ` (${percent(agreement.low)} to ${percent(agreement.high)})`;
  const alike = agreement ? `Of the pairs that two people ordered, in ${agreement.groups} shared questions, ${percent(agreement.mean)}${interval} are in the same order; 50 % is chance, and a judge's accuracy is measured alike.` : "No two people have ranked the same question yet.";
  $("agreement").textContent = `${alike} ${disputed} questions wait to be settled by one more person.`;
  $("question").textContent = question;
  $("command").textContent = command;
  fill($("people"), people.map((one) => [one.name, one.role, `${one.ranked + one.skipped} of ${one.total}`, one.skipped,
    one.controls ? `${one.passed} of ${one.controls}` : "–",
    one.compared ? `${one.alike} of ${one.compared} pairs, ${percent(one.alike / one.compared)}${one.doubt && `; ${one.doubt}`}` : "–"]));
  if (JSON.stringify(questions) !== listed) list(questions);
  listed = JSON.stringify(questions);
}

// Each question with its images and everybody's answer. Its address ends with its key, and opens it again.
function list(questions) {
  $("looked").hidden = questions.length === 0;
  $("questions").replaceChildren(...questions.map((one) => {
    const details = make("details", { id: one.instance, open: location.hash === `#${one.instance}` });
    details.ontoggle = () => details.open && history.replaceState(null, "", `#${one.instance}`);
    const skips = one.opinions.filter((each) => each.reason).map((each) => `${each.name} skipped: ${each.reason}`);
    const images = [["Reference", one.reference], ...one.candidates.map((address, slot) => [letter(slot), address])];
    details.append(make("summary", { textContent: [one.id, ...(one.disputed ? ["people disagree"] : []), ...skips].join(" · ") }),
      make("p", { className: "hint", textContent: one.theme }),
      make("div", { className: "side" }, images.map(([name, address]) => make("figure", {}, [
        make("a", { href: address, target: "_blank" }, [make("img", { src: address, alt: name, loading: "lazy" })]),
        make("figcaption", { textContent: name })]))),
      make("ul", {}, one.opinions.map((each) => make("li", { textContent: `${each.name}: ${each.reason || letters(each.order)}` }))));
    return details;
  }));
}

const letter = (slot) => (slot < 26 ? String.fromCharCode(65 + slot) : String(slot + 1));
const letters = (order) => order.map((tier) => [tier].flat().map(letter).join(" = ")).join(" ");

function make(tag, content, children = []) {
  const element = Object.assign(document.createElement(tag), content);
  element.append(...children);
  return element;
}

function fill(body, rows) {
  body.replaceChildren(...rows.map((cells) => make("tr", {}, cells.map((text) => make("td", { textContent: text })))));
}

look();
