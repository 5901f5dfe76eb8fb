"""A local page to draw pages that belong together, and to teach a character (`pacorl studio`)."""
