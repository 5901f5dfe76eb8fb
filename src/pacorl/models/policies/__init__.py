"""Generators behind one seam, by the name of their kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.config.table import Table
from pacorl.io.documents import read_object
from pacorl.types import TINY

if TYPE_CHECKING:
    import torch

    from pacorl.models.policies.policy import Policy, PolicyOptions
    from pacorl.models.policies.spec import PolicySpec
    from pacorl.types import Prompt

POLICIES: Table[PolicySpec] = Table(
    "kind of generator",
    {
        "flux": "pacorl.models.policies.flux:FLUX",
        "kontext": "pacorl.models.policies.kontext:KONTEXT",
        "qwen_edit": "pacorl.models.policies.qwen_image:QWEN_EDIT",
        "qwen_edit_plus": "pacorl.models.policies.qwen_image:QWEN_EDIT_PLUS",
        "qwen_image": "pacorl.models.policies.qwen_image:QWEN_IMAGE",
        "sd3": "pacorl.models.policies.sd3:SD3",
        "klein": "pacorl.models.policies.klein:KLEIN",
    },
    group="pacorl.policies",
    key="kind",
)
"""`model.kind` → its spec. The first is the default."""
DEFAULT_KIND = next(iter(POLICIES))


def build_policy(
    options: PolicyOptions, *, device: str | torch.device, record_sizes: bool = False, staged: bool = False
) -> Policy:
    """The configured generator; see `PolicySpec.load`."""
    return POLICIES[options.kind].load(options, device=device, record_sizes=record_sizes, staged=staged)


def default_options() -> PolicyOptions:
    """The options of a config that says nothing of its generator."""
    return POLICIES[DEFAULT_KIND].options.model_validate({})


def tiny_spec(*, edits: bool) -> PolicySpec:
    """The kind whose committed checkpoint `tiny` names: one makes sets, one edits."""
    return next(spec for spec in POLICIES.values() if spec.tiny and spec.edits == edits)


def check_sources(spec: PolicySpec, prompt: Prompt, model: str) -> None:
    """Check that a prompt has as many sources as a kind takes; `model` is what the user called the generator.

    Raises:
        ValueError: It is an edit and the kind makes sets, or the reverse, or it has a source too many, or references.
    """
    if prompt.references:
        raise ValueError(
            f"{model} takes no reference images of characters, and {len(prompt.references)} are given; leave them out, "
            "the characters' descriptions in the prompt act alone"
        )
    if not prompt.sources and not spec.sets:
        raise ValueError(f"{model} edits images, and there is none; give one with --image")
    if prompt.sources and not spec.edits:
        editor = next(other for other in POLICIES.values() if other.edits).published
        raise ValueError(f"{model} generates sets and edits no images; name an editor with --model, e.g. {editor}")
    if (count := len(prompt.sources)) > spec.policy.references:
        raise ValueError(f"{count} images are given, and {model} edits at most {spec.policy.references} at once")


def kind_of(checkpoint: str, *, edits: bool = False) -> str:
    """The kind of a checkpoint (a diffusers folder, a hub name or "tiny"), by the folder's index or by the name.

    `edits` says which of the tiny checkpoints is meant.
    """
    if checkpoint == TINY:
        return tiny_spec(edits=edits).kind
    index = Path(checkpoint) / "model_index.json"
    if index.is_file():
        pipeline = str(read_object(index).get("_class_name", ""))
        kinds = {spec.pipeline: kind for kind, spec in POLICIES.items()}
        if pipeline not in kinds:
            raise ValueError(f"{checkpoint} is a {pipeline or 'pipeline without a name'}; there are {', '.join(kinds)}")
        return kinds[pipeline]
    matches = {kind: re.search(spec.hub_name, checkpoint.lower()) for kind, spec in POLICIES.items()}
    # The longest match decides: FLUX.1-Kontext is a flux by its first letters only. Of equals, also of none, the first.
    lengths = {kind: len(match[0]) if match else 0 for kind, match in matches.items()}
    return max(lengths, key=lambda kind: lengths[kind])
