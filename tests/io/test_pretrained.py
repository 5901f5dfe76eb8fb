"""Checkpoints are data: none of their Python files is run or asked about, and weights are safetensors, with named
exceptions."""

from __future__ import annotations

import ast
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
        FLUX.from_pretrained(generator)


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


def modules() -> dict[str, ast.AST]:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def own_classes(trees: dict[str, ast.AST]) -> set[str]:
    """Classes of the package with a `from_pretrained` of their own."""
    found = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                found |= {node.name} if "from_pretrained" in methods else set()
    return found


PICKLES = re.compile(r"torch\.(load|hub)\b.*|pickle\.(load|loads|Unpickler)|joblib\.load|(np|numpy)\.load")
"""Functions that read pickles, or download code."""
LOADERS = {"from_pretrained", "load_checkpoint"}
"""Methods that load a checkpoint; some libraries' read pickles."""


def loads(tree: ast.AST, own: set[str]) -> list[str]:
    """Every load of a checkpoint in a module but those of the package's own classes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            own_loader = node.attr == "from_pretrained" and ast.unparse(node.value) in own
            if (node.attr in LOADERS and not own_loader) or PICKLES.fullmatch(name):
                found.append(f"line {node.lineno}: {name}")
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and {"load", "hub"} & {a.name for a in node.names}
        ):
            found.append(f"line {node.lineno}: from torch import …")
        if isinstance(node, ast.Call) and any(keyword.arg == "pretrained" for keyword in node.keywords):
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}(pretrained=…)")
    return found


EXCEPTIONS = {
    # The published file of the aesthetic head exists in no other form: tensors alone, by torch's restricted reader.
    "rewards/clip.py": ["torch.load"],
    # Bytes that the line itself has made.
    "runtime/processes.py": ["pickle.loads"],
}
"""Module → its loads beside `pretrained`."""


@pytest.mark.slow
def test_checkpoints_are_loaded_by_one_function() -> None:
    trees = modules()
    # PEFT's config is JSON, and names no code.
    own = own_classes(trees) | {"PeftConfig"}
    assert {"LocalJudge", "PacoReward", "Generator"} < own
    found = {}
    for name, tree in trees.items():
        kinds = [fault.partition(": ")[2] for fault in loads(tree, own)]
        if kinds and name != "io/pretrained.py":
            found[name] = kinds
    assert found == EXCEPTIONS


@pytest.mark.slow
def test_torch_loads_tensors_alone() -> None:
    (call,) = (
        node
        for node in ast.walk(modules()["rewards/clip.py"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    )
    assert "weights_only=True" in ast.unparse(call)
