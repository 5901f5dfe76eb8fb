"""Makers of the committed checkpoints of the tiny world: `python -m research.tiny` runs them in order."""
