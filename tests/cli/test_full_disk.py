"""A full disk is one line that names a path, whatever the command."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest
from stories import STORIES, draw_images
from toy_world import toy_world

from pacorl import cli

COMMANDS = {name: commands[0] for name, commands in STORIES.items() if len(commands) == 1}
PROMPTS, SELECTION, GRIDS, PANELS = STORIES["dataset"]


def command(*words: str) -> int | str | None:
    """The exit code of a command line."""
    sys.argv = ["pacorl", *words]
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("before", "words"),
    [
        *(pytest.param([], words, id=name) for name, words in COMMANDS.items()),
        pytest.param([PROMPTS, SELECTION], GRIDS, id="dataset-generate"),
    ],
)
def test_the_path_is_named_where_the_kernel_refuses_a_write(
    before: list[list[str]],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    draw_images()
    assert [command(*line) for line in before] == [0] * len(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with toy_world() if words[0] == "train-policy" else contextlib.nullcontext():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # a lock's note has room
        try:
            code = command(*words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    *_, line = capsys.readouterr().err.splitlines()
    assert code == 1
    assert re.fullmatch(r"pacorl: \S*\brun/\S+: .*File too large.*", line)
