"""A tiny dataset folder, whose grids an unreliable painter made, and a stand-in for a language model's server."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from fake_server import chatting
from PIL.Image import Image
from tiny_sets import draw_grid, panels_of_prompt, redrawn

from pacorl.dataset.folder import PromptRecord, read_prompts
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.tiny.world import set_prompts
from pacorl.types import Prompt


def write_tiny_prompts(path: Path, count: int) -> None:
    rows = [
        {
            "idx": f"{prompt.id:04d}",
            "prompt": prompt.text,
            "layout": "2x2",
            "theme": prompt.theme,
            "category": "Character",
            "task_name": "Multi-Scenario",
            "criteria": {dimension: dict(named) for dimension, named in prompt.criteria.items()},
        }
        for prompt in set_prompts("train", count)
    ]
    write_jsonl(path, rows)


def draw_unreliably(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Image]:
    """Grids as a generator would make them that gets a third of the attributes wrong; the oracle can read them."""
    sets = [panels_of_prompt(prompt) for prompt in prompts]
    return [
        draw_grid(redrawn(panels, chance=0.35, rng=random.Random(seed)), prompt.grid, 32)
        for prompt, panels, seed in zip(prompts, sets, seeds, strict=True)
    ]


def write_grids(folder: Path, records: list[PromptRecord], *, grids: int) -> None:
    rng, files = random.Random(7), []
    for record in records:
        panels = panels_of_prompt(record.prompt)
        for number in range(grids):
            name = f"grids/{record.idx}/{number}.png"
            sheet = draw_grid(redrawn(panels, chance=0.35, rng=rng), record.prompt.grid, 32)
            write_atomic(folder / name, png_bytes(sheet))
            files.append(folder / name)
    DatasetStep(folder, "generate").finish(outputs=files, counts={})


@pytest.fixture(scope="session")
def made_datasets(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(prompts: int, grids: int, *, paired: bool) -> Path:
        folder = tmp_path_factory.mktemp("datasets")
        for name in ("prompts.jsonl", "diverse.jsonl"):
            write_tiny_prompts(folder / name, prompts)
        write_grids(folder, read_prompts(folder / "diverse.jsonl"), grids=grids)
        if paired:
            from pacorl.dataset.grids import pair

            pair(folder)
        return folder

    return make


@pytest.fixture
def dataset(tmp_path: Path, made_datasets: Callable[..., Path]) -> Callable[..., Path]:
    """Makes a folder with prompts.jsonl, diverse.jsonl, grids and, unless `paired` is false, instances."""

    def make(prompts: int = 3, grids: int = 3, *, paired: bool = True) -> Path:
        return shutil.copytree(made_datasets(prompts, grids, paired=paired), tmp_path / "dataset")

    return make


@pytest.fixture
def llm():
    """Makes chat models that talk to a server; `answer` is what `chatting` takes."""
    from pacorl.judge.chat import ChatModel

    with ExitStack() as running:

        def make(answer, **options):
            server = running.enter_context(chatting(answer).running())
            model = ChatModel("stub", base_url=server.url, **{"retries": 1, "timeout_seconds": 10} | options)
            return server, model

        yield make


# --- the annotation page as a process ----------------------------------------------------------------------------

SERVE = "from pacorl.cli.dataset import app; app()"


class AnnotationServer:
    """`pacorl dataset annotate` as a process of its own; entered, it gives the links of its people."""

    def __init__(self, folder: Path, *options: str, port: int) -> None:
        self.command = [sys.executable, "-c", SERVE, "annotate", str(folder), "--port", str(port), *options]
        self.port = port

    def __enter__(self) -> dict[str, str]:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        links = {}
        while "serving" not in (line := self.process.stdout.readline()):
            assert line, "the server ended before it served"
            name, tab, link = line.strip().partition("\t")
            if tab:
                links[name] = link
        return links

    def __exit__(self, *fault: object) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self.process.stdout.close()
