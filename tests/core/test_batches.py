"""Groups of items that are tied by what they share."""

from pacorl.core.batches import components


def test_an_item_that_shares_with_two_groups_joins_them() -> None:
    ties = [("a", 2), ("d", 4), ("e", 4), ("e", 2), ("f", 5)]
    assert components(ties) == [["a", "d", "e"], ["f"]]
