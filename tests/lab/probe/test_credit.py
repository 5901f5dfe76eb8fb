"""Panel credit before a run: how local panels are, and what gradients share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.core.grid import split
from pacorl.grpo.builders import read_prompts
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.probe.credit import CreditFinding, measure_credit, signal_by_noise
from pacorl.lab.probe.options import ProbeOptions
from pacorl.lab.probe.probing import configured_sampler, opened, plan_design
from pacorl.rewards.reward import PanelScores
from pacorl.types import Prompt

Config = Callable[..., PolicyConfig]
FEW = ("prompts_per_epoch=4", "group_size=8", "sampling.batch=4")


class Red:
    """The mean of red of all panels, with each panel's share given as the part of the panel `shift` places on."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float | None]:
        return [scores.score for scores in self.panel_scores(prompts, images)]

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[PanelScores]:
        found = []
        for prompt, image in zip(prompts, images, strict=True):
            red = [float(np.asarray(panel)[..., 0].mean()) / 255 for panel in split(image, prompt.grid)]
            parts = np.roll(red, self.shift) / len(red)
            found.append(PanelScores(float(np.mean(red)), parts.tolist()))
        return found


def measured(config: PolicyConfig, reward: object, *, groups: int) -> CreditFinding:
    own, train = configured_sampler(config), read_prompts(config)[0]
    design = plan_design(config, own, ProbeOptions(), prompts=len(train))
    with opened(config, design, train, ["as trained"], credit=groups) as models:
        rewards: dict[str, Any] = {configured.key: reward for configured in config.rewards}
        return measure_credit(config, models.draw(own), rewards, models.credited)


def test_panels_that_do_not_meet_are_local(toy: Config) -> None:
    """The toy generator reads each token alone, so that new noise of a panel changes that panel only."""
    found = measured(toy(*FEW), Red(shift=0), groups=3)
    assert found.own > 0
    assert found.rest == pytest.approx(0, abs=1e-9)
    assert found.advice == "panel"


def test_a_score_that_changes_elsewhere_is_not_local(toy: Config) -> None:
    found = measured(toy(*FEW), Red(shift=1), groups=3)
    assert found.own == pytest.approx(0, abs=1e-9)
    assert found.share == pytest.approx(1)
    assert found.advice == "set"


@pytest.mark.slow
def test_groups_have_noise_of_their_own_and_the_weights_no_gradient(toy: Config) -> None:
    config = toy(*FEW)
    found = measured(config, Red(shift=0), groups=5)
    panel = found.signals[-1]
    assert [signal.credit for signal in found.signals] == ["set", "half", "panel"]
    # Equal noise in all groups would make equal gradients of equal prompts.
    assert -1 < panel.between.value < 1
    assert panel.within.low < panel.within.value < panel.within.high


def test_prompts_without_panels_are_refused(toy: Config) -> None:
    config = toy(*FEW)
    own = configured_sampler(config)
    with (
        opened(
            config, plan_design(config, own, ProbeOptions(), prompts=2), read_prompts(config)[0], ["as trained"]
        ) as models,
        pytest.raises(ValueError, match="prompt 7 is one image without panels"),
    ):
        measure_credit(config, models.draw(own), {}, [Prompt(7, "a hat")])


def test_an_aggregate_without_a_slope_is_refused(toy: Config) -> None:
    with pytest.raises(ValueError, match=r"advantages\.aggregate ranked has no slope"):
        measured(toy(*FEW, "advantages={aggregate: ranked}"), Red(shift=0), groups=2)


def test_shared_gradients_are_signal() -> None:
    """Against the definition, pair by pair."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(50, generator=generator)
    halves = []
    for _ in range(6):
        first, second = (0.3 * shared + torch.randn(50, generator=generator) for _ in range(2))
        halves.append((first, second))

    between, within = signal_by_noise(halves, np.random.default_rng(0))
    whole = [first + second for first, second in halves]
    products = [float(one @ other) for one in whole for other in whole if one is not other]
    signal, power = np.mean(products), np.mean([float(one @ one) for one in whole])
    assert between.value == pytest.approx(signal / (power - signal), rel=1e-5)

    shares = np.mean([float(first @ second) for first, second in halves])
    powers = np.mean([float(first @ first + second @ second) / 2 for first, second in halves])
    assert within.value == pytest.approx(shares / powers, rel=1e-5)
    assert between.low <= between.value <= between.high


@pytest.mark.slow
def test_the_command_compares_credits(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("probe") / "found"
    few = ["prompts_per_epoch=2", "group_size=4", "sampling.batch=4", "sampling.tree={seeds: 1}"]
    run = CliRunner().invoke(app, ["probe", "tiny", *few, "--epochs", "2", "--credit", "2", "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert "credit" in run.output
    found = json.loads((out / "probe.json").read_text())["credit"]
    assert [signal["credit"] for signal in found["signals"]] == ["set", "half", "panel"]
    assert 0 <= found["share"] <= 1
    assert found["advice"] in {"panel", "0.5", "set"}
