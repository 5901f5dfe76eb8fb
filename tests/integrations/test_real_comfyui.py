"""The workflows in a real ComfyUI on a CPU: its executor and its own nodes, and ours against a running `pacorl serve`.

COMFYUI is the folder of ComfyUI's source, and COMFYUI_PYTHON the interpreter of its environment, .venv/bin/python there
by default; pacorl is not installed in it. Without COMFYUI these tests are skipped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfy_graph import graph_of
from judges import serving
from PIL import Image
from ports import free_port
from tiny_sets import set_of

from pacorl.core.grid import join
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import draw, with_another
from pacorl.types import Grid

COMFYUI = os.environ.get("COMFYUI", "")
ABSENT = pytest.mark.skipif(not COMFYUI, reason="COMFYUI names no folder of ComfyUI's source")
pytestmark = [pytest.mark.nightly, ABSENT]
PACK = Path(__file__).parents[2] / "integrations" / "comfyui"
HERO = set_of(("red", "round", "crown", "night"), 5, random.Random(1))
REFERENCE, SOUND = draw(HERO[0], 64), [draw(panel, 64) for panel in HERO[1:]]
WRONG = draw(with_another(HERO[4], "hat", random.Random(0)), 64)
STARTED = 180.0
"""Seconds in which ComfyUI starts."""


class Comfy:
    """A running ComfyUI, by its API."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def graph(self, name: str) -> dict[str, Any]:
        """A workflow of the pack in the API's form, by the inputs that ComfyUI's nodes declare."""
        nodes: Mapping[str, Any] = {
            node: SimpleNamespace(INPUT_TYPES=lambda declared=info["input"]: {"required": {}, **declared})
            for node, info in self.ask("/object_info").items()
        }
        return graph_of(json.loads((PACK / "workflows" / f"{name}.json").read_text("utf-8")), nodes)

    def run(self, graph: Mapping[str, Any]) -> Any:
        """Execute a graph; node → what it showed."""
        number = self.ask("/prompt", {"prompt": graph, "extra_data": {"extra_pnginfo": {"workflow": {"nodes": []}}}})
        while not (history := self.ask(f"/history/{number['prompt_id']}")):
            time.sleep(0.1)
        (result,) = history.values()
        assert result["status"]["status_str"] == "success", result["status"]
        return result["outputs"]

    def image(self, shown: Mapping[str, str]) -> Image.Image:
        with Image.open(self.folder / shown["type"] / shown["subfolder"] / shown["filename"]) as image:
            image.load()
            return image


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    folder = tmp_path_factory.mktemp("comfy")
    for name in ("input", "custom_nodes", "page"):
        (folder / name).mkdir()
    (folder / "custom_nodes" / "pacorl").symlink_to(PACK)
    (folder / "page" / "index.html").write_text("<html></html>")  # its page is a package of its own
    images = {"page": join([*SOUND[:3], WRONG], Grid(2, 2)), "redrawn": join(SOUND, Grid(2, 2))}
    for name, image in {**images, "reference": REFERENCE, "first": WRONG, "second": SOUND[0]}.items():
        image.save(folder / "input" / f"{name}.png")

    python = os.environ.get("COMFYUI_PYTHON") or str(Path(COMFYUI) / ".venv" / "bin" / "python")
    port = free_port()
    command = [python, "main.py", "--cpu", "--port", str(port), "--base-directory", str(folder)]
    command += ["--front-end-root", str(folder / "page")]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        serving({"tiny": LocalJudge.from_pretrained("tiny")}) as judge,
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=COMFYUI, env={**outside, "PACORL_SERVER": judge}, stdout=log, stderr=log
        ) as process,
    ):
        running = Comfy(f"http://127.0.0.1:{port}", folder)
        until = time.monotonic() + STARTED
        try:
            while True:
                try:
                    running.ask("/system_stats")
                    break
                except OSError:
                    assert process.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < until, (folder / "log").read_text()
                    time.sleep(0.5)
            yield running
        finally:
            process.kill()


def test_a_page_is_checked(comfy: Comfy) -> None:
    graph = comfy.graph("check")
    del graph["2"]  # a character of the user's
    del graph["3"]["inputs"]["references"]
    shown = comfy.run(graph)
    assert shown["4"]["text"] == ["False"]
    assert json.loads(shown["5"]["text"][0])["odd_one_out"] == "image 4"


def test_candidates_are_ranked(comfy: Comfy) -> None:
    shown = comfy.run(comfy.graph("rank"))
    (best,) = shown["6"]["images"]
    assert comfy.image(best).tobytes() == SOUND[0].tobytes()
    assert [pair["candidate"] for pair in json.loads(shown["7"]["text"][0])] == [2, 1]


def test_a_page_is_repaired(comfy: Comfy) -> None:
    """An image in the place of the model's: its panel under the mask is kept, and nothing else of it."""
    graph = comfy.graph("repair")
    for model in ("2", "3", "4", "6", "7", "8"):
        del graph[model]
    graph["redrawn"] = {"class_type": "LoadImage", "inputs": {"image": "redrawn.png"}}
    graph["9"]["inputs"]["source"] = ["redrawn", 0]
    shown = comfy.run(graph)
    assert shown["12"]["text"] == ["4"]
    page = comfy.image(shown["11"]["images"][0])
    assert page.convert("RGB").tobytes() == join(SOUND, Grid(2, 2)).tobytes()
    assert json.loads(page.info["verdict"])["passed"] is True
