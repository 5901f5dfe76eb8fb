"""Requirements of a run, and whether this machine meets them."""
