"""The same image read again by the judge, in a way that should not matter; and what a judge was asked, kept.

A judge at temperature 0 in this process answers one question alike each time, so that its noise shows only if the
question is put in another form that means the same. What the forms disagree on is the judge's share of the variance:
a group's ranking that rests on it says more about the judge than about the images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from pacorl.core.grid import join, split
from pacorl.judges.judge import Counters, Judge, RemoteJudge
from pacorl.rewards.reward import Reward
from pacorl.types import Prompt, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.config.policy_run import PolicyConfig

Form = Callable[[Prompt, "Image"], tuple[Prompt, "Image"]]
"""How an image and its prompt are shown to a reward."""

AS_TRAINED = "as trained"
SHRINK = 7 / 8
"""Of the sides of an image that is read `resized`: small enough to see alike, large enough to cut other patches."""


def again(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """The same question: what a server's own sampling, batching and retries change."""
    return prompt, image


def turned(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """The panels in reverse order, so that each pair is asked about the other way round; consistency has no order."""
    panels = split(image, prompt.grid)[::-1]
    return replace(prompt, panels=prompt.panels[::-1]), join(panels, prompt.grid)


def resized(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """The image at seven eighths of its sides, which the judge cuts into other patches."""
    return prompt, image.resize((round(image.width * SHRINK), round(image.height * SHRINK)))


READINGS: Mapping[str, Form] = {
    "again": again,
    "turned": turned,
    "resized": resized,
}


def readings_of(config: PolicyConfig, requested: Sequence[str] | None, *, edits: bool) -> tuple[str, ...]:
    """How the judge of a config is read besides as in training; by default turned, if pairs have no order.

    Args:
        requested: Names of `READINGS`, or None.
        edits: Whether the prompts are edits, whose questions have an order.

    Raises:
        ValueError: if a reading is unknown, or there is nobody to read, or edits would be turned.
    """
    if requested is None:
        ordered = config.judge is None or config.judge.symmetric or edits
        return () if ordered else ("turned",)
    for name in requested:
        if name not in READINGS:
            raise ValueError(f"--judge-repeats {name!r} is none of {', '.join(READINGS)} or none")
        if config.judge is None:
            raise ValueError(f"--judge-repeats {name}: no reward of this config asks a judge; leave it out")
    if "turned" in requested and edits:
        raise ValueError(
            f"--judge-repeats turned with edits by kind {config.model.kind}: questions about edits say which image is "
            "the original; take again or resized"
        )
    return tuple(requested)


class RereadReward:
    """A reward that sees its prompts and images in another form."""

    def __init__(self, reward: Reward, form: Form, *, judge: Judge) -> None:
        self.reward, self.form, self.judge = reward, form, judge

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Accept what the reward accepts."""
        self.reward.check(prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        forms = [self.form(prompt, image) for prompt, image in zip(prompts, images, strict=True)]
        return self.reward([prompt for prompt, _ in forms], [image for _, image in forms])


class Recorder:
    """A judge that counts, and answers from what it was asked before: other temperatures of a reward cost nothing."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.seconds = 0.0
        self.answers: dict[tuple[object, ...], Verdict] = {}

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order."""
        keys = [_key(question) for question in questions]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self.answers}
        # Several threads may meet here: the worst that comes of it is a question asked twice.
        if new:
            started = time.perf_counter()
            self.answers |= dict(zip(new, self.judge.verdicts(list(new.values())), strict=True))
            self.seconds += time.perf_counter() - started
        return [self.answers[key] for key in keys]

    def explain(self, question: Question) -> str:
        """The answer in words."""
        return self.judge.explain(question)


class RemoteRecorder(Recorder):
    """A recorder of a judge elsewhere, which several threads may ask at once."""

    @property
    def counters(self) -> Counters:
        """The judge's own."""
        assert isinstance(self.judge, RemoteJudge)
        return self.judge.counters

    def close(self) -> None:
        """Leave the judge open: the run's own judges close it."""


def recorder_of(judge: Judge) -> Recorder:
    """A recorder that scoring meets as it meets the judge."""
    return RemoteRecorder(judge) if isinstance(judge, RemoteJudge) else Recorder(judge)


def asking(reward: Reward, judge: Judge, *, form: str = AS_TRAINED, temperature: float | None = None) -> Reward:
    """A reward of `JudgedReward`'s kind with another judge, read in a form, at a temperature."""
    changed: Any = copy(reward)
    changed.judge = judge
    if temperature is not None:
        changed.temperature = temperature
    return changed if form == AS_TRAINED else RereadReward(changed, READINGS[form], judge=judge)


def _key(question: Question) -> tuple[object, ...]:
    return question.text, *(
        (image.size, blake2b(image.tobytes(), digest_size=16).digest()) for image in question.images
    )
