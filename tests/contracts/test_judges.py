"""A judge of a config, in this process and behind a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_server import FakeServer
from PIL import Image

from pacorl.config.base import dump, load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import parse_yaml, read_object
from pacorl.judge import judge_for, judge_from, open_judge
from pacorl.judge.judge import JudgeSettings, RemoteJudge, close_judge
from pacorl.judge.local import BASES, EMBEDDED
from pacorl.judge.pairwise import ask_pairs
from pacorl.types import Question


@pytest.fixture(params=["here", "there"])
def settings(request: pytest.FixtureRequest) -> Iterator[JudgeSettings]:
    """The tiny judge, or a server that answers."""
    if request.param == "here":
        yield JudgeSettings(checkpoint="tiny")
        return
    with FakeServer().running() as server:
        yield JudgeSettings(checkpoint=f"{server.url}#judge")


def test_it_answers_every_question_and_keeps_equal_ones_alike(settings: JudgeSettings) -> None:
    judge = open_judge(settings, device="cpu", processes=2)
    assert isinstance(judge, RemoteJudge) == settings.remote
    red, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    try:
        verdicts = judge.verdicts([Question((red, blue), "Same?"), Question((red.copy(), blue), "Same?")])
        (answers,) = ask_pairs(judge, [[red, blue, red]], [{"same": "Same?"}])
    finally:
        close_judge(judge)
    assert all(verdict.p_yes is not None and 0 <= verdict.p_yes <= 1 for verdict in verdicts)
    assert verdicts[0] == verdicts[1]
    assert list(answers) == [(0, 1), (0, 2), (1, 2)]
    assert answers[0, 1]["same"].p_yes == pytest.approx(verdicts[0].p_yes, abs=1e-6)


def test_a_person_names_it_in_one_word(settings: JudgeSettings) -> None:
    judge, name = judge_from(settings.checkpoint)
    close_judge(judge)
    assert name == settings.name


def test_a_judge_of_this_process_brings_what_a_plan_needs() -> None:
    for folder in EMBEDDED.values():
        assert (folder / "config.json").is_file()
    for path in BASES.values():
        assert set(read_object(path)) == {"model", "processor"}


def test_a_config_of_the_run_is_read_back_as_it_was(settings: JudgeSettings) -> None:
    run = load(PolicyConfig, None, [f"judge={settings.model_dump(exclude_defaults=True)}"])
    assert run.judge == settings
    assert PolicyConfig.model_validate(parse_yaml(dump(run), name="config")).judge == settings


@pytest.mark.parametrize(
    ("source", "edits", "expected"),
    [
        ("tiny", True, "tiny-edits"),
        ("tiny", False, "tiny"),
        ("X-GenGroup/PaCo-Reward-7B", True, "X-GenGroup/PaCo-Reward-7B"),
        ("", True, ""),
    ],
)
def test_edits_have_a_committed_judge_of_their_own(source: str, edits: bool, expected: str) -> None:
    assert judge_for(source, edits=edits) == expected
