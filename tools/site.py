"""Hook of mkdocs that adds files from outside `docs/` to the site (`make docs`, mkdocs.yml).

README.md is its first page. `cli.md` is generated from the command line. Linked files, such as recipes, become part of
the site. A public name of `api.md` without a docstring is a warning, and warnings fail a strict build.
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
    """Add the files of ADDED, and the page of commands with their arguments and options."""
    from typer.cli import get_docs_for_click

    # Files, and all files of folders.
    for name in ADDED:
        paths = [ROOT / name]
        if not paths[0].is_file():
            paths = sorted(paths[0].rglob("*.*"))
        for path in paths:
            if "__pycache__" not in path.parts:
                source = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, site_path(source), abs_src_path=str(path)))

    # By typer's own writer, so that the page has the words of --help.
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="pacorl")
    commands = get_docs_for_click(obj=command, ctx=context, name="pacorl", title="Commands")
    files.append(File.generated(config, "cli.md", content=commands))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links of the repository to links of the site."""
    uri = page.file.src_uri
    if uri == "api.md":
        package = griffe.load("pacorl", search_paths=[ROOT / "src"], docstring_parser="google")
        for name in re.findall(r"^::: (\S+)", markdown, re.MULTILINE):
            for path in undocumented(package[name.removeprefix("pacorl.")]):
                LOG.warning("api.md: %s has no docstring", path)
    # Links are relative to the file in the repository, and become relative to the page.
    source = uri if uri in ADDED else f"docs/{uri}"
    if uri == "index.md":
        source = START

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


def undocumented(item: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield the public modules, classes, fields and functions of an item without a docstring, itself included.

    Loggers need none, nor does an attribute that keeps the constructor's argument of its name: `Args` explains it.
    """
    documented: Any = item.final_target if item.is_alias else item
    if not documented.has_docstring:
        yield documented.path
    if not (documented.is_module or documented.is_class):
        return

    # Fields that the constructor's docstring explains need none of their own.
    constructor = documented.members.get("__init__")
    explains = constructor and constructor.has_docstring
    arguments = [argument.name for argument in constructor.parameters] if explains else []
    for member in documented.members.values():
        explained = member.name == "logger" or member.name in arguments
        if member.is_public and not (member.is_imported or member.is_special or explained):
            yield from undocumented(member)


class FencedExamples(griffe.Extension):  # type: ignore[misc]
    """Format the code below `Example:` as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the example of one docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in example[1].rstrip().splitlines()]
    return "\n".join(["**Example**", "", "```python", *lines, "```", ""])
