"""GEdit-Bench end to end: painted by a tiny Kontext, rated by a model behind an OpenAI-compatible API."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_data import gedit_rows, write_parquet
from PIL import Image
from typer.testing import CliRunner, Result

from pacorl.bench.gedit import SUBSETS, read_edits
from pacorl.bench.rating import RUBRIC, UnreadableError, read_rubric, read_scores
from pacorl.cli.benchmark import app
from pacorl.cli.shared import INCOMPLETE
from pacorl.io.documents import read_jsonl


@dataclass
class Rater:
    """A server that rates pictures by their mean colour; its first answer to each question may be no JSON."""

    chatters: bool = False
    refuses: str = "(never said)"
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[Rater]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"rater": self}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, images: list[Image.Image], text: str) -> str:
        self.asked.append(text)
        if self.refuses in text:
            return "I would rather not."
        if self.chatters and "could not be used" not in text:
            return '{"score": [11, 3]}'
        return f"Here you are: {json.dumps({'reasoning': 'It is so.', 'score': scores_of(images)})}"


def scores_of(images: list[Image.Image]) -> list[int]:
    """Two scores that depend on the pictures alone."""
    level = int(np.asarray(images[-1]).mean())
    return [level % 11, (level + 3 * len(images)) % 11]


class _Handler(BaseHTTPRequestHandler):
    rater: Rater
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._send(
            {"data": [{"id": "rater"}]} if self.path == "/v1/models" else {}, 200 if "models" in self.path else 404
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send({}, 404)
            return
        *pictures, text = body["messages"][0]["content"]
        images = [
            Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))) for part in pictures
        ]
        answer = self.rater.answer(images, text["text"])
        self._send({"model": "rater", "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]})

    def _send(self, document: Any, status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["gedit", *[str(argument) for argument in arguments]])


@pytest.fixture
def edits(tmp_path: Path) -> Path:
    """Finished edits in the published layout."""
    folder = tmp_path / "edits"
    for number, row in enumerate(gedit_rows()):
        path = folder / "fullset" / row["task_type"] / row["instruction_language"] / f"{row['key']}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number + 5,) * 3).save(path)
    return folder


def by_hand(folder: Path) -> dict[str, float]:
    """Every column by loops over the rows."""
    cells: dict[str, dict[str, list[list[float]]]] = {}
    for row in gedit_rows():
        source = Image.open(io.BytesIO(row["input_image"]["bytes"]))
        edit = Image.open(folder / "fullset" / row["task_type"] / row["instruction_language"] / f"{row['key']}.png")
        semantic, perceptual = min(scores_of([source, edit])), min(scores_of([edit]))
        language = row["instruction_language"].upper()
        for part in [language, *([f"{language}-I"] if row["Intersection_exist"] else [])]:
            held = cells.setdefault(part, {}).setdefault(row["task_type"], [])
            held.append([semantic, perceptual, sqrt(semantic * perceptual)])
    found = {}
    for part, tasks in cells.items():
        mean = np.mean([np.mean(rows, axis=0) for rows in tasks.values()], axis=0)
        found |= {f"{part} {name}": float(value) for name, value in zip(("SC", "PQ", "O"), mean, strict=True)}
    return found


def test_the_table_is_what_loops_give(gedit_folder: Path, edits: Path, tmp_path: Path) -> None:
    with Rater(chatters=True).running() as rater:
        done = command(
            gedit_folder, "--images", edits, "--judge", rater.url, "--judge-model", "rater", "--out", tmp_path / "run",
            "--json",
        )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    values = json.loads(done.stdout)["tables"][0]["rows"][0]["values"]
    expected = by_hand(edits)
    assert len(expected) == 3 * len(SUBSETS)
    for name, value in expected.items():
        assert values[name]["mean"] == pytest.approx(value), name
    assert len(rater.asked) == 4 * 8  # each of two questions asked twice, because the first answer was off the scale
    assert any("edited" in text and gedit_rows()[0]["instruction"] in text for text in rater.asked)
    (row, *_) = read_jsonl(tmp_path / "run" / "results.jsonl")
    assert row["reasons"] == ["It is so.", "It is so."]


def test_an_edit_that_nobody_rates_is_missing_and_no_zero(gedit_folder: Path, edits: Path, tmp_path: Path) -> None:
    arguments = (gedit_folder, "--images", edits, "--judge-model", "rater", "--out", tmp_path / "run", "--limit", 4)
    with Rater(refuses="Answer with one JSON").running() as rater:
        done = command(*arguments, "--judge", rater.url)
    assert done.exit_code == INCOMPLETE
    assert "3 answers in a row could not be used" in done.stdout
    with Rater().running() as rater:
        done = command(*arguments, "--judge", rater.url)
    assert done.exit_code == 0, (done.output, done.exception)
    assert len(rater.asked) == 8


def test_one_language_and_missing_edits(gedit_folder: Path, edits: Path, tmp_path: Path) -> None:
    (edits / "fullset" / "subject-add" / "en" / "k0.png").unlink()
    with Rater().running() as rater:
        arguments = (
            gedit_folder, "--images", edits, "--judge", rater.url, "--judge-model", "rater", "--out", tmp_path / "run",
            "--language", "en",
        )  # fmt: skip
        assert "k0.png is missing" in str(command(*arguments).exception)
        done = command(*arguments, "--skip-bad", "--json")
    assert done.exit_code == INCOMPLETE
    document = json.loads(done.stdout)
    assert list(document["skipped"]) == ["en/subject-add/k0"]
    assert document["tables"][0]["rows"][0]["values"]["CN O"] is None


@pytest.mark.slow
def test_painted_by_kontext_and_rated(gedit_folder: Path, tmp_path: Path) -> None:
    from pacorl.data.characters import vocabulary
    from pacorl.policies.flux import tiny_flux
    from pacorl.policies.kontext import tiny_kontext

    torch.manual_seed(0)
    tiny_kontext(tiny_flux(vocabulary())).save_pretrained(tmp_path / "kontext")
    with Rater().running() as rater:
        arguments = (
            gedit_folder, "--model", tmp_path / "kontext", "--size", "64x64", "--steps", 2, "--out", tmp_path / "run",
            "--judge", rater.url, "--judge-model", "rater", "--limit", 2, "--json",
        )  # fmt: skip
        done = command(*arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        asked = len(rater.asked)
        assert command(*arguments).exit_code == 0
    assert len(rater.asked) == asked == 4
    painted = sorted(path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*.png"))
    assert painted == [
        "fullset/color_alter/en/k2.png",
        "fullset/subject-add/en/k0.png",
        "sources/en/color_alter/k2.png",
        "sources/en/subject-add/k0.png",
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"instruction_language": "de"}, "instruction_language 'de' is none of en, cn"),
        ({"instruction": ""}, "no instruction; a row of GEdit-Bench has"),
        ({"key": "../k"}, "cannot name a folder"),
        ({"key": "k1"}, "key en/subject-add/k1 is that of an earlier row"),
    ],
)
def test_rows_of_another_schema_are_named(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    rows = gedit_rows()[:4:2]
    write_parquet(tmp_path / "rows.parquet", [rows[1], rows[0] | change])
    with pytest.raises(ValueError, match="row 2: ") as caught:
        read_edits(tmp_path)
    assert fault in str(caught.value)


def test_answers_are_read_or_refused() -> None:
    assert read_scores('Sure.\n```json\n{"score": [5, 25], "reasoning": "x"}\n```', scale=25) == ([2.0, 10.0], "x")
    for answer in ("none", '{"score": [5]}', '{"score": [5, 11]}', '{"score": [true, 1]}', '{"score": [5, 1'):
        with pytest.raises(UnreadableError):
            read_scores(answer, scale=10)


def test_a_rubric_must_say_what_was_asked(tmp_path: Path) -> None:
    assert read_rubric(RUBRIC).scale == 10
    path = tmp_path / "rubric.yaml"
    path.write_text("semantics: rate it\nquality: rate it\n")
    with pytest.raises(ValueError, match=r"'semantics' must hold \{instruction\}"):
        read_rubric(path)
    path.write_text("semantics: '{instruction}'\n")
    with pytest.raises(ValueError, match="'quality' must be a text"):
        read_rubric(path)
    path.write_text("semantics: '{instruction}'\nquality: rate\nscale: -1\n")
    with pytest.raises(ValueError, match="'scale' must be a number above 0"):
        read_rubric(path)


def test_who_rates_must_be_named(gedit_folder: Path, edits: Path) -> None:
    assert "name who rates the edits with --judge" in str(command(gedit_folder, "--images", edits).exception)


def test_a_generator_of_sets_edits_nothing(gedit_folder: Path, tmp_path: Path) -> None:
    done = command(gedit_folder, "--model", "black-forest-labs/FLUX.1-dev", "--paint-only", "--out", tmp_path)
    assert "is of kind 'flux', which makes sets" in str(done.exception)
