"""The layers of docs/architecture.md hold: a module imports lower layers and its own folder only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pacorl

SOURCE = Path(pacorl.__file__).parent
LAYERS = [
    {"types"},
    {"io", "core.table"},
    {"config.base", "config.one_of"},
    {"core", "config.judge_run"},
    {"data", "lora", "quantize", "twins"},
    {"policies", "judges"},
    {"config"},
    {"rewards"},
    {"engine", "report"},
    {"score", "web", "generate"},
    {"train", "train_judge", "bench", "serve", "dataset"},
    {"annotate"},
    {"plan", "probe", "quickstart", "studio"},
    {"cli", "testing"},
    {"__main__"},
]
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> list[Path]:
    """Every module but the package's own `__init__`, whose lazy exports may name any room."""
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def room_of(path: Path) -> str:
    """The room of a module's file: `config.base` if the layers name it, else its folder."""
    return room_named(".".join(path.relative_to(SOURCE).with_suffix("").parts))


def room_named(dotted: str) -> str:
    """The room of `config.base.load`: the longest beginning that the layers name, else the first part."""
    parts = dotted.split(".")
    beginnings = [".".join(parts[:count]) for count in (2, 1)]
    return next((name for name in beginnings if name in LAYER_OF), parts[0])


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


def breaches(source: str, room: str) -> list[str]:
    """What a module of `room` imports and must not."""
    faults = []
    for line, name in imported(ast.parse(source)):
        package, _, rest = name.partition(".")
        other = room_named(rest)
        if package != "pacorl" or other in {"", "__version__"} or rest.split(".")[0] == room.split(".", maxsplit=1)[0]:
            continue
        if other not in LAYER_OF:
            faults.append(f"line {line}: {name} is in no layer")
        elif LAYER_OF[other] >= LAYER_OF[room]:
            faults.append(f"line {line}: {room} (layer {LAYER_OF[room]}) imports {name} (layer {LAYER_OF[other]})")
    return faults


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_lower_layers(path: Path) -> None:
    assert room_of(path) in LAYER_OF, f"{room_of(path)} is in no layer; add it to the plan, or put it elsewhere"
    assert breaches(path.read_text(encoding="utf-8"), room_of(path)) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("data", "from pacorl.judges.judge import LocalJudge"),
        ("types", "from pacorl import config"),
        ("core", "import pacorl.rewards"),
        ("rewards", "def late():\n    from pacorl.train.trainer import train_policy"),
        ("policies", "if TYPE_CHECKING:\n    from pacorl.engine.runtime import Runtime"),
        ("core", "import_module('pacorl.policies')"),
        ("core", "from pacorl.attic import anything"),
    ],
)
def test_a_breach_is_seen(room: str, source: str) -> None:
    assert len(breaches(source, room)) == 1


def test_lower_layers_and_the_own_room_are_allowed() -> None:
    source = (
        "from pacorl.core.grid import split\nfrom pacorl.train.update import Batch\nfrom pacorl import types, config"
    )
    assert breaches(source, "train") == []


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_command_modules_open_with_light_imports(path: Path) -> None:
    tops = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = [name for node in tops for _, name in imported(node)]
    heavy = [
        n
        for n in names
        if n.split(".")[0] not in {*sys.stdlib_module_names, "typer"}
        and not n.startswith(
            (
                *("pacorl.cli", "pacorl.__version__", "pacorl.config.options", "pacorl.types", "pacorl.bench.table"),
                "pacorl.io.terminal",
            )
        )
    ]
    assert heavy == []


def test_importing_the_package_opens_no_heavy_door() -> None:
    code = "import sys, pacorl; print(sorted({'torch', 'numpy', 'PIL', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lazy_exports_resolve() -> None:
    from pacorl.data.records import load_prompts

    assert pacorl.load_prompts is load_prompts
    assert set(pacorl.__all__) <= set(dir(pacorl))
    with pytest.raises(AttributeError, match="no attribute 'load_promts'"):
        pacorl.load_promts  # noqa: B018
