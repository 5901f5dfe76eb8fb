"""Adapters in both spellings of their keys, and those of another base; tests/zoo has their answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from judges import build, draw_lora
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from pacorl.io.processor import ImageTextProcessor
from pacorl.judge.adapter import merge_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's

# Every linear layer of the language model, as the released adapter; `gate_proj` is a name in the vision tower too.
LANGUAGE = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


def base(processor: ImageTextProcessor, family: str = "qwen2_5_vl", **sizes: int) -> Any:
    return build(family, processor, **sizes).double()


def trained(model: Any) -> Any:
    """PEFT's own model of an adapter whose B matrices are drawn, so that it changes the answers."""
    return draw_lora(get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=LANGUAGE)))


@pytest.fixture(scope="module")
def adapter(processor: ImageTextProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    trained(base(processor)).save_pretrained(folder)
    return folder


def rewritten(adapter: Path, folder: Path, *, keys: tuple[str, str] = ("", ""), **config: Any) -> Path:
    """The adapter with other keys, and other entries in its config."""
    folder.mkdir()
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({re.sub(*keys, key): value for key, value in weights.items()}, folder / "adapter_model.safetensors")
    document = json.loads((adapter / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def test_both_spellings_are_one_adapter(processor: ImageTextProcessor, adapter: Path, tmp_path: Path) -> None:
    """Before transformers 4.52: model.layers…, and suffixes for targets, which match the vision tower as well."""
    targets = [f"{letter}_proj" for letter in ("q", "k", "v", "o", "gate", "up", "down")]
    old = rewritten(adapter, tmp_path / "old", keys=(r"\.model\.language_model\.", ".model."), target_modules=targets)
    assert "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in load_file(old / "adapter_model.safetensors")
    today, before = (merge_adapter(base(processor), str(folder)).state_dict() for folder in (adapter, old))
    assert today.keys() == before.keys()
    assert all(torch.equal(today[name], before[name]) for name in today)


def test_an_adapter_of_another_family_is_refused(processor: ImageTextProcessor, adapter: Path, tmp_path: Path) -> None:
    """The 7B models of two families have weights of one shape, so only the base's name tells them apart."""
    named = rewritten(adapter, tmp_path / "named", base_model_name_or_path="Qwen/Qwen2.5-VL-7B-Instruct")
    merge_adapter(base(processor), str(named))
    with pytest.raises(ValueError, match=r"trained on Qwen/Qwen2\.5-VL-7B-Instruct, and this judge is a qwen2_vl"):
        merge_adapter(base(processor, "qwen2_vl"), str(named))


def test_an_adapter_that_lacks_a_block_is_refused(processor: ImageTextProcessor, adapter: Path, tmp_path: Path) -> None:
    """PEFT loads such a file without a word."""
    partial = rewritten(adapter, tmp_path / "partial")
    weights = load_file(adapter / "adapter_model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.1.mlp.up_proj." not in name}
    save_file(kept, partial / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"partial has weights for \d+ of the \d+ layers .*\.N\.mlp\.up_proj"):
        merge_adapter(base(processor), str(partial))


def test_a_file_in_another_form_is_refused(processor: ImageTextProcessor, adapter: Path, tmp_path: Path) -> None:
    """Its α would be its rank, and the config beside it says 8 of rank 4."""
    bare = rewritten(adapter, tmp_path / "bare", keys=(r"^base_model\.model\.", ""))
    (bare / "adapter_model.safetensors").rename(bare / "judge.safetensors")
    with pytest.raises(ValueError, match=r"judge\.safetensors; a judge takes PEFT's"):
        merge_adapter(base(processor), str(bare))
