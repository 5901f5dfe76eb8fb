"""Adapters that a config names are looked for as they are loaded, and a judge that is a LoRA is its base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pacorl.config.base import ConfigError, load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.local import TINY_JUDGE
from pacorl.plan import sources

NAMES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors", "night.safetensors")


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of lab/loras in a cache of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--lab--loras"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    return repo / "snapshots" / "abc"


def weights(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x.lora_A.weight": torch.zeros(1, 1)}, file)
    return file


def absent(*overrides: str) -> dict[str, str]:
    absences = sources.all_absences(load(PolicyConfig, None, list(overrides)), ())
    return {absence.key: absence.remedy for absence in absences if absence.remedy.startswith("a LoRA adapter")}


@pytest.mark.parametrize("name", [*NAMES, "lora/adapter_model.safetensors"])
def test_an_adapter_that_would_load_is_not_absent(tmp_path: Path, name: str) -> None:
    weights(tmp_path / "run" / name)
    assert absent(f"adapter.start={tmp_path / 'run'}") == {}
    assert list(absent(f"adapter.start={tmp_path / 'no-run'}")) == ["adapter.start"]


def test_a_file_in_a_hub_s_repository_is_looked_for_in_the_cache(hub: Path) -> None:
    weights(hub / "styles" / "night.safetensors")
    assert absent("adapter.start=lab/loras:styles/night.safetensors") == {}
    remedies = absent("adapter.start=lab/loras:styles/day.safetensors", "judge.adapter=lab/others:judge")
    assert "`hf download lab/loras --include 'styles/day.safetensors*'`" in remedies["adapter.start"]
    assert "`hf download lab/others --include 'judge*'`" in remedies["judge.adapter"]


def test_a_judge_that_is_a_lora_is_planned_as_its_base(tmp_path: Path) -> None:
    weights(tmp_path / "judge" / "adapter_model.safetensors")
    config = tmp_path / "judge" / "adapter_config.json"
    options = load(PolicyConfig, None, [f"judge.checkpoint={tmp_path / 'judge'}"]).judge

    config.write_text(json.dumps({"base_model_name_or_path": str(TINY_JUDGE)}))
    judge = sources.judge(options, key="judge")
    assert (judge.note, judge.absences) == ("", ())
    assert judge.configs["model"]["model_type"] == "qwen2_5_vl"

    config.write_text(json.dumps({"base_model_name_or_path": "lab/base"}))
    (absence,) = sources.judge(options, key="judge").absences
    assert (absence.key, absence.source) == (f"judge.checkpoint (the base of {tmp_path / 'judge'})", "lab/base")

    config.write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match=r"names no base; set judge\.checkpoint to its base and judge\.adapter=/"):
        sources.judge(options, key="judge")


def test_of_a_single_file_s_generator_the_other_parts_are_absent(tmp_path: Path) -> None:
    file = weights(tmp_path / "flux1-dev.safetensors")
    config = load(PolicyConfig, None, [f"model.checkpoint={file}"])
    (absence,) = sources.generator_of(config.model, config.generator).absences
    assert absence.source == "black-forest-labs/FLUX.1-dev"
    assert absence.remedy.endswith(", 10 GB")
