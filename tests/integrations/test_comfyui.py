"""The ComfyUI nodes, called as ComfyUI calls them, and workflows, against a running `pacorl serve`."""

from __future__ import annotations

import json
import random
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from comfy_graph import graph_of, load_custom_node
from judges import serving
from PIL import Image
from tiny_sets import set_of
from torch import Tensor
from typer.testing import CliRunner

import pacorl
from pacorl.cli import app
from pacorl.config.options import BELOW
from pacorl.core.grid import join
from pacorl.gate.paco_reward import PacoReward
from pacorl.judge.local import LocalJudge
from pacorl.records.characters import find_character
from pacorl.tiny.world import draw, theme_text, with_another
from pacorl.types import Grid

FOLDER = Path(__file__).parents[2] / "integrations" / "comfyui"
PACK = load_custom_node(FOLDER)
NODES = PACK.NODE_CLASS_MAPPINGS
HERO = set_of(("red", "round", "crown", "night"), 5, random.Random(1))
REFERENCE, SOUND = draw(HERO[0], 64), [draw(panel, 64) for panel in HERO[1:]]
WRONG = draw(with_another(HERO[4], "hat", random.Random(0)), 64)
GATE = {"theme": "", "least": 0.5}


def batch(*images: Image.Image) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(image)) for image in images]) / 255


def page(last: Image.Image) -> Tensor:
    """Three sound panels and this one, on one page."""
    return batch(join([*SOUND[:3], last], Grid(2, 2)))


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, serving({"tiny": LocalJudge.from_pretrained("tiny")}) as url:
        patch.setenv(PACK.SERVER, url)
        yield


def run(class_type: str, /, **inputs: Any) -> Any:
    """What ComfyUI is returned by a node with these inputs, which must be those that it declares."""
    node = NODES[class_type]()
    declared = node.INPUT_TYPES()
    required = declared["required"].keys()
    assert required <= inputs.keys() <= {*required, *declared.get("optional", {}), *declared.get("hidden", {})}
    with torch.inference_mode():
        returned = getattr(node, node.FUNCTION)(**inputs)
    assert isinstance(returned, dict) or len(returned) == len(node.RETURN_TYPES)
    return returned


def test_the_pack_needs_what_comfyui_has() -> None:
    source = (FOLDER / "__init__.py").read_text("utf-8")
    names = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    assert names - sys.stdlib_module_names == {"numpy", "PIL", "torch", "folder_paths"}
    package = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))
    assert (package["project"]["version"], package["project"]["dependencies"]) == (pacorl.__version__, [])


# --- the nodes -------------------------------------------------------------------------------------------------


def test_a_page_is_checked_as_by_the_command(tmp_path: Path) -> None:
    Image.fromarray((page(WRONG)[0].numpy() * 255).round().astype(np.uint8)).save(tmp_path / "page.png")
    words = ["check", str(tmp_path / "page.png"), "--grid", "2x2", "--min", "0.5", "--judge", "tiny", "--json"]
    command = CliRunner().invoke(app, words)
    assert command.exit_code == BELOW
    passed, number, text = run("PacoCheckPage", page=page(WRONG), rows=2, columns=2, **GATE)
    assert (passed, number) == (False, 4)
    here, there = json.loads(text)["panels"], json.loads(command.stdout)["panels"]
    assert [panel["score"] for panel in here] == pytest.approx([panel["score"] for panel in there], abs=1e-5)
    assert run("PacoCheckPage", page=batch(*SOUND), rows=1, columns=1, **GATE)[:2] == (True, 0)
    with_hero = run("PacoCheckPage", page=page(WRONG), rows=2, columns=2, references=batch(REFERENCE), **GATE)
    assert json.loads(with_hero[2])["panels"][3]["character"] == "the character"


def test_the_mask_is_over_the_panel_to_draw_again() -> None:
    same, mask, number, _ = run("PacoRepairPage", page=page(WRONG), rows=2, columns=2, **GATE)
    assert (number, tuple(mask.shape)) == (4, (1, 128, 128))
    assert mask[0, 64:, 64:].min() == 1
    assert mask.sum() == 64 * 64
    assert torch.equal(same, page(WRONG))
    assert run("PacoRepairPage", page=page(SOUND[3]), rows=2, columns=2, **GATE)[1].sum() == 0
    panels = batch(SOUND[0], WRONG, *SOUND[1:3])
    _, mask, number, _ = run("PacoRepairPage", page=panels, rows=1, columns=1, **GATE)
    assert number == 2
    assert mask.sum((1, 2)).tolist() == [0, 64 * 64, 0, 0]


def test_candidates_are_ranked_as_by_python() -> None:
    candidates = [WRONG, *SOUND[:2]]
    with PacoReward.from_pretrained("tiny") as reward:
        ranked = reward.score_set([REFERENCE, *candidates], ranking=True).ranked
    best, text = run("PacoRank", reference=batch(REFERENCE), candidates=batch(*candidates), theme="", keep=2)
    assert [entry["candidate"] for entry in json.loads(text)] == [pair.second for pair in ranked]
    assert torch.equal(best, batch(*(candidates[pair.second - 1] for pair in ranked[:2])))


def test_a_character_is_that_of_the_commands(tmp_path: Path) -> None:
    folder = tmp_path / "hero"
    folder.mkdir()
    for number, side in ((2, 48), (10, 32)):
        REFERENCE.resize((side, side)).save(folder / f"{number}.png")
    for card in (
        "description: a red round hero\nkeep: {outfit: crown, palette: night}\n",
        "description: 'a red round hero'\nkeep:\n  outfit: crown\n  palette: night\n",
    ):
        (folder / "card.yaml").write_text(card)
        references, description, name = run("PacoLoadCharacter", folder=str(folder))
        assert tuple(references.shape) == (2, 48, 48, 3)
        assert (description, name) == (find_character(str(folder)).text, "hero")
    # ComfyUI reads the folder again after a change alone.
    before = NODES["PacoLoadCharacter"].IS_CHANGED(str(folder))
    WRONG.save(folder / "2.png")
    assert NODES["PacoLoadCharacter"].IS_CHANGED(str(folder)) != before
    (folder / "card.yaml").unlink()
    with pytest.raises(ValueError, match="the folder's full path"):
        run("PacoLoadCharacter", folder=str(folder))


def test_a_saved_page_is_read_by_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving(tmp_path, monkeypatch)
    texts = [panel.scene for panel in HERO[1:]]
    inputs = {
        "rows": 2,
        "columns": 2,
        "panels": "\n".join(texts),
        "theme": theme_text(HERO[0].place),
        "filename_prefix": "page",
    }
    hidden = {"prompt": {"save": {}}, "extra_pnginfo": {"workflow": {"nodes": []}}}
    result = run("PacoSavePage", page=page(WRONG), **inputs, **hidden)
    (file,) = result["ui"]["images"]
    saved = tmp_path / file["filename"]
    with Image.open(saved) as image:
        assert json.loads(image.info["workflow"]) == {"nodes": []}
        assert json.loads(image.info["prompt"]).keys() == {"save"}
    checked = CliRunner().invoke(app, ["check", str(saved), "--min", "0.5", "--judge", "tiny", "--json"])
    assert json.loads(checked.stdout)["odd_one_out"] == f"{saved}[4]"
    words = ["generate", "--from", str(saved), "--min", "0.5", "--judge", "tiny", "--dry-run", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 0
    with pytest.raises(ValueError, match="1 lines for 4 panels"):
        run("PacoSavePage", page=page(WRONG), **inputs | {"panels": "one"})


def saving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's module of folders."""
    paths = SimpleNamespace(
        get_output_directory=lambda: str(folder),
        get_save_image_path=lambda prefix, output, width, height: (output, prefix, 1, "", prefix),
    )
    monkeypatch.setitem(sys.modules, "folder_paths", paths)


def test_a_refusal_and_an_absent_server_are_told_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="refuses: the judge cannot judge these images"):
        run("PacoCheckPage", page=page(WRONG), rows=2, columns=2, theme="", least=0.0)
    with pytest.raises(RuntimeError, match="refuses: 1 image has nothing to be compared with"):
        run("PacoCheckPage", page=batch(WRONG), rows=1, columns=1, **GATE)
    with serving({"tiny": LocalJudge.from_pretrained("tiny")}, api_key="secret") as url:
        monkeypatch.setenv(PACK.SERVER, url)
        with pytest.raises(RuntimeError, match="PACORL_API_KEY"):
            PACK.ask([WRONG, REFERENCE])
        monkeypatch.setenv(PACK.KEY, "secret")
        assert PACK.ask([WRONG, REFERENCE])["judge"] == "tiny"
        photograph = REFERENCE.resize((6000, 4000))
        assert len(PACK.ask([WRONG, photograph], references=[photograph] * 4, least=0.1)["panels"]) == 2
        monkeypatch.setenv(PACK.SERVER, url.removeprefix("http://") + "#tiny")
        assert PACK.ask([WRONG, REFERENCE])["judge"] == "tiny"
    monkeypatch.setenv(PACK.SERVER, "http://127.0.0.1:9/v1")
    with pytest.raises(RuntimeError, match=r"no judge answers at http://127\.0\.0\.1:9/v1/consistency .*pacorl serve"):
        run("PacoCheckPage", page=page(WRONG), rows=2, columns=2, **GATE)


# --- the workflows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((FOLDER / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_a_workflow_has_the_inputs_that_its_nodes_declare(path: Path) -> None:
    """`test_real_comfyui.py` executes them."""
    workflow = json.loads(path.read_text("utf-8"))
    types = {str(entry["id"]): entry["type"] for entry in workflow["nodes"]}
    graph = graph_of(workflow, NODES)
    assert graph
    for entry in graph.values():
        declared = NODES[entry["class_type"]].INPUT_TYPES()
        fields = declared["required"] | declared.get("optional", {})
        assert declared["required"].keys() <= entry["inputs"].keys()
        for name, value in entry["inputs"].items():
            if isinstance(value, list) and types[value[0]] in NODES:
                assert fields[name][0] == NODES[types[value[0]]].RETURN_TYPES[value[1]], name
