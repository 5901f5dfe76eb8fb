from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
import uvicorn
from typer.testing import CliRunner, Result

from pacorl.cli.score import INCOMPLETE, register
from pacorl.core.questions import consistent, meets_criterion, same_theme
from pacorl.data.characters import all_panels, draw, draw_grid, vocabulary
from pacorl.io.images import open_image
from pacorl.judges.local import LocalJudge
from pacorl.serve.builtin import create_app
from pacorl.twins import tiny_judge
from pacorl.types import Grid, Question

PANELS = list(all_panels()[::1500])


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judge whose weights are random: what it says does not matter here."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("judge")
    for part in tiny_judge(vocabulary()):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(judge_folder: Path) -> LocalJudge:
    return LocalJudge.from_pretrained(judge_folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{number}.png" for number in range(4)]
    for path, panel in zip(paths, PANELS, strict=True):
        draw(panel, 32).save(path)
    return paths


@pytest.fixture(scope="module")
def url(judge: LocalJudge) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_app({"tiny": judge}), port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def run(*arguments: object) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def p_yes(judge: LocalJudge, paths: list[Path], text: str) -> float:
    value = judge.verdicts([Question(tuple(map(open_image, paths)), text)])[0].p_yes
    assert value is not None
    return value


def test_two_pictures(judge_folder: Path, judge: LocalJudge, pictures: list[Path]) -> None:
    result = run(*pictures[:2], "--judge", judge_folder, "--json", "--theme", "a red hero")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["mean"] == pytest.approx(p_yes(judge, pictures[:2], same_theme("a red hero")), abs=1e-6)
    assert document["note"] == ""


def test_a_server_says_the_same(url: str, judge: LocalJudge, pictures: list[Path]) -> None:
    result = run(*pictures, "--judge", url, "--model", "tiny", "--json", "--symmetric")
    assert result.exit_code == 0, result.output
    both = [p_yes(judge, order, consistent()) for order in (pictures[:2], pictures[1::-1])]
    assert json.loads(result.stdout)["matrix"][0][1] == pytest.approx(sum(both) / 2, abs=1e-6)


def test_a_grid_is_cut_and_shown(judge_folder: Path, tmp_path: Path) -> None:
    draw_grid(PANELS, Grid(2, 2), 32).save(tmp_path / "sheet.png")
    page = tmp_path / "page.html"
    result = run(tmp_path / "sheet.png", "--grid", "2x2", "--judge", judge_folder, "--report", page)
    assert result.exit_code == 0, result.output
    assert "sheet.png[3]" in result.stdout
    assert "Fits least" in result.stdout
    assert "sheet.png[4]" in page.read_text()


def test_ranking(judge_folder: Path, pictures: list[Path]) -> None:
    result = run("--rank", *pictures, "--judge", judge_folder)
    assert result.exit_code == 0, result.output
    values = [float(line.split()[0]) for line in result.stdout.splitlines()[:3]]
    assert values == sorted(values, reverse=True)


def test_keep_going_ends_with_a_code_of_its_own(judge_folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    result = run(*pictures[:2], bad, "--judge", judge_folder, "--keep-going", "--json")
    assert result.exit_code == INCOMPLETE
    assert json.loads(result.stdout)["left_out"] == {str(bad): f"{bad}: empty"}
    assert str(run(*pictures[:2], bad, "--judge", judge_folder).exception) == f"{bad}: empty"


def test_a_grid_is_of_one_picture(judge_folder: Path, pictures: list[Path]) -> None:
    assert "cuts one image, 4 are given" in str(run(*pictures, "--grid", "2x2", "--judge", judge_folder).exception)


def test_criteria_reasons_and_temperature(pictures: list[Path], tmp_path: Path) -> None:
    """By the committed judge, whose reasons come to an end."""
    written = tmp_path / "criteria.json"
    written.write_text(json.dumps({"Style": {"Palette": "One palette."}}))
    options = ("--criteria", "Same hat.", "--criteria", written, "--temperature", 2, "--reasons")
    result = run(*pictures[:2], "--json", *options)
    assert result.exit_code == 0, result.output
    judge = LocalJudge.from_pretrained("tiny", temperature=2.0)
    (pair,) = json.loads(result.stdout)["pairs"]
    plain = {"Same hat.": "Same hat.", "Style / Palette": "One palette."}
    for label, text in plain.items():
        expected = p_yes(judge, pictures[:2], meets_criterion(text))
        assert pair["by_question"][label] == pytest.approx(expected, rel=1e-4)
    assert pair["p_yes"] == pytest.approx(sum(pair["by_question"].values()) / 2)
    assert all(f"{label}: " in pair["reasons"] for label in plain)


def test_an_adapter_is_put_on(judge_folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    message = str(run(*pictures[:2], "--judge", judge_folder, "--adapter", tmp_path).exception)
    assert "neither adapter_model.safetensors nor pytorch_lora_weights.safetensors" in message


def test_a_key_is_read_from_the_environment(url: str, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--judge", url, "--model", "tiny", "--api-key-env", "NO_SUCH_KEY")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "set the environment variable NO_SUCH_KEY" in str(run(*pictures[:2], *options).exception)
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    assert run(*pictures[:2], *options).exit_code == 0


def test_the_embedded_judge_says_what_it_knows(pictures: list[Path]) -> None:
    result = run(*pictures[:2])
    assert result.exit_code == 0, result.output
    assert "P(Yes), the two images belong together" in result.stdout
    assert "knows the tiny world of drawn characters only" in result.stderr


def test_a_wrong_model_name_lists_the_served_ones(url: str, pictures: list[Path]) -> None:
    assert "it serves tiny" in str(run(*pictures, "--judge", url, "--model", "paco").exception)
