"""`python -m tools.tiny …`, from the repository's root."""

from __future__ import annotations

from tools.tiny.cli import app

app()
