// Parts of the page are built anew, and a dialog covers it: the keyboard's focus returns to the control that had it, known
// by its name and its place among controls of that name.
(() => {
  const CONTROLS = "button, [role=combobox]";
  const named = (control) => control.getAttribute("aria-label") ?? control.textContent;
  const alike = () => [...document.querySelectorAll(CONTROLS)].filter((control) => named(control) === name);
  let name = null, place = 0;
  addEventListener("focusin", ({ target }) => {
    if (target.closest(".q-dialog, .q-menu")) return;
    name = target.matches(CONTROLS) ? named(target) : null;
    place = alike().indexOf(target);
  });
  // A click beside every control gives the focus up.
  addEventListener("pointerdown", ({ target }) => { if (!target.closest(`${CONTROLS}, .q-dialog`)) name = null; });
  new MutationObserver(() => {
    const isLost = document.activeElement === document.body && !document.querySelector(".q-dialog");
    if (name !== null && isLost) alike()[place]?.focus();
  }).observe(document.body, { childList: true, subtree: true });
})();
