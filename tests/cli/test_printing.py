"""Text of files, servers and models reaches a terminal without its control characters."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
from fake_server import FakeServer

from pacorl import cli
from pacorl.io.terminal import CONTROLS
from pacorl.tiny.world import all_panels, draw

HOSTILE = "\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\u202e\u2066\u200f[red]x[-red][link=http:--e.example]y[-link]"
"""Writes the clipboard, clears the screen, reorders the rest; then markup of rich."""


def test_file_names_in_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [str(tmp_path / f"é{number}{HOSTILE}.png") for number in range(3)]
    for path, panel in zip(images, all_panels()[::8000], strict=False):
        draw(panel, 32).save(path, "PNG")
    # Both are set by the command line, for its own process.
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    shown = []
    with FakeServer().running() as server:
        for further in ([], ["--json"]):
            monkeypatch.setattr(sys, "argv", ["pacorl", "score", *images, "--judge", f"{server.url}#judge", *further])
            with pytest.raises(SystemExit):
                cli.main()
            streams = capsys.readouterr()
            assert not CONTROLS.search(streams.out + streams.err), ascii(streams)
            shown.append(streams.out)
    assert Path(images[0]).name.removeprefix("é").encode("unicode_escape").decode() in shown[0]
    assert "é0" in shown[1]
    assert json.loads(shown[1])["images"][0] == images[0]
