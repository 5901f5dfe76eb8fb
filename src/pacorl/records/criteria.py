"""Criteria of a set: dimension → name → text."""

from __future__ import annotations

PublishedCriteria = dict[str, dict[str, str | None] | None]
"""As in published files, in which a few names have no text."""


def written(criteria: PublishedCriteria | None) -> dict[str, dict[str, str]]:
    """Keep the criteria that have a text, and the dimensions that have such criteria."""
    kept = {}
    for dimension, texts in (criteria or {}).items():
        with_text = {name: text for name, text in (texts or {}).items() if text}
        if with_text:
            kept[dimension] = with_text
    return kept
