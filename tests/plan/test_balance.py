"""Whether a judge keeps up with those that train, by their FLOPs."""

from __future__ import annotations

import io
import json
from functools import cache

import pytest
from tiny_runs import JPEG_SIZE, planned
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.io.console import PlainConsole
from pacorl.plan.cost import Cost
from pacorl.plan.plan import print_plan, summary


@cache
def balance(*overrides: str, world: int = 1) -> Cost:
    cost = planned(*overrides, world=world).cost
    assert cost
    return cost


@pytest.mark.slow
def test_the_balance_follows_the_questions_and_the_forwards() -> None:
    alone = balance()
    more = balance("rewards=[{name: consistency}, {name: panel_match}]")
    assert (alone.questions, more.questions) == (6, 10)
    judged = alone.judged.flops
    assert more.judged.flops == pytest.approx(judged * 10 / 6)
    assert balance("judge={checkpoint: tiny, symmetric: true}").judged.flops == pytest.approx(2 * judged)
    node = balance("sampling={size: [64, 64], tree: {seeds: 1}}")
    assert node.image < 0.9 * alone.image
    assert node.judged.flops == judged


@pytest.mark.slow
def test_as_many_judge_cards_as_the_trainers_keep_busy() -> None:
    for world in (1, 6):
        several = balance(world=world)
        assert several.world == world
        assert several.judge_cards == -(-world * several.judged.flops // several.image)
        assert several.balance_line.endswith(f"and one with {several.image / several.judged.flops:.1f}")


@pytest.mark.slow
def test_the_balance_is_printed_and_in_the_json() -> None:
    plan = planned()
    assert plan.cost
    console = PlainConsole(width=300, file=io.StringIO())
    print_plan(plan, console)
    assert isinstance(console.file, io.StringIO)
    assert plan.cost.balance_line in console.file.getvalue()
    assert json.loads(plan.to_json())["cost"]["questions"] == 6


@pytest.mark.slow
def test_without_a_judge_there_is_none() -> None:
    plan = planned("judge=none", "best_by=''", f"rewards=[{{name: '{JPEG_SIZE}'}}]")
    assert plan.cost
    assert plan.cost.questions == 0
    assert not any(line.startswith("balance") for line in summary(plan))


def dry_run(*flags: str, code: int = 0) -> dict[str, float]:
    result = CliRunner().invoke(app, ["generate", "--dry-run", "--json", *flags])
    assert result.exit_code == code, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.slow
def test_generating_counts_the_judge_of_the_best() -> None:
    alone, judged = dry_run(), dry_run("--best-of", "4")
    components = {row["component"]: row for row in judged["rows"]}  # type: ignore[attr-defined]
    assert judged["peak_bytes"] > alone["peak_bytes"]
    assert judged["peak_bytes"] - alone["peak_bytes"] >= components["judge"]["bytes"]
    low = dry_run("--best-of", "4", "--memory", "low")
    rows = {row["component"]: row for row in low["rows"]}  # type: ignore[attr-defined]
    assert rows["judge"]["phases"] == rows["judge at work"]["phases"] == ["score"]
    assert low["peak_bytes"] < judged["peak_bytes"]
    # A judge over HTTP takes no memory here; that it does not answer is told.
    silent = dry_run("--best-of", "4", "--judge", "http://127.0.0.1:1/v1", code=2)
    assert silent["peak_bytes"] == alone["peak_bytes"]
