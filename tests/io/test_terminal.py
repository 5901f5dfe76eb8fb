"""Control characters become letters, and nothing else changes."""

import logging
import sys

import pytest

from pacorl.io.terminal import CONTROLS, PrintableFormatter, printable

HOSTILE = "\x1b]52;c;ZXZpbA==\x07 \x9b2J \x7f \r \u202e \u2066 \u200f \udc80 [red]x[/] [link=http://e.example]y[/]"
CHANGED = ("\x1b]0;t\x07", "\x9b2J\x7f", "a\rb", "\u202etxt.exe\u2069", "\u200e\u200f\u061c\u2028", "\udc80")


@pytest.mark.parametrize("text", [*CHANGED, "two\nlines\tand a tab", "Füchse, 狐狸, لومڑی, 👩‍🚀 – 100 %"])
def test_a_control_character_is_shown_by_its_escape(text: str) -> None:
    assert printable(text) == (ascii(text)[1:-1] if text in CHANGED else text)


def test_log_lines_with_their_tracebacks_are_printable() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        fault = sys.exc_info()
    record = logging.LogRecord("pacorl", logging.WARNING, __file__, 1, "%s is away", (HOSTILE,), fault)
    line = PrintableFormatter().format(record)
    assert not CONTROLS.search(line)
    assert line.count(printable(HOSTILE)) == 2
