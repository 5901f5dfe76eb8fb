"""The pages are true: what they name exists, from modules and commands to config keys and links."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
import pytest
import typer
import yaml
from pydantic import BaseModel
from tools.tiny import __main__ as tiny

import pacorl
from pacorl import cli
from pacorl.bench.benchmarks import BENCHMARKS
from pacorl.character_training.character_config import CharacterConfig
from pacorl.cli import mcp
from pacorl.config.base import Section
from pacorl.config.one_of import OneOf
from pacorl.core.advantages import AGGREGATES
from pacorl.core.metric_names import MONITOR, SIGN_MEANINGS
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sde import SDE_TYPES
from pacorl.core.solvers import SOLVERS
from pacorl.dataset.export import FORMATS
from pacorl.dataset.importing import SOURCES
from pacorl.dataset.selections import SELECTIONS
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.models.policies import POLICIES
from pacorl.rewards import REWARDS
from tools import hardware

ROOT = Path(__file__).parents[1]
SOURCE = Path(pacorl.__file__).parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
MAPS = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
RUNS: dict[str, type[Section]] = {
    "train-policy": PolicyConfig,
    "train-reward": JudgeConfig,
    "train-character": CharacterConfig,
}
FILES = {".jsonl", ".json", ".safetensors", ".yaml", ".md"}
OPTION = re.compile(r"(?:^|(?<=[ `]))(--[a-z][\w-]*)")
OTHERS_OPTIONS = {
    "--help",
    "--allowed-media-domains",
    "--gpu-memory-utilization",
    "--num_processes",
    "--cpu",
    "--repo-type",
    "--local-dir",
    "--no_python",
    "--config_file",
    "--strict",
    "--no-python",
    "--nproc_per_node",
    "--no-deps",
    "--needs",
    "--tiny",
    "--slice",
    "--minutes",
    "--build-arg",
    "--user",
}
"""Of accelerate, torchrun, hf, mypy, vLLM, pip, docker and `benchmarks.gpu_day`."""
FENCE = re.compile(r"^( *)```(\w*)(?: title=[^\n]*)?\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(page: Path) -> list[str]:
    """What stands in backticks within a page's sentences and tables."""
    return [text.replace(r"\|", "|") for text in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text("utf-8")))]


def test_every_extra_is_in_the_table_of_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "install.md").read_text(), flags=re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`(\w+)`", row)} == set(project["optional-dependencies"])


# --- modules and paths ----------------------------------------------------------------------------------------------


def exists(name: str) -> bool:
    """Whether a path, or a module with names of its own, is in the repository."""
    stem = name.rstrip("/")
    if any((base / ending).exists() for base in (ROOT, SOURCE) for ending in (stem, f"{stem}.py")):
        return True
    parts = stem.removeprefix("pacorl.").split(".")
    return any(
        module.is_file() and all(re.search(rf"\b{part}\b", module.read_text("utf-8")) for part in parts[count:])
        for count in range(1, len(parts) + 1)
        for module in (
            SOURCE.joinpath(*parts[:count]).with_suffix(".py"),
            SOURCE.joinpath(*parts[:count], "__init__.py"),
        )
    )


def rooms() -> list[str]:
    names = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return sorted(names - {"__init__", "__main__"})


@pytest.mark.parametrize("page", MAPS, ids=name_of)
def test_modules_and_paths_of_the_map_exist(page: Path) -> None:
    paths = [text for text in code_of(page) if re.fullmatch(r"[a-z_]+(/[\w.-]+)+/?", text)]
    dotted = [text for text in code_of(page) if re.fullmatch(rf"({'|'.join(rooms())})(\.\w+)+", text)]
    assert len(paths) > 5
    assert [name for name in [*paths, *dotted] if not exists(name)] == []


@pytest.mark.parametrize("page", [ROOT / "docs" / "install.md", ROOT / "Dockerfile"], ids=name_of)
def test_a_container_reads_the_hub_s_cache_of_its_host(page: Path) -> None:
    """Without the mount each container downloads the weights again."""
    home = re.search(r"--home-dir (\S+)", (ROOT / "Dockerfile").read_text("utf-8"))
    assert home
    (line,) = re.findall(r"docker run .*--gpus all.*", page.read_text("utf-8"))
    assert f"-v ~/.cache/huggingface:{home[1]}/.cache/huggingface" in line


def test_every_mount_is_on_a_folder_that_all_users_of_the_image_may_write_to() -> None:
    """Docker makes a missing folder, and a new volume on it, as root's."""
    recipe = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    (made,) = re.findall(r"^RUN mkdir -p (.*?) *&&", recipe, flags=re.MULTILINE)
    (open_to_all,) = re.findall(r"chmod 1777 (.*)$", recipe, flags=re.MULTILINE)
    home = re.search(r"^ENV HOME=(\S+) USER=\w+$", recipe, flags=re.MULTILINE)
    assert home
    assert set(open_to_all.split()) >= {home[1], *made.split()}

    (service,) = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text("utf-8"))["services"].values()
    pages = recipe + (ROOT / "docs" / "install.md").read_text("utf-8")
    targets = re.findall(r"-v \S+?:(/[\w./-]+)", pages) + [volume.partition(":")[2] for volume in service["volumes"]]
    assert len(targets) == 5
    assert [target for target in targets if target not in open_to_all.split()] == []


@pytest.mark.parametrize("page", [ROOT / "docs" / "install.md", ROOT / "Dockerfile"], ids=name_of)
def test_a_container_writes_into_folders_of_its_caller(page: Path) -> None:
    text = page.read_text("utf-8")
    runs = list(re.finditer(r"docker run (.*) -v (?:\"\$PWD/)?(\S+?):", text))
    assert len(runs) == 2
    for run in runs:
        assert '--user "$(id -u):$(id -g)"' in run[1]
        made = " ".join(re.findall(r"mkdir -p (.*)", text[: run.start()]))
        assert run[2] in made.split()


def test_the_image_is_built_from_all_that_the_wheel_holds() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    sources = {Path(path).parts[0] for path in [*targets["packages"], *targets["force-include"]]}
    kept = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert kept[0] == "*"
    assert {f"!{source}" for source in sources} <= set(kept)


@pytest.mark.parametrize("page", [ROOT / "docs" / "security.md", ROOT / "docs" / "reference.md"], ids=name_of)
def test_named_tests_are_files(page: Path) -> None:
    """A folder would name no test."""
    named = [text for text in code_of(page) if re.fullmatch(r"(tests|qa)/[\w/.-]+", text)]
    assert len(named) > 5
    assert [text for text in named if not (ROOT / text).is_file()] == []


def test_every_room_is_on_the_map() -> None:
    words = " ".join(code_of(MAPS[0]))
    assert [room for room in rooms() if not re.search(rf"\b{room}\b", words)] == []


def test_the_layers_of_the_map_are_those_that_are_enforced() -> None:
    enforced = re.search(r"^LAYERS = (\[.*?^\])", (ROOT / "tests/test_layers.py").read_text("utf-8"), re.S | re.M)
    assert enforced
    layers = [set(re.findall(r'"([\w.]+)"', line)) for line in re.findall(r"\{.*?\}", enforced[1], re.S)]
    shown = re.findall(r"^(\d+)  ([a-z_. ]+?)(?:   .*)?$", MAPS[0].read_text("utf-8"), flags=re.MULTILINE)
    assert {int(number): set(names.split()) for number, names in shown} == dict(enumerate(layers))


# --- tables of entries ----------------------------------------------------------------------------------------------


def first_cells(text: str, header: str) -> list[str]:
    """The first code of each row of the table whose first heading is `header`."""
    _, _, rest = text.partition(f"\n| {header} |")
    rows = rest.partition("\n\n")[0].split("\n")[2:]
    return [row.split("`")[1] for row in rows if row]


@pytest.mark.parametrize(
    ("page", "header", "table", "more"),
    [
        ("rewards.md", "`name`", REWARDS, {"path/to/file.py:Name"}),
        ("policies.md", "`model.kind`", POLICIES, set()),
        ("models.md", "Kind", POLICIES, set()),
        ("benchmarks.md", "Command", [f"pacorl benchmark {name} DATA" for name in BENCHMARKS], set()),
        ("label.md", "`--method`", SELECTIONS, set()),
        ("label.md", "`--formats`", FORMATS, set()),
        ("label.md", "`--kind`", SOURCES, set()),
    ],
    ids=["rewards", "generators", "models", "benchmarks", "selections", "formats", "imports"],
)
def test_a_page_lists_every_entry(page: str, header: str, table: Iterable[str], more: set[str]) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert set(first_cells(text, header)) - more == set(table)


def test_the_page_of_training_names_every_reward() -> None:
    text = (ROOT / "docs" / "train.md").read_text("utf-8")
    rows = text.partition("\n| To reward | `name` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([\w/.:]+)`", rows)) == {*REWARDS, "path/to/file.py:Name"}


def test_the_page_of_models_has_each_licence_and_limit_of_the_code() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    for kind, spec in POLICIES.items():
        identifier, name = spec.licence
        gated = ", gated" if spec.gated else ""
        references = spec.policy.max_references or "–"
        row = rf"^\| `{kind}` \| `{spec.published}` \| [^|]+ \| {references}[^|]* \| `{name or identifier}`{gated} \|$"
        assert re.search(row, text, flags=re.MULTILINE), f"{kind}: {spec.published}, {name or identifier}{gated}"


def test_the_page_of_hardware_has_every_recipe() -> None:
    """`tests/grpo/test_recipes.py` plans each row anew, which takes minutes."""
    memory, _, seconds = (ROOT / "docs" / "hardware.md").read_text("utf-8").partition("## Seconds per epoch")
    row = re.compile(r"^\| \[(\w+)\.yaml\]", re.MULTILINE)
    assert row.findall(memory) == list(hardware.RECIPES)
    assert list(dict.fromkeys(row.findall(seconds))) == list(hardware.RECIPES), "a recipe has a row for each card"


def test_a_row_that_is_missing_is_seen() -> None:
    assert first_cells("Text.\n\n| `name` | Score |\n|---|---|\n| `a` | x |\n| `b` | `c` |\n\nMore.", "`name`") == [
        "a",
        "b",
    ]


def test_the_page_of_the_engine_explains_every_entry() -> None:
    text = (ROOT / "docs" / "engine.md").read_text("utf-8")
    objectives = text.partition("## Objectives")[2].partition("\n## ")[0]
    assert re.findall(r"^\*\*`(\w+)`\*\*", objectives, flags=re.MULTILINE) == list(OBJECTIVES)
    words = " ".join(code_of(ROOT / "docs" / "engine.md"))
    names = [*AGGREGATES, *SDE_TYPES, *SOLVERS]
    assert [name for name in names if not re.search(rf"\b{name}\b", words)] == []


def test_the_benchmarks_are_counted() -> None:
    numbers = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert re.findall(r"There are (\w+) benchmarks", text) == [numbers[len(BENCHMARKS)]]


def test_the_map_lists_every_command() -> None:
    rows = first_cells(MAPS[0].read_text("utf-8").replace(r"\|", "/"), "Command")
    commands = [row.split()[1] for row in rows if row.startswith("pacorl ")]
    names = command_tree().list_commands(click.Context(command_tree()))  # type: ignore[attr-defined]
    assert set(commands) == set(names)
    (benchmarks,) = (row for row in rows if row.startswith("pacorl benchmark "))
    assert benchmarks.split()[2].split("/") == list(BENCHMARKS)


def test_a_module_that_is_not_there_is_seen() -> None:
    assert exists("types.Prompt")
    assert exists("core/grid")
    assert not exists("core/lattice")
    assert not exists("types.Promt")


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


def all_options() -> set[str]:
    """Every option of every command, and of the scripts beside the package."""
    pending, names = (
        [command_tree(), typer.main.get_command(tiny.app), typer.main.get_command(mcp.app)],
        set(OTHERS_OPTIONS),
    )
    while pending:
        command: Any = pending.pop()
        names |= {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
        if hasattr(command, "get_command"):
            context = click.Context(command)
            pending += [command.get_command(context, name) for name in command.list_commands(context)]
    files = [*(ROOT / "benchmarks").rglob("*.py"), ROOT / "qa/attack/__main__.py"]
    scripts = [path.read_text("utf-8") for path in files]
    return names | {name for text in scripts for name in re.findall(r'"(--[\w-]+)"', text)}


def test_the_options_that_pages_name_exist() -> None:
    named = [(name_of(page), option) for page in PAGES for text in code_of(page) for option in OPTION.findall(text)]
    options = all_options()
    assert len(named) > 100
    assert [(page, option) for page, option in named if option not in options] == []


@pytest.mark.parametrize(
    "line",
    ["trainpolicy x.yaml", "train-policy x.yaml --dryrun", "train-policy x.yaml sampling.stepz=3", "dataset paint SET"],
)
def test_a_command_that_does_not_parse_is_seen(line: str) -> None:
    assert len(list(faults_of(shlex.split(line)))) == 1


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
    if isinstance(hint, OneOf):
        yield from (hint.table[name].options for name in hint.table)
    else:
        yield hint
        for part in get_args(hint):
            yield from leaves(part)


def config_keys(page: Path) -> Iterator[str]:
    """Dotted keys that a page's sentences name, such as `judge.backend`; files and modules aside."""
    sections = {name for run in RUNS.values() for name in run.model_fields}
    for text in code_of(page):
        match = re.match(r"([a-z_]+)((?:\.[a-z_]+)+)(?=$|: |=)", text)
        if match and match[1] in sections and not exists(match[0]) and Path(match[0]).suffix not in FILES:
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


def test_a_key_that_is_not_there_is_seen() -> None:
    assert has_key(PolicyConfig, "evaluation.rewards.name")
    assert has_key(JudgeConfig, "trainer.fsdp")
    assert not has_key(PolicyConfig, "evaluation.reward")
    assert len(yaml_blocks()) >= 3


def test_the_signs_of_the_page_are_those_of_the_monitor() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+/)(\w+)` ", page, flags=re.MULTILINE) == [(MONITOR, sign) for sign in SIGN_MEANINGS]


def test_the_citation_is_of_this_version_and_of_one_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    paper, readme = citation["preferred-citation"], (ROOT / "README.md").read_text("utf-8")
    assert citation["version"] == pacorl.__version__
    assert [person["family-names"] for person in paper["authors"]] == re.findall(
        r"(\w+), \w+(?= and|\})",
        re.search(r"author  = (.*)", readme)[1],  # type: ignore[index]
    )
    assert paper["title"].partition(":")[2] in readme
    assert paper["url"] in readme


# --- the site and its language ----------------------------------------------------------------------------------------

USER_PAGES, USER_WORDS, README_WORDS = 16, 25_000, 900
NAVIGATION = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
BARE_POINT = re.compile(r"(?<![\w./\\])\.\d")
LINK_TARGET = re.compile(r"\]\([^)]*\)")


def listed_pages(navigation: str) -> list[str]:
    return re.findall(r"([\w./-]+\.md)$", navigation, flags=re.MULTILINE)


def test_every_page_is_in_the_sites_navigation() -> None:
    """`make docs` is strict about it too; here it is part of `make check`."""
    listed = set(listed_pages(NAVIGATION))
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} <= listed


def test_the_pages_for_users_are_few() -> None:
    users, heading, _ = NAVIGATION.partition("- For developers:")
    assert heading
    pages = [ROOT / "docs" / name for name in listed_pages(users) if name != "index.md"]
    assert len(pages) <= USER_PAGES
    assert sum(len(read_by_people(page).split()) for page in pages) <= USER_WORDS
    assert len(read_by_people(ROOT / "README.md").split()) <= README_WORDS


def read_by_people(page: Path) -> str:
    """A page without its comments."""
    return re.sub(r"<!--.*?-->", "", page.read_text("utf-8"))


def test_no_two_pages_begin_alike() -> None:
    """Search results and previews show the first words."""
    openings: dict[str, list[str]] = {}
    for page in PAGES:
        paragraphs = [text for text in FENCE.sub("", page.read_text("utf-8")).split("\n\n") if text.strip()]
        prose = next(text for text in paragraphs if not text.lstrip().startswith(("#", "|", "`")))
        openings.setdefault(" ".join(prose.split()[:3]), []).append(name_of(page))
    assert [pages for pages in openings.values() if len(pages) > 1] == []


def bare_points(text: str) -> list[str]:
    """Each number without a digit before its point, code and links aside."""
    prose = LINK_TARGET.sub("]", re.sub(r"`[^`\n]+`", "", FENCE.sub("", text)))
    return [prose[match.start() - 10 : match.end() + 10] for match in BARE_POINT.finditer(prose)]


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "configs").rglob("*.yaml"))], ids=name_of)
def test_numbers_have_a_digit_before_the_point(page: Path) -> None:
    text = read_by_people(page)
    if page.suffix == ".yaml":
        text = "\n".join(re.findall(r"#.*$", text, flags=re.MULTILINE))
    assert bare_points(text) == []


def test_a_number_without_a_digit_is_seen() -> None:
    assert len(bare_points("It rose from .68 to +.85 [.1, .2].")) == 4
    assert bare_points("It rose from 0.68 in `.5` and [a](../b/.9) by 2.5.") == []


# --- links ----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        file, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(target)
    assert dead == []


def test_the_page_on_the_judge_shows_the_workflow() -> None:
    page = (ROOT / "docs" / "judge.md").read_text("utf-8")
    workflow = (ROOT / "examples" / "check-panels.yml").read_text("utf-8")
    assert f'```yaml title=".github/workflows/check-panels.yml"\n{workflow}```' in page
    install, command = (step["run"] for step in yaml.safe_load(workflow)["jobs"]["check"]["steps"] if "run" in step)
    assert list(faults_of(shlex.split(command)[1:])) == []
    # A pull request must not download CUDA, nor other versions than those that are tested.
    assert "-c vendor/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu" in install
    assert f"vendor/pacorl-{pacorl.__version__}-py3-none-any.whl" in install


def test_the_compose_file_starts_a_confined_judge_by_a_command_that_exists() -> None:
    (service,) = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text("utf-8"))["services"].values()
    assert list(faults_of(service["command"])) == []
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert "judge" in service["environment"]["PACORL_HOSTS"].split(",")


@pytest.mark.parametrize("example", ["reinforce.py", "contrast.py"])
def test_the_page_on_extending_shows_the_example_files(example: str) -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    assert f"```python\n{(ROOT / 'examples' / example).read_text('utf-8')}```" in page
