"""How the tiny judge's domain is made: its images, its spoiled latents, and that the classifier learns from them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from tools.tiny import pretrain_domain
from tools.tiny.negatives import TEXTURES, Texture, draw_textures
from tools.tiny.pretrain_domain import (
    SIDE,
    SPOILERS,
    drawn,
    early_generators,
    fit,
    handled,
    random_adapter,
    recoloured,
)

from pacorl.judge.domain import Domain, thumbnail
from pacorl.models.policies.flux import TINY_FLUX
from pacorl.tiny import characters


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(TINY_FLUX / "vae", torch_dtype=torch.float32)


@pytest.mark.slow
def test_textures_come_again_with_their_seed() -> None:
    first, again, other = (draw_textures(5, seed=seed) for seed in (3, 3, 4))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert all(a.tobytes() != b.tobytes() for a, b in zip(first, other, strict=True))
    assert {image.mode for image in first} == {"RGB"}


@pytest.mark.parametrize("texture", dict.fromkeys(TEXTURES), ids=lambda texture: texture.__name__)
def test_a_texture_is_an_image_that_is_not_flat(texture: Texture) -> None:
    image = texture(random.Random(0), np.random.default_rng(0))
    assert image.size == (128, 128)
    assert np.asarray(image).std() > 3


@pytest.mark.parametrize("spoil", dict.fromkeys(SPOILERS), ids=lambda spoil: spoil.__name__)
def test_spoiled_latents_keep_their_shape(spoil: pretrain_domain.Spoiler) -> None:
    torch.manual_seed(0)
    latents = torch.randn(4, 8, 16, 16)
    for seed in range(3):
        spoiled = spoil(latents, random.Random(seed))
        assert spoiled.shape == latents.shape
        assert spoiled.isfinite().all()


def test_shuffled_blocks_are_the_grids_own() -> None:
    """Without the noise that is mixed in, every value of a shuffled grid stands somewhere in the original."""
    latents = torch.arange(2 * 3 * 8 * 8.0).reshape(2, 3, 8, 8)
    moved = pretrain_domain.shuffled_blocks(latents, random.Random(1))
    assert not torch.equal(moved, latents)
    for before, after in zip(latents, moved, strict=True):
        assert set(after.flatten().tolist()) <= set(before.flatten().tolist())


@pytest.mark.slow
def test_an_earlier_generator_is_not_changed_by_later_steps(vae: AutoencoderKL) -> None:
    steps = early_generators(vae, [0, 1], seed=0)
    first = next(steps)
    before = {name: weight.clone() for name, weight in first.transformer.state_dict().items()}
    second = next(steps)
    assert all(torch.equal(weight, before[name]) for name, weight in first.transformer.state_dict().items())
    assert any(not torch.equal(weight, before[name]) for name, weight in second.transformer.state_dict().items())


def test_a_random_adapter_has_its_spread() -> None:
    layers = torch.nn.ModuleDict({"to_q": torch.nn.Linear(64, 64)})
    random_adapter(layers, ["to_q"], spread=0.3, seed=0)
    (second,) = (parameter for name, parameter in layers.named_parameters() if "lora_B" in name)
    assert second.std().item() == pytest.approx(0.3, rel=0.1)


@pytest.mark.campaign
def test_the_classifier_learns_a_world_from_what_is_outside(tmp_path: Path) -> None:
    """A quick one, of a few drawings and textures."""
    rng = random.Random(0)
    inside = [thumbnail(handled(image, rng), size=SIDE) for image in drawn(rng, count=100)]
    outside = [thumbnail(image, size=SIDE) for image in (*draw_textures(40, seed=0), *recoloured(inside[:20]))]
    net = fit(inside, outside, steps=120, log=tmp_path / "log.jsonl", seed=0, batch=32)
    domain = Domain(net, "a test", SIDE, threshold=0.0)
    panels = [characters.draw(panel, 64) for panel in characters.all_panels()[::100]]
    assert np.mean(domain.outside(panels)) < 0.05
    assert np.mean(domain.outside(draw_textures(30, seed=9))) > 0.85
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2
