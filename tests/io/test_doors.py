"""Documents, images, files, locks and HTTP have one door each: no module beside `pacorl.io` reads or parses what others
wrote, replaces a file, locks one or asks a server."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pacorl

SOURCE = Path(pacorl.__file__).parent
TOOLS = SOURCE.parents[1] / "tools" / "tiny"
PARSERS = {"json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.compose", "tomllib.load", "pickle.load"}
PARSERS |= {"yaml.safe_dump", "yaml.dump", "Image.open"}
WRITERS = {"os.replace", "os.rename", "os.fsync", "fcntl.flock", "fcntl.lockf", "json.dump"}
LAST_NAMES = {name.rpartition(".")[2] for name in PARSERS | WRITERS}


CLIENTS = {"http.client", "urllib.request", "urllib3", "requests", "httpx", "httpx2", "httpcore2", "aiohttp", "openai"}


def modules() -> list[Path]:
    """Every module of the package and of the tiny world's makers, but the doors themselves."""
    paths = [*SOURCE.rglob("*.py"), *TOOLS.rglob("*.py")]
    return sorted(path for path in paths if path.parent != SOURCE / "io")


def side_doors(source: str) -> list[str]:
    """The calls that go past `pacorl.io`, with their lines; a written JSON text is one as well."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) and node.attr in LAST_NAMES else ""
        if name in PARSERS | WRITERS:  # called, or handed on as in `map(json.loads, lines)`
            faults.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module}
            faults += [f"line {node.lineno}: import {name}" for name in imported & CLIENTS]
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


@pytest.mark.parametrize(
    "source",
    [
        "row = json.loads(line)",
        "rows = map(json.loads, lines)",
        "document = yaml.safe_load(text)",
        "lines = path.read_text(encoding='utf-8').splitlines()",
        "image = Image.open(path)",
        "os.replace(aside, path)",
        "def later():\n    import urllib.request",
        "from http.client import HTTPConnection",
        "path.write_text(json.dumps(row) + '\\n')",
        "def later():\n    fcntl.flock(handle, fcntl.LOCK_EX)",
    ],
)
def test_a_side_door_is_seen(source: str) -> None:
    assert len(side_doors(source)) == 1


def test_texts_for_people_and_the_doors_are_allowed() -> None:
    assert side_doors("print(json.dumps(row)); parse_json(text); write_atomic(path, text); path.write_text(text)") == []
