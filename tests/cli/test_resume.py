"""`--resume` with a value and without."""

from __future__ import annotations

import pytest

from pacorl.cli.resume import spelled_out


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["run.yaml", "--resume"], ["run.yaml", "--resume", "auto"]),
        (["--resume", "run.yaml"], ["--resume", "auto", "run.yaml"]),
        (["run.yaml", "--resume", "seed=1"], ["run.yaml", "--resume", "auto", "seed=1"]),
        (["run.yaml", "--resume", "--dry-run"], ["run.yaml", "--resume", "auto", "--dry-run"]),
        (["run.yaml", "--resume", "auto"], ["run.yaml", "--resume", "auto"]),
        (["run.yaml", "--resume", "runs/a/checkpoints/step-000040"],) * 2,
        (["run.yaml", "--resume=auto"],) * 2,
        (["run.yaml"],) * 2,
    ],
)
def test_a_bare_resume_means_auto(given: list[str], meant: list[str]) -> None:
    assert spelled_out(given) == meant
