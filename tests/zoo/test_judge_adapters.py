"""Adapters of a judge in every form: P(Yes) is that of PEFT's own model, merged, to the bit.

An image tool has no judge to put an adapter on, and no trainer writes a language model's adapter in its form.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import snapshot_in
from judges import build, draw_lora, pairs, processor_of_any_size

from pacorl.gate.paco_reward import PacoReward
from pacorl.io.processor import ImageTextProcessor
from pacorl.judge.local import LocalJudge
from pacorl.judge_training.judge_config import RewardTuningConfig
from pacorl.judge_training.tuning import save_processor, source_of, tune

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's

RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def processor() -> ImageTextProcessor:
    return processor_of_any_size()


@pytest.fixture(scope="module")
def base(processor: ImageTextProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judge's folder, as a hub's."""
    folder = tmp_path_factory.mktemp("judge")
    build("qwen2_5_vl", processor).save_pretrained(folder)
    save_processor(processor, folder, source=str(folder))
    return folder


def loaded(base: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)


def p_yes(model: Any, processor: ImageTextProcessor) -> list[float | None]:
    return [verdict.p_yes for verdict in LocalJudge(model, processor).verdicts(pairs(6))]


@pytest.fixture(scope="module")
def made(base: Path) -> Any:
    """PEFT's own model of an adapter, as the judge's training makes it, with a second one named `old`."""
    model = tune(loaded(base), RewardTuningConfig(rank=RANK, alpha=ALPHA))
    model.add_adapter("old", copy.deepcopy(model.peft_config["default"]))
    return draw_lora(model)


@pytest.fixture(scope="module")
def truth(base: Path, made: Any, processor: ImageTextProcessor) -> list[float | None]:
    merged = copy.deepcopy(made).merge_and_unload(adapter_names=["default"])
    answers = p_yes(merged, processor)
    assert answers != pytest.approx(p_yes(loaded(base), processor), abs=0.01), "the adapter changes nothing"
    return answers


def saved(made: Any, folder: Path) -> Path:
    """`pacorl train-reward` saves by PEFT too, the one adapter that it has."""
    made.save_pretrained(folder, selected_adapters=["default"])
    return folder


# --- a judge's LoRA as the judge -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lora_as_the_judge_is_its_base_with_it(
    base: Path, made: Any, truth: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(made, tmp_path / "adapter")
    with caplog.at_level(logging.WARNING):
        judge = LocalJudge.from_pretrained(str(folder))
    assert [verdict.p_yes for verdict in judge.verdicts(pairs(6))] == truth
    lines = [record.message for record in caplog.records if "LoRA" in record.message]
    assert lines == [f"{folder} is a LoRA adapter; the judge is its base {base} with it merged in"]
    with PacoReward.from_pretrained(folder) as reward:
        assert reward.name == str(folder)


def test_a_lora_is_no_checkpoint_to_train(made: Any, base: Path, tmp_path: Path) -> None:
    folder = str(saved(made, tmp_path / "adapter"))
    with pytest.raises(ValueError, match=rf"is a LoRA adapter; set model\.checkpoint={base} tuning\.start={folder}"):
        source_of(folder)


@pytest.mark.parametrize(("name", "folder"), [("lab/judge-lora", "."), ("lab/judge-lora:step-400", "step-400")])
def test_a_lora_on_the_hub_as_the_judge(
    name: str, folder: str, *, made: Any, truth: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The released PaCo-Reward-7B-Lora, in small; its files are in the cache, and no network is reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    saved(made, snapshot_in(tmp_path, "lab/judge-lora") / folder)
    judge = LocalJudge.from_pretrained(name)
    assert [verdict.p_yes for verdict in judge.verdicts(pairs(6))] == truth
