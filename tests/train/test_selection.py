"""Runs that train on a part of what they sampled: groups that are alike are left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_runs import metrics
from toy_world import toy_config, toy_world

from pacorl import PolicyTrainer
from pacorl.engine.rows import Row
from pacorl.engine.scoring import Scorer
from pacorl.lora.adapters import adapter_state
from pacorl.train.sampling import EpochSampler, ScoredSamples
from pacorl.types import Prompt, Samples

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


def test_a_run_with_selection_resumes_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = [*SETTINGS, "selection.min_std=0.01", "save_every=1"]
    with toy_world():
        for name, overrides in {"whole": [], "cut": ["epochs=1"]}.items():
            PolicyTrainer(toy_config(tmp_path / name, *settings, *overrides), rewards={"red": red}).train()
        PolicyTrainer(toy_config(tmp_path / "cut", *settings), resume=True, rewards={"red": red}).train()
    assert metrics(tmp_path / "whole", "epoch") == metrics(tmp_path / "cut", "epoch")


SCOUTS = [*SETTINGS, "epochs=1", "sampling.steps=5", "sampling.batch=1", "advantages.clip=100"]


def final_latents(trainer: PolicyTrainer, patch: pytest.MonkeyPatch) -> list[dict[int, torch.Tensor]]:
    """Row → endpoint, of each time that samples are drawn in an epoch."""
    drawn: list[dict[int, torch.Tensor]] = []
    sample = EpochSampler.sample

    def recorded(sampler: EpochSampler, rows: Sequence[Row], scorer: Scorer, **options: Any) -> list[Samples]:
        samples = sample(sampler, rows, scorer, **options)
        rollouts = [rollout for update in samples for rollout in update.rollouts]
        drawn.append({row: x_NC for r in rollouts for row, x_NC in zip(r.row_B, r.final_BNC, strict=True)})
        return samples

    with patch.context() as own:
        own.setattr(EpochSampler, "sample", recorded)
        trainer.run_epoch()
    return drawn


@pytest.mark.parametrize(("objective", "tree"), [("grpo_clip", "{}"), ("grpo_clip", "{seeds: 1}"), ("awm", "{}")])
def test_kept_scouts_are_drawn_again_as_a_full_group_would_draw_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, tree: str
) -> None:
    settings = [*SCOUTS, f"objective.name={objective}", f"sampling.tree={tree}"]
    scouts = "selection.scouts={per_prompt: 8, suffix: {steps: 1}}"
    with toy_world():
        full = final_latents(
            PolicyTrainer(toy_config(tmp_path / "full", *settings, "group_size=8"), rewards={"red": red}), monkeypatch
        )
        scouted = final_latents(
            PolicyTrainer(toy_config(tmp_path / "scouts", *settings, scouts), rewards={"red": red}), monkeypatch
        )
    (every,) = full
    cheap, kept = scouted
    assert cheap.keys() == every.keys() == set(range(16))
    assert [sum(row // 8 == group for row in kept) for group in (0, 1)] == [4, 4]
    assert all(torch.equal(x_NC, every[row]) for row, x_NC in kept.items())
    assert not any(torch.equal(x_NC, every[row]) for row, x_NC in cheap.items())
    (line,) = metrics(tmp_path / "scouts", "epoch")
    assert -1 <= line["scouts/correlation"] <= 1
    assert line["grad_norm"] > 0
    assert line["samples/used"] == 1.0


def test_scouts_of_the_judges_extremes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scores of the scouts themselves, and the advantages are those of the samples that were drawn again."""
    settings = [*SCOUTS, "selection.scouts={per_prompt: 8, suffix: {steps: 1}}"]
    with toy_world():
        trainer = PolicyTrainer(toy_config(tmp_path / "run", *settings), rewards={"red": red})
        scored: list[ScoredSamples] = []
        score_samples = EpochSampler.score_samples

        def recorded(sampler: EpochSampler, rows: Sequence[Row], **options: Any) -> ScoredSamples:
            scored.append(score_samples(sampler, rows, **options))
            return scored[-1]

        monkeypatch.setattr(EpochSampler, "score_samples", recorded)
        trainer.run_epoch()
    scouts, kept = scored
    for group in (range(8), range(8, 16)):
        order = sorted(group, key=lambda row: (scouts.scores[row][0], row))
        assert set(kept.scores) & set(group) == {*order[:2], *order[-2:]}
        again = torch.tensor([kept.scores[row][0] for row in sorted(set(kept.scores) & set(group))])
        values = kept.advantages.value_B[sorted(set(kept.scores) & set(group))]
        assert values.argsort().tolist() == again.argsort().tolist()


def test_a_run_with_scouts_resumes_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = [*SETTINGS, "save_every=1", "selection.scouts={per_prompt: 8, suffix: {steps: 1}}"]
    with toy_world():
        for name, overrides in {"whole": [], "cut": ["epochs=1"]}.items():
            PolicyTrainer(toy_config(tmp_path / name, *settings, *overrides), rewards={"red": red}).train()
        PolicyTrainer(toy_config(tmp_path / "cut", *settings), resume=True, rewards={"red": red}).train()
    assert metrics(tmp_path / "whole", "epoch") == metrics(tmp_path / "cut", "epoch")
