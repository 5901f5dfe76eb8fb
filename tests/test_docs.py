"""What a reader may copy from a page works: its commands parse, its config keys exist, its YAML loads.

Links are checked by `make docs`, which is strict; `tests/pages` runs the blocks of some pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
import pytest
import typer
import yaml
from pydantic import BaseModel

import pacorl
from pacorl import cli
from pacorl.character_training.character_config import CharacterConfig
from pacorl.config.base import Section
from pacorl.config.table import Table
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.models.policies import POLICIES

ROOT = Path(__file__).parents[1]
SOURCE = Path(pacorl.__file__).parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
RUNS: dict[str, type[Section]] = {
    "train-policy": PolicyConfig,
    "train-reward": JudgeConfig,
    "train-character": CharacterConfig,
}
FENCE = re.compile(r"^( *)```(\w*)(?: title=[^\n]*)?\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(page: Path) -> list[str]:
    """What stands in backticks within a page's sentences and tables."""
    return [text.replace(r"\|", "|") for text in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text("utf-8")))]


# --- tables ---------------------------------------------------------------------------------------------------------


def test_the_page_of_models_has_each_licence() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    for kind, spec in POLICIES.items():
        identifier, name = spec.licence
        row = rf"^\| `{kind}` \| `{spec.published}` \|.*`{name or identifier}`{', gated' * spec.gated} \|"
        assert re.search(row, text, flags=re.MULTILINE), f"{kind}: {spec.published}, {name or identifier}"


# --- commands -------------------------------------------------------------------------------------------------------


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words after `pacorl` of every command that a page shows."""
    fenced = [body for _, language, body in FENCE.findall(page.read_text("utf-8")) if language in {"", "bash", "sh"}]
    lines = "\n".join(fenced).replace("\\\n", " ").splitlines()
    for line in [*lines, *code_of(page)]:
        match = re.search(r"(?:^|\s)(?:[\w./]*/)?(?:pacorl|-m pacorl\.cli)\s+(.*)", line)
        if match and not line.lstrip().startswith(("#", "pip ", "from ", "import ")):
            yield shlex.split(match[1], comments=True)


@cache
def command_tree() -> click.Command:
    return typer.main.get_command(cli.app)


def faults_of(words: list[str]) -> Iterator[str]:
    """What a command line names and the program has not."""
    command: Any = command_tree()
    while hasattr(command, "get_command") and words and re.match(r"[a-z]", words[0]):
        names, words = words[0].split("|"), words[1:]
        commands = {name: command.get_command(click.Context(command), name) for name in names}
        unknown = [name for name, sub in commands.items() if sub is None]
        yield from (f"no command {name!r}" for name in unknown)
        if unknown:
            return
        command = commands[names[0]]
    options = {name for option in command.params for name in [*option.opts, *option.secondary_opts]} | {"--help"}
    own = words[: words.index("--")] if "--" in words else words
    given = [word.partition("=")[0] for word in own if word.startswith("--")]
    yield from (f"{command.name} has no option {name}" for name in given if name not in options)
    if command.name in RUNS:
        keys = [match[1] for word in own if (match := re.match(r"([a-z_]+(?:\.\w+)*)=", word))]
        yield from (f"{command.name} has no key {key}" for key in keys if not has_key(RUNS[command.name], key))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_parse(page: Path) -> None:
    faults = [f"{' '.join(words)}: {fault}" for words in command_lines(page) for fault in faults_of(words)]
    assert faults == []


# --- config keys ----------------------------------------------------------------------------------------------------


def has_key(run: type[Section], key: str) -> bool:
    """Whether a run's config has a dotted key, in any of the options that a section may be."""
    sections, hints = [run], []
    for name in key.split("."):
        hints = [hint for section in sections if (hint := get_type_hints(section, include_extras=True).get(name))]
        if any(get_origin(leaf) is dict for hint in hints for leaf in leaves(hint)):
            return True
        sections = [leaf for hint in hints for leaf in leaves(hint) if isinstance(leaf, type) and leaf is not Section]
        sections = [section for section in sections if issubclass(section, BaseModel)]
    return bool(hints)


def leaves(hint: Any) -> Iterator[Any]:
    """A type hint's own parts, and the options of every table entry that it may be."""
    if isinstance(hint, Table):
        yield from (hint[name].options for name in hint)
    else:
        yield hint
        for part in get_args(hint):
            yield from leaves(part)


def config_keys(page: Path) -> Iterator[str]:
    """Dotted keys that a page's sentences name, such as `judge.checkpoint`; files and modules aside."""
    sections = {name for run in RUNS.values() for name in run.model_fields}
    files = {".jsonl", ".json", ".safetensors", ".yaml", ".md", ".py"}
    for text in code_of(page):
        match = re.match(r"([a-z_]+)((?:\.[a-z_]+)+)(?=$|: |=)", text)
        if match and match[1] in sections and Path(match[0]).suffix not in files:
            package, name = SOURCE / match[1], match[2].split(".")[1]
            if not (package.is_dir() and any(path.stem == name for path in package.iterdir())):
                yield match[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_config_keys_of_a_page_exist(page: Path) -> None:
    assert [key for key in config_keys(page) if not any(has_key(run, key) for run in RUNS.values())] == []


def yaml_blocks() -> list[tuple[str, dict[str, Any]]]:
    """The pages' YAML that is of a run: every top-level key is one of a policy's run."""
    return [
        (f"{name_of(page)}: {', '.join(document)}", document)
        for page in PAGES
        for _, language, body in FENCE.findall(page.read_text("utf-8"))
        if language == "yaml" and set(document := yaml.safe_load(body)) <= set(PolicyConfig.model_fields)
    ]


@pytest.mark.parametrize("document", [block for _, block in yaml_blocks()], ids=[name for name, _ in yaml_blocks()])
def test_the_yaml_of_a_page_loads(document: dict[str, Any]) -> None:
    PolicyConfig.model_validate(document)


# --- files beside the pages -----------------------------------------------------------------------------------------


def test_the_workflow_runs_a_command_that_exists() -> None:
    workflow = (ROOT / "examples" / "check-panels.yml").read_text("utf-8")
    install, command = (step["run"] for step in yaml.safe_load(workflow)["jobs"]["check"]["steps"] if "run" in step)
    assert list(faults_of(shlex.split(command.splitlines()[1].removesuffix(" || code=$?"))[1:])) == []
    # A pull request must not download CUDA, nor other versions than those that are tested.
    assert "-c vendor/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu" in install
    assert f"vendor/pacorl-{pacorl.__version__}-py3-none-any.whl" in install


def test_the_compose_file_starts_a_confined_judge_by_a_command_that_exists() -> None:
    (service,) = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text("utf-8"))["services"].values()
    assert list(faults_of(service["command"])) == []
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
