"""When the correlation between sizes is warned of."""

import pytest

from pacorl.train.evaluate import _surely_below


@pytest.mark.parametrize(
    ("found", "count", "warns"),
    [(0.25, 32, False), (-0.3, 48, True), (0.0, 32, False), (0.0, 400, True), (-1.0, 9, False), (1.0, 50, False)],
)
def test_a_low_correlation_is_warned_of_where_chance_does_not_explain_it(found: float, count: int, warns: bool) -> None:
    assert _surely_below(0.3, found, count=count) == warns
