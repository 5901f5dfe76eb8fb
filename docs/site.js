// The theme gives every code block a nav without a name, beside one for the page: to a reader of landmarks, noise.
new MutationObserver(() => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
}).observe(document.body, { childList: true, subtree: true });
