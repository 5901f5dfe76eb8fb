"""At the published size the pipelines need no help: nothing is patched, and nothing resized beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import INSTRUCTIONS, drawn, edit, loop, source_image
from PIL import Image
from pipelines import diffusers_own
from tests.twins import TWINS
from tests.twins.parts import vocabulary

from pacorl.models.policies import POLICIES
from pacorl.models.policies.pipeline import pack
from pacorl.types import Size

SETTINGS: dict[str, dict[str, Any]] = {
    "kontext": {"guidance_scale": 2.5, "max_sequence_length": 48},
    "klein": {"guidance_scale": 1.0, "max_sequence_length": 144},
    "qwen_edit": {"true_cfg_scale": 1.0},
    "qwen_edit_plus": {"true_cfg_scale": 1.0},
}


def deep(pipeline: Any, kind: str) -> Any:
    """The twin with a VAE as deep as the published ones, so that a token has its 16 pixels."""
    if not hasattr(pipeline.vae.config, "block_out_channels"):
        return pipeline
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    config = {**pipeline.vae.config, **blocks, "block_out_channels": [4] * 4, "norm_num_groups": 2}
    parts = {**pipeline.components, "vae": type(pipeline.vae).from_config(config)}
    if kind == "kontext":
        # The tiny one's shift is for images of 64 px, and at 1024 leaves no sigma apart from 1 in fp32.
        parts["scheduler"] = type(pipeline.scheduler)(use_dynamic_shifting=True, shift=3.0)
    return type(pipeline)(**parts)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SETTINGS)
def test_at_its_own_size_the_pipeline_needs_no_help(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = POLICIES[kind].over(deep(drawn(TWINS[kind](vocabulary())), kind), **SETTINGS[kind])
    # FLUX.2's pipeline resizes nothing below 1024².
    height, width = (832, 1248) if kind == "klein" else (208, 312)
    path = source_image(tmp_path / "source.png", height=height, width=width)
    size = policy.size_of(edit(path), Size(1024, 1024))
    assert size == Size(832, 1248)
    images = [Image.open(path)] if policy.max_sources > 1 else Image.open(path)
    expected = diffusers_own(policy.pipeline)(
        images,
        prompt=INSTRUCTIONS[0],
        height=size.height,
        width=size.width,
        num_inference_steps=2,
        generator=[torch.Generator().manual_seed(0)],
        output_type="latent",
        **SETTINGS[kind],
    ).images
    if kind == "klein":
        vae = policy.pipeline.vae
        expected = (pack(expected) - vae.bn.running_mean) / (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    torch.testing.assert_close(loop(policy, [edit(path)], size, steps=2), expected, rtol=0, atol=1e-5)
