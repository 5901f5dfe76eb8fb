"""Tiny pipelines with random weights on which every input tells, and sources for edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.twins import tiny_flux, tiny_klein, tiny_kontext, tiny_qwen_edit, tiny_qwen_image_21
from tests.twins.parts import vocabulary

from pacorl.grpo.rollout import denoise
from pacorl.models.policies.flux import FLUX, FluxPolicy
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Character, Grid, Prompt, Size

SETTINGS = {"max_sequence_length": 144, "true_cfg_scale": 3.0}
"""Options of twins: room for the prompts in every tokenizer, byte-level ones too, and guidance for the negative one."""
INSTRUCTIONS = ("Give the hero a crown.", "Show the scene at night.", "Paint the hero red.")


def drawn(pipeline: Any) -> Any:
    """The pipeline with its zero-initialised layers drawn, so that its output depends on everything."""
    for parameter in pipeline.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return pipeline


def settings_of(spec: PolicySpec) -> dict[str, Any]:
    """The settings that a kind has."""
    return {name: value for name, value in SETTINGS.items() if name in spec.options.model_fields}


def flux_policy() -> FluxPolicy:
    torch.manual_seed(0)
    policy = FLUX.over(drawn(tiny_flux(vocabulary())), guidance_scale=3.5, max_sequence_length=48)
    assert isinstance(policy, FluxPolicy)
    return policy


def kontext_pipeline() -> Any:
    torch.manual_seed(0)
    return drawn(tiny_kontext(tiny_flux(vocabulary())))


def klein_pipeline() -> Any:
    torch.manual_seed(0)
    return drawn(tiny_klein(vocabulary()))


def qwen_pipeline(*, plus: bool = False) -> Any:
    torch.manual_seed(0)
    return drawn(tiny_qwen_edit(vocabulary(), plus=plus))


def qwen_image_21_pipeline() -> Any:
    torch.manual_seed(0)
    return drawn(tiny_qwen_image_21(vocabulary()))


def source_image(path: Path, *, height: int, width: int, seed: int = 0) -> Path:
    """An image of random blocks, all of which differ."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return path


def heroes(folder: Path) -> Prompt:
    """A set of two panels below each other, which have one and two references of other shapes."""
    paths = [
        source_image(folder / f"{n}.png", height=h, width=w, seed=n) for n, (h, w) in enumerate([(64, 64), (48, 80)])
    ]
    characters = (Character("ann", "", (paths[0],)), Character("bob", "", (paths[1],)))
    panels = ("Ann waves.", "Ann and Bob jump.")
    return Prompt(
        0, "A set.", theme="A day", grid=Grid(2, 1), panels=panels, characters=characters, references=tuple(paths)
    )


def edit(path: Path, number: int = 0, text: str = INSTRUCTIONS[0]) -> Prompt:
    return Prompt(id=number, text=text, sources=(path,))


def loop(policy: PipelinePolicy, prompts: list[Prompt], size: Size, *, steps: int = 3) -> torch.Tensor:
    """Endpoints of the loop without noise, from one seed per prompt."""
    with torch.no_grad():
        return denoise(
            policy,
            list(range(len(prompts))),
            conditioning=policy.collate(policy.encode(prompts, size)),
            sigmas=policy.sigmas(steps, size),
            size=size,
        )
