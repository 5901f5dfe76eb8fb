"""The ComfyUI nodes, in a stand-in of ComfyUI's loader and executor (comfy_graph.py)."""

from __future__ import annotations

import copy
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from comfy_graph import execute, load_custom_node
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.twins import tiny_flux_transformer
from tests.zoo import comfy
from torch import Tensor

import pacorl
from pacorl import PacoReward
from pacorl.gate.check import ControlError, check_set
from pacorl.tiny.characters import Panel, all_panels, draw

FOLDER = Path(__file__).parents[2] / "integrations" / "comfyui"
PACK = load_custom_node(FOLDER)
NODES = PACK.NODE_CLASS_MAPPINGS
PANELS = [draw(panel, 32) for panel in all_panels()[::1500]]
JUDGE = {"class_type": "PacoLoadJudge", "inputs": {"source": "tiny"}}


def batch(count: int = 4) -> Tensor:
    """Panels as ComfyUI has images."""
    flat = [torch.frombuffer(bytearray(panel.tobytes()), dtype=torch.uint8) for panel in PANELS[:count]]
    return torch.stack([pixels.reshape(32, 32, 3) for pixels in flat]) / 255


def run(class_type: str, /, **inputs: Any) -> list[Any]:
    """The outputs of one node behind a tiny judge; tensors are linked as IMAGE."""
    constants = {key: ("IMAGE", value) for key, value in inputs.items() if isinstance(value, Tensor)}
    linked = {key: [key, 0] if key in constants else value for key, value in inputs.items()}
    graph = {"judge": JUDGE, "node": {"class_type": class_type, "inputs": linked}}
    return [values[0] for values in execute(NODES, graph, constants)["node"]]


@pytest.mark.parametrize("name", NODES)
def test_a_node_has_what_comfyui_asks_of_one(name: str) -> None:
    node = NODES[name]
    assert name in PACK.NODE_DISPLAY_NAME_MAPPINGS
    assert callable(getattr(node, node.FUNCTION))
    assert node.CATEGORY == "pacorl"
    assert isinstance(node.RETURN_TYPES, tuple)
    assert len(getattr(node, "RETURN_NAMES", node.RETURN_TYPES)) == len(node.RETURN_TYPES)
    for fields in node.INPUT_TYPES().values():
        assert all(isinstance(field, tuple) and isinstance(field[0], str | list) for field in fields.values())
    assert node.__doc__


def test_scores_are_those_of_python() -> None:
    with PacoReward.from_pretrained("tiny") as reward:
        pair = reward.score(*PANELS[:2], theme="red round hero")
        whole = reward.score_set(PANELS, theme="red round hero")
    theme = {"judge": ["judge", 0], "theme": "red round hero"}
    (p_yes,) = run("PacoScorePair", first=batch(1), second=batch(2)[1:], **theme)
    mean, odd, text = run("PacoScoreSet", images=batch(), **theme)
    assert p_yes == pytest.approx(pair, abs=1e-6)
    assert mean == pytest.approx(whole.mean, abs=1e-6)
    assert whole.odd_one_out is not None
    assert odd == whole.odd_one_out.image + 1
    assert len(json.loads(text)["pairs"]) == 6
    assert run("PacoScoreSet", images=batch(2), **theme)[1] == 0, "of two, neither is the odd one"


def test_a_set_is_generated_from_a_sentence_about_a_character(tmp_path: Path) -> None:
    folder = tmp_path / "hero"
    folder.mkdir()
    for number, side in enumerate((32, 48)):
        draw(all_panels()[number], side).save(folder / f"{number}.png")
    (folder / "card.yaml").write_text("description: red round hero, crown, night\n")
    constants: dict[str, Any] = {}
    text = (
        "Generate four images of the hero featuring: 'waving, flag', 'jumping, boat', 'standing, tree', 'waving, lamp'"
    )
    graph = {
        "generator": {"class_type": "PacoLoadGenerator", "inputs": {"model": "tiny"}},
        "character": {"class_type": "PacoLoadCharacter", "inputs": {"folder": str(folder)}},
        "node": {
            "class_type": "PacoGenerateSet",
            "inputs": {"generator": ["generator", 0], "text": text, "seed": 1, "steps": 2, "character": str(folder)},
        },
    }
    outputs = execute(NODES, graph, constants)
    references, looks, _ = [values[0] for values in outputs["character"]]
    assert references.shape == (2, 32, 32, 3)
    assert looks == "red round hero, crown, night"
    images, panels = [values[0] for values in outputs["node"]]
    assert images.shape == (4, 64, 64, 3)
    assert "waving, flag" in panels.splitlines()[0]


def test_the_registrys_package_is_of_this_version() -> None:
    package = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))
    assert package["project"]["version"] == pacorl.__version__
    assert set(package["tool"]["comfy"]) == {"PublisherId", "DisplayName"}


def hero(*hats: str) -> Tensor:
    """Panels of a red round hero at night, each with another scene; two may have one hat."""
    scenes = [("waving", "flag"), ("jumping", "boat"), ("standing", "tree"), ("waving", "lamp"), ("jumping", "ball")]
    drawn = [Panel("red", "round", hat, "night", *scene) for hat, scene in zip(hats, scenes, strict=False)]
    return torch.stack([torch.from_numpy(np.array(draw(panel, 64))) for panel in drawn]) / 255


@pytest.mark.slow
def test_a_batch_is_checked_as_by_python() -> None:
    images = hero("crown", "crown", "crown", "cap")
    fields = {"judge": ["judge", 0], "theme": "", "least": 0.5}
    passed, odd, text = run("PacoCheckSet", images=images, **fields)
    with PacoReward.from_pretrained("tiny") as reward:
        here = check_set(reward.judge, PACK.to_images(images), least=0.5).to_dict()
    assert (passed, odd) == (False, 4)
    assert json.loads(text)["panels"][3] == pytest.approx(here["panels"][3], abs=1e-6)
    assert run("PacoCheckSet", images=images[:3], **fields)[:2] == [True, 0]
    wrong, *others = json.loads(run("PacoCheckSet", images=images, references=images[3:], **fields)[2])["panels"][::-1]
    assert wrong["passed"]
    assert not any(panel["passed"] for panel in others)
    with pytest.raises(ControlError, match="cannot judge these images"):
        run("PacoCheckSet", images=images, **(fields | {"least": 0.0}))


@pytest.mark.slow
def test_a_batch_is_repaired_from_further_batches() -> None:
    images = hero("crown", "crown", "crown", "cap")
    redrawn = torch.cat([hero("cap", "cap", "cap", "top-hat"), hero("cap", "cap", "cap", "crown")])
    fields = {"judge": ["judge", 0], "theme": "", "least": 0.5, "references": images[:1]}
    repaired, passed, text = run("PacoRepairSet", images=images, redrawn=redrawn, **fields)
    assert passed
    assert torch.equal(repaired, torch.cat([images[:3], redrawn[7:]]))
    assert [attempt["panel"] for attempt in json.loads(text)["tries"]] == [4, 4]
    kept, passed, _ = run("PacoRepairSet", images=images, redrawn=redrawn[:4], **fields)
    assert not passed
    assert torch.equal(kept[:3], images[:3])


def test_the_best_candidates_come_first() -> None:
    with PacoReward.from_pretrained("tiny") as reward:
        order = [pair.second - 1 for pair in reward.rank([PANELS[0], *PANELS]).ranked]
    inputs = {"judge": ["judge", 0], "reference": batch(1), "candidates": batch(), "theme": "", "keep": 2}
    best, scores = run("PacoRankCandidates", **inputs)
    assert torch.equal(best, batch()[order[:2]])
    ranked = json.loads(scores)
    assert [row["candidate"] - 1 for row in ranked] == order
    assert [row["p_yes"] for row in ranked] == sorted((row["p_yes"] for row in ranked), reverse=True)


def test_a_grid_is_split_row_by_row_and_joined_again() -> None:
    (grid,) = run("PacoGridJoin", panels=batch(), rows=2, columns=2)
    assert grid.shape == (1, 64, 64, 3)
    assert torch.equal(grid[0, :32, 32:], batch()[1])
    (panels,) = run("PacoGridSplit", grid=grid, rows=2, columns=2)
    assert torch.equal(panels, batch())


@pytest.mark.parametrize(
    ("node", "inputs", "fault"),
    [
        ("PacoGridSplit", {"grid": batch(1), "rows": 3, "columns": 2}, "32x32 pixels do not divide into 3x2 panels"),
        ("PacoGridJoin", {"panels": batch(3), "rows": 2, "columns": 2}, "3 panels do not fill grids of 2x2"),
        (
            "PacoRepairSet",
            {"judge": ["judge", 0], "images": batch(2), "redrawn": batch(3), "theme": "", "least": 0.5},
            "3 redrawn images do not match 2 images",
        ),
        ("PacoScoreSet", {"judge": ["judge", 0], "images": batch(1), "theme": ""}, "nothing to be compared with"),
    ],
)
def test_what_cannot_be_done_stops_the_graph_with_its_reason(node: str, inputs: Mapping[str, Any], fault: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=fault):
        run(node, **inputs)


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ComfyUI's user directory, as its own module names it."""
    module = SimpleNamespace(get_user_directory=lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "folder_paths", module)
    return tmp_path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The judges that were loaded or connected to."""
    sources: list[str] = []
    monkeypatch.setattr(PacoReward, "from_pretrained", lambda source, model: sources.append(source))
    return sources


def load(source: str) -> None:
    execute(NODES, {"judge": {"class_type": "PacoLoadJudge", "inputs": {"source": source}}}, {})


@pytest.mark.parametrize(
    ("source", "host"),
    [
        ("http://judge.example/v1", "judge.example"),
        ("HTTPS://Judge.Example:8443/v1", "judge.example"),
        ("http://localhost.judge.example/v1", "localhost.judge.example"),
        ("http://127.0.0.1.judge.example/v1", "127.0.0.1.judge.example"),
        ("http://192.168.0.7:8000", "192.168.0.7"),
        ("http://0.0.0.0:8000", "0.0.0.0"),
        ("http://\x1bc.example/v1", r"\x1bc.example"),
    ],
)
def test_a_workflow_cannot_send_images_to_a_new_host(
    source: str, host: str, user_folder: Path, loaded: list[str]
) -> None:
    fault = (
        f"the judge is at {host}, and images are not sent to a new host unasked; to allow it, add the line {host} to "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(f'{fault}{user_folder}')}/pacorl_hosts.txt$"):
        load(source)
    assert loaded == []


@pytest.mark.usefixtures("user_folder")
def test_every_server_of_a_judge_needs_permission(loaded: list[str]) -> None:
    with pytest.raises(ValueError, match=r"the judge is at judge\.example, and images are not sent"):
        load("http://127.0.0.1:8000,http://judge.example/v1#it")
    assert loaded == []


@pytest.mark.parametrize(
    "source", ["tiny", "lab/judge", "http://127.0.0.1:8000/v1", "http://localhost:8000/v1", "http://[::1]:8000/v1"]
)
def test_this_machine_needs_no_permission(source: str, loaded: list[str]) -> None:
    load(source)
    assert loaded == [source]


def test_an_allowed_host_is_remembered(user_folder: Path, loaded: list[str]) -> None:
    (user_folder / "pacorl_hosts.txt").write_text("other.example\n Judge.Example \n")
    load("http://judge.example:8000/v1")
    assert loaded == ["http://judge.example:8000/v1"]
    with pytest.raises(ValueError, match=r"the judge is at evil\.example"):
        load("http://evil.example/v1")


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_a_lora_that_comfyui_cannot_read_is_on_the_model_with_its_scale(
    strength: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's folder with α twice the rank, of which ComfyUI itself loads no weight."""
    torch.manual_seed(0)
    base = tiny_flux_transformer(width=64, heads=2, double_blocks=1, single_blocks=1)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "proj_mlp"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)

    def load_lora_for_models(model: Any, clip: Any, lora: Any, strength_model: float, strength_clip: float) -> Any:
        patched = copy.deepcopy(model)
        assert comfy.patch_in_comfy(patched, lora, strength_model) == [], "lora key not loaded"
        return patched, clip

    modules = {
        "sd": SimpleNamespace(load_lora_for_models=load_lora_for_models),
        "utils": SimpleNamespace(load_torch_file=lambda file, safe_load: load_file(file)),
    }
    monkeypatch.setitem(sys.modules, "comfy", comfy)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"comfy.{name}", module)
        monkeypatch.setattr(comfy, name, module, raising=False)
    graph = {
        "node": {
            "class_type": "PacoLoadLora",
            "inputs": {"model": ["m", 0], "source": str(tmp_path), "strength": strength},
        }
    }
    ((patched,),) = execute(NODES, graph, {"m": ("MODEL", base)})["node"]
    merged = model.merge_and_unload()
    for (name, weight), before, after in zip(
        patched.named_parameters(), base.parameters(), merged.parameters(), strict=True
    ):
        assert torch.allclose(weight, before + strength * (after - before), atol=1e-6), name
    assert any(not torch.equal(*both) for both in zip(patched.parameters(), base.parameters(), strict=True))
