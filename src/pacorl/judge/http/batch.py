"""Deduplication of a call's questions: each distinct image is encoded once, each distinct question is asked once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pacorl.core.questions import text_fault
from pacorl.judge.http.messages import EncodedImage, ImageFormat, UnansweredError, encode
from pacorl.judge.judge import Counters
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

Answer = Callable[[Sequence[EncodedImage], str], Awaitable[float]]
"""(images, text) → P(Yes). Raises UnansweredError if there is none."""


def encoded(image: Image, question: Question, number: int, *options: Any) -> Coroutine[Any, Any, EncodedImage]:
    """Encode an image on another thread, so that requests go out meanwhile; messages use its number."""
    return asyncio.to_thread(encode, image, f"image {number} of {question.text!r}", *options)


class RequestBatch:
    """One call's questions, all of them under way at once."""

    def __init__(
        self, answer: Answer, counters: Counters, image_format: ImageFormat, known: Mapping[str, EncodedImage]
    ) -> None:
        self._answer = answer
        self._counters = counters
        self._format = image_format
        self._known = known
        self._images: dict[int, asyncio.Task[EncodedImage]] = {}
        self._verdicts: dict[tuple[str, ...], asyncio.Task[Verdict]] = {}

    @property
    def images(self) -> dict[str, EncodedImage]:
        """Encoded images of a finished batch by their digests."""
        images = [task.result() for task in self._images.values()]
        return {image.digest: image for image in images}

    async def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order."""
        tasks: dict[int, asyncio.Task[Verdict]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                # All images first: further ones are encoded on other threads while requests go out.
                for question in questions:
                    self._encode(question, group)
                for number in sharing_order(questions):
                    question = questions[number]
                    images = [await self._images[id(image)] for image in question.images]
                    tasks[number] = self._verdict(images, question.text, group)
        except ExceptionGroup as faults:
            # All have the same cause: an image's task fails every question about it.
            raise faults.exceptions[0] from None
        return [tasks[number].result() for number in range(len(questions))]

    def _encode(self, question: Question, group: asyncio.TaskGroup) -> None:
        """Begin to encode a question's images, unless another question has."""
        for number, image in enumerate(question.images, 1):
            if id(image) not in self._images:
                encoding = encoded(image, question, number, self._format, self._known)
                self._images[id(image)] = group.create_task(encoding)

    def _verdict(self, images: Sequence[EncodedImage], text: str, group: asyncio.TaskGroup) -> asyncio.Task[Verdict]:
        """Ask a question, unless an equal one has been asked."""
        # By content: the panels of two grids may be equal without being one object.
        key = (*(image.digest for image in images), text)
        if key in self._verdicts:
            self._counters.cached += 1
        else:
            self._verdicts[key] = group.create_task(self._ask(images, text))
        return self._verdicts[key]

    async def _ask(self, images: Sequence[EncodedImage], text: str) -> Verdict:
        try:
            reason = text_fault(text)
            if reason:
                raise UnansweredError(reason)
            return Verdict(await self._answer(images, text))
        except UnansweredError as fault:
            self._counters.missing += 1
            return Verdict(None, str(fault))


def sharing_order(questions: Sequence[Question]) -> list[int]:
    """Order the questions so that those with the same first images follow one another, for a server's prefix cache."""
    position: dict[int, int] = {}
    for question in questions:
        for image in question.images:
            position.setdefault(id(image), len(position))
    return sorted(range(len(questions)), key=lambda number: [position[id(image)] for image in questions[number].images])
