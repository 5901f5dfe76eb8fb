"""Models without weights: any diffusers or transformers model on the meta device, from its config.json."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pacorl.twins import model_of

if TYPE_CHECKING:
    from pacorl.policies.policy import Parts, PolicySpec

META = torch.device("meta")
WITHOUT_WEIGHTS = frozenset({"scheduler", "processor"})
"""Components of a pipeline that have a config and no weights."""
CLASS_KEYS = ("_class_name", "architectures", "model_type")
"""What says in a config.json of which class the component is."""


def model_on_meta(config: Mapping[str, Any], *, dtype: torch.dtype) -> nn.Module:
    """A frozen model from its config.json, as `twins.model_of` takes it, with parameters of one type."""
    with META:
        model: nn.Module = model_of(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def pipeline_on_meta(spec: PolicySpec, configs: Parts, *, dtype: str) -> Any:
    """A spec's pipeline from the configs of its components. It has no tokenizers, so that it encodes no text."""
    import diffusers

    components: dict[str, Any] = {}
    for name in configs.keys() - WITHOUT_WEIGHTS:
        # The published class: a checkpoint's config.json may leave its own out.
        classes = {key: spec.parts[name][key] for key in CLASS_KEYS if key in spec.parts[name]}
        components[name] = model_on_meta({**configs[name], **classes}, dtype=getattr(torch, dtype))
    # The published scheduler too: checkpoints keep theirs in scheduler_config.json, which is not among `configs`.
    scheduler = dict(spec.parts["scheduler"])
    components["scheduler"] = getattr(diffusers, scheduler["_class_name"]).from_config(scheduler)
    components |= spec.policy.components_on_meta(configs)
    pipeline = getattr(diffusers, spec.pipeline)
    absent = [name for name in inspect.signature(pipeline).parameters if name not in components]
    return pipeline(**components, **dict.fromkeys(absent))
