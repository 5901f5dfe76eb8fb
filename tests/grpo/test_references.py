"""Training with references of characters: on policy in mixed batches, stopped and resumed, refused before weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from edit_twins import klein_pipeline, kontext_pipeline, qwen_image_21_pipeline, qwen_pipeline, source_image
from safetensors.torch import load_file
from tiny_runs import JPEG_SIZE, train_policy
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig

PIPELINES = {
    "klein": klein_pipeline,
    "kontext": kontext_pipeline,
    "qwen_edit_plus": lambda: qwen_pipeline(plus=True),
    "qwen_image_21": qwen_image_21_pipeline,
}


@pytest.fixture
def recipe(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Two groups in one batch: a prompt with one reference, and a prompt with two of other shapes."""
    kind = request.param
    PIPELINES[kind]().save_pretrained(tmp_path / "checkpoint")
    for number, (height, width) in enumerate([(64, 64), (48, 80), (80, 48)]):
        source_image(tmp_path / f"{number}.png", height=height, width=width, seed=number)
    records = [
        {"prompt": "a red hero waves", "characters": {"hero": {"images": ["0.png"]}}},
        {"prompt": "a blue hero jumps by a boat", "references": ["1.png", "2.png"]},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {
        "out": str(tmp_path / "run"),
        "epochs": 2,
        "prompts_per_epoch": 2,
        "group_size": 2,
        "trackers": [],
        "model": {"kind": kind, "checkpoint": str(tmp_path / "checkpoint"), "dtype": "float32"},
        "adapter": {"rank": 2, "alpha": 4},
        "prompts": {name: str(tmp_path / "train.jsonl") for name in ("train", "evaluation")},
        "sampling": {"size": [64, 64], "steps": 3, "sde_steps": [1], "batch": 4},
        "evaluation": {"size": [64, 64], "steps": 2, "batch": 2, "every": 1},
        "judge": None,
        "rewards": [{"name": JPEG_SIZE}],
        "optimizer": {"updates_per_epoch": 1, "lr": 1.0e-3},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("klein", "kontext", "qwen_edit_plus", "qwen_image_21")],
    indirect=True,
)
def test_a_run_is_on_policy_and_a_resumed_run_is_the_same(recipe: Path) -> None:
    """Sampling and training read the references alike: the ratio before the first update is exactly 1."""
    result = CliRunner().invoke(app, ["train-policy", str(recipe)])
    assert result.exception is None, result.output
    whole = recipe.parent / "run"
    epochs = [line for line in lines(whole) if line["kind"] == "epoch"]
    assert [epoch["ratio_deviation/1"] for epoch in epochs] == [0.0, 0.0]
    assert all(epoch["grad_norm"] > 0 for epoch in epochs)

    cut = recipe.parent / "cut"
    train_policy(load(PolicyConfig, recipe, [f"out={cut}", "epochs=1"]))
    train_policy(load(PolicyConfig, recipe, [f"out={cut}"]), resume=True)
    adapters = [load_file(out / "adapter" / "adapter_model.safetensors") for out in (whole, cut)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
