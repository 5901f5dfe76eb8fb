"""What is absent is listed with where to get it, and what is here is read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hub_cache import snapshot_in
from safetensors.torch import save_file

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.local import TINY_JUDGE
from pacorl.plan import sources
from pacorl.tiny import CHECKPOINTS


def weights(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x.lora_A.weight": torch.zeros(1, 1)}, file)
    return file


def absent(*overrides: str) -> dict[str, str]:
    """Key → remedy."""
    config = load(PolicyConfig, None, list(overrides))
    found = [*sources.absent_prompts(config), *sources.absences_of(config, ())]
    found += sources.generator_of(config.model)[1]
    found += sources.judge("judge.checkpoint", config.judge)[1]
    return {absence.key: absence.remedy for absence in found}


def test_absent_sources_are_listed_with_where_to_get_them(tmp_path: Path) -> None:
    train = tmp_path / "a.jsonl"
    remedies = absent(f"prompts={{train: {train}, evaluation: 'tiny:test'}}", "adapter.start=runs/one/adapter/")
    assert set(remedies) == {"prompts.train", "model.checkpoint", "judge.checkpoint", "adapter.start"}
    assert "`pacorl data t2is`" in remedies["prompts.train"]
    assert "`hf download black-forest-labs/FLUX.1-dev --include model_index.json" in remedies["model.checkpoint"]
    assert "`hf auth login`, then `hf download" in remedies["model.checkpoint"]
    assert remedies["model.checkpoint"].endswith("`, 34 GB")
    assert remedies["judge.checkpoint"].endswith("`hf download X-GenGroup/PaCo-Reward-7B`, 17 GB")
    assert "folder runs/one/adapter/" in remedies["adapter.start"]
    edits = absent("model.kind=kontext", "rewards=[{name: edit_consistency}]", "prompts.train=mine/train.jsonl")
    assert "GEdit-Bench" in edits["prompts.train"]


def test_a_local_checkpoint_is_read_and_its_missing_weights_are_named(tmp_path: Path) -> None:
    assert "model.checkpoint" not in absent("model.checkpoint=tiny")
    for file in (CHECKPOINTS / "flux").rglob("*.json"):
        copy = tmp_path / file.relative_to(CHECKPOINTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    remedy = absent(f"model.checkpoint={tmp_path / 'flux'}")["model.checkpoint"]
    assert "the weights of transformer, vae, text_encoder, text_encoder_2" in remedy

    # Of a single file the other parts are absent.
    file = weights(tmp_path / "flux1-dev.safetensors")
    assert absent(f"model.checkpoint={file}")["model.checkpoint"].endswith(", 10 GB")


def test_a_sharded_checkpoint_needs_every_shard(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY_JUDGE / "config.json").read_text())
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    assert "judge.checkpoint" in absent(f"judge.checkpoint={tmp_path}")
    (tmp_path / "model-2.safetensors").touch()
    assert "judge.checkpoint" not in absent(f"judge.checkpoint={tmp_path}")


def test_an_adapter_that_would_load_is_not_absent(tmp_path: Path, hub_cache: Path) -> None:
    assert "adapter.start" in absent(f"adapter.start={tmp_path / 'no-run'}")
    weights(tmp_path / "run" / "lora" / "adapter_model.safetensors")
    weights(snapshot_in(hub_cache, "lab/loras") / "styles" / "night.safetensors")
    for source in (tmp_path / "run", "lab/loras:styles/night.safetensors"):
        assert "adapter.start" not in absent(f"adapter.start={source}")
    remedies = absent("adapter.start=lab/loras:styles/day.safetensors")
    assert "`hf download lab/loras --include 'styles/day.safetensors*'`" in remedies["adapter.start"]


def test_a_judge_that_is_a_lora_is_planned_as_its_base(tmp_path: Path) -> None:
    weights(tmp_path / "judge" / "adapter_model.safetensors")
    for base, needed in ((str(TINY_JUDGE), False), ("lab/base", True)):
        config = tmp_path / "judge" / "adapter_config.json"
        config.write_text(json.dumps({"base_model_name_or_path": base}))
        remedy = absent(f"judge.checkpoint={tmp_path / 'judge'}").get("judge.checkpoint", "")
        assert ("lab/base" in remedy) == needed
