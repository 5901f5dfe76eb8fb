"""Models without weights: any diffusers or transformers model on the meta device, from its config.json."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from pacorl.policies.policy import Parts, PolicySpec

META = torch.device("meta")
WITHOUT_WEIGHTS = frozenset({"scheduler", "processor"})
"""Components of a pipeline that have a config and no weights."""


def model_on_meta(config: Mapping[str, Any], *, dtype: torch.dtype) -> nn.Module:
    """A frozen model from its config.json, which names its class as both libraries save it.

    Args:
        config: With `_class_name` (diffusers), or `model_type` and `architectures` (transformers).
        dtype: Of the parameters.
    """
    with META:
        model = _built(dict(config))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def _built(config: dict[str, Any]) -> nn.Module:
    import diffusers
    import transformers

    model: nn.Module
    if "_class_name" in config:
        model = getattr(diffusers, config["_class_name"]).from_config(config)
        return model
    (architecture,) = config.pop("architectures")
    options = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = getattr(transformers, architecture)(options)
    return model


def pipeline_on_meta(spec: PolicySpec, parts: Parts, *, dtype: str) -> Any:
    """A spec's pipeline from the configs of its components. It has no tokenizers, so that it encodes no text.

    The class of each component is the published one: a checkpoint's config.json may leave it out.
    """
    import diffusers

    components: dict[str, Any] = {
        name: model_on_meta({**config, **_class_of(spec.parts[name])}, dtype=getattr(torch, dtype))
        for name, config in parts.items()
        if name not in WITHOUT_WEIGHTS
    }
    scheduler = dict(spec.parts["scheduler"])
    components["scheduler"] = getattr(diffusers, scheduler["_class_name"]).from_config(scheduler)
    components |= spec.policy.components_on_meta(parts)
    pipeline = getattr(diffusers, spec.pipeline)
    absent = [name for name in inspect.signature(pipeline).parameters if name not in components]
    return pipeline(**components, **dict.fromkeys(absent))


def _class_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("_class_name", "architectures", "model_type") if name in config}
