"""Judges, reward services and language models that misbehave: what they say is right, missing or refused, never wrong.

The behaviours are those of `tests/helpers/misbehaving.py`, each as it goes over the wire. What is missing though a good
answer was sent is `lost`, a fault too; so time-outs are long, except for behaviours that last until one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fake_server import FakeServer, Handler
from misbehaving import (
    BEHAVIOURS,
    SCORES,
    SLOW,
    TEXTS,
    Draws,
    asking,
    impatient,
    lying_elsewhere,
    misbehave,
    misbehaving,
    p_of_scores,
    questions,
    text_of,
    truth_of,
)
from PIL import Image
from qa.attack.harness import Outcome, Tally

VERDICTS, SLOW_VERDICTS, SCORED, SLOW_SCORED, TALKED = 10_000, 200, 2_000, 100, 1_000
"""At share 1."""
TOGETHER = 1000
"""Questions of one call."""
SERVERS, CONCURRENCY, TRIES = 4, 8, 2
LONG, SHORT = 120.0, 10.0
"""Seconds of a time-out, without and with slow behaviours: a busy machine answers well within either."""


def verdicts(name: str, count: int, behaviours: Sequence[str], *, seed: int, timeout: float) -> Tally:
    """`HttpJudge` against servers that draw a behaviour for each question."""
    tally, draws, asked = Tally(name), Draws(behaviours, seed=seed), questions(count)
    servers = [misbehaving(draws) for _ in range(SERVERS)]
    with (
        impatient(),
        lying_elsewhere() as liar,
        asking(servers, timeout=timeout, retries=TRIES - 1, concurrency=CONCURRENCY) as judge,
    ):
        for start in range(0, count, TOGETHER):
            batch, started = asked[start : start + TOGETHER], time.monotonic()
            answers = judge.verdicts(batch)
            seconds = time.monotonic() - started
            for number, (question, verdict) in enumerate(zip(batch, answers, strict=True), start):
                kind = _kind(verdict.p_yes, truth_of(question), draws, question.text)
                if verdict.p_yes is None and (not verdict.error or "\n" in verdict.error):
                    kind = "nameless"
                tally.add(Outcome(number, kind, seconds / len(batch), f"{verdict} for {truth_of(question)}"))
            rounds = 1 + math.ceil(len(batch) / (SERVERS * CONCURRENCY))
            if seconds > rounds * TRIES * timeout:
                tally.add(Outcome(start, "slow", 0, f"{seconds:.0f} s for {rounds} rounds of verdicts"))
        if liar.chats:
            tally.add(Outcome(count, "wrong", 0, "a redirect was followed"))
    return tally


def scores(name: str, count: int, behaviours: Sequence[str], *, seed: int, timeout: float, together: int) -> Tally:
    """`HttpScorer`, with a scorer of its own for so many images together; a refusal ends the call."""
    from pacorl.rewards.http import HttpScorer
    from pacorl.rewards.reward import RewardError, scores_of
    from pacorl.types import Grid, Prompt

    tally, draws, pick = Tally(name), Draws(behaviours, seed=seed), random.Random(seed)
    with impatient(), lying_elsewhere() as liar, scoring_server(draws).running() as server:
        for start in range(0, count, together):
            numbers = range(start, min(start + together, count))
            prompts = [Prompt(id=n, text=f"number {n}", theme="", grid=Grid(1, 1)) for n in numbers]
            images = [Image.new("RGB", (8, 8), pick.choice(["red", "blue", "green"])) for _ in prompts]
            scorer = HttpScorer(f"{server.url}/scores", batch=1, concurrency=CONCURRENCY, timeout=timeout, tries=TRIES)
            started = time.monotonic()
            try:
                answers = scores_of("http", scorer, prompts, images)
                kinds = [_kind(s, p_of_scores(p.text), draws, p.text) for s, p in zip(answers, prompts, strict=True)]
                said = str(answers)
            except RewardError as error:
                said = str(error)
                good = not all(draws.missing_by_design(prompt.text) for prompt in prompts)
                kinds = ["lost" if good else "refused" if f"prompt {start}" in said else "nameless"] * len(prompts)
            seconds = (time.monotonic() - started) / len(prompts)
            for number, kind in zip(numbers, kinds, strict=True):
                tally.add(Outcome(number, kind, seconds, said[:600]))
        if liar.chats:
            tally.add(Outcome(count, "wrong", 0, "a redirect was followed"))
    return tally


def texts(name: str, count: int, behaviours: Sequence[str], *, seed: int) -> Tally:
    """`ChatModel`, one question at a time."""
    from pacorl.judge.http.chat import ChatError, ChatModel, ChatRefusedError

    tally, draws = Tally(name), Draws(behaviours, seed=seed)
    with impatient(), lying_elsewhere() as liar, talking_server(draws).running() as server:
        model = ChatModel("judge", base_url=server.url, timeout_seconds=LONG, retries=TRIES - 1)
        for number in range(count):
            question, started = f"number {number}", time.monotonic()
            try:
                said = model.ask([{"role": "user", "content": question}])
                kind = "right" if said == text_of(question) else "wrong"
            except (ChatError, ChatRefusedError) as error:
                said = str(error)
                kind = "nameless" if "\n" in said else "missing" if draws.missing_by_design(question) else "lost"
            tally.add(Outcome(number, kind, time.monotonic() - started, said[:600]))
        if liar.chats:
            tally.add(Outcome(count, "wrong", 0, "a redirect was followed"))
    return tally


def _kind(value: float | None, truth: float, draws: Draws, text: str) -> str:
    if value is None:
        return "missing" if draws.missing_by_design(text) else "lost"
    return "right" if math.isclose(value, truth, abs_tol=1e-3) else "wrong"


def answered(handler: Handler, answer: dict[str, Any], text: str, draws: Draws, behaviours: dict[str, Any]) -> None:
    """The answer, or what the behaviour that is drawn makes of it."""
    if (name := draws.draw(text)) == Draws.HONEST:
        handler.answer(answer)
    else:
        misbehave(handler, answer, name, behaviours=behaviours)


def scoring_server(draws: Draws) -> FakeServer:
    """A reward service that draws a behaviour for each image, or scores it."""

    def score(handler: Handler, body: dict[str, Any]) -> None:
        (prompt,) = body["prompts"]
        answered(handler, {"scores": [p_of_scores(prompt["text"])]}, prompt["text"], draws, SCORES)

    return FakeServer(posts={"/v1/scores": score})


def talking_server(draws: Draws) -> FakeServer:
    """A language model that draws a behaviour for each question, or answers it."""

    def talk(handler: Handler, body: dict[str, Any]) -> None:
        question = body["messages"][0]["content"]
        message = {"role": "assistant", "content": text_of(question)}
        answer = {"model": body["model"], "choices": [{"index": 0, "message": message}]}
        answered(handler, answer, question, draws, TEXTS)

    return FakeServer(posts={"/v1/chat/completions": talk})


def tallies(*, seed: int, share: float, target: str = "", number: int | None = None) -> Iterator[Tally]:
    """A number counts for nothing here: behaviours are drawn as questions come in."""

    def shared(count: int) -> int:
        return max(20, round(share * count))

    judge, reward = [*BEHAVIOURS, "reset"], [*SCORES, "reset"]
    rows: dict[str, Callable[[str], Tally]] = {
        "judge": lambda name: verdicts(name, shared(VERDICTS), judge, seed=seed, timeout=LONG),
        "slow_judge": lambda name: verdicts(name, shared(SLOW_VERDICTS), SLOW, seed=seed, timeout=SHORT),
        "reward": lambda name: scores(name, shared(SCORED), reward, seed=seed, timeout=LONG, together=1),
        "language_model": lambda name: texts(name, shared(TALKED), [*TEXTS, "reset"], seed=seed),
        "slow_reward": lambda name: scores(
            name, shared(SLOW_SCORED), SLOW, seed=seed, timeout=SHORT, together=TOGETHER
        ),
    }
    for name, row in rows.items():
        if target in ("", name):
            yield row(f"answers/{name}")
