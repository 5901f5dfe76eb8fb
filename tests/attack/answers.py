"""Judges and reward services that misbehave: a verdict or a score is right, missing or refused, and never wrong.

The behaviours are those of `tests/judges/misbehaving.py`, each as it goes over the wire.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import misbehaving
from fake_server import FakeServer, Handler
from misbehaving import (
    BEHAVIOURS,
    SCORES,
    SLOW,
    asking,
    impatient,
    lying_elsewhere,
    misbehave,
    p_of_scores,
    questions,
    truth_of,
)
from PIL import Image
from tests.attack.harness import Outcome, Tally

VERDICTS, SCORED = 10_000, 2_000
"""At share 1."""
TOGETHER = 1000
"""Questions of one call."""


def verdicts(count: int, *, seed: int) -> Tally:
    """`HttpJudge` against four servers, each of which draws a behaviour for each question."""
    tally, names = Tally("answers/judge"), [*BEHAVIOURS, "reset", *SLOW]
    servers = [misbehaving.misbehaving(names, seed=4 * seed + number) for number in range(4)]
    with impatient(), lying_elsewhere() as liar, asking(servers, timeout=2, retries=1) as judge:
        for start in range(0, count, TOGETHER):
            asked = questions(count)[start : start + TOGETHER]
            started = time.monotonic()
            answers = judge.verdicts(asked)
            seconds = (time.monotonic() - started) / len(asked)
            for number, (question, verdict) in enumerate(zip(asked, answers, strict=True), start):
                right = verdict.p_yes is not None and math.isclose(verdict.p_yes, truth_of(question), abs_tol=1e-3)
                missing = verdict.p_yes is None and bool(verdict.error) and "\n" not in verdict.error
                kind = "right" if right else "missing" if missing else "wrong"
                tally.add(Outcome(number, kind, seconds, f"{verdict} for {truth_of(question)}"))
        if liar.chats:
            tally.add(Outcome(count, "wrong", 0, "a redirect was followed"))
    return tally


def scores(count: int, *, seed: int) -> Tally:
    """`HttpScorer`, one image at a time."""
    from pacorl.rewards.http import HttpScorer
    from pacorl.rewards.reward import RewardError, scores_of
    from pacorl.types import Grid, Prompt

    tally, draw = Tally("answers/reward"), random.Random(seed)
    names = [*SCORES, "reset", *SLOW]
    with ExitStack() as stack:
        stack.enter_context(impatient())
        liar = stack.enter_context(lying_elsewhere())
        server = stack.enter_context(scoring_server(names, seed=seed).running())
        for number in range(count):
            prompt = Prompt(id=number, text=f"number {number}", theme="", grid=Grid(1, 1))
            image = Image.new("RGB", (8, 8), draw.choice(["red", "blue", "green"]))
            # A service of its own each time: what one answer does to the next is the judge's tally.
            scorer = HttpScorer(f"{server.url}/scores", timeout=1, tries=2)
            started = time.monotonic()
            try:
                (score,) = scores_of("http", scorer, [prompt], [image])
                right = score is not None and math.isclose(score, p_of_scores(prompt.text), abs_tol=1e-9)
                kind = "right" if right else "missing" if score is None else "wrong"
                detail = f"{score} for {p_of_scores(prompt.text)}"
            except RewardError as error:
                kind, detail = ("refused" if f"prompt {number}" in str(error) else "nameless"), str(error)
            tally.add(Outcome(number, kind, time.monotonic() - started, detail))
        if liar.chats:
            tally.add(Outcome(count, "wrong", 0, "a redirect was followed"))
    return tally


def scoring_server(names: list[str], *, seed: int, honest: float = 0.3) -> FakeServer:
    """A reward service that draws one of the behaviours for each image, or scores it."""
    draw = random.Random(seed)

    def score(handler: Handler, body: dict[str, object]) -> None:
        answer = {"scores": [p_of_scores(prompt["text"]) for prompt in body["prompts"]]}  # type: ignore[attr-defined]
        if draw.random() < honest:
            handler.answer(answer)
        else:
            misbehave(handler, answer, draw.choice(names), behaviours=SCORES)

    return FakeServer(posts={"/v1/scores": score})


def tallies(*, seed: int, share: float) -> Iterator[Tally]:
    yield verdicts(max(100, round(share * VERDICTS)), seed=seed)
    yield scores(max(20, round(share * SCORED)), seed=seed)
