"""Deduplication of a call's questions: each distinct image is encoded once, each distinct question is asked once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from pacorl.core.questions import text_fault
from pacorl.judge.http.messages import DeclinedError, EncodedImage, ImageFormat, UnansweredError, encode
from pacorl.judge.judge import Counters
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

Answer = Callable[[Sequence[EncodedImage], str], Awaitable[float]]
"""(images, text) → P(Yes). Raises UnansweredError if there is none."""


def encoded(
    image: Image, question: Question, number: int, image_format: ImageFormat
) -> Coroutine[Any, Any, EncodedImage]:
    """Encode an image on another thread, so that requests go out meanwhile; messages use its number."""
    return asyncio.to_thread(encode, image, f"image {number} of {question.text!r}", image_format)


class RequestBatch:
    """One call's questions, all of them under way at once."""

    def __init__(self, answer: Answer, counters: Counters, image_format: ImageFormat) -> None:
        self._answer = answer
        self._counters = counters
        self._format = image_format
        self._images: dict[int, asyncio.Task[EncodedImage]] = {}
        self._verdicts: dict[tuple[str, ...], asyncio.Task[Verdict]] = {}

    async def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._verdict(question, group)) for question in questions]
        except ExceptionGroup as faults:
            # All have the same cause: an image's task fails every question about it.
            raise faults.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _verdict(self, question: Question, group: asyncio.TaskGroup) -> Verdict:
        for number, image in enumerate(question.images, 1):
            if id(image) not in self._images:
                self._images[id(image)] = group.create_task(encoded(image, question, number, self._format))
        images = [await self._images[id(image)] for image in question.images]
        # By content: the panels of two grids may be equal without being one object.
        key = (*(image.digest for image in images), question.text)
        if key in self._verdicts:
            self._counters.cached += 1
        else:
            self._verdicts[key] = group.create_task(self._ask(images, question.text))
        return await self._verdicts[key]

    async def _ask(self, images: Sequence[EncodedImage], text: str) -> Verdict:
        try:
            reason = text_fault(text)
            if reason:
                raise UnansweredError(reason)
            return Verdict(await self._answer(images, text))
        except UnansweredError as fault:
            self._counters.missing += 1
            return Verdict(None, str(fault), declined=isinstance(fault, DeclinedError))
