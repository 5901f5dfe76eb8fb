"""No command replaces a file that it did not make: it refuses in one line, before any work, and all stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from run_folder import finished_run
from tests.cli.test_early import SCORE, SET, TEACH, TRAIN, write_ranking
from typer.testing import CliRunner, Result

from pacorl.cli import app

REFUSED = [
    (["prompts", "split", "mine/train.jsonl", "--out", "mine"], "mine/train.jsonl"),
    ([*SET, "--model", "tiny", "--out", "mine"], "mine/set-2.png"),
    ([*SET, "--model", "tiny", "--out", "new", "--report", "mine/page.html"], "mine/page.html"),
    ([*SET, "--model", "tiny", "--out", "new", "--pdf", "mine/thesis.pdf"], "mine/thesis.pdf"),
    ([*SCORE, "--report", "a.png"], "a.png"),
    (["report", "run"], "run/report.html"),
    (["report", "other", "run"], "run/compare-other.html"),
    (["benchmark", "consistency-rank", "rank", "--judge", "tiny", "--out", "mine"], "mine"),
    (["serve", "tiny", "--write", "mine/config.yaml"], "mine/config.yaml"),
    ([*TRAIN, "out=mine"], "mine/config.yaml"),
    ([*TEACH, "out=mine"], "mine/config.yaml"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files of the user under the names that commands write."""
    monkeypatch.chdir(tmp_path)
    write_ranking(tmp_path / "rank")
    for name in ("run", "other"):
        finished_run(tmp_path / name)
    for name in ("report.html", "compare-other.html"):
        (tmp_path / "run" / name).write_text("<p>mine</p>")
    (tmp_path / "mine").mkdir()
    for name in ("page.html", "thesis.pdf", "config.yaml", "summary.json"):
        (tmp_path / "mine" / name).write_text("mine")
    (tmp_path / "mine" / "train.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "a boat"}\n{"prompt": "a hat"}\n')
    for name in ("a.png", "b.png", "mine/set-2.png"):
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=lambda value: " ".join(value[:2]) if value[1:] else None)
def test_files_of_a_user_are_named_and_stay(folder: Path, words: list[str], named: str) -> None:
    before = content(folder)
    result = run(*words)
    assert isinstance(result.exception, ValueError), result.output
    assert named in str(result.exception)
    assert "\n" not in str(result.exception)
    assert content(folder) == before


@pytest.mark.slow
def test_what_generate_made_it_replaces(folder: Path) -> None:
    small = [*SET, "--model", "tiny", "--size", "64x64", "--steps", "1", "--out", "new", "--pdf", "new/a.pdf"]
    for seed in ("1", "2"):
        result = run(*small, "--seed", seed, "--report", "new/page.html")
        assert result.exit_code == 0, result.output
