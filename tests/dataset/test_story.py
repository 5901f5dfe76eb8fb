"""The tiny story through the commands themselves: prompts → diversify → grids → pair → people → explain → export."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from annotators import read_panel, shared_attributes, simulate
from app_server import serving_app
from dataset_folder import draw_unreliably
from typer.testing import CliRunner

from pacorl.cli.dataset import app
from pacorl.generate.image_queue import ImageSource
from pacorl.io.documents import read_jsonl


def run(*arguments: object) -> dict[str, float]:
    """One command, and its counts by their labels."""
    found = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert found.exit_code == 0
    return {label: float(count) for label, count in re.findall(r"(?m)^(\S.*?) +([\d.]+)$", found.stdout)}


def serve_and_simulate(folder, people):
    """People rank through a real server; returns how many rankings each made."""
    from pacorl.annotate.server import Annotation, make_app

    annotation = Annotation(folder)
    annotation.start(people)
    with serving_app(make_app(annotation)) as url:
        return simulate(url, {name: annotation.token(name) for name in people}, noise=0.3)


def reasons(messages, number):
    label = "Yes" if "the answer is Yes" in messages[0]["content"][-1]["text"] else "No"
    return json.dumps({"answer": label, **dict.fromkeys(("style", "identity", "logic"), "As can be seen here.")})


@pytest.mark.slow
def test_from_prompts_to_training_pairs(tmp_path, llm, monkeypatch):
    folder = tmp_path / "set"
    assert run("prompts", folder, "--model", "tiny", "--count", 20)["records"] == 20
    assert run("diversify", folder, "--number", 3)["kept"] == 3
    source = ImageSource(lambda: partial(draw_unreliably, panel_size=32), {"checkpoint": "drawn"})
    monkeypatch.setattr("pacorl.generate.image_sources.image_source", lambda *args, **options: source)
    assert run("generate", folder, "--grids", 3)["missing"] == 0
    total = run("pair", folder)["instances"]
    assert total == 3 * 3 * 4 * 3
    ranked = serve_and_simulate(folder, ["ann", "ben", "cat"])
    assert sum(ranked.values()) >= 2 * total

    server, _ = llm(reasons)
    explained = run("explain", folder, "--model", f"{server.url}#stub")
    assert explained["explained"] == explained["pairs"] > 40
    counts = run("export", folder, "--test-share", 0.3)
    assert counts["splits: train: with reasons"] > 0
    assert counts["splits: test: yes"] > 0
    assert run("export", folder, "--test-share", 0.3) == counts

    # The labels say what the oracle says of the images.
    rows = [row for split in ("train", "test") for row in read_jsonl(folder / f"export/comparisons_{split}.jsonl")]
    agreement = {
        label: [
            shared_attributes(*(read_panel((folder / "export" / name).read_bytes()) for name in row["images"]))
            for row in rows
            if row["consistent"] == label
        ]
        for label in (True, False)
    }
    means = {label: sum(values) / len(values) for label, values in agreement.items()}
    assert means[True] > means[False] + 0.8
