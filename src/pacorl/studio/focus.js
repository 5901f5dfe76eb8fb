// Parts of the page are built anew, and a dialog covers it: the keyboard's focus returns to the control that had it, known
// by its name and its place among controls of that name. Of a removed thing it goes to the next, and after Undo to it.
(() => {
  const CONTROLS = "button, [role=combobox]";
  const named = (control) => control.getAttribute("aria-label") ?? control.textContent;
  const all = () => [...document.querySelectorAll(CONTROLS)].filter((control) => control.checkVisibility());
  const alike = (name) => all().filter((control) => named(control) === name);
  const isLost = () => document.activeElement === document.body && !document.querySelector(".q-dialog");
  let name = null, place = 0, position = 0, removed = null;
  addEventListener("focusin", ({ target }) => {
    if (target.closest(".q-dialog, .q-menu")) return;
    name = target.matches(CONTROLS) ? named(target) : null;
    place = alike(name).indexOf(target);
    position = all().indexOf(target);
  });
  // A click beside every control gives the focus up.
  addEventListener("pointerdown", ({ target }) => { if (!target.closest(`${CONTROLS}, .q-dialog`)) name = null; });
  const goOn = () => {
    if (name === null || !isLost()) return;
    if (name.startsWith("Remove ")) removed = name;
    const back = name === "Undo" ? alike(removed)[0] : null;
    (back ?? all()[Math.min(position, all().length - 1)])?.focus();
  };
  new MutationObserver(() => {
    if (name === null || !isLost()) return;
    alike(name)[place]?.focus();
    setTimeout(goOn, 500); // parts of one change may come one after the other
  }).observe(document.body, { childList: true, subtree: true });
})();
