"""What a start of the package imports; the layers of packages are contracts of import-linter in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pacorl

SOURCE = Path(pacorl.__file__).parent


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of the imports at the top of a module, or below."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_command_modules_open_with_light_imports(path: Path) -> None:
    tops = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [name for node in tops for name in imported(node)]
    light = (
        "pacorl.cli",
        "pacorl.__version__",
        "pacorl.config.options",
        "pacorl.types",
        "pacorl.bench.benchmarks",
        "pacorl.io.terminal",
        "pacorl.io.versions",
    )
    allowed = {*sys.stdlib_module_names, "typer"}
    heavy = [name for name in names if name.split(".")[0] not in allowed and not name.startswith(light)]
    assert heavy == []


@pytest.mark.slow
def test_no_loop_imports_fsdp() -> None:
    """It takes a second of each start, and two processes or more alone need it."""
    code = (
        "import sys, pacorl.grpo.trainer, pacorl.generate.generator, pacorl.judge.local; "
        "print([name for name in ('torch.distributed.fsdp', 'torch.distributed.tensor') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lazy_exports_resolve() -> None:
    from pacorl.records.prompts import load_prompts

    assert pacorl.load_prompts is load_prompts
    assert set(pacorl.__all__) <= set(dir(pacorl))
    with pytest.raises(AttributeError, match="no attribute 'load_promts'"):
        pacorl.load_promts  # noqa: B018
