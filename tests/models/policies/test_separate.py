"""Separate panels as a policy of sets: each panel is the image that its prompt makes alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import (
    flux_policy,
    heroes,
    klein_pipeline,
    kontext_pipeline,
    qwen_image_21_pipeline,
    qwen_pipeline,
)
from toy_world import toy_config, toy_world

from pacorl.core.grid import split
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.core.sde import log_prob
from pacorl.grpo import builders
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.pending import packed, unpacked
from pacorl.grpo.rollout import Draw, collect, sample_images, transition_at, velocity_at
from pacorl.grpo.rows import Row
from pacorl.models.policies import POLICIES
from pacorl.models.policies.separate import SeparatePanels, panel_prompts, panel_seeds
from pacorl.records.prompts import prompts_from
from pacorl.types import Grid, Samples, SetSize, Size

SIZE = Size(32, 64)
PIPELINES = {
    "klein": klein_pipeline,
    "kontext": kontext_pipeline,
    "qwen_edit_plus": lambda: qwen_pipeline(plus=True),
    "qwen_image_21": qwen_image_21_pipeline,
}


def policy_of(kind: str) -> Any:
    if kind == "flux":
        return flux_policy()
    spec = POLICIES[kind]
    known = [name for name in ("max_sequence_length",) if name in spec.options.model_fields]
    return spec.over(PIPELINES[kind](), **dict.fromkeys(known, 144))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flux", *PIPELINES])
def test_each_panel_is_the_image_that_its_prompt_makes_alone(kind: str, tmp_path: Path) -> None:
    """Sets of other texts share a batch; each panel has its own seed, references and sigmas."""
    policy = policy_of(kind)
    limit = policy.max_references
    ann = heroes(tmp_path)
    sets = [ann, replace(ann, id=1, panels=("Ann runs.", "Ann and Bob sit."))]
    if not limit:
        sets = [replace(prompt, references=(), characters=()) for prompt in sets]
    of_sets = SeparatePanels(policy, lambda prompt: panel_prompts(prompt, "twin", limit))
    sampler, seeds = Sampler(size=SIZE, steps=2), [5, 2**62]
    images = sample_images(of_sets, sets, sampler=sampler, cache=ConditioningCache(of_sets), seeds=seeds, batch=2)

    cache = ConditioningCache(policy)
    for prompt, seed, image in zip(sets, seeds, images, strict=True):
        assert image.size == (SIZE.width, 2 * SIZE.height)
        panels = panel_prompts(prompt, "twin", limit)
        for panel, own_seed, cut in zip(panels, panel_seeds(seed, 2), split(image, prompt.grid), strict=True):
            (alone,) = sample_images(policy, [panel], sampler=sampler, cache=cache, seeds=[own_seed], batch=1)
            pixels = [torch.frombuffer(bytearray(shown.tobytes()), dtype=torch.uint8).int() for shown in (alone, cut)]
            # Other batches round otherwise.
            assert int((pixels[0] - pixels[1]).abs().max()) <= 1
            assert pixels[0].float().std() > 1


def test_every_panel_has_its_own_seed() -> None:
    """As `pacorl generate --separate` counts them, and within torch's range for any seed of a draw."""
    assert panel_seeds(7, 3) == [21, 22, 23]
    large = panel_seeds(2**63 - 1, 16)
    assert len(set(large)) == 16
    assert max(large) < 2**63


def test_a_panels_tokens_are_those_of_its_place_in_the_set() -> None:
    """Its velocity is that of the panel alone, and its likelihood that of the step, in the tokens of panel credit."""
    with toy_world():
        config = toy_config(Path("unused"), "prompts.separate=true", "sampling.size=[8,8]")
        policy = builders.build_adapted_policy(config, device=torch.device("cpu"))
        prompt = prompts_from("tiny:train:2")[0]
        spec = OBJECTIVES[config.objective.name]
        sampler = config.sampling.sampler(0, group_size=2, seed=0, spec=spec, evaluation_size=Size(8, 8))
        cache = ConditioningCache(policy)
        draw = Draw(policy, sampler, cache, seed=0, epoch=0, batch=2, by_panel=True)
        (batch,) = collect(draw, [Row(prompt, 0), Row(prompt, 1)]).nodes
        assert batch.size == SetSize(16, 16, Grid(2, 2))

        x, sigma = batch.latents_VNC, batch.sigmas_T[batch.step]
        velocity = velocity_at(policy, x, sigma, cache.batch(batch.prompts, batch.size), batch.size)
        transition = transition_at(sampler, batch.sigmas_T, batch.step, x, velocity)
        places = ([0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15])
        for panel, tokens in zip(config.images_of(prompt), places, strict=True):
            text = policy.of_panels.collate(policy.of_panels.encode([panel, panel], Size(8, 8)))
            alone = velocity_at(policy.of_panels, x[:, tokens], sigma, text, Size(8, 8))
            assert torch.allclose(velocity[:, tokens], alone, atol=1e-6)
            own = type(transition)(transition.mean_BNC[:, tokens], transition.std)
            density = log_prob(batch.next_latents_ENC[:, tokens], own)
            assert torch.allclose(density[:, None], batch.log_prob_B[:, tokens])

        # An unfinished epoch is stored and restored with its sizes.
        stored = unpacked(packed(Samples(nodes=[batch])), {prompt.id: prompt})
        assert stored.nodes[0].size == batch.size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["klein", "qwen_image_21"])
def test_training_replays_mixed_references_to_the_bit(kind: str, tmp_path: Path) -> None:
    """By the rollout's own batches, so that the ratio is exactly 1."""
    policy, ann = policy_of(kind), heroes(tmp_path)
    of_sets = SeparatePanels(policy, lambda prompt: panel_prompts(prompt, "twin", policy.max_references))
    rows = [Row(ann, 0), Row(ann, 1), Row(replace(ann, id=1, panels=("Bob runs.", "A boat.")), 2)]
    sampler = Sampler(size=SIZE, steps=3, sde_steps=(0, 1), sde_type="cps", tree=Tree(3, (1, 1)))
    cache = ConditioningCache(of_sets)
    for nodes in collect(Draw(of_sets, sampler, cache, seed=0, epoch=0, batch=3), rows).nodes:
        x, sigma = nodes.latents_VNC, nodes.sigmas_T[nodes.step]
        velocity = velocity_at(of_sets, x, sigma, cache.batch(nodes.prompts, nodes.size), nodes.size)
        transition = transition_at(sampler, nodes.sigmas_T, nodes.step, x, velocity)
        assert torch.equal(log_prob(nodes.next_latents_ENC, transition), nodes.log_prob_B)
