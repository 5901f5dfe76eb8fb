"""`pacorl prompts` as it is called: what it says, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.records.prompts import load_prompts, prompts_from


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_check_says_what_leaks(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a fox\na boat\n")
    (tmp_path / "bench.txt").write_text("A fox.\n")
    mine, bench = str(tmp_path / "mine.txt"), str(tmp_path / "bench.txt")
    leaking = run("prompts", mine, "--against", bench)
    assert leaking.exit_code == 1
    assert "1 of 2 training prompts are measured on" in leaking.output
    document = json.loads(run("prompts", mine, "--against", bench, "--json").output)
    assert document["leaks"][0]["text"] == "a fox"
    assert run("prompts", "tiny:train", "--against", "tiny:dev", "--against", "tiny:test").exit_code == 0


def test_split_writes_two_files_that_share_nothing(tmp_path: Path) -> None:
    result = run("prompts", "tiny:train", "--out", tmp_path, "--test", "40", "--against", "tiny:train:8")
    assert result.exit_code == 0, result.output
    train, test = (load_prompts(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert len(test) >= 40
    kept_out = {prompt.text for prompt in prompts_from("tiny:train:8")}
    texts = [{prompt.text for prompt in side} for side in (train, test)]
    assert texts[0].isdisjoint(texts[1])
    assert kept_out.isdisjoint(texts[0] | texts[1])
    assert len(train) + len(test) + int(result.output.split(", ")[-1].split()[0]) == 288
