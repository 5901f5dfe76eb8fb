"""Checkpoints are data: none of their Python files is run or asked about, and weights are safetensors, with named
exceptions."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

import pacorl
from pacorl.io.pretrained import pretrained
from pacorl.judge.local import TINY_JUDGE
from pacorl.models.policies.flux import FLUX

SOURCE = Path(pacorl.__file__).parent
CODE = "needs Python code of its own, and no code of a checkpoint is run; convert it, or name another checkpoint"


@pytest.fixture(autouse=True)
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that a checkpoint's code would write; a person who is asked says yes."""
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda *question: asked.append(str(question)) or "y")
    yield tmp_path / "executed"
    assert asked == []
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_JUDGE, tmp_path / "judge"))


@pytest.fixture
def generator(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE / "tiny" / "checkpoints" / "flux", tmp_path / "flux"))


def change(path: Path, **values: Any) -> None:
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | values))


def write_code(folder: Path, executed: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "evil.py").write_text(f"open({str(executed)!r}, 'w').close()\nclass Evil: pass\n")


def give_code(judge: Path, executed: Path) -> None:
    """Make a judge's config name a class of its own."""
    write_code(judge, executed)
    classes = {"AutoConfig": "evil.Evil", "AutoModelForImageTextToText": "evil.Evil"}
    change(judge / "config.json", model_type="evil", auto_map=classes)


@pytest.mark.parametrize("kind", [AutoConfig, AutoModelForImageTextToText])
def test_a_model_with_code_of_its_own_is_refused(kind: Any, judge: Path, executed: Path) -> None:
    give_code(judge, executed)
    with pytest.raises(ValueError, match=f"^{judge} {CODE}$"):
        pretrained(kind, judge)


def test_a_tokenizer_with_code_of_its_own_is_read_without_it(judge: Path, executed: Path) -> None:
    write_code(judge, executed)
    change(judge / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil"] * 2})
    assert pretrained(AutoTokenizer, judge).decode([1])


def test_pickled_weights_of_a_model_are_not_read(judge: Path) -> None:
    torch.save(load_file(judge / "model.safetensors"), judge / "pytorch_model.bin")
    (judge / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^{judge} has no weights as safetensors, and pickled ones .* are not read"):
        pretrained(AutoModelForImageTextToText, judge)


@pytest.mark.parametrize(
    "entry",
    [["evil", "Evil"], ["os", "system"], ["this", "x"], ["transformers", "AutoModel"], ["diffusers", "AutoModel"]],
)
def test_a_component_is_a_class_of_a_library(entry: list[str], generator: Path, executed: Path) -> None:
    write_code(generator / "text_encoder", executed)
    change(generator / "model_index.json", text_encoder=entry)
    named = rf"its model_index\.json names {entry[0]}\.{entry[1]} as text_encoder, and a component is a model class of"
    with pytest.raises(ValueError, match=f"^{generator}: {named}"):
        FLUX.load(FLUX.options_for(str(generator), dtype="float32"))


def test_a_processor_in_a_pipeline_runs_no_code_either(generator: Path, executed: Path) -> None:
    folder = generator / "tokenizer"
    write_code(folder, executed)
    change(generator / "model_index.json", tokenizer=["transformers", "LlavaProcessor"])
    change(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    change(
        folder / "preprocessor_config.json", image_processor_type="Evil", auto_map={"AutoImageProcessor": "evil.Evil"}
    )
    change(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil"] * 2})
    with pytest.raises(ValueError, match=f"^{generator} {CODE}$"):
        pretrained(diffusers.FluxPipeline, generator)


# --- the door -----------------------------------------------------------------------------------------------------


LOADER = re.compile(
    r"torch\.(load\b|hub)|(pickle|joblib|np|numpy)\.loads?\b|\b(?!LocalJudge|PacoReward|Generator|FLUX)\w+\.from_pretrained\(|"
    r"from torch import .*(load|hub)|\bpretrained=|load_checkpoint\("
)
"""A load of a checkpoint, which may be a pickle or have code of its own, but by the package's own classes."""
EXCEPTIONS = {
    # The published file of the aesthetic head exists in no other form: tensors alone, by torch's restricted reader.
    "rewards/clip.py": ['state = torch.load(path, map_location="cpu", weights_only=True)'],
    # Bytes that the line itself has made.
    "runtime/processes.py": ["pickle.loads(pickle.dumps(error))"],
}
"""Module → its loads beside `pretrained`."""


def test_checkpoints_are_loaded_by_one_function() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if LOADER.search(line)]
        if lines and path.name != "pretrained.py":
            found[path.relative_to(SOURCE).as_posix()] = lines
    assert found == EXCEPTIONS
