"""Text of files, servers and models reaches a terminal without its control characters."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import FakeServer

from pacorl import cli
from pacorl.io.terminal import CONTROLS
from pacorl.tiny.world import all_panels, draw

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\u202e\u2066\u200f[red]x[/red][link=http://e.example]y[/link]"
"""Writes the clipboard, clears the screen, reorders the rest; then markup of rich."""
"""The functions that make texts printable, and a script of the repository that writes its own page."""

Said = Callable[..., str]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command as the console script does; returns both streams, which hold no control character."""

    def run(*words: object, code: int) -> str:
        monkeypatch.setattr(sys, "argv", ["pacorl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams = capsys.readouterr()
        assert (ended.value.code or 0) == code, streams
        for stream in streams:
            assert not CONTROLS.search(stream), ascii(stream)
        return streams.out + streams.err

    # All three are set by the command line, for its own process.
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    return run


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}{HOSTILE.replace('/', '')}.png" for number in range(3)]
    for path, panel in zip(paths, all_panels()[::8000], strict=False):
        draw(panel, 32).save(path, "PNG")
    return paths


def test_file_names_in_scores(said: Said, images: list[Path]) -> None:
    with FakeServer().running() as server:
        judge = ("--judge", f"{server.url}#judge")
        shown = said("score", *images, *judge, code=0)
        document = json.loads(said("score", *images, *judge, "--json", code=0))
    assert str(images[0]).encode("unicode_escape").decode() in shown
    assert document["images"][0] == str(images[0])


def test_a_warning_a_log_line_and_a_traceback(
    said: Said, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(**_: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest: print(  # pytest's own would record it
                warnings.formatwarning(message, *rest), file=sys.stderr
            )
            warnings.warn(HOSTILE, stacklevel=1)
        record = logging.LogRecord("pacorl", logging.WARNING, __file__, 1, "%s", (HOSTILE,), None)
        assert logging.lastResort
        logging.lastResort.handle(record)

    monkeypatch.setattr(cli, "app", warn)
    assert said("score", code=0).count(r"\x1b]52;c;") == 2
    try:
        raise KeyError(HOSTILE)
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    traceback = capsys.readouterr().err
    assert "ValueError: " in traceback
    assert not CONTROLS.search(traceback)
