"""A probe from end to end: what it draws, what it says, and that a seed decides it all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_world import ToyJudge
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.grid import join, split
from pacorl.core.sampler import Tree
from pacorl.grpo.builders import read_prompts
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.lab.probe.probing import (
    Findings,
    ProbeOptions,
    configured_sampler,
    draw,
    level_counts,
    opened,
    plan_design,
    probe,
    readings_of,
    turn,
)
from pacorl.types import Grid, Prompt, Question

Config = Callable[..., PolicyConfig]
FEW = ("prompts_per_epoch=4", "group_size=8", "sampling.batch=4")


@pytest.fixture
def found(toy: Config) -> Findings:
    return probe(toy(*FEW), ProbeOptions(epochs=2))


def undated(document: dict[str, object]) -> str:
    """The document without what a clock measures."""
    return json.dumps({key: value for key, value in document.items() if key not in {"seconds", "cost"}})


@pytest.mark.slow
def test_the_seed_decides_everything_but_the_clock(toy: Config, found: Findings) -> None:
    again = probe(toy(*FEW), ProbeOptions(epochs=2))
    other = probe(toy(*FEW, "seed=7"), ProbeOptions(epochs=2))
    assert undated(again.document()) == undated(found.document())
    assert undated(other.document()) != undated(found.document())


def test_shares_of_a_prompt_sum_to_one(found: Findings) -> None:
    for finding in found.candidates:
        shares = [finding.variances.share(name).value for name in finding.variances.within]
        assert sum(shares) == pytest.approx(1.0)
        assert finding.variances.names[-1] == "judge"


def test_candidates_share_prompts_and_starts(toy: Config) -> None:
    """What tells two candidates apart is the candidate: noise at the last step changes a picture little."""
    config = toy(*FEW)
    own, train = configured_sampler(config), read_prompts(config)[0]
    design = plan_design(config, own, ProbeOptions(noise_levels=(1e-9, 2e-9)), prompts=len(train))
    first, second = (c for c in design.candidates if c.varies == "noise_level")
    with opened(config, design, train, ["as trained"]) as models:
        scores = [draw(models, candidate, own, seeds=2)[:, 0] for candidate in (first, second)]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
    pairs = scores[0].reshape(-1, 2)
    assert pairs[:, 0] == pytest.approx(pairs[:, 1], abs=0.01)  # siblings without noise are one image
    assert np.ptp(pairs[:, 0]) > 0.02  # and starts are not


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["{}", "{solver: ab2, steps: 2, check_every: 0}"])
def test_the_cost_of_an_epoch_is_what_a_run_makes(toy: Config, suffix: str) -> None:
    """Forwards and questions are those of an epoch of training."""
    config = toy(*FEW, "sampling.tree={seeds: 2}", "sampling.steps=5", f"sampling.suffix={suffix}")
    cost = probe(config, ProbeOptions(epochs=1)).cost
    trainer = PolicyTrainer(config)
    latents, asked = {True: 0, False: 0}, 0
    velocity, verdicts = trainer.policy.velocity, ToyJudge.verdicts

    def counted(x_BNC: torch.Tensor, *rest: object) -> torch.Tensor:
        latents[torch.is_grad_enabled()] += len(x_BNC)
        return velocity(x_BNC, *rest)  # type: ignore[arg-type]

    def counting(judge: ToyJudge, questions: list[Question]) -> object:
        nonlocal asked
        asked += len(questions)
        return verdicts(judge, questions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.policy, "velocity", counted)
        patch.setattr(ToyJudge, "verdicts", counting)
        trainer.run_epoch()
    trainer.close()
    assert (cost.forwards, cost.trained, cost.questions) == (latents[False], latents[True], asked)
    assert list(cost.seconds) == ["sampling", "reward", "update"]
    assert min(cost.seconds.values()) > 0


def test_the_nodes_of_a_group(toy: Config, found: Findings) -> None:
    own = configured_sampler(toy(*FEW)).model_copy(update={"tree": Tree(4, (6,))})
    first = found.candidates[0]
    assert level_counts(toy(*FEW), own, first.candidate, first.variances) == {"start": 4, "step 1": 24, "judge": 24}


def test_advantages_among_siblings_do_not_meet_the_start(toy: Config) -> None:
    group, siblings = (
        probe(toy(*FEW, "sampling.tree={seeds: 2}", f"advantages.among={among}", "judge.symmetric=true"))
        for among in ("group", "siblings")
    )
    assert siblings.candidates[0].signal.value == pytest.approx(1.0)
    assert siblings.candidates[0].signal.low == pytest.approx(1.0)
    assert group.candidates[0].signal.low < 0.9


# --- the judge's readings --------------------------------------------------------------------------------------


def test_turned_panels_keep_their_texts(toy: Config) -> None:
    image = join([split(grid_of(n), Grid(1, 1))[0] for n in range(4)], Grid(2, 2))
    prompt, turned = turn(Prompt(0, "", grid=Grid(2, 2), panels=("a", "b", "c", "d")), image)
    assert prompt.panels == ("d", "c", "b", "a")
    assert [panel.getpixel((0, 0)) for panel in split(turned, Grid(2, 2))] == [(n, n, n) for n in (3, 2, 1, 0)]


def grid_of(level: int) -> object:
    from PIL import Image

    return Image.new("RGB", (4, 4), (level, level, level))


def test_a_judge_of_one_formula_owns_nothing_however_panels_are_turned(found: Findings) -> None:
    """The toy judge knows no order, and a turned panel keeps its text."""
    assert found.readings == ("as trained", "turned")
    for finding in found.candidates:
        assert finding.variances.variance("judge").value == pytest.approx(0.0, abs=1e-20)


def test_a_judge_that_heeds_the_order_owns_a_share(toy: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = ToyJudge.verdicts

    def partial(judge: ToyJudge, questions: list[Question]) -> list[object]:
        """The first image's brightness moves the answer."""
        bias = [0.3 * np.asarray(q.images[0]).mean() / 255 * (len(q.images) > 1) for q in questions]
        return [replace(v, p_yes=v.p_yes * (1 - b)) for v, b in zip(verdicts(judge, questions), bias, strict=True)]

    monkeypatch.setattr(ToyJudge, "verdicts", partial)
    finding = probe(toy(*FEW), ProbeOptions(epochs=1)).candidates[0]
    assert finding.variances.variance("judge").low > 1e-8


@pytest.mark.parametrize("overrides", [("judge.symmetric=true",), ("judge=none", "rewards=[{name: jpeg_size}]")])
def test_a_judge_without_an_order_reads_once(toy: Config, overrides: tuple[str, ...]) -> None:
    findings = probe(toy(*FEW, *overrides))
    assert findings.readings == ("as trained",)
    assert findings.candidates[0].variances.names == ("prompt", "start", "step 1")
    assert any("the judge read each image once" in note for note in findings.notes)


def test_edits_are_not_turned() -> None:
    config = configs.load(PolicyConfig, recipe().with_name("tiny_edit.yaml"), [])
    assert readings_of(config, edits=True) == ("as trained",)
    assert readings_of(config, edits=False) == ("as trained", "turned")


def test_a_run_without_a_judge_is_probed_too(toy: Config) -> None:
    findings = probe(toy(*FEW, "judge=none", "rewards=[{name: jpeg_size}]"))
    assert findings.cost.questions == 0


def test_a_reward_that_asks_a_judge_needs_one(toy: Config) -> None:
    with pytest.raises(ValueError, match=r"judge is none, and rewards.consistency, rewards.panel_match ask a judge"):
        probe(toy(*FEW, "judge=none"))


def test_groups_that_lack_a_score_are_left_out_and_counted(toy: Config, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def bright(prompts, images):\n"
        "    means = [image.convert('L').resize((1, 1)).getpixel((0, 0)) for image in images]\n"
        "    return [None if prompt.id == 2 else mean / 255 for prompt, mean in zip(prompts, means)]\n"
    )
    overrides = ("judge=none", "prompts_per_epoch=4", f"rewards=[{{name: '{path}:bright'}}]")
    findings = probe(toy(*FEW, *overrides), ProbeOptions(epochs=4))
    own = findings.candidates[0]
    assert own.missing_groups == 1
    assert "1 of 4 groups lack a score, and are left out" in findings.notes
    path.write_text("def bright(prompts, images):\n    return [None if n % 2 else 0.5 for n, _ in enumerate(images)]\n")
    with pytest.raises(ValueError, match="every prompt of as configured lacks a score"):
        probe(toy(*FEW, *overrides), ProbeOptions(epochs=1))


# --- the command -----------------------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, ["probe", *words])
    return result.exit_code, result.stdout, result.output + str(result.exception or "")


@pytest.mark.slow
def test_the_command_on_the_tiny_world(tmp_path: Path) -> None:
    """The real classes in small, from the config to table, document and plot."""
    settings = ["prompts_per_epoch=2", "group_size=4", "sampling.size=[32,32]", "sampling.steps=3"]
    settings += ["sampling.batch=8", "sampling.suffix={}", "optimizer.updates_per_epoch=1"]
    words = [str(recipe()), *settings, "--steps", "0", "--noise-levels", "0.7", "--sizes", "32x32"]
    code, shown, everything = run(*words, "--epochs", "3", "--out", str(tmp_path))
    assert code == 0, everything
    assert "2 prompts × 2 starts × 2 children per step" in shown
    assert "step 0" in shown
    document = json.loads((tmp_path / "probe.json").read_text())
    assert document["schema"] == 3
    assert [candidate["name"] for candidate in document["candidates"]] == ["as configured", "step 0"]
    assert document["cost"]["seconds"]["update"] > 0
    assert set(os.listdir(tmp_path)) == {".pacorl", "probe.json"}


SCHEMA = {
    "": "schema design candidates cost notes seconds",
    "design": "prompts starts children readings samples budget",
    "candidates.0": "name sde_steps noise_level size mean levels signal groups_alike groups_missing",
    "candidates.0.levels": "prompt start step\N{NO-BREAK SPACE}1 judge",
    "candidates.0.levels.start": "variance share",
    "candidates.0.signal": "value low high",
    "cost": "forwards trained questions seconds",
    "cost.seconds": "sampling reward update",
}
"""Dotted places of the document, and the keys there."""


@pytest.mark.parametrize("place", SCHEMA)
def test_the_document_keeps_its_keys(found: Findings, place: str) -> None:
    here = json.loads(json.dumps(found.document(), allow_nan=False))
    for key in filter(None, place.split(".")):
        here = here[int(key)] if key.isdecimal() else here[key]
    assert list(here) == [key.replace("\N{NO-BREAK SPACE}", " ") for key in SCHEMA[place].split(" ")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "has a budget of 0 samples"),
        (["--epochs", "0.03"], "too small for 1 candidates"),
        (["--steps", "first"], "--steps 'first' is no list such as 0,1,3"),
        (["--sizes", "64"], "--sizes '64' is no list such as 256x256,384x384"),
        (["objective={name: diffusion_nft}", "sampling.tree={}"], "trains on finished samples"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str) -> None:
    code, _, everything = run(str(recipe()), *words)
    assert code == 1
    assert message in everything


def test_samples_that_a_run_cannot_divide_are_refused_before_any_is_drawn(toy: Config) -> None:
    with pytest.raises(ValueError, match="samples an epoch do not divide into"):
        probe(toy("prompts_per_epoch=1", "group_size=4", "sampling.batch=4", "optimizer.updates_per_epoch=2"))


def test_several_processes_are_refused(toy: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from pacorl.runtime import processes

    monkeypatch.setattr(processes.Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match="runs in one process, and the launcher started 2"):
        probe(toy(*FEW))
