"""Regular expressions that look through texts of strangers take time in proportion to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pacorl.config import public
from pacorl.core import grid, questions
from pacorl.generate import panels, storyboard
from pacorl.records import comparisons, leaks, rankings
from pacorl.tiny import words

LENGTH, SECONDS = 12_000, 0.5
"""A quadratic one takes seconds for LENGTH characters, a linear one milliseconds."""
UNITS = (
    *("1", "a", " ", ". ", '"', '"a', "'", "'a ", "“", "‘", "「", "{", "<|", "=", " = ", "?a", "&a", "-", "_", "1x"),
    *(
        "://a",
        "1 ",
        ".a",
        'theme: "a',
        "Instruction: 'a",
        "sk-",
        "Bearer ",
        "Basic ",
        "eyJ",
        "eyJ-",
        "?key",
        "key: ",
        "://a:",
        "-----BEGIN A ",
        "Yes.",
        "a-",
    ),
)
READERS: dict[str, Callable[[str], Any]] = {
    "layout": grid.LAYOUT.search,
    "panel tags": grid.PANEL_TAG.findall,
    "quoted words": grid.QUOTED.findall,
    "themes of questions": leaks.QUOTED.findall,
    "ties": rankings.TIE.split,
    "decisions": comparisons.DECISION.match,
    "mentions": storyboard.MENTION.findall,
    "control tokens": questions.CONTROL_TOKEN.search,
    "counted images": panels.read_request,
    "listed panels": lambda text: panels.write_panels(f"a fox{text}"),
    "words": words.WORD.findall,
    "secrets": public.find_secret,
}


@pytest.mark.parametrize("name", READERS)
def test_an_expression_is_linear(name: str) -> None:
    for unit in UNITS:
        text = unit * (LENGTH // len(unit))
        started = time.process_time()
        for hostile in (text, f"a{text}b", f"{text}:"):
            READERS[name](hostile)
        assert time.process_time() - started < SECONDS, f"{unit!r} again and again"
