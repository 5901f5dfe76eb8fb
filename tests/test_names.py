"""No entry of a table is known outside its own file and its line of the table: by name, by class, by a family test.

Prose is free: docstrings, messages and comments may name a model. What is read here are whole string literals, imports
and `startswith` tests in `src/pacorl`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import pacorl
from pacorl.config.table import Table
from pacorl.models.policies import POLICIES

SOURCE = Path(pacorl.__file__).parent


@dataclass(frozen=True)
class Guarded:
    """A table whose entries nobody else may know."""

    table: Table[object]
    home: str
    """The table's own file."""
    names: frozenset[str]
    """Literals that would give an entry away."""
    prefixes: frozenset[str] = frozenset()
    """Beginnings by which a family might be told."""

    @property
    def modules(self) -> frozenset[str]:
        """The entries' own modules."""
        return frozenset(home.partition(":")[0] for home in self.table._homes.values())

    @property
    def own_files(self) -> frozenset[str]:
        return frozenset(f"{name.replace('.', '/').removeprefix('pacorl/')}.py" for name in self.modules) | {self.home}


def policy_names() -> frozenset[str]:
    specs = POLICIES.values()
    return frozenset(POLICIES) | {spec.pipeline for spec in specs} | {spec.published for spec in specs}


GUARDED: Mapping[str, Guarded] = {
    # The kinds of a family begin alike: qwen_edit, qwen_edit_plus.
    "policies": Guarded(
        POLICIES, "models/policies/__init__.py", policy_names(), frozenset(kind.partition("_")[0] for kind in POLICIES)
    ),
}
"""To guard another table, add its line here."""


def faults(tree: ast.AST, guarded: Guarded) -> Iterator[str]:
    """What a module knows of a guarded table's entries."""
    prose = _prose(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in guarded.names and id(node) not in prose:
            yield f"line {node.lineno}: names {node.value!r}"
        elif isinstance(node, ast.ImportFrom) and node.module in guarded.modules:
            yield f"line {node.lineno}: imports {', '.join(alias.name for alias in node.names)} of {node.module}"
        elif isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name in guarded.modules]
            yield from (f"line {node.lineno}: imports {name}" for name in own)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            literals = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            family = [text for text in literals if str(text).lower() in guarded.prefixes | guarded.names]
            yield from (f"line {node.lineno}: tells a family by {text!r}" for text in family)


def _prose(tree: ast.AST) -> set[int]:
    """Docstrings: literals that stand as statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def own_of_others(path: Path, guarded: Guarded) -> bool:
    """Whether a file is an entry's own, or the table's."""
    return str(path.relative_to(SOURCE)) in guarded.own_files


@pytest.mark.slow
@pytest.mark.parametrize("name", GUARDED)
def test_an_entry_is_known_in_its_own_file_alone(name: str) -> None:
    guarded = GUARDED[name]
    found = {
        f"{path.relative_to(SOURCE)}: {fault}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not own_of_others(path, guarded)
        for fault in faults(ast.parse(path.read_text(encoding="utf-8")), guarded)
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        'kind = "flux"',
        'if kind in ("kontext",): pass',
        'kind.startswith("qwen")',
        'checkpoint.lower().startswith("sd3")',
        'sizes = {"FluxPipeline": 1}',
        "from pacorl.models.policies.flux import FluxPolicy",
        "def late():\n    from pacorl.models.policies import flux\n    import pacorl.models.policies.qwen_image",
        'source = "Qwen/Qwen-Image-Edit"',
    ],
)
def test_knowledge_of_an_entry_is_seen(source: str) -> None:
    assert list(faults(ast.parse(source), GUARDED["policies"]))


def test_prose_may_name_an_entry() -> None:
    source = '"""flux"""\ndef f():\n    """kontext"""\n    raise ValueError("name one, e.g. FluxPipeline")\n'
    assert list(faults(ast.parse(source), GUARDED["policies"])) == []
