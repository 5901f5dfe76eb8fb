"""Generators by the name of their kind. To add one: a class behind `models.policy.Policy` and a line here."""

from __future__ import annotations

from collections.abc import Callable

from pacorl.models.flux import FluxPolicy
from pacorl.models.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {"flux": FluxPolicy.from_pretrained}
