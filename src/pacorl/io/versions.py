"""How to install more packages."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """Return the pip command that adds the packages of an extra to an installed pacorl."""
    return f"pip install 'pacorl[{extra}]'"
