// Parts of the page are built anew, and a dialog covers it: the keyboard's focus returns to the control that had it, known
// by its name and its place among controls of that name. After Undo it goes to what is back. After a removal it goes
// before the next control, on which a person who goes on typing would press it.
(() => {
  const CONTROLS = "button, [role=combobox]";
  const named = (control) => control.getAttribute("aria-label") ?? control.textContent;
  const all = () => [...document.querySelectorAll(CONTROLS)].filter((control) => control.checkVisibility());
  const alike = (name) => all().filter((control) => named(control) === name);
  const parts = () => all().filter((control) => !control.closest(".status"));  // whose own come and go
  const isLost = () => document.activeElement === document.body && !document.querySelector(".q-dialog");
  const isRemoval = () => name.startsWith("Remove ");
  let name = null, place = 0, position = 0, removed = null, left = null;
  addEventListener("focusin", ({ target }) => {
    if (target.closest(".q-dialog, .q-menu, [data-before]")) return;
    name = target.matches(CONTROLS) ? named(target) : null;
    place = alike(name).indexOf(target);
    position = Math.max(parts().indexOf(target), 0);
  });
  // A click beside every control gives the focus up.
  addEventListener("pointerdown", ({ target }) => { if (!target.closest(`${CONTROLS}, .q-dialog`)) name = null; });
  const before = (control) => {
    const spot = document.createElement("span");
    spot.tabIndex = -1;
    spot.dataset.before = "";
    spot.addEventListener("blur", () => spot.remove());
    control.before(spot);
    spot.focus();
  };
  const goOn = () => {
    if (name === null || !isLost()) return;
    const back = name === "Undo" ? alike(removed)[0] : null;
    const next = back ?? parts()[Math.min(position, parts().length - 1)];
    if (!isRemoval()) return next?.focus();
    removed = name;
    before(next);
  };
  new MutationObserver(() => {
    if (left && left !== document.querySelector(".hero img")) {
      left = null;
      document.querySelector(".hero")?.scrollIntoView();
    }
    if (name === null || !isLost()) return;
    if (!isRemoval()) alike(name)[place]?.focus({ preventScroll: true });
    setTimeout(goOn, 500); // parts of one change may come one after the other
  }).observe(document.body, { childList: true, subtree: true });

  // On a phone the picture is above the drawings among which one is chosen.
  addEventListener("click", ({ target }) => {
    if (target.closest(".shot") && matchMedia("(max-width: 720px)").matches) left = document.querySelector(".hero img") ?? true;
  });

  addEventListener("keydown", (event) => {
    const { target, key } = event;
    // Words of one line, which wrap.
    if (key === "Enter" && target.closest(".line")) { event.preventDefault(); target.blur(); }
    // Tab goes from caption to caption, and then from ✕ to ✕: a space that was meant for a caption presses none.
    if (key !== "Tab") return;
    const inPictures = (kind) => [...document.querySelectorAll(`.picture ${kind}`)];
    const order = [...inPictures("textarea"), ...inPictures(".cross")];
    const next = order[order.indexOf(target) + (event.shiftKey ? -1 : 1)];
    if (order.includes(target) && next) { event.preventDefault(); next.focus(); }
  }, true);
})();
