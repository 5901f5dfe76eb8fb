"""A bound on the decoded images that a server holds for all its callers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pacorl.io.images import ImageError
from pacorl.types import Size


class PixelBudget:
    """Pixels that all requests of an event loop may hold at one time, three bytes each; first come, first served."""

    def __init__(self, pixels: int, *, per_request: int) -> None:
        if not 0 < per_request <= pixels:
            raise ValueError(f"per_request {per_request:,} must be from 1 to the budget's {pixels:,} pixels")
        self.free = pixels
        self.per_request = per_request
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, sizes: Sequence[Size]) -> AsyncIterator[None]:
        """Wait until the images of a request fit into the budget, and hold their pixels for the block.

        Raises:
            ImageError: They have more than `per_request` pixels together.
        """
        pixels = self.check(sizes)
        await self._take(pixels)
        try:
            yield
        finally:
            self.free += pixels
            self._admit()

    def check(self, sizes: Sequence[Size]) -> int:
        """Return the pixels of a request's images. Raises ImageError for more than `per_request`."""
        pixels = sum(size.height * size.width for size in sizes)
        if pixels > self.per_request:
            raise ImageError(
                f"the images of this request have {pixels:,} pixels together; send at most {self.per_request:,}"
            )
        return pixels

    async def _take(self, pixels: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((pixels, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at the same moment
                self.free += pixels
            self._admit()
            raise

    def _admit(self) -> None:
        """Admit requests in order, as long as they fit."""
        while self._waiting:
            pixels, turn = self._waiting[0]
            # A cancelled request takes no pixels, and must not block the next.
            if not turn.cancelled():
                if pixels > self.free:
                    return
                self.free -= pixels
                turn.set_result(None)
            self._waiting.popleft()
