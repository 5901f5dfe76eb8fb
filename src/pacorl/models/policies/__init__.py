"""Generators behind one interface, by kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.config.table import Table
from pacorl.io.documents import read_object
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.models.policies.spec import PolicySpec

POLICIES: Table[PolicySpec] = Table(
    "kind of generator",
    {
        "flux": "pacorl.models.policies.flux:FLUX",
        "kontext": "pacorl.models.policies.kontext:KONTEXT",
        "qwen_edit": "pacorl.models.policies.qwen_image:QWEN_EDIT",
        "qwen_edit_plus": "pacorl.models.policies.qwen_image:QWEN_EDIT_PLUS",
        "qwen_image": "pacorl.models.policies.qwen_image:QWEN_IMAGE",
        "sd3": "pacorl.models.policies.sd3:SD3",
        "klein": "pacorl.models.policies.klein:KLEIN",
        "qwen_image_21": "pacorl.models.policies.qwen_image_21:QWEN_IMAGE_21",
    },
    key="kind",
    is_open=True,
)
"""`model.kind` → its spec. The first is the default."""
DEFAULT_KIND = next(iter(POLICIES))


def kind_of(checkpoint: str, *, edits: bool = False) -> str:
    """Determine the kind of a checkpoint (a diffusers folder, a hub name or "tiny"), by its index or its name.

    `edits` selects between the tiny checkpoints: one for sets, one for edits.
    """
    if checkpoint == TINY:
        return next(kind for kind, spec in POLICIES.items() if spec.tiny and spec.edits == edits)
    index = Path(checkpoint) / "model_index.json"
    if index.is_file():
        class_name = str(read_object(index).get("_class_name", ""))
        kinds = {str(spec.pipeline): kind for kind, spec in POLICIES.items()}
        if class_name not in kinds:
            named = class_name or "pipeline without a name"
            raise ValueError(f"{checkpoint} is a {named}; there are {', '.join(kinds)}")
        return kinds[class_name]

    # The longest match decides: FLUX.1-Kontext also matches flux.
    best, longest = DEFAULT_KIND, 0
    for kind, spec in POLICIES.items():
        match = re.search(spec.hub_name, checkpoint.lower().replace("_", "-"))
        if match and len(match[0]) > longest:
            best, longest = kind, len(match[0])
    return best
