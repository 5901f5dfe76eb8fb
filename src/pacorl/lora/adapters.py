"""LoRA adapters: adding them, putting saved ones on, and copies that follow the trained one.

Their files are read and written by `lora.formats`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacorl.lora.formats import HUB_NAME, Lora, peft_options, read_lora
from pacorl.lora.shards import full_tensor, materialize, shard_like


def add_lora(transformer: nn.Module, *, rank: int, alpha: int, targets: Sequence[str]) -> None:
    """Adds one trainable adapter, in fp32 or better, to the modules whose names end in `targets`.

    Raises ValueError where a target matches no module: an adapter that trains nothing must not go unnoticed.
    """
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"adapter target {target!r} matches no linear layer of {type(transformer).__name__}")
    _inject(transformer, r=rank, lora_alpha=alpha, target_modules=list(targets))


def _inject(transformer: nn.Module, **options: Any) -> None:
    """Adds one adapter in fp32 or better, the only thing that learns; `options` are those of PEFT's `LoraConfig`."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(lora_dropout=0.0, init_lora_weights="gaussian", **options)
    inject_adapter_in_model(config, transformer)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def adapter_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's own weights by plain names, `blocks.0.attn.to_q.lora_A.weight`; shards where they are sharded."""
    materialize(transformer)
    return {
        name.replace(".default.", "."): parameter.detach()
        for name, parameter in transformer.named_parameters()
        if "lora_" in name
    }


def set_adapter_state(transformer: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts weights into the adapter in place.

    Raises ValueError, naming them, where names or shapes do not fit.
    """
    own = adapter_state(transformer)
    strangers, missing = sorted(set(state) - set(own)), sorted(set(own) - set(state))
    if strangers or missing:
        raise ValueError(
            f"the adapter does not fit this model: {len(strangers)} unknown weights (e.g. {strangers[:1]}), "
            f"{len(missing)} absent ones (e.g. {missing[:1]})"
        )
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"adapter weight {name} is {tuple(value.shape)} and the model's is {tuple(own[name].shape)}; "
                "set adapter.rank and targets as it was trained, or start from another"
            )
        own[name].copy_(shard_like(own[name], value))


def full_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's weights unsharded. Every process must call it."""
    return {name: full_tensor(value) for name, value in state.items()}


def start_from(transformer: nn.Module, source: str | Path, *, rank: int, alpha: int, base: str) -> None:
    """Puts a saved adapter's weights into the one that is to be trained on.

    Args:
        transformer: The model, with an adapter that `add_lora` made.
        source: An adapter in any form, as `adapter_file` takes it.
        rank: Of the adapter that is trained.
        alpha: Likewise.
        base: The model that is trained, by name or folder.

    Raises:
        ValueError: It is of another base, rank, α or other modules; the message says which settings would fit.
    """
    lora = read_lora(source)
    if HUB_NAME.fullmatch(lora.base) and HUB_NAME.fullmatch(base) and lora.base != base:
        # Two models may have equal shapes (FLUX.1-dev and Kontext), so names are compared if both are a hub's.
        raise ValueError(f"the adapter in {source} was trained on {lora.base}, and model.checkpoint is {base}")
    _check_shape(lora, source, rank=rank, alpha=alpha)
    own = adapter_state(transformer)
    absent, strangers = set(own) - set(lora.state), set(lora.state) - set(own)
    if absent and not strangers:
        targets = ", ".join(sorted({_suffix(name) for name in lora.state}))
        raise ValueError(
            f"adapter.start {source} has no weights for {len(absent)} of the {len(own)} that would be trained "
            f"(e.g. {min(absent)}); set adapter.targets=[{targets}]"
        )
    set_adapter_state(transformer, lora.state)


def _check_shape(lora: Lora, source: object, *, rank: int, alpha: int) -> None:
    """Raises ValueError if an adapter is not of this one rank and α."""
    for key, values in (("ranks", lora.ranks), ("alphas", lora.alphas)):
        if len(several := sorted(set(values.values()))) > 1:
            raise ValueError(
                f"adapter.start {source} has modules of {key} {', '.join(f'{value:g}' for value in several)}, and "
                "training takes one for all; merge it into model.checkpoint"
            )
    own = {"rank": next(iter(lora.ranks.values())), "alpha": next(iter(lora.alphas.values()))}
    wrong = [key for key, value in (("rank", rank), ("alpha", alpha)) if own[key] != value]
    if wrong:
        fix = " ".join(f"adapter.{key}={own[key]:g}" for key in wrong)
        raise ValueError(f"adapter.start {source} has rank {own['rank']:g} and alpha {own['alpha']:g}; set {fix}")


def _suffix(name: str) -> str:
    """A target that matches the module of an adapter's weight: what follows the block's number."""
    module = name.rpartition(".lora_")[0]
    return re.sub(r"^.*?_blocks\.\d+\.", "", module)


def load_lora(transformer: nn.Module, source: str | Path) -> None:
    """Puts a saved adapter on a model; ranks, α and modules are the adapter's own.

    Args:
        transformer: The model, without an adapter.
        source: An adapter in any form, as `adapter_file` takes it.

    Raises:
        ValueError: There is none, it does not fit, or it is of a kind that plain LoRA is not (DoRA, rank-stabilised).
    """
    lora = read_lora(source)
    layers = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    strangers = [name for name in sorted(lora.alphas) if name not in layers]
    if strangers:
        raise ValueError(f"{source} does not fit this model: it has no layer {strangers[0]} ({len(strangers)} unknown)")
    _inject(transformer, **peft_options(lora))
    set_adapter_state(transformer, lora.state)


@contextmanager
def adapter_off(transformer: nn.Module) -> Iterator[None]:
    """Within the block the model is its base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    learning = [(parameter, parameter.requires_grad) for parameter in transformer.parameters()]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        # PEFT lets everything learn again, also modules that were frozen since no output depends on them.
        for parameter, was in learning:
            parameter.requires_grad_(was)


class AdapterCopy:
    """Weights of an adapter beside the trained ones, to be swapped in for a while."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.state = {name: value.clone() for name, value in adapter_state(transformer).items()}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model carries the copy."""
        trained = {name: value.clone() for name, value in adapter_state(self.transformer).items()}
        set_adapter_state(self.transformer, self.state)
        try:
            yield
        finally:
            set_adapter_state(self.transformer, trained)

    def load(self, state: Mapping[str, Any]) -> None:
        self.state = {name: shard_like(self.state[name], value).clone() for name, value in state.items()}

    @torch.no_grad()
    def _approach(self, share: float) -> None:
        """copy ← (1 − share)·copy + share·trained."""
        for name, value in adapter_state(self.transformer).items():
            self.state[name].lerp_(value, share)


class MovingAverage(AdapterCopy):
    """The exponential moving average of an adapter, updated once per `interval` optimizer steps.

    The decay warms up: update number s (from 0) takes min((1 + s)/(10 + s), decay), so that a young average is the
    trained adapter of the last few updates and not the start. s follows from the optimizer step, so a resumed run
    needs nothing but the average itself.
    """

    def __init__(self, transformer: nn.Module, *, decay: float, interval: int) -> None:
        super().__init__(transformer)
        self.decay, self.interval = decay, interval

    def follow(self, optimizer_step: int) -> None:
        """Call after optimizer step number `optimizer_step` (from 1)."""
        if optimizer_step % self.interval == 0:
            self._approach(1 - self.decay_at(optimizer_step // self.interval - 1))

    def decay_at(self, update: int) -> float:
        """The average's own weight in update number `update` (from 0)."""
        return min((1 + update) / (10 + update), self.decay)


class OldPolicy(AdapterCopy):
    """DiffusionNFT's sampling policy: old ← d·old + (1−d)·trained with d = min(0.001·step, 0.5) (arXiv 2509.16117).

    Early on it is the trained policy, later it lags behind, so that what is contrasted is not what just moved.
    """

    def follow(self, optimizer_step: int) -> None:
        """Call after each epoch, with the optimizer steps taken so far."""
        self._approach(1 - min(0.001 * optimizer_step, 0.5))
