"""What the documentation site takes from outside `docs/`: a hook of mkdocs (`make docs`, mkdocs.yml).

README.md is its first page. `cli.md` is made of the command line. Files that pages link to, such as recipes, become
part of the site. A public name of `api.md` without a docstring is a warning, and warnings fail a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pacorl.cli import app

LOG = logging.getLogger("mkdocs.plugins.pacorl")
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
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies beside `docs/`, and the page of commands."""
    for name in ADDED:
        for path in [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*.*")):
            if "__pycache__" not in path.parts:
                source = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, site_path(source), abs_src_path=str(path)))
    files.append(File.generated(config, "cli.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    own = page.file.src_uri
    if own == "api.md":
        for name in undocumented(re.findall(r"^::: (\S+)", markdown, re.MULTILINE)):
            LOG.warning("api.md: %s has no docstring", name)
    source = repository_path(own)

    def moved(link: re.Match[str]) -> str:
        target = link[2]
        if not re.match(r"[a-z]+:", target):
            there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
            target = posixpath.relpath(there, posixpath.dirname(own) or ".")
        return f"{link[1]}{target}{link[3] or ''})"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes a cell of a table's head that says nothing a plain cell: it heads no column."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def site_path(source: str) -> str:
    """`docs/judge.md` → `judge.md`, `README.md` → `index.md`; other files keep their path."""
    return "index.md" if source == START else source.removeprefix("docs/")


def repository_path(page: str) -> str:
    """The way back of `site_path`."""
    return START if page == "index.md" else page if page in ADDED else f"docs/{page}"


def commands_page() -> str:
    """Every command with its arguments and options, by typer's own writer."""
    from typer.cli import get_docs_for_click

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="pacorl")
    return get_docs_for_click(obj=command, ctx=context, name="pacorl", title="Commands")


def undocumented(names: list[str]) -> Iterator[str]:
    """The public modules, classes, fields and functions below those given without a docstring, loggers aside."""
    package = griffe.load("pacorl", search_paths=[ROOT / "src"], docstring_parser="google")
    for name in names:
        yield from _undocumented(package[name.removeprefix("pacorl.")])


def _undocumented(item: griffe.Object | griffe.Alias) -> Iterator[str]:
    own: Any = item.final_target if item.is_alias else item
    if not own.has_docstring:
        yield own.path
    if own.is_module or own.is_class:
        for member in own.members.values():
            if member.is_public and not (member.is_imported or member.is_special or member.name == "logger"):
                yield from _undocumented(member)


class FencedExamples(griffe.Extension):  # type: ignore[misc]
    """Shows the code below `Example:` as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fences the example of one docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in example[1].rstrip().splitlines()]
    return "\n".join(["**Example**", "", "```python", *lines, "```", ""])
