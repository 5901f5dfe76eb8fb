"""Generators by the name of their kind. To add one: a class behind `policies.policy.Policy` and a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pacorl.policies.flux import FluxPolicy
from pacorl.policies.kontext import KontextPolicy
from pacorl.policies.policy import Policy
from pacorl.policies.qwen_image import QwenEditPolicy

if TYPE_CHECKING:
    import torch


POLICIES: dict[str, Callable[..., Policy]] = {
    "flux": FluxPolicy.from_pretrained,
    "kontext": KontextPolicy.from_pretrained,
    "qwen_edit": QwenEditPolicy.from_pretrained,
    "qwen_edit_plus": partial(QwenEditPolicy.from_pretrained, plus=True),
}


def distilled_options(kind: str, *, guidance: float | None, max_sequence_length: int | None) -> dict[str, Any]:
    """What only FLUX's kinds are told, as far as it is given; None leaves a value to the policy.

    Raises ValueError for an unknown kind, and where Qwen-Image is given either.
    """
    if kind not in POLICIES:
        raise ValueError(f"unknown kind of generator {kind!r}; there are {', '.join(POLICIES)}")
    options = {"guidance": guidance, "max_sequence_length": max_sequence_length}
    given = {name: value for name, value in options.items() if value is not None}
    if given and kind.startswith("qwen"):
        raise ValueError(
            f"a generator of kind {kind} has no distilled guidance and reads texts of any length; "
            f"leave {' and '.join(given)} out, and guide it by true_cfg_scale (--true-cfg)"
        )
    return given


def build_policy(config: Any, *, device: str | torch.device, record_sizes: bool = False) -> Policy:
    """The configured generator. Raises ValueError where the checkpoint is of another kind."""
    options = policy_options(config, record_sizes=record_sizes)
    return POLICIES[config.kind](config.checkpoint, dtype=config.dtype, device=device, **options)


def policy_options(config: Any, *, record_sizes: bool = False) -> dict[str, Any]:
    """What a policy is built with besides weights; Qwen-Image has no distilled guidance and reads any length.

    `record_sizes`: whether sets are painted at their records' own sizes; edits take the shape of their source.
    """
    options: dict[str, Any] = {"true_cfg_scale": config.true_cfg_scale, "negative_prompt": config.negative_prompt}
    if not config.kind.startswith("qwen"):
        options |= {"guidance": config.guidance, "max_sequence_length": config.max_sequence_length}
    if config.kind == "flux":
        options["record_sizes"] = record_sizes
    return options
