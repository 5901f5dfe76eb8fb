"""Runs that train on a part of what they sampled: groups that are alike are left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_runs import metrics
from toy_world import toy_config, toy_world

from pacorl import PolicyTrainer
from pacorl.models.lora.adapters import adapter_state
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS = [
    "epochs=2",
    "prompts_per_epoch=2",
    "group_size=4",
    "prompts.train=tiny:train:2",
    "sampling.batch=4",
    "optimizer.updates_per_epoch=2",
    "optimizer.lr=0.01",
    "evaluation.every=0",
    "advantages.floor={form: add}",
    "rewards=[{name: red}]",
    "best_by=red",
]
"""Each group is one update: the first prompt's and the second's come in turn."""


def red(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
    """Of the second prompt all but alike."""
    return [
        image.getpixel((0, 0))[0] * (1e-6 if prompt.id else 1.0) for prompt, image in zip(prompts, images, strict=True)
    ]


def alike(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
    return [0.5] * len(images)


def test_a_step_without_groups_is_skipped_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with toy_world():
        trainer = PolicyTrainer(toy_config(tmp_path / "run", *SETTINGS, "selection.min_std=0.01"), rewards={"red": red})
        trainer.train()
    epochs = metrics(tmp_path / "run", "epoch")
    assert [line["groups/alike"] for line in epochs] == [1, 1]
    assert [line["updates/empty"] for line in epochs] == [1, 1]
    assert [line["samples/used"] for line in epochs] == [0.5, 0.5]
    assert [line["samples/prompts"] for line in epochs] == [1.0, 1.0]
    assert trainer.step == 2, "one step an epoch in place of two"
    assert all(line["grad_norm"] > 0 and line["ratio_deviation/1"] == 0 for line in epochs)
    assert caplog.text.count("1 of 2 optimizer steps were skipped, since selection.min_std 0.01 dropped all") == 1


def test_a_run_whose_groups_are_all_alike_changes_nothing_and_goes_on(tmp_path: Path) -> None:
    with toy_world():
        trainer = PolicyTrainer(
            toy_config(tmp_path / "run", *SETTINGS, "selection.min_std=0.01"), rewards={"red": alike}
        )
        before = {name: value.clone() for name, value in adapter_state(trainer.transformer).items()}
        trainer.train()
    assert all(torch.equal(before[name], value) for name, value in adapter_state(trainer.transformer).items())
    assert [line["updates/empty"] for line in metrics(tmp_path / "run", "epoch")] == [2, 2]


@pytest.mark.slow
def test_a_run_with_selection_resumes_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = [*SETTINGS, "selection.min_std=0.01", "save_every=1"]
    with toy_world():
        for name, overrides in {"whole": [], "cut": ["epochs=1"]}.items():
            PolicyTrainer(toy_config(tmp_path / name, *settings, *overrides), rewards={"red": red}).train()
        PolicyTrainer(toy_config(tmp_path / "cut", *settings), resume=True, rewards={"red": red}).train()
    assert metrics(tmp_path / "whole", "epoch") == metrics(tmp_path / "cut", "epoch")
