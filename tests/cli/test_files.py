"""`pacorl data --test`: a split of prompts."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.records.prompts import load_prompts, prompts_from


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_split_writes_two_files_that_share_nothing(tmp_path: Path) -> None:
    result = run("data", "tiny:train", "--out", tmp_path, "--test", "40", "--against", "tiny:train:8")
    assert result.exit_code == 0, result.output
    train, test = (load_prompts(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert len(test) >= 40
    kept_out = {prompt.text for prompt in prompts_from("tiny:train:8")}
    texts = [{prompt.text for prompt in side} for side in (train, test)]
    assert texts[0].isdisjoint(texts[1])
    assert kept_out.isdisjoint(texts[0] | texts[1])
    assert len(train) + len(test) + int(result.output.split(", ")[-1].split()[0]) == 288
