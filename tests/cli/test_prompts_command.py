"""`pacorl prompts check` and `split`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.data.records import load_prompts, prompts_from


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prompts", *arguments])
    return result.exit_code, result.output


def test_check_says_what_leaks(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a fox\na boat\n")
    (tmp_path / "bench.txt").write_text("A fox.\n")
    mine, bench = str(tmp_path / "mine.txt"), str(tmp_path / "bench.txt")
    code, said = run("check", mine, "--against", bench)
    assert code == 1
    assert "1 of 2 training prompts are measured on" in said
    code, said = run("check", mine, "--against", bench, "--json")
    assert json.loads(said)["leaks"][0]["text"] == "a fox"
    assert run("check", "tiny:train", "--against", "tiny:dev", "--against", "tiny:test")[0] == 0


def test_split_writes_two_files_that_share_nothing(tmp_path: Path) -> None:
    arguments = ["split", "tiny:train", "--out", str(tmp_path), "--test", "40", "--keep-out", "tiny:train:8"]
    code, said = run(*arguments)
    assert code == 0, said
    train, test = (load_prompts(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert len(test) >= 40
    kept_out = {prompt.text for prompt in prompts_from("tiny:train:8")}
    texts = [{prompt.text for prompt in part} for part in (train, test)]
    assert texts[0].isdisjoint(texts[1])
    assert kept_out.isdisjoint(texts[0] | texts[1])
    assert len(train) + len(test) + int(said.split(", ")[-1].split()[0]) == 288
