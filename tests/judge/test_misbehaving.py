"""A verdict is right or missing, whatever a server does; nothing but a refused name or key is raised."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_server import FakeServer, Handler, completion, p_of
from misbehaving import (
    BEHAVIOURS,
    REFUSED,
    RIGHT,
    SLOW,
    Draws,
    asking,
    impatient,
    lying_elsewhere,
    misbehave,
    misbehaving,
    questions,
    truth_of,
)

from pacorl.judge.http import HttpJudge
from pacorl.judge.judge import JudgeRefusedError
from pacorl.types import Question, Verdict


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with impatient():
        yield


@pytest.fixture
def liar() -> Iterator[FakeServer]:
    """Where redirects lead."""
    with lying_elsewhere() as fake:
        yield fake


def tally(asked: Sequence[Question], verdicts: Sequence[Verdict]) -> Counter[str]:
    """How many verdicts are right, missing and wrong; a missing one says why, on a line of bounded length."""
    counts: Counter[str] = Counter()
    for question, verdict in zip(asked, verdicts, strict=True):
        if verdict.p_yes is None:
            assert verdict.error
            assert "\n" not in verdict.error
            assert len(verdict.error) < 600
            counts["missing"] += 1
        else:
            counts["right" if verdict.p_yes == pytest.approx(truth_of(question), abs=1e-3) else "wrong"] += 1
    return counts


def test_there_are_as_many_behaviours_as_were_tried_by_hand() -> None:
    assert len(BEHAVIOURS) + len(SLOW) + 1 >= 84


@pytest.mark.slow
def test_each_behaviour_alone_gives_right_or_missing_verdicts(liar: FakeServer) -> None:
    outcome: dict[str, str] = {}
    fake = FakeServer()
    names = [name for name in (*BEHAVIOURS, "reset") if name not in REFUSED]

    def behave(handler: Handler, number: int) -> bool:
        body = fake.chats[number - 1]
        name = names[int(body["messages"][0]["content"][-1]["text"].split()[1])]
        misbehave(handler, completion(body, p_of(body)), name)
        return True

    fake.behave = behave
    asked = questions(len(names))
    with fake.running(), HttpJudge("judge", [fake.url], timeout=20, retries=0) as judge:
        verdicts = judge.verdicts(asked)
        fake.behave = lambda handler, number: False
        assert tally(asked[:20], judge.verdicts(asked[:20])) == {"right": 20}  # nothing is left over
    for name, question, verdict in zip(names, asked, verdicts, strict=True):
        (outcome[name],) = tally([question], [verdict])
    assert [name for name in names if outcome[name] == "wrong"] == []
    assert {name for name in names if outcome[name] == "right"} == RIGHT
    assert liar.chats == []


@pytest.mark.slow
def test_among_all_behaviours_verdicts_are_right_or_missing(liar: FakeServer) -> None:
    names = [name for name in (*BEHAVIOURS, "reset") if name not in REFUSED]
    draws, asked = Draws(names, seed=0, honest=0.4), questions(300)
    with asking([misbehaving(draws) for _ in range(2)], timeout=60, retries=1, concurrency=8) as judge:
        verdicts = judge.verdicts(asked)
    counts = tally(asked, verdicts)
    assert counts["wrong"] == 0
    assert min(counts["right"], counts["missing"]) > 20
    missing = [question.text for question, verdict in zip(asked, verdicts, strict=True) if verdict.p_yes is None]
    assert all(map(draws.missing_by_design, missing))  # nobody who was answered well is without a verdict
    assert liar.chats == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_wrong_address_is_raised(name: str, liar: FakeServer) -> None:
    with (
        asking([misbehaving(Draws([name], seed=0, honest=0))]) as judge,
        pytest.raises(JudgeRefusedError, match="check the judge's address"),
    ):
        judge.verdicts(questions(1))
    assert liar.chats == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_who_takes_for_ever_is_missing(name: str) -> None:
    asked = questions(3)
    with asking([misbehaving(Draws([name], seed=0, honest=0))], timeout=0.5, retries=0) as judge:
        judge.check()
        assert tally(asked, judge.verdicts(asked)) == {"missing": 3}


PAGES: dict[str, Any] = {
    "models of null": ("/v1/models", {"data": None}),
    "models of a number": ("/v1/models", {"data": 5}),
    "models of texts": ("/v1/models", {"data": ["judge"]}),
    "models of a list": ("/v1/models", [1]),
    "20,000 models": ("/v1/models", {"data": [{"id": str(number)} for number in range(20_000)]}),
    "tokens of null": ("/tokenize", {"tokens": [None]}),
    "tokens of texts": ("/tokenize", {"tokens": ["x"]}),
    "tokens of truths": ("/tokenize", {"tokens": [True]}),
    "tokens below 0": ("/tokenize", {"tokens": [-1]}),
    "a token of 5,000 digits": ("/tokenize", json.loads('{"tokens": [1' + "0" * 4000 + "]}")),
    "tokens of a number": ("/tokenize", {"tokens": 5}),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_broken_handshake_is_right_or_missing_too(name: str) -> None:
    path, document = PAGES[name]
    asked = questions(2)
    with asking([FakeServer(pages={path: document})], timeout=20, retries=0) as judge:
        if name == "20,000 models":
            with pytest.raises(JudgeRefusedError, match="serves no model 'judge'") as refused:
                judge.verdicts(asked)
            assert len(str(refused.value)) < 1000
            return
        assert tally(asked, judge.verdicts(asked))["wrong"] == 0
