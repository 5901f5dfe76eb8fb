"use strict";
document.documentElement.classList.add("script");

// A wipe on the second image of every set: the first one above it, cut off where the handle stands.
for (const set of document.querySelectorAll(".set")) {
  const [first, second] = set.querySelectorAll(".frame");
  if (!second) continue;
  const over = first.querySelector("img").cloneNode();
  over.classList.add("over");
  over.alt = "";
  const wipe = Object.assign(document.createElement("input"), { type: "range", min: 0, max: 100, step: "any", value: 0, className: "wipe" });
  wipe.setAttribute("aria-label", "Share of the image that shows before");
  const place = () => second.style.setProperty("--wipe", wipe.value + "%");
  wipe.addEventListener("input", place);
  second.querySelector("img").after(over);
  second.append(wipe);
  second.classList.add("wiped");
  place();
}

// A bar of the overview opens the fold that its set lies in.
const unfold = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
window.addEventListener("hashchange", unfold);
unfold();

// Curves: the pointer's epoch, a mark on each line, and the values in the corner.
const short = value => Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(1) : +value.toPrecision(4);
const element = (near, name, attributes) => {
  const made = document.createElementNS(near.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
for (const chart of document.querySelectorAll(".chart")) {
  const [x0, x1, left, right, y0, y1, bottom, top] = JSON.parse(chart.dataset.frame);
  const lines = JSON.parse(chart.dataset.lines);
  const readout = chart.closest(".curve").querySelector(".readout");
  const toX = epoch => left + (epoch - x0) / (x1 - x0) * (right - left);
  const toY = value => bottom + (value - y0) / (y1 - y0) * (top - bottom);
  const marks = element(chart, "g", {});
  chart.append(marks);
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect();
    const scale = chart.viewBox.baseVal.width / box.width;
    const epoch = x0 + ((event.clientX - box.left) * scale - left) / (right - left) * (x1 - x0);
    const nearest = lines.map(line => line.points.reduce((a, b) => Math.abs(b[0] - epoch) < Math.abs(a[0] - epoch) ? b : a));
    const at = toX(nearest[0][0]);
    marks.replaceChildren(
      element(chart, "line", { x1: at, x2: at, y1: top, y2: bottom, class: "cross" }),
      ...nearest.map(([e, v], i) => element(chart, "circle", { cx: toX(e), cy: toY(v), r: 3.5, class: "line-" + i % 6 })));
    readout.textContent = "epoch " + nearest[0][0] + ": " + nearest.map(point => short(point[1])).join(", ");
  });
  chart.addEventListener("pointerleave", () => {
    marks.replaceChildren();
    readout.textContent = readout.dataset.rest;
  });
}
