"""Hook of mkdocs (`make docs`): adds to the site what stands outside `docs/`, and the references made of the code.

README.md is its first page. `cli.md`, `config.md` and `api.md` are the references of commands, config keys and public
names. Linked files, such as recipes, become part of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import pacorl
from pacorl.cli import app
from pacorl.config.reference import RUNS, keys_of

ROOT = Path(__file__).parents[1]
START = "README.md"
ADDED = (
    START,
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "configs",
    "examples",
    "integrations",
)
MODULES = (
    "generate.sets",
    "generate.repair",
    "records.compose",
    "core.grid",
    "gate.scores",
    "judge.judge",
    "types",
    "core.objectives",
    "core.grid",
    "rewards.reward",
    "models.policies.policy",
    "testing",
)
"""Modules of the API's page, beside the package's own names."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.MULTILINE)


CONFIG_INTRODUCTION = """# Config keys

Every key that a run's YAML may have, with its choices and default. `pacorl config KEY` prints the same in a terminal. A
YAML needs only what differs from the defaults, which are the paper's settings for FLUX.1-dev. Any key can follow a
command: `pacorl train-policy CONFIG sampling.steps=8`. Another choice in a section brings keys of its own:
`objective.name=awm` leaves out the file's other keys of `objective`, but no key on the command line.
"""


def config_page() -> str:
    """All config keys in Markdown, a table for each run."""
    lines = [CONFIG_INTRODUCTION]
    for run, model in RUNS.items():
        lines += [f"## `pacorl {run}`", "", "| Key | Meaning |", "|---|---|"]
        for text in keys_of(model).values():
            key, _, meaning = text.replace("|", "\\|").partition("\n")
            lines.append(f"| `{key}` | {' '.join(meaning.split())} |")
        lines.append("")
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of ADDED and the three references."""
    from typer.cli import get_docs_for_click

    for name in ADDED:
        path = ROOT / name
        for one in [path] if path.is_file() else sorted(path.rglob("*.*")):
            if "__pycache__" not in one.parts:
                source = one.relative_to(ROOT).as_posix()
                files.append(File.generated(config, site_path(source), abs_src_path=str(one)))

    # By typer's own writer, so that the page has the words of --help.
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="pacorl")
    commands = get_docs_for_click(obj=command, ctx=context, name="pacorl", title="Commands")
    api = "# Python API\n\n[python.md](python.md) shows these names at work.\n"
    for heading, names in {"The package": pacorl.__all__, "Modules": MODULES}.items():
        api += f"\n## {heading}\n\n" + "".join(f"::: pacorl.{name}\n\n" for name in names)
    for page, content in {"cli.md": commands, "config.md": config_page(), "api.md": api}.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links of the repository to links of the site."""
    # Links are relative to the file in the repository, and become relative to the page.
    uri = page.file.src_uri
    source = START if uri == "index.md" else uri if uri in ADDED else f"docs/{uri}"

    def moved(link: re.Match[str]) -> str:
        target = link[2]
        if not re.match(r"[a-z]+:", target):
            there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
            target = posixpath.relpath(there, posixpath.dirname(uri) or ".")
        return f"{link[1]}{target}{link[3] or ''})"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert empty header cells of tables to plain cells, for screen readers."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def site_path(source: str) -> str:
    """Map `docs/judge.md` to `judge.md` and `README.md` to `index.md`; other files keep their path."""
    return "index.md" if source == START else source.removeprefix("docs/")


class FencedExamples(griffe.Extension):
    """Format the code below `Example:` as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the example of one docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in example[1].rstrip().splitlines()]
    return "\n".join(["**Example**", "", "```python", *lines, "```", ""])
