"""Untrusted text on a terminal or in a log: control characters are replaced by their escapes.

    print(printable(answer))      # \\x1b]0;title\\x07, and the window keeps its title

A terminal obeys the controls in a file name, a server's answer or a config's key: `ESC ]52` writes the clipboard,
`ESC [2J` clears the screen, and bidirectional controls reorder the visible text (CVE-2021-42574).
"""

import logging
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from textwrap import wrap

Progress = Callable[[int, int], None]
"""Callback of a long step with (done, total)."""

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029\ud800-\udfff]"  # separators of lines, and halves of pairs, which no stream can encode
)


def printable(text: str) -> str:
    """Replace control characters by Python's escapes; tabs and newlines stay."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def excerpt(text: str) -> str:
    """Quote a text, or its first 60 characters, cut after a word."""
    first, *more = wrap(text, 60) or [""]
    return repr(f"{first} …" if more else first)


def did_you_mean(word: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Ask about the name that a misspelt word resembles, for the end of a message; empty if it resembles none."""
    names = list(names)
    near = get_close_matches(word, names, n=1, cutoff=cutoff)
    # A part of a name is too short to resemble the whole: nft and diffusion_nft, lr and optimizer.lr.
    near += [name for name in names if len(word) > 1 and word in re.split("[-_.]", name)]
    return f"did you mean {near[0]!r}?" if near else ""


def silent(done: int, total: int) -> None:
    """`Progress` without a display."""


class PrintableFormatter(logging.Formatter):
    """A log line, its traceback included, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Format as usual, then replace control characters."""
        return printable(super().format(record))
