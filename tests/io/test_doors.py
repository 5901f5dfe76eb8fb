"""Documents, images, files and locks have one door: no module beside `pacorl.io` parses what others wrote, replaces a
file or locks one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pacorl

SOURCE = Path(pacorl.__file__).parent
PARSERS = {"json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.compose", "tomllib.load", "pickle.load"}
PARSERS |= {"yaml.safe_dump", "yaml.dump", "Image.open"}
WRITERS = {"os.replace", "os.rename", "os.fsync", "fcntl.flock", "fcntl.lockf", "json.dump"}
LAST_NAMES = {name.rpartition(".")[2] for name in PARSERS | WRITERS}


def modules() -> list[Path]:
    """Every module of the package but the doors themselves."""
    return sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE / "io")


def side_doors(source: str) -> list[str]:
    """The calls that go past `pacorl.io`, with their lines; a written JSON text is one as well."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in LAST_NAMES else ""
        if name in PARSERS | WRITERS:  # called, or handed on as in `map(json.loads, lines)`
            faults.append(f"line {node.lineno}: {name}")
        method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if method == "read_text":
            faults.append(f"line {node.lineno}: read_text")
        if isinstance(node, ast.Call) and method == "write_text":
            dumped = any("json.dumps" in ast.unparse(argument) for argument in node.args)
            faults += [f"line {node.lineno}: write_text of JSON"] if dumped else []
    return faults


@pytest.mark.slow
def test_documents_images_and_files_go_through_io() -> None:
    found = []
    for path in modules():
        found += [f"{path}: {fault}" for fault in side_doors(path.read_text(encoding="utf-8"))]
    assert found == []
