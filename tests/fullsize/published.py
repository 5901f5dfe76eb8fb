"""Checkpoints of published widths without weights: folders with every file that is not a weight, and what loads them.

Tokenizers are a twin's, trained on the run's own texts; all sizes are the published ones but for the number of the
generator's repeated blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from research import twin
from tests.fullsize.pretended import mapped
from torch.utils._python_dispatch import _disable_current_modes

from pacorl.models.policies.policy import WITHOUT_WEIGHTS
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.generators import model_on_meta
from pacorl.plan.passes import Depth, with_depth
from pacorl.plan.sources import JUDGE_PARTS


def write_generator(folder: Path, spec: PolicySpec, texts: Sequence[str], *, depth: Depth) -> Path:
    """A generator's folder of so many blocks."""
    twin.write_generator(folder, spec, parts=with_depth(spec.parts, depth), texts=texts, weights=False)
    return folder


def write_judge(folder: Path, texts: Sequence[str]) -> Path:
    """The published 7B judge's folder with a quarter of its blocks, the last of the vision tower among them."""
    text, vision = (dict(JUDGE_PARTS["model"][name]) for name in ("text_config", "vision_config"))
    text["num_hidden_layers"] //= 4
    vision["depth"] //= 4
    vision["fullatt_block_indexes"] = vision["fullatt_block_indexes"][:1]
    model = {**JUDGE_PARTS["model"], "text_config": text, "vision_config": vision}
    twin.write_judge(folder, {**JUDGE_PARTS, "model": model}, texts=texts, weights=False)
    return folder


@contextmanager
def weightless() -> Iterator[None]:
    """Within the block loading a checkpoint gives its models mapped: of full size, and with nothing in memory."""
    load_pipeline = DiffusionPipeline.from_pretrained.__func__

    def pipeline(cls: Any, source: str, *, dtype: torch.dtype, **components: Any) -> Any:
        for config in Path(source).glob("*/config.json"):
            if config.parent.name not in {*components, *WITHOUT_WEIGHTS}:
                components[config.parent.name] = model(config.parent, dtype=dtype)
        return load_pipeline(cls, source, dtype=dtype, **components)

    def model(source: str | Path, *, dtype: torch.dtype, **_: Any) -> Any:
        with _disable_current_modes():  # building it is nothing that a card sees
            return mapped(model_on_meta(json.loads((Path(source) / "config.json").read_text()), dtype=dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(pipeline))
        patch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", model)
        yield
