"""The budget of decoded pixels: nobody exceeds it, everybody's turn comes, and nothing is lost."""

from __future__ import annotations

import asyncio
import re

import pytest

from pacorl.io.images import ImageError
from pacorl.types import Size
from pacorl.web.budget import PixelBudget

TEN = Size(2, 5)


def test_a_request_above_its_share_is_refused_at_once() -> None:
    async def ask() -> None:
        async with PixelBudget(30, per_request=20).reserve([TEN, TEN, Size(1, 1)]):
            pytest.fail("held")

    message = "the images of this request have 21 pixels together; send at most 20"
    with pytest.raises(ImageError, match=re.escape(message)):
        asyncio.run(ask())


def test_requests_wait_in_order_until_there_is_room() -> None:
    async def ask() -> tuple[list[str], list[int]]:
        budget, order, held = PixelBudget(20, per_request=20), list[str](), [0]

        async def request(name: str, count: int) -> None:
            async with budget.reserve([TEN] * count):
                order.append(name)
                held.append(20 - budget.free)
                await asyncio.sleep(0.01)

        # The small one behind the large one does not overtake it: the large one would wait for ever.
        await asyncio.gather(request("a", 1), request("large", 2), request("b", 1), request("c", 1))
        assert budget.free == 20
        return order, held

    order, held = asyncio.run(ask())
    assert order == ["a", "large", "b", "c"]
    assert max(held) == 20


def test_pixels_come_back_from_requests_that_fail_or_are_cancelled() -> None:
    async def ask() -> None:
        budget = PixelBudget(20, per_request=20)

        async def hold() -> None:
            async with budget.reserve([TEN, TEN]):
                await asyncio.sleep(60)

        with pytest.raises(ZeroDivisionError):
            async with budget.reserve([TEN]):
                raise ZeroDivisionError
        holding, waiting, last = (asyncio.create_task(hold()) for _ in range(3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        holding.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert budget.free == 0  # the last one has them
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        assert budget.free == 20

    asyncio.run(ask())


def test_a_turn_that_comes_while_its_request_is_cancelled_is_given_back() -> None:
    async def ask() -> None:
        budget = PixelBudget(10, per_request=10)

        async def hold() -> None:
            async with budget.reserve([TEN]):
                await asyncio.sleep(60)

        first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0)  # it gives its pixels to the second, which has not run since
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert budget.free == 10

    asyncio.run(ask())


def test_a_share_is_no_larger_than_the_budget() -> None:
    with pytest.raises(ValueError, match="per_request 30 must be from 1 to the budget's 20 pixels"):
        PixelBudget(20, per_request=30)
