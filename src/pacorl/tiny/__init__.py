"""The tiny world: words, characters, the oracle that grades them, and checkpoints of a few megabytes."""

from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"
