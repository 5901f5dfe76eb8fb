"""Every form of the engine equals plain float64 loops: samples, log-probabilities, advantages, weights, averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import engine_forms as forms
import pytest
import worlds
from forms_table import CASES, DRAWN, DRAWN_FAST, DRAWN_IN_CAMPAIGN, RESUMED, TWO_PROCESSES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pacorl.config.base import ConfigError
from pacorl.grpo.rows import divide

Run = tuple[Sequence[str], int]
"""Overrides of the config, and the epochs before a checkpoint and a resume; 0 for a run without a stop."""


def differences(overrides: Sequence[str], folder: Path, *, stop_after: int = 0) -> list[str]:
    observed = forms.train(folder / "engine", overrides, stop_after=stop_after)
    return forms.differences(observed, forms.reference(overrides, folder / "reference"))


@pytest.mark.parametrize("name", CASES)
def test_the_engine_equals_plain_loops(name: str, tmp_path: Path) -> None:
    assert differences(CASES[name], tmp_path) == []


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_plain_loops(name: str, tmp_path: Path) -> None:
    assert differences(CASES[name], tmp_path, stop_after=1) == []


def train_all(folder: Path, runs: Sequence[Run]) -> None:
    """Several runs in one world of processes, which takes longer to start than to run."""
    for number, (overrides, stop_after) in enumerate(runs):
        result = folder / f"observed-{number}"
        forms.train_in_process(folder / f"run-{number}", overrides, result, stop_after=stop_after)


def check_two_processes(folder: Path, runs: Sequence[Run], *, extra: Mapping[str, str] | None = None) -> None:
    worlds.run(train_all, folder, runs, world=2, extra=extra)
    for number, (overrides, stop_after) in enumerate(runs):
        expected = forms.reference(overrides, folder / f"reference-{number}")
        observed = forms.merged(folder / f"observed-{number}")
        assert forms.differences(observed, expected) == [], (overrides, stop_after)


def test_two_processes_equal_plain_loops(tmp_path: Path) -> None:
    check_two_processes(tmp_path, [(CASES[name], stop_after) for name, stop_after in TWO_PROCESSES.items()])


@pytest.mark.slow
def test_panel_credit_on_two_shards_equals_plain_loops(tmp_path: Path) -> None:
    check_two_processes(tmp_path, [(CASES["panel credit"], 0)], extra=worlds.fsdp2())


# --- drawn settings --------------------------------------------------------------------------------------------


@st.composite
def sampled(draw: st.DrawFn, *, is_path: bool) -> list[str]:
    """Steps, tree and suffix that fit each other."""
    steps = draw(st.integers(3, 6))
    # Objectives of the endpoint take noise to branch a tree.
    branching = is_path or draw(st.booleans())
    sde_type = draw(st.sampled_from(["flow_sde", "cps"])) if branching else "flow_sde"
    last = steps - 2 if sde_type == "cps" else steps - 1
    chosen = sorted(draw(st.sets(st.integers(0, last), min_size=1, max_size=3)))
    count = draw(st.integers(1, len(chosen)))
    kind = draw(st.sampled_from(["fixed", "random", "sliding"]))
    overrides = [f"sampling.steps={steps}", f"sampling.sde_type={sde_type}", f"sampling.sde_steps={chosen}"]
    overrides.append(f"sampling.window={{kind: {kind}, size: {count}}}")
    levels = len(chosen) if kind == "fixed" else count
    overrides.append(f"sampling.noise_level={draw(st.sampled_from([0.3, 0.7, 1.0]))}")

    left = steps - chosen[-1] - 1 if branching else steps
    if left >= 2 and draw(st.booleans()):
        solver, count = draw(st.sampled_from(["euler", "ab2"])), draw(st.integers(2, left))
        overrides.append(f"sampling.suffix={{solver: {solver}, steps: {count}}}")

    if not branching:
        return [*overrides, f"group_size={draw(st.sampled_from([2, 4, 6]))}"]
    # Three levels of three children would be 27 leaves, each with loops of its own.
    widths = [1, 2] if levels == 3 else [1, 2, 3]
    branches = draw(st.lists(st.sampled_from(widths), min_size=levels, max_size=levels))
    if not is_path:
        branches[0] = max(2, branches[0])
    leaves = 1
    for count in branches:
        leaves *= count
    seeds = draw(st.integers(2 if leaves == 1 else 1, 2))
    overrides.append(f"sampling.tree={{seeds: {seeds}, branches: {branches}}}")
    return [*overrides, f"group_size={seeds * leaves}"]


@st.composite
def objectives(draw: st.DrawFn, name: str) -> list[str]:
    overrides = [f"objective.name={name}", f"objective.kl_weight={draw(st.sampled_from([0.0, 0.2]))}"]
    if name == "diffusion_nft":
        return [*overrides, f"objective.beta={draw(st.sampled_from([0.1, 1.0]))}"]
    overrides.append(f"objective.clip_range={draw(st.sampled_from([1e-4, 1e-2, 1.0]))}")
    return overrides


@st.composite
def compared(draw: st.DrawFn) -> list[str]:
    aggregate = draw(st.sampled_from(["log_tamed", "weighted_sum"]))
    floor = draw(st.sampled_from(["none", "max", "add"]))
    overrides = [f"advantages.aggregate={aggregate}", f"advantages.floor={floor}"]
    overrides.append(f"advantages.clip={draw(st.sampled_from([0.5, 5.0]))}")
    overrides.append(f"advantages.credit={draw(st.sampled_from(['set', 'panel']))}")
    overrides.append(f"advantages.std={draw(st.sampled_from(['group', 'global']))}")
    if aggregate == "log_tamed":
        overrides.append(f"advantages.threshold={draw(st.sampled_from([0.05, 0.2, 1.0]))}")
    return overrides


@st.composite
def optimised(draw: st.DrawFn) -> list[str]:
    return [
        f"optimizer.updates_per_epoch={draw(st.integers(1, 2))}",
        f"optimizer.max_grad_norm={draw(st.sampled_from([0.01, 1.0]))}",
        f"optimizer.weight_decay={draw(st.sampled_from([0.0, 0.1]))}",
        f"sampling.batch={draw(st.sampled_from([1, 2, 3]))}",
        f"prompts_per_epoch={draw(st.sampled_from([2, 4]))}",
        f"seed={draw(st.integers(0, 1000))}",
    ]


@st.composite
def configs(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(["grpo_clip", "grpo_guard", "diffusion_nft", "awm"]))
    parts = [compared(), sampled(is_path=name.startswith("grpo")), objectives(name), optimised()]
    return [override for part in parts for override in draw(part)]


def check(overrides: list[str], *, stop_after: int = 0) -> None:
    with TemporaryDirectory() as folder:
        try:
            config = forms.config_of(overrides, Path(folder))
            assume(not divide(config).differences(config))  # the reference has the config's own batches
            found = differences(overrides, Path(folder), stop_after=stop_after)
        except ConfigError:
            assume(False)
    assert found == []


QUICK = settings(max_examples=DRAWN, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(QUICK, max_examples=DRAWN_FAST)
@given(configs(), st.integers(0, 1))
def test_a_few_drawn_settings_equal_plain_loops(overrides: list[str], stop_after: int) -> None:
    check(overrides, stop_after=stop_after)


@pytest.mark.slow
@QUICK
@given(configs(), st.integers(0, 1))
def test_drawn_settings_equal_plain_loops(overrides: list[str], stop_after: int) -> None:
    check(overrides, stop_after=stop_after)


@pytest.mark.nightly
@settings(max_examples=DRAWN_IN_CAMPAIGN, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.integers(0, 1))
def test_many_drawn_settings_equal_plain_loops(overrides: list[str], stop_after: int) -> None:
    check(overrides, stop_after=stop_after)
