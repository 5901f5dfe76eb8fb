"""What the committed tiny checkpoints can do, measured on the files as they are loaded (docs/quickstart.md)."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from page_blocks import ROOT, blocks
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.core import questions
from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.judge.local import LocalJudge
from pacorl.models.policies.flux import FLUX, FluxPolicy
from pacorl.tiny.oracle import grade, read_panels
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, SCENES, draw, panels_of, set_prompts, theme_text, with_another
from pacorl.types import Grid, Question, Size

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def judge() -> LocalJudge:
    return LocalJudge.from_pretrained("tiny")


@pytest.fixture(scope="module")
def policy() -> FluxPolicy:
    return FLUX.load(FLUX.options_for("tiny", dtype="float32", max_sequence_length=48))


def test_the_judge_is_right_about_held_out_pairs(judge: LocalJudge) -> None:
    """Half of the pairs are equal, half have one look redrawn."""
    rng, pool, asked = Random(0), panels_of("test"), []
    for number in range(600):
        first, size, (pose, prop) = rng.choice(pool), rng.choice((32, 64)), rng.choice(SCENES)
        second = replace(first, pose=pose, prop=prop)
        if number % 2:
            second = with_another(second, rng.choice(LOOKS), rng)
        text = questions.same_theme(f"2x2 grid layout of {theme_text(first.place)}.")
        asked.append(Question((draw(first, size), draw(second, size)), text))
    answers = judge.verdicts(asked)
    assert np.mean([((one.p_yes or 0) > 0.5) != number % 2 for number, one in enumerate(answers)]) >= 0.95


@pytest.mark.parametrize(
    ("grid", "side", "valid"),
    [
        (Grid(2, 2), 64, 0.9),
        pytest.param(Grid(2, 2), 96, 0.75, marks=pytest.mark.nightly),
        pytest.param(Grid(3, 3), 64, 0.75, marks=pytest.mark.nightly),
    ],
)
def test_the_generator_is_able_but_unreliable(policy: FluxPolicy, grid: Grid, side: int, valid: float) -> None:
    prompts = set_prompts("test", 48, grid=grid)
    sampler = Sampler(size=Size(side * grid.rows, side * grid.cols), steps=10)
    images = sample_images(policy, prompts, sampler=sampler, cache=ConditioningCache(policy), seeds=range(48), batch=12)
    shown = [read_panels(split(image, grid)) for image in images]
    graded = [grade(asked_in(prompt), panels) for prompt, panels in zip(prompts, shown, strict=True)]
    means = {name: float(np.mean([grades[name] for grades in graded])) for name in graded[0]}
    assert means["valid"] >= valid, means
    assert means["prompt_match"] >= 0.7, means
    assert 0.4 <= means["attribute_agreement"] <= 0.75, means


def test_the_first_examples_are_pictures_to_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's and the page's first commands, at the default seed."""
    monkeypatch.chdir(tmp_path)
    pages = (ROOT / "README.md", ROOT / "docs" / "generate.md")
    lines = [line for page in pages for block in blocks(page, "bash") for line in block.lines]
    examples = [line for line in lines if line.startswith("pacorl generate ") and "--image" not in line][:3]
    scores = {}
    for number, line in enumerate(examples):
        out = ["--out", str(tmp_path / str(number)), "--json"]
        result = CliRunner().invoke(app, [*shlex.split(line)[1:], *out])
        scores[line] = json.loads(result.stdout)["made"][0]["score"]
    assert len(scores) == 3
    assert min(scores.values()) >= 0.9, scores
