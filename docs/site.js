// What axe-core finds wrong with the theme's pages.
const wide = new ResizeObserver((seen) => {
  // A table that is wider than the window is scrolled by keys too, which takes a place among the stops of Tab.
  for (const { target } of seen) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
});
new MutationObserver(() => {
  // The theme gives every code block a nav without a name, beside one for the page: to a reader of landmarks, noise.
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
  // Of the page's contents the whole is a landmark, not the part below each of its headings, of which two may be alike.
  for (const nav of document.querySelectorAll(".md-nav--secondary .md-nav:not([role])")) {
    nav.setAttribute("role", "none");
    nav.removeAttribute("aria-label");
  }
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([role])")) {
    table.setAttribute("role", "group");
    table.setAttribute("aria-label", "Table");
    wide.observe(table);
  }
}).observe(document.body, { childList: true, subtree: true });
