"""Versions of installed packages, and how to install more."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, version
from urllib.parse import unquote, urlsplit

from pacorl.io.documents import parse_json


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of packages by name."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:  # run from a source tree, or of an extra
            installed[package] = "not installed"
    return installed


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra of pacorl, from the folder or file that pacorl was installed from."""
    try:
        # What pip notes of an installation that is not from an index (PEP 610).
        noted = distribution("pacorl").read_text("direct_url.json")
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]', in the folder of pacorl's source"
    origin = parse_json(noted, name="direct_url.json") if noted else {}
    source = urlsplit(origin.get("url", ""))
    if source.scheme != "file":
        return f"pip install 'pacorl[{extra}]'"

    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{unquote(source.path)}[{extra}]'"
