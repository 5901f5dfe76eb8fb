"""Training of separate panels: each panel is the image that its prompt makes alone, in sampling and in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_twins import (
    flux_policy,
    klein_pipeline,
    kontext_pipeline,
    qwen_image_21_pipeline,
    qwen_pipeline,
    source_image,
)
from safetensors.torch import load_file
from tiny_runs import metrics
from toy_world import toy_config, toy_world
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import ConfigError, load
from pacorl.core.grid import split
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.core.sde import log_prob
from pacorl.grpo import builders
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.pending import packed, unpacked
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, collect, sample_images, transition_at, velocity_at
from pacorl.grpo.rows import Row, check_image_counts
from pacorl.grpo.trainer import train_policy
from pacorl.io.images import open_image
from pacorl.lab.plan.plan import plan_policy
from pacorl.models.policies import POLICIES
from pacorl.models.policies.separate import SeparatePanels, panel_prompts, panel_seeds
from pacorl.records.prompts import prompts_from, save_prompts
from pacorl.types import Character, Grid, Prompt, Samples, SetSize, Size

SIZE = Size(32, 64)
PIPELINES = {
    "klein": klein_pipeline,
    "kontext": kontext_pipeline,
    "qwen_edit_plus": lambda: qwen_pipeline(plus=True),
    "qwen_image_21": qwen_image_21_pipeline,
}


def cast(folder: Path) -> Prompt:
    """A set of one column, whose panels have one and two references of other shapes."""
    paths = [
        source_image(folder / f"{n}.png", height=h, width=w, seed=n) for n, (h, w) in enumerate([(64, 64), (48, 80)])
    ]
    characters = (Character("ann", "", (paths[0],)), Character("bob", "", (paths[1],)))
    panels = ("Ann waves.", "Ann and Bob jump.")
    return Prompt(
        0, "A set.", theme="A day", grid=Grid(2, 1), panels=panels, characters=characters, references=tuple(paths)
    )


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
    ann = cast(tmp_path)
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


def test_a_panels_velocity_and_likelihood_depend_on_its_own_tokens_alone() -> None:
    """Another latent in one panel changes that panel's tokens, which the token grid says are its own."""
    with toy_world():
        config = toy_config(Path("unused"), "prompts.separate=true", "sampling.size=[8,8]")
        policy = builders.build_adapted_policy(config, device=torch.device("cpu"))
        prompts = prompts_from("tiny:train:2")
        spec = OBJECTIVES[config.objective.name]
        sampler = config.sampling.sampler(0, group_size=2, seed=0, spec=spec, evaluation_size=Size(8, 8))
        cache = ConditioningCache(policy)
        draw = Draw(policy, sampler, cache, seed=0, epoch=0, batch=2, by_panel=True)
        (batch,) = collect(draw, [Row(prompts[0], 0), Row(prompts[0], 1)]).nodes
        assert batch.size == SetSize(16, 16, Grid(2, 2))

        conditioning = cache.batch(batch.prompts, batch.size)
        changed = batch.latents_VNC.clone()
        changed[:, 0] += 1.0
        at = (batch.sigmas_T[batch.step], conditioning, batch.size)
        velocity, other = (velocity_at(policy, x, *at) for x in (batch.latents_VNC, changed))
        moved = (velocity != other).any(-1)[0].reshape(4, 4)
        assert moved[:2, :2].any()
        assert not moved[2:].any()
        assert not moved[:, 2:].any()

        # The stored log-probabilities are those of the step, panel by panel.
        transition = transition_at(sampler, batch.sigmas_T, batch.step, batch.latents_VNC, velocity)
        tokens = [0, 1, 4, 5]
        own = type(transition)(transition.mean_BNC[:, tokens], transition.std)
        assert torch.allclose(log_prob(batch.next_latents_ENC[:, tokens], own), batch.log_prob_B[:, 0])

        # An unfinished epoch is stored and restored with its sizes.
        stored = unpacked(packed(Samples(nodes=[batch])), {prompts[0].id: prompts[0]})
        assert stored.nodes[0].size == batch.size


def test_every_panel_has_its_own_seed() -> None:
    """As `pacorl generate --separate` counts them, and within torch's range for any seed of a draw."""
    assert panel_seeds(7, 3) == [21, 22, 23]
    large = panel_seeds(2**63 - 1, 16)
    assert len(set(large)) == 16
    assert max(large) < 2**63


def test_prompts_of_one_text_and_other_panels_are_encoded_apart() -> None:
    with toy_world():
        config = toy_config(Path("unused"), "prompts.separate=true")
        policy = builders.build_adapted_policy(config, device=torch.device("cpu"))
        cache = ConditioningCache(policy)
        first = Prompt(0, "A set.", grid=Grid(1, 2), panels=("a fox", "an owl"))
        size = policy.size_of(first, Size(8, 8))
        texts = cache.batch([first, replace(first, panels=("an owl", "a fox"))], size).tensors["text"]
        assert torch.equal(texts[[0, 1]], texts[[3, 2]])
        assert not torch.equal(texts[0], texts[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["klein", "qwen_image_21"])
def test_training_replays_mixed_references_to_the_bit(kind: str, tmp_path: Path) -> None:
    """By the rollout's own batches, so that the ratio is exactly 1."""
    policy, ann = policy_of(kind), cast(tmp_path)
    of_sets = SeparatePanels(policy, lambda prompt: panel_prompts(prompt, "twin", policy.max_references))
    rows = [Row(ann, 0), Row(ann, 1), Row(replace(ann, id=1, panels=("Bob runs.", "A boat.")), 2)]
    sampler = Sampler(size=SIZE, steps=3, sde_steps=(0, 1), sde_type="cps", tree=Tree(3, (1, 1)))
    cache = ConditioningCache(of_sets)
    for nodes in collect(Draw(of_sets, sampler, cache, seed=0, epoch=0, batch=3), rows).nodes:
        x, sigma = nodes.latents_VNC, nodes.sigmas_T[nodes.step]
        velocity = velocity_at(of_sets, x, sigma, cache.batch(nodes.prompts, nodes.size), nodes.size)
        transition = transition_at(sampler, nodes.sigmas_T, nodes.step, x, velocity)
        assert torch.equal(log_prob(nodes.next_latents_ENC, transition), nodes.log_prob_B)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["klein", "qwen_image_21"])
def test_a_run_with_references_is_on_policy_and_resumes(kind: str, tmp_path: Path) -> None:
    """Panels with one and two references in one batch of two groups."""
    PIPELINES[kind]().save_pretrained(tmp_path / "checkpoint")
    ann = cast(tmp_path)
    save_prompts([ann, replace(ann, id=1, panels=("Ann and Bob run.", "Bob sits."))], tmp_path / "train.jsonl")
    config = {
        "epochs": 2,
        "prompts_per_epoch": 2,
        "group_size": 2,
        "save_every": 1,
        "trackers": [],
        "model": {"kind": kind, "checkpoint": str(tmp_path / "checkpoint"), "dtype": "float32"},
        "adapter": {"rank": 2, "alpha": 4},
        "prompts": {name: str(tmp_path / "train.jsonl") for name in ("train", "evaluation")}
        | {"leaks": "off", "separate": True},
        "sampling": {"size": [32, 32], "steps": 3, "sde_steps": [1], "batch": 2},
        "evaluation": {"size": [64, 32], "steps": 2, "batch": 2, "every": 1},
        "judge": None,
        "rewards": [{"name": "jpeg_size"}],
        "optimizer": {"updates_per_epoch": 1, "lr": 1.0e-3, "ema_interval": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_policy(load(PolicyConfig, tmp_path / "run.yaml", [f"out={whole}"]))
    epochs = [line for line in metrics(whole) if line["kind"] == "epoch"]
    assert [epoch["ratio_deviation/1"] for epoch in epochs] == [0.0, 0.0]
    assert all(epoch["grad_norm"] > 0 for epoch in epochs)
    assert {open_image(path).size for path in (whole / "samples").rglob("evaluation*/*.png")} == {(32, 128)}

    train_policy(load(PolicyConfig, tmp_path / "run.yaml", [f"out={cut}", "epochs=1"]))
    train_policy(load(PolicyConfig, tmp_path / "run.yaml", [f"out={cut}"]), resume=True)
    adapters = [load_file(out / "adapter" / "adapter_model.safetensors") for out in (whole, cut)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


@pytest.mark.slow
def test_a_run_is_verified(tmp_path: Path) -> None:
    """Its epoch and its evaluation are computed again to the bit."""
    with toy_world():
        out = train_policy(toy_config(tmp_path / "run", "prompts.separate=true", "sampling.size=[8,8]"))
        for words in (["--epoch", "2"], ["--evaluation", "2"]):
            verified = CliRunner().invoke(app, ["verify", str(out), *words])
            assert verified.exit_code == 0, (verified.output, verified.exception)
            assert "2 equal bits" in verified.output, verified.output


def test_the_credit_of_separate_panels_is_their_own(tmp_path: Path) -> None:
    """A panel's noise changes no other panel, so what a run finds is panel credit."""
    with toy_world():
        settings = ["prompts.separate=true", "sampling.size=[8,8]", "advantages.credit=auto", "epochs=1"]
        out = train_policy(toy_config(tmp_path / "run", *settings, "rewards=[{name: panel_match}]"))
    assert load(PolicyConfig, out / "config.yaml").advantages.credit == "panel"


def test_the_plan_counts_every_panel(tmp_path: Path) -> None:
    """Four panels of a set are the latents and judged pixels of one image of twice the sides, at less attention."""
    klein_pipeline().save_pretrained(tmp_path / "klein")
    model = f"model={{kind: klein, checkpoint: '{tmp_path / 'klein'}', dtype: float32, max_sequence_length: 64}}"
    common = [model, "judge=none", "rewards=[{name: jpeg_size}]"]
    common += ["prompts={train: 'tiny:train:4', evaluation: 'tiny:dev:2'}", "evaluation.size=[256,256]"]
    separate = [*common, "prompts.separate=true", "sampling.size=[128,128]", "evaluation.size=[128,128]"]
    plans = [
        plan_policy(load(PolicyConfig, None, [*settings, f"out={tmp_path}"]))
        for settings in ([*common, "sampling.size=[256,256]"], separate)
    ]
    rows = [{row.component: row.bytes for row in plan.rows} for plan in plans]
    for name in ("an epoch's rollouts", "an evaluation's images"):
        assert rows[0][name] == rows[1][name]
    assert rows[1]["encoded prompts"] == 4 * rows[0]["encoded prompts"]
    assert rows[1]["decoding an image"] < rows[0]["decoding an image"]
    assert plans[0].cost.phases["decoding"].flops == pytest.approx(plans[1].cost.phases["decoding"].flops, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["prompts.record_sizes=true"], "records give the size of sets; leave record_sizes out"),
        (["model={kind: flux, checkpoint: tiny, dtype: float32}"], "the tiny generator draws whole sets; leave out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], fault: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=fault):
        train_policy(toy_config(tmp_path / "run", "prompts.separate=true", *settings))


def test_sets_without_texts_of_panels_are_refused_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "build_policy", lambda *args, **options: pytest.fail("weights were loaded"))
    record = {"prompt": "a 2x2 grid layout of a fox", "layout": "2x2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    config = toy_config(tmp_path / "run", "prompts.separate=true", f"prompts.train={tmp_path / 'train.jsonl'}")
    with pytest.raises(ValueError, match="separate panels need a text each, and prompt 0 has 0 for a 2x2 grid"):
        train_policy(config)


def test_a_sharded_run_refuses_panels_that_take_forwards_of_their_own(tmp_path: Path) -> None:
    prompts = [cast(tmp_path)]
    for kind, given in (("klein", prompts), ("qwen_image_21", [replace(prompts[0], references=())])):
        config = toy_config(tmp_path, f"model.kind={kind}", "judge.symmetric=false", "prompts.separate=true")
        with pytest.raises(ValueError, match=f"FSDP2, prompts.separate and model.kind {kind}, whose panels take"):
            check_image_counts(config, given, given)
    config = toy_config(tmp_path, "model.kind=klein", "judge.symmetric=false", "prompts.separate=true")
    check_image_counts(config, [replace(prompts[0], references=())], [])
