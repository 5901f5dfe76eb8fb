"""Panel credit through a run: its tables, its exact ratio, its settings and what refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_runs import JPEG_SIZE, metrics, train_policy
from toy_world import toy_config, toy_world

from pacorl.config import base as configs
from pacorl.config.base import ConfigError
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION
from pacorl.grpo.builders import with_credit
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import Row
from pacorl.grpo.scoring import reward_table
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.rewards.reward import PanelScores
from pacorl.types import Grid, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

PANEL = "advantages.credit=panel"
LEFT_OUT = "advantages.credit=null"


class Reds:
    """A quarter more for each panel than for the one before."""

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [found.score for found in self.panel_scores(prompts, images)]

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        parts = [[0.25 * (panel + 1) for panel in range(prompt.grid.count)] for prompt in prompts]
        return [PanelScores(sum(part), part) for part in parts]


def test_the_table_of_parts() -> None:
    """A score without parts counts for every panel; panels that a set lacks, and missing scores, stay missing."""
    prompts = [Prompt(0, "four", grid=Grid(2, 2)), Prompt(1, "two", grid=Grid(1, 2))]
    rows = [Row(prompts[0], 0), Row(prompts[0], 1), Row(prompts[1], 2)]
    scores = {
        0: [PanelScores(1.0, [0.1, 0.2, 0.3, 0.4]), PanelScores(7.0, None)],
        1: [PanelScores(None, [0.1, None, 0.3, 0.4]), PanelScores(8.0, None)],
        2: [PanelScores(1.1, [0.5, 0.6]), PanelScores(None, None)],
    }
    table = reward_table(scores, rows, names=("reds", "whole"), by_panel=True)
    nan = float("nan")
    expected = [[[0.1, 0.2, 0.3, 0.4], [0.1, nan, 0.3, 0.4], [0.5, 0.6, nan, nan]], [[7.0] * 4, [8.0] * 4, [nan] * 4]]
    assert table.part_RBP is not None
    torch.testing.assert_close(table.part_RBP, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert reward_table(scores, rows, names=("reds", "whole")).part_RBP is None


class Whole:
    """A reward without parts."""

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [1.0] * len(images)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_with_panel_credit_has_a_ratio_of_exactly_1(objective: str, tmp_path: Path) -> None:
    overrides = [PANEL, f"objective.name={objective}", "epochs=2", "sampling.sde_steps=[0,1]"]
    with toy_world():
        epochs = metrics(train_policy(toy_config(tmp_path / "run", *overrides)), "epoch")
    deviations = [line.get(RATIO_DEVIATION) for line in epochs]
    assert deviations == [None if objective == "diffusion_nft" else 0.0] * 2


@pytest.mark.parametrize(
    ("rewards", "credit", "reason"),
    [
        ("{name: consistency}, {name: panel_match}", "panel", "every reward has scores of panels"),
        (f"{{name: consistency}}, {{name: '{JPEG_SIZE}'}}", "set", "jpeg_size has no scores of panels"),
        ("{name: reds}, {name: consistency}", "panel", "every reward has scores of panels"),
        ("{name: reds}, {name: whole}", "set", "whole has no scores of panels"),
    ],
)
def test_credit_left_out_is_panel_if_every_reward_has_parts(
    rewards: str, credit: str, reason: str, tmp_path: Path
) -> None:
    functions = {"reds": Reds(), "whole": Whole()}
    sets = [Prompt(0, "a set", grid=Grid(2, 2))]
    with toy_world():
        config = toy_config(tmp_path, f"rewards=[{rewards}]", LEFT_OUT)
        chosen, note = with_credit(config, functions, sets)
        assert chosen.advantages.credit == credit
        assert note == f"advantages.credit is {credit}: {reason}"
        own = toy_config(tmp_path, f"rewards=[{rewards}]", "advantages.credit=panel")
        kept, note = with_credit(own, functions, sets)
        assert (kept.advantages, note) == (own.advantages, "")
        # The clip range follows the credit.
        ranges = [made.objective.epsilon for made in (chosen, kept)]
        assert ranges == [1e-3 if credit == "panel" else 1e-4, 1e-3]


def test_edits_have_the_credit_of_their_image(tmp_path: Path) -> None:
    edits = [Prompt(0, "an edit", sources=(tmp_path / "source.png",))]
    with toy_world():
        chosen, note = with_credit(toy_config(tmp_path, LEFT_OUT), {}, edits)
    assert chosen.advantages.credit == "set"
    assert note == "advantages.credit is set: the prompts are edits"


def test_a_run_names_its_choice_of_credit_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with toy_world():
        run = train_policy(toy_config(tmp_path / "run", LEFT_OUT, "epochs=1"))
        assert capsys.readouterr().out.count("advantages.credit is panel: every reward") == 1
        assert configs.load(PolicyConfig, run / "config.yaml", []).advantages.credit == "panel"
        PolicyTrainer(toy_config(tmp_path / "run", LEFT_OUT, "epochs=2"), resume=True).train()
        with pytest.raises(ConfigError, match=r"advantages\.credit was 'panel' and is now 'set'"):
            PolicyTrainer(toy_config(tmp_path / "run", "advantages.credit=set", "epochs=3"), resume=True)
