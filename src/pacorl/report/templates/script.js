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
