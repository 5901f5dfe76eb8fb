"""Rich's console, for untrusted text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from pacorl.io.terminal import printable


class PlainConsole(Console):
    """Console without markup, emoji codes and control characters in strings.

    Cells, titles and headings of tables are strings too. A style is given by a `Text`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into a text, with its control characters replaced."""
        return super().render_str(printable(text), **options)


def labelled(label: str, text: str, *, style: str) -> Text:
    """A styled label before a text."""
    return Text.assemble((label, style), " ", printable(text))
