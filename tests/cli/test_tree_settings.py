"""A tree or a suffix that does not fit is refused before anything loads: one line, with the fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pacorl.cli import main
from pacorl.config.recipes import recipe

CASES = [
    (["sampling.tree={seeds: 5}"], 1, "5 seeds × 2 branches = 10 samples and group_size is 12; make them equal"),
    (["sampling.tree={seeds: 24}"], 1, "24 seeds × 1 branches = 24 samples and group_size is 12; make them equal"),
    (["sampling.tree={seeds: 1, branches: [4]}"], 1, "= 4 samples and group_size is 12; make them equal"),
    (["sampling.tree={seeds: 1, branches: [3, 4]}"], 1, "and an epoch has 1 stochastic steps; give one entry per step"),
    (["sampling.tree={seeds: 0}"], 1, "sampling.tree.seeds: Input should be greater than 0 (got 0)"),
    (
        ["sampling.batch=7"],
        1,
        "batches of 7 (sampling.batch); batches of 1, 2, 3, 4, 6, 9, 12, 18; or 70 or 84 samples",
    ),
    ([], 5, "× 5 processes × batches of 12 (sampling.batch); 1, 3 processes; or 120 samples"),
    (["sampling.suffix={solver: ab2, steps: 1}"], 1, "the suffix has 1; give it 2 steps, or take solver euler"),
    (["sampling.suffix.steps=5"], 1, "only 4 deterministic steps follow the last stochastic one; set it to at most 4"),
    (["sampling.sde_steps=[5]", "sampling.suffix.solver=ab2"], 1, "leave sampling.suffix out, or raise sampling.steps"),
]


@pytest.mark.parametrize(("settings", "world", "fix"), CASES)
def test_what_does_not_fit_is_one_line(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    world: int,
    fix: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "pacorl",
            "train-policy",
            str(recipe()),
            "--dry-run",
            f"out={tmp_path}",
            "optimizer.updates_per_epoch=2",
            *settings,
        ],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code == 1
    assert shown.startswith("pacorl: ")
    assert fix in shown
    assert shown.count("\n") == 1
