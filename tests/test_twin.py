"""Checkpoints of random weights, by research/twin.py: they load, and have the shapes that they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from research import twin
from research.gpu_day import product
from safetensors.torch import load_file
from tiny_runs import metrics, train_policy

from pacorl.config.base import load
from pacorl.core.objectives import RATIO_DEVIATION
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.local import BASES, LocalJudge
from pacorl.models.policies import POLICIES
from pacorl.types import Question, Size

SLOW = ["flux", "kontext", "qwen_edit"]
FEW_KINDS = pytest.mark.parametrize("kind", ["klein", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])


@pytest.mark.slow
@FEW_KINDS
def test_a_generators_twin_loads(kind: str, tmp_path: Path) -> None:
    spec, folder = POLICIES[kind], tmp_path / kind
    twin.main([kind, str(folder), "--width", "tiny", "--depth", "1"])
    policy = spec.from_pretrained(folder, dtype="bfloat16")
    assert len(policy.pipeline.transformer.transformer_blocks) == 1
    stored = {
        tensor.dtype for file in (folder / "transformer").glob("*.safetensors") for tensor in load_file(file).values()
    }
    assert stored == {torch.bfloat16}
    assert all(parameter.isfinite().all() for parameter in policy.transformer.parameters())


@pytest.mark.parametrize("base", BASES)
def test_a_judges_twin_answers(base: str, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    twin.main([base, str(folder), "--width", "tiny"])
    policy = POLICIES["flux"].from_pretrained("tiny", max_sequence_length=48)
    size = Size(64, 64)
    images = policy.decode(policy.noise([0, 1], size), size)
    (verdict,) = LocalJudge.from_pretrained(folder).verdicts([Question(tuple(images), "Do they look alike?")])
    assert 0 < verdict.p_yes < 1


@pytest.mark.slow
def test_a_recipe_trains_on_shallow_twins(tmp_path: Path) -> None:
    """As gpu_day's part `product` does, whose commands are processes."""
    for kind in ("flux", "judge"):
        twin.main([kind, str(tmp_path / kind), "--width", "tiny", "--depth", "1"])
    folders = [f"model.checkpoint={tmp_path / 'flux'}", f"judge.checkpoint={tmp_path / 'judge'}"]
    settings = [*product.SETTINGS, *product.TINY_SETTINGS, *folders, f"out={tmp_path / 'run'}"]
    run = train_policy(load(PolicyConfig, product.RECIPE, settings))
    (epoch,) = metrics(run, "epoch")
    assert {value for key, value in epoch.items() if key.startswith(RATIO_DEVIATION)} == {0.0}


@FEW_KINDS
def test_published_configs_are_written_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone: the weights of one block of each model would be gigabytes."""
    weights: dict[str, int] = {}

    def count(model: torch.nn.Module, folder: Path, stem: str) -> None:
        weights[folder.name] = sum(tensor.numel() for shard in twin.shards_of(model) for tensor in shard.values())

    monkeypatch.setattr(twin, "write_shards", count)
    spec, folder = POLICIES[kind], tmp_path / kind
    twin.main([kind, str(folder)])
    assert abs(weights["transformer"] / spec.parameters - 1) < 1e-3
    config = json.loads((folder / "transformer" / "config.json").read_text())
    published = spec.parts["transformer"]
    assert {name: config[name] for name in published} == published
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == spec.pipeline


def test_shards_are_small_and_their_index_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "SHARD", 3000)
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
    model.append(model[0])  # tied
    twin.write_shards(model, tmp_path, "model")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 4
    stored = {name: file.name for file in files for name in load_file(file)}
    assert stored == index["weight_map"]
    assert set(stored) == {f"{number}.{name}" for number in range(4) for name in ("weight", "bias")}


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        twin.main(["flux", str(tmp_path), "--width", "tiny"])
