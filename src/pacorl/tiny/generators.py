"""Committed generators of the tiny world: the fields of their `models.policies.spec.TinyCheckpoint`."""

from typing import Any

from pacorl.tiny import CHECKPOINTS
from pacorl.tiny.words import check_tiny, check_tiny_edit
from pacorl.types import Size

CONSISTENT = "consistent"
"""The tiny generator's LoRA, trained by contrast for 21 epochs, with 1.5 times as much panel match. The base has room
to learn."""
COLLAPSED = "collapsed"
"""Its LoRA by plain consistency, without contrast: sets agree with each other too."""
STEADY = "steady"
"""The tiny editor's LoRA that keeps a hero. Without it the editor is unreliable, so that there is room to learn."""
TRAINED_WITH: dict[str, Any] = {"guidance_scale": 3.5, "max_sequence_length": 48}
"""Sequence length of the committed checkpoints. Attention reads padding, so another length degrades them."""

FLUX: dict[str, Any] = {
    "folder": CHECKPOINTS / "flux",
    "size": Size(192, 192),
    "check": check_tiny,
    "options": TRAINED_WITH,
    "adapters": {CONSISTENT: CHECKPOINTS / CONSISTENT, COLLAPSED: CHECKPOINTS / COLLAPSED},
    "adapter": CONSISTENT,
}
KONTEXT: dict[str, Any] = {
    "folder": CHECKPOINTS / "kontext",
    "size": Size(64, 64),
    "check": check_tiny_edit,
    "options": TRAINED_WITH,
    "adapters": {STEADY: CHECKPOINTS / STEADY},
}
