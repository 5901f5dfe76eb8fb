"""The edit policies train end to end through the command, each from a whole checkpoint of its tiny twin."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from edit_twins import kontext_pipeline, qwen_pipeline, source_image
from research.tiny.character_edits import character_edits, write_edits
from safetensors.torch import load_file
from tiny_runs import JPEG_SIZE
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.io.images import upright_size
from pacorl.types import Size

KINDS = ("kontext", "qwen_edit", "qwen_edit_plus")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kontext, qwen_edit and qwen_edit_plus as diffusers saves them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    kontext_pipeline().save_pretrained(folder / "kontext")
    qwen_pipeline().save_pretrained(folder / "qwen_edit")
    qwen_pipeline(plus=True).save_pretrained(folder / "qwen_edit_plus")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, checkpoints: Path, request: pytest.FixtureRequest) -> Path:
    """Two groups of two, one of a square source and one of a wide one."""
    train = write_edits(tmp_path, character_edits("train", 1), name="train")
    source_image(tmp_path / "wide.png", height=60, width=96)
    with train.open("a") as file:
        file.write(json.dumps({"image": "wide.png", "instruction": "Change the scene to night."}) + "\n")
    config = {
        "out": str(tmp_path / "run"),
        "epochs": 1,
        "prompts_per_epoch": 2,
        "group_size": 2,
        "trackers": [],
        "model": {
            "kind": request.param,
            "checkpoint": str(checkpoints / request.param),
            "dtype": "float32",
            "true_cfg_scale": 2.0,
            "gradient_checkpointing": True,
        },
        "adapter": {"rank": 2, "alpha": 4},
        "prompts": {
            "train": str(train),
            "evaluation": str(write_edits(tmp_path, character_edits("dev", 2), name="dev")),
        },
        "sampling": {"size": [64, 64], "steps": 3, "sde_steps": [1], "batch": 2},
        "evaluation": {"size": [96, 96], "steps": 2, "batch": 2},
        "judge": {"checkpoint": "tiny"},
        # A judge of sets says the same of whatever random weights generate; the size of the file tells them apart.
        "rewards": [{"name": "edit_consistency", "args": {"temperature": 8}}, {"name": JPEG_SIZE}],
        "optimizer": {"updates_per_epoch": 1, "lr": 1.0e-3},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    # The other kinds have recipes, whose twins train in test_recipes.py.
    [pytest.param(kind, marks=() if kind == "qwen_edit_plus" else pytest.mark.nightly) for kind in KINDS],
    indirect=True,
)
def test_one_epoch_through_the_command(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["train-policy", str(recipe)])
    assert result.exception is None, result.output
    out = recipe.parent / "run"
    before, epoch, after = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    assert (before["kind"], epoch["kind"], after["kind"]) == ("evaluation", "epoch", "evaluation")
    assert epoch["ratio_deviation/1"] == 0.0
    assert epoch["grad_norm"] > 0
    assert epoch["samples/used"] == 1.0
    assert epoch["advantage/zero_std_groups"] == 0.0
    assert 0 < before["edit_consistency"] < 1
    state = load_file(out / "adapter" / "adapter_model.safetensors")
    assert any(value.any() for name, value in state.items() if "lora_B" in name), "nothing was trained"
    shapes = {upright_size(path) for path in out.glob("samples/evaluation-*/*.png")}
    assert shapes == {Size(96, 96)}
    report = (out / "report.html").read_text()
    assert "Edit consistency" in report


@pytest.mark.parametrize(("scale", "forwards"), [(1.0, 1), (2.0, 2)])
def test_true_cfg_takes_two_forwards(tmp_path: Path, scale: float, forwards: int) -> None:
    from pacorl.models.policies.kontext import KONTEXT
    from pacorl.types import Prompt

    source = source_image(tmp_path / "source.png", height=64, width=64)
    policy = KONTEXT.over(kontext_pipeline(), max_sequence_length=48, true_cfg_scale=scale)
    calls: list[int] = []
    policy.transformer.register_forward_hook(lambda *_: calls.append(1))
    conditioning = policy.collate(policy.encode([Prompt(0, "red", sources=(source,))], Size(64, 64)))
    with torch.no_grad():
        policy.velocity(policy.noise([0], Size(64, 64)), torch.full((1,), 0.5), conditioning, Size(64, 64))
    assert len(calls) == forwards
