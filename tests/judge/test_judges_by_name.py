"""Which judge a name means."""

import pytest

from pacorl.judge import judge_for


@pytest.mark.parametrize(
    ("source", "edits", "expected"),
    [
        ("tiny", True, "tiny-edits"),
        ("tiny", False, "tiny"),
        ("X-GenGroup/PaCo-Reward-7B", True, "X-GenGroup/PaCo-Reward-7B"),
        ("", True, ""),
    ],
)
def test_edits_have_a_committed_judge_of_their_own(source: str, edits: bool, expected: str) -> None:
    assert judge_for(source, edits=edits) == expected
