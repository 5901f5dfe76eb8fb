"""`python -m tools.control`: draws the figure of another character for the controls of `pacorl check`."""

from __future__ import annotations

from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.judge.check import CONTROL_FIGURE
from pacorl.tiny.characters import Panel, draw

FIGURE = Panel.parse("white pointed hero, top-hat, candy, standing, lamp")
SIDE = 128


def main() -> None:
    """Write the committed figure again."""
    write_atomic(CONTROL_FIGURE, png_bytes(draw(FIGURE, SIDE)))


if __name__ == "__main__":
    main()
