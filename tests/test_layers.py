"""Imports follow docs/architecture.md: packages import lower ones only, and no two files import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pacorl

SOURCE = Path(pacorl.__file__).parent
LAYERS = [
    {"types"},
    {"io"},
    {"config"},
    {"core"},
    {"tiny"},
    {"records"},
    {"models"},
    {"report"},
    {"judge"},
    {"runtime"},
    {"web"},
    {"rewards"},
    {"grpo"},
    {"gate"},
    {"character_training", "judge_training", "generate", "serve"},
    {"bench", "dataset"},
    {"quickstart"},
    {"plan"},
    {"annotate", "studio"},
    {"cli", "testing"},
    {"__main__"},
]
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
METHOD = {"core", "models", "judge", "rewards", "runtime", "grpo", "judge_training"}
FORBIDDEN = {"report", "plan", "studio", "annotate", "tiny", "gate", "generate", "bench", "dataset", "cli"}
"""What the method imports none of: its callers give it listeners."""


def modules() -> list[Path]:
    """Every module but the package's own `__init__`, whose lazy exports may name any package."""
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def name_of(path: Path) -> str:
    """A module's dotted name below `pacorl`, such as `core.sde`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that is imported anywhere: at the top, in functions, under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def own_imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, name below `pacorl`) of the imports of this project's modules."""
    for line, name in imported(ast.parse(source)):
        package, _, rest = name.partition(".")
        if package == "pacorl" and rest not in {"", "__version__"}:
            yield line, rest


def breaches(source: str, package: str) -> list[str]:
    """Imports that a module of `package` must not contain."""
    faults = []
    for line, name in own_imports(source):
        other = name.split(".")[0]
        if other == package:
            continue
        if other not in LAYER_OF:
            faults.append(f"line {line}: {name} is in no layer")
        elif LAYER_OF[other] >= LAYER_OF[package]:
            faults.append(
                f"line {line}: {package} (layer {LAYER_OF[package]}) imports {name} (layer {LAYER_OF[other]})"
            )
    return faults


def imports_by_module(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module → the modules of `sources` that it imports."""
    graph = {}
    for module, source in sources.items():
        # A type may name a module that imports this one: an epoch's argument is the trainer that runs it.
        tree = ast.parse(source)
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
        names = {name for _, name in own_imports(ast.unparse(tree))}
        # `from pacorl.core import sde` names a module, and `from pacorl.core.sde import kl` a name in one.
        known = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in known if name in sources and name != module}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.slow
def test_packages_import_lower_layers_only() -> None:
    faults = []
    for path in modules():
        package = name_of(path).split(".")[0]
        assert package in LAYER_OF, f"{package} is in no layer; add it here and to docs/architecture.md"
        faults += [f"{path}: {fault}" for fault in breaches(path.read_text(encoding="utf-8"), package)]
    assert faults == []


@pytest.mark.slow
def test_no_two_files_import_each_other() -> None:
    sources = {name_of(path): path.read_text(encoding="utf-8") for path in modules()}
    assert cycle(imports_by_module(sources)) == []


@pytest.mark.parametrize("package", sorted(METHOD))
def test_the_method_knows_none_of_its_applications(package: str) -> None:
    known = set()
    for path in modules():
        if name_of(path).split(".")[0] == package:
            known |= {name.split(".")[0] for _, name in own_imports(path.read_text(encoding="utf-8"))}
    assert not known & FORBIDDEN


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_command_modules_open_with_light_imports(path: Path) -> None:
    tops = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [name for node in tops for _, name in imported(node)]
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
