"""Versions of installed packages, and how to install more."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


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
    """Return the pip command that adds the packages of an extra to an installed pacorl."""
    return f"pip install 'pacorl[{extra}]'"
