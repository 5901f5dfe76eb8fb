"""Training of separate panels: on policy, resumed, verified, planned, and refused before weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_twins import heroes, klein_pipeline, qwen_image_21_pipeline
from safetensors.torch import load_file
from tiny_runs import metrics
from toy_world import toy_config, toy_world
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import ConfigError, load
from pacorl.grpo import builders
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import check_image_counts
from pacorl.grpo.trainer import train_policy
from pacorl.io.images import open_image
from pacorl.lab.plan.plan import plan_policy
from pacorl.records.prompts import save_prompts
from pacorl.types import Grid, Prompt, Size

PIPELINES = {"klein": klein_pipeline, "qwen_image_21": qwen_image_21_pipeline}


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


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["klein", "qwen_image_21"])
def test_a_run_with_references_is_on_policy_and_resumes(kind: str, tmp_path: Path) -> None:
    """Panels with one and two references in one batch of two groups."""
    PIPELINES[kind]().save_pretrained(tmp_path / "checkpoint")
    ann = heroes(tmp_path)
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


@pytest.mark.slow
def test_the_credit_of_separate_panels_is_their_own(tmp_path: Path) -> None:
    """A panel's noise changes no other panel, so what a run finds is panel credit."""
    with toy_world():
        settings = ["prompts.separate=true", "sampling.size=[8,8]", "advantages.credit=auto", "epochs=1"]
        out = train_policy(toy_config(tmp_path / "run", *settings, "rewards=[{name: panel_match}]"))
    assert load(PolicyConfig, out / "config.yaml").advantages.credit == "panel"


@pytest.mark.slow
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
    prompts = [heroes(tmp_path)]
    for kind, given in (("klein", prompts), ("qwen_image_21", [replace(prompts[0], references=())])):
        config = toy_config(tmp_path, f"model.kind={kind}", "judge.symmetric=false", "prompts.separate=true")
        with pytest.raises(ValueError, match=f"FSDP2, prompts.separate and model.kind {kind}, whose panels take"):
            check_image_counts(config, given, given)
    config = toy_config(tmp_path, "model.kind=klein", "judge.symmetric=false", "prompts.separate=true")
    check_image_counts(config, [replace(prompts[0], references=())], [])
