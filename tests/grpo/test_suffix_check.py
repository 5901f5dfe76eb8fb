"""The check of a cheap suffix: one group is finished by all steps too, and its advantages are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import metrics
from toy_world import ToyJudge, ToyPolicy, toy_config

from pacorl.core.metric_names import SUFFIX_CORRELATION
from pacorl.core.sampler import Sampler, Suffix, Tree
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw, collect
from pacorl.grpo.rows import Row
from pacorl.grpo.start import checkpoints
from pacorl.grpo.suffix_check import advantage_correlation, full_scores
from pacorl.grpo.trainer import PolicyTrainer, train_policy
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Prompt, Size

pytestmark = pytest.mark.usefixtures("toy")

CHEAP = ["sampling.steps=8", "sampling.suffix={solver: ab2, steps: 3, check_every: 1}", "evaluation.every=0"]


def line(run: Path) -> list[dict[str, float]]:
    return metrics(run, "epoch")


def values(advantages: list[float], *, used: list[bool] | None = None) -> Advantages:
    return Advantages(torch.tensor(advantages), torch.tensor(used or [True] * len(advantages)), {})


def brightness(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
    return [sum(image.convert("L").tobytes()) / image.width / image.height / 255 for image in images]


@pytest.mark.slow
def test_it_is_made_every_so_many_epochs_and_changes_nothing_else(tmp_path: Path) -> None:
    runs = {
        every: train_policy(
            toy_config(tmp_path / str(every), *CHEAP, "epochs=3", f"sampling.suffix.check_every={every}")
        )
        for every in (0, 2)
    }
    checked, unchecked = line(runs[2]), line(runs[0])
    assert [SUFFIX_CORRELATION in epoch for epoch in checked] == [True, False, True]
    assert all(-1 <= epoch.get(SUFFIX_CORRELATION, 0) <= 1 for epoch in checked)
    assert [{k: v for k, v in epoch.items() if k != SUFFIX_CORRELATION} for epoch in checked] == unchecked
    last = [load_file(checkpoints(run / "checkpoints")[-1] / "adapter.safetensors") for run in runs.values()]
    assert all(torch.equal(value, last[1][name]) for name, value in last[0].items())


@pytest.mark.slow
def test_it_makes_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two processes would make one more of them than the other, and wait for it."""
    decode, graphs = ToyPolicy.decode, []

    def decoded(policy: ToyPolicy, x_BNC: torch.Tensor, *rest: object) -> object:
        graphs.append(torch.is_grad_enabled())
        return decode(policy, x_BNC, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ToyPolicy, "decode", decoded)
    train_policy(toy_config(tmp_path / "run", *CHEAP, "epochs=1"))
    assert graphs
    assert not any(graphs)


@pytest.mark.slow
def test_a_full_suffix_is_not_checked(tmp_path: Path) -> None:
    run = train_policy(toy_config(tmp_path / "run", "epochs=1", "sampling.suffix.check_every=1"))
    assert SUFFIX_CORRELATION not in line(run)[0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["sampling.suffix.steps=6"], marks=pytest.mark.slow),
        pytest.param(["sampling.suffix.steps=6", "sampling.tree.seeds=1", "sampling.batch=4"], marks=pytest.mark.slow),
        ["sampling.suffix.steps=5", "sampling.sde_steps=[0,2]", "sampling.tree={seeds: 2, branches: [1, 2]}"],
        ["sampling.suffix.steps=8", "objective.name=diffusion_nft"],
    ],
    ids=["own noise", "one start", "two levels", "endpoints"],
)
def test_all_steps_beside_all_steps_agree_wholly(settings: list[str], tmp_path: Path) -> None:
    """The suffix says what all steps are, so the group's latents, the weights and the scores are the epoch's own."""
    settings = [*CHEAP, "sampling.suffix.solver=euler", *settings]
    for epoch in line(train_policy(toy_config(tmp_path / "run", *settings))):
        assert epoch[SUFFIX_CORRELATION] == pytest.approx(1.0, abs=1e-12)


def test_it_costs_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its suffix, by all steps; its images and questions once more, and the cheap ones are the epoch's own."""
    counts: list[dict[str, int]] = []
    for every in (0, 1):
        counts.append({"velocity": 0, "decode": 0, "verdicts": 0})
        _count(monkeypatch, ToyPolicy, "velocity", counts[-1])
        _count(monkeypatch, ToyPolicy, "decode", counts[-1])
        _count(monkeypatch, ToyJudge, "verdicts", counts[-1])
        config = toy_config(tmp_path / str(every), *CHEAP, "epochs=1", f"sampling.suffix.check_every={every}")
        trainer = PolicyTrainer(config)
        counts[-1].update(dict.fromkeys(counts[-1], 0))
        trainer.run_epoch()
        trainer.close()
        monkeypatch.undo()
    group, steps_left, questions = config.group_size, 6, 6 + 4
    assert {name: counts[1][name] - counts[0][name] for name in counts[0]} == {
        "velocity": group * steps_left,
        "decode": group,
        "verdicts": group * questions,
    }


def _count(patch: pytest.MonkeyPatch, owner: type, name: str, counts: dict[str, int]) -> None:
    """Adds up the rows of each call."""
    method: Callable[..., object] = getattr(owner, name)

    def counted(self: object, rows: Sequence[object], *args: object) -> object:
        counts[name] += len(rows)
        return method(self, rows, *args)

    patch.setattr(owner, name, counted)


@pytest.mark.slow
def test_a_stopped_and_resumed_run_checks_alike(tmp_path: Path) -> None:
    settings = [*CHEAP, "sampling.suffix.check_every=2"]
    whole = line(train_policy(toy_config(tmp_path / "whole", *settings, "epochs=4")))
    train_policy(toy_config(tmp_path / "run", *settings, "epochs=1"))
    assert line(train_policy(toy_config(tmp_path / "run", *settings, "epochs=4"), resume="auto")) == whole
    assert SUFFIX_CORRELATION in whole[2]


def test_a_suffix_that_orders_a_group_otherwise_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the images that are finished by few steps are inverted."""
    decode = ToyPolicy.decode
    calls = iter(range(10**6))

    def inverted(self: ToyPolicy, *args: object) -> list[Image.Image]:
        images = decode(self, *args)  # type: ignore[arg-type]
        return [image.point(lambda value: 255 - value) for image in images] if next(calls) % 6 < 4 else images

    monkeypatch.setattr(ToyPolicy, "decode", inverted)
    config = toy_config(tmp_path / "run", *CHEAP, "judge=none", "rewards=[{name: brightness}]", "evaluation.every=9")
    trainer = PolicyTrainer(config, rewards={"brightness": brightness})
    with caplog.at_level(logging.WARNING):
        values = [trainer.run_epoch()[SUFFIX_CORRELATION] for _ in range(2)]
    trainer.close()
    assert all(value < -0.9 for value in values)
    (warning,) = [record.message for record in caplog.records if "sampling.suffix" in record.message]
    assert warning.startswith(
        "epoch 1: with sampling.suffix solver ab2, steps 3 a group's advantages correlate by "
        f"{values[0]:.2f} with all steps' advantages, less than 0.9; give it more steps"
    )


def test_a_score_that_one_way_lacks_does_not_count() -> None:
    group = [Row(Prompt(0, ""), number) for number in range(4)]
    cheap = values([1.0, 0.0, 5.0, -1.0], used=[True, True, False, True])
    assert advantage_correlation(cheap, values([1.0, 0.0, -9.0, -1.0]), group) == pytest.approx(1.0)
    assert advantage_correlation(values([0.0] * 4), cheap, group) is None
    assert advantage_correlation(values([1.0] * 4, used=[True, False, False, False]), cheap, group) is None


def test_each_sample_is_finished_from_its_own_latent() -> None:
    """Four children of one node, as sampling by all steps would have finished them."""
    policy, group = ToyPolicy(), [Row(Prompt(0, "a red hat"), number) for number in range(4)]
    cheap = Sampler(size=Size(16, 16), steps=6, sde_steps=(1,), tree=Tree(1, (4,)), suffix=Suffix(steps=1))
    draw = Draw(policy, cheap, ConditioningCache(policy), seed=0, epoch=0, batch=2)
    whole = replace(draw, sampler=cheap.model_copy(update={"suffix": Suffix()}))

    scores = full_scores(draw, group, [collect(draw, group)], rewards={"brightness": brightness}, runtime=Runtime())  # type: ignore[dict-item]
    expected = {
        row: [score]
        for rollout in collect(whole, group).rollouts
        for row, score in zip(rollout.row_B, brightness([], rollout.images), strict=True)
    }
    assert scores == {row: pytest.approx(score, abs=1e-3) for row, score in expected.items()}
    assert len({round(score, 4) for (score,) in expected.values()}) == 4
