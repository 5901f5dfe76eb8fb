"""A transformer from outside, which is in no diffusers pipeline: examples/own_policy.py generates and trains."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import metrics, train_policy
from torch.nn import functional

from pacorl.config.base import load
from pacorl.generate.generator import Generator
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.lora import read_lora
from pacorl.models.policies import POLICIES
from pacorl.models.policies.spec import PolicySpec
from pacorl.testing import check_policy
from pacorl.tiny import CHECKPOINTS
from pacorl.types import Prompt, Size

EXAMPLES = Path(__file__).parents[3] / "examples"
KIND = f"{EXAMPLES / 'own_policy.py'}:PAINTER"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights of one's own in a folder, with the parts of diffusers that they were trained with."""
    spec: Any = importlib.util.spec_from_file_location("own_policy", EXAMPLES / "own_policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    module.Painter().save_pretrained(tmp_path / "painter" / "transformer")
    for part in ("vae", "scheduler"):
        shutil.copytree((CHECKPOINTS / "flux") / part, tmp_path / "painter" / part)
    return tmp_path / "painter"


def test_it_generates_by_its_name_alone(checkpoint: Path) -> None:
    generator = Generator.from_pretrained(str(checkpoint), kind=KIND)
    prompts = [Prompt(0, "a red fox"), Prompt(1, "a blue fox that jumps")]
    images = generator.sample(prompts, [0, 0], size=Size(32, 48), steps=2)
    assert [image.size for image in images] == [(48, 32)] * 2
    assert images[0] != images[1]


def test_it_keeps_the_contract_with_texts_of_different_lengths(checkpoint: Path) -> None:
    policy = Generator.from_pretrained(str(checkpoint), kind=KIND, dtype="float32").policy
    check_policy(policy, [Prompt(0, "a fox"), Prompt(1, "a blue fox that jumps over a brook")], Size(32, 48))


def test_padding_without_a_mask_is_seen_in_texts_of_one_length(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Generator.from_pretrained(str(checkpoint), kind=KIND, dtype="float32").policy
    check_policy(policy, ["a fox", "a cat"], (32, 48))
    attend = functional.scaled_dot_product_attention

    def attend_to_all(*args: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        return attend(*args)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend_to_all)
    with pytest.raises(AssertionError, match="mask the padding"):
        check_policy(policy, ["a fox", "a cat"], (32, 48))


def test_it_trains_with_a_ratio_of_exactly_1(checkpoint: Path, tmp_path: Path) -> None:
    settings = [
        f"model={{kind: '{KIND}', checkpoint: '{checkpoint}', dtype: float32, gradient_checkpointing: false}}",
        f"rewards=[{{name: '{EXAMPLES / 'jpeg_reward.py'}:jpeg_size'}}]", "evaluation.rewards=[]", "judge=none",
        "adapter={rank: 2, alpha: 4}", "prompts={train: 'tiny:train:2', evaluation: 'tiny:dev:1'}", "epochs=1",
        "prompts_per_epoch=2", "group_size=4", "sampling={size: [32, 32], steps: 3, batch: 4}",
        "evaluation={size: [32, 32], steps: 2}", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    folder = train_policy(load(PolicyConfig, None, settings))
    (line,) = metrics(folder, "epoch")
    assert line["ratio_deviation"] == 0.0
    state = read_lora(folder / "adapter").state
    assert any(value.any() for name, value in state.items() if ".lora_B." in name)


def test_a_class_with_from_pretrained_is_a_pipeline_too(tmp_path: Path) -> None:
    flux = POLICIES["flux"]
    spec = PolicySpec(options=flux.options, policy=flux.policy, pipeline=flux.pipeline_type, steps=4)
    policy = spec.load(spec.options_for(str(CHECKPOINTS / "flux"), dtype="float32"))
    assert type(policy.pipeline) is flux.pipeline_type
    with pytest.raises(ValueError, match="needs a FluxPipeline"):
        spec.check_source(str(CHECKPOINTS / "kontext"))
