"""Pipelines as diffusers makes them, to compare policies with."""

from __future__ import annotations

from typing import Any


def diffusers_own(pipeline: Any) -> Any:
    """The pipeline with a new transformer of the same weights, on which a policy has set nothing."""
    source = pipeline.transformer
    transformer = type(source).from_config(source.config).eval()
    transformer.load_state_dict(source.state_dict())
    return type(pipeline)(**{**pipeline.components, "transformer": transformer})
