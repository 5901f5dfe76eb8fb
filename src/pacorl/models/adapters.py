"""LoRA adapters on a model: adding, loading, and moving copies of the trained adapter.

`models.lora` reads and writes their files; `models.adapted_linear` has an adapted layer's forward.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pacorl.io.documents import blamed_on
from pacorl.io.hub import HUB_NAME
from pacorl.models.lora import ADAPTER, Lora, peft_options, read_lora

# FSDP2's modules and tensors are recognised by their methods, without importing their classes, which takes a second.


def materialize(module: nn.Module) -> None:
    """Reshard the weights gathered by a forward."""
    # After a forward without backward FSDP2 leaves the root's weights unsharded, and changes would be lost.
    submodules: Iterable[Any] = module.modules()
    for submodule in submodules:
        if hasattr(submodule, "reshard"):
            submodule.reshard()


def full_tensor(tensor: Any) -> Tensor:
    """Gather a possibly sharded tensor. Every process must call it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def shard_like(parameter: Any, value: Tensor) -> Tensor:
    """Move a full tensor, present on every process, to the device and sharding of `parameter`."""
    value = value.to(parameter.device, parameter.dtype)
    if hasattr(parameter, "full_tensor") and not hasattr(value, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        # No source rank: each process slices its own full tensor, without communication.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def add_lora(transformer: nn.Module, *, rank: int, alpha: int, targets: Sequence[str]) -> None:
    """Add one trainable adapter, in fp32 or better, to the modules whose names end in `targets`.

    Raises:
        ValueError: A target matches no module; otherwise an adapter without effect could go unnoticed.
    """
    names = linear_layers(transformer)
    # PEFT itself complains only if none of the targets matches.
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"adapter target {target!r} matches no linear layer of {type(transformer).__name__}")
    _inject(transformer, r=rank, lora_alpha=alpha, target_modules=list(targets))


def _inject(transformer: nn.Module, **options: Any) -> None:
    """Add one adapter and freeze all other weights; `options` belong to PEFT's `LoraConfig`."""
    from peft import LoraConfig, inject_adapter_in_model

    from pacorl.models.adapted_linear import AdaptedLinear

    config = LoraConfig(lora_dropout=0.0, init_lora_weights="gaussian", **options)
    inject_adapter_in_model(config, transformer)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            # Optimizer steps are below bf16's resolution, so a bf16 adapter would hardly change.
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for layer in lora_layers(transformer):
        layer.__class__ = AdaptedLinear  # with the same weights and names


def lora_layers(transformer: nn.Module) -> list[Any]:
    """Return the layers adapted by PEFT."""
    from peft.tuners.lora import LoraLayer

    return [module for module in transformer.modules() if isinstance(module, LoraLayer)]


def adapter_state(transformer: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's weights by plain names, `blocks.0.attn.to_q.lora_A.weight`; shards of sharded weights."""
    materialize(transformer)
    state = {}
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            state[name.replace(f".{ADAPTER}.", ".")] = parameter.detach()
    return state


def set_adapter_state(transformer: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy weights into the adapter in place. Raises ValueError naming weights that do not fit."""
    current = adapter_state(transformer)
    for kind, names in {"unknown": state.keys() - current.keys(), "absent": current.keys() - state.keys()}.items():
        if names:
            raise ValueError(f"the adapter does not fit this model: {len(names)} {kind} weights (e.g. {min(names)})")
    for name, value in state.items():
        if current[name].shape != value.shape:
            raise ValueError(
                f"adapter weight {name} is {tuple(value.shape)} and the model's is {tuple(current[name].shape)}; it "
                "belongs to a base of another size, or was trained with another rank"
            )
        current[name].copy_(shard_like(current[name], value))


def start_from(transformer: nn.Module, source: str | Path, *, rank: int, alpha: int, base: str) -> None:
    """Initialize the trained adapter from a saved adapter.

    Args:
        transformer: The model, with an adapter of `rank` and `alpha` from `add_lora`.

    Raises:
        ValueError: It has another base, rank, α or other modules; the message names the fitting settings.
    """
    lora = read_lora(source, layers=linear_layers(transformer))
    # Two models may have equal shapes (FLUX.1-dev and Kontext), so hub names are compared.
    if HUB_NAME.fullmatch(lora.base) and HUB_NAME.fullmatch(base) and lora.base != base:
        raise ValueError(f"the adapter in {source} was trained on {lora.base}, and model.checkpoint is {base}")
    copy_start(transformer, lora, rank=rank, alpha=alpha, key="adapter.start", source=source)


def copy_start(model: nn.Module, lora: Lora, *, rank: int, alpha: float, key: str, source: str | Path) -> None:
    """Copy a read adapter into the trained adapter, of `rank` and `alpha`; `key`: the setting that names `source`."""
    # Training has one rank and one α for all modules.
    shapes = {(rank_of, lora.alphas[module]) for module, rank_of in lora.ranks.items()}
    if shapes != {(rank, alpha)}:
        raise ValueError(f"{key} {source} has {lora.facts}; training has rank {rank}, alpha {alpha:g}: set them alike")
    # Targets that would match: the module's name after the block's number.
    targets = ", ".join(sorted({re.sub(r"^.*?(blocks|layers)\.\d+\.", "", module) for module in lora.alphas}))
    with blamed_on(f"{key} {source}, of targets=[{targets}]"):
        set_adapter_state(model, lora.state)


def linear_layers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers, adapted or not."""
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            # An adapted layer is PEFT's, which holds the linear one.
            names.add(name.removesuffix(".base_layer"))
    return names


def load_lora(transformer: nn.Module, strengths: Mapping[str, float]) -> list[str]:
    """Add a saved adapter, or several as one, with their own ranks, α and modules; return a line about each.

    Args:
        strengths: Adapters in any form as for `adapter_file`, with their strengths.

    Raises:
        ValueError: There is no adapter, it does not fit, or it is not plain LoRA.
    """
    layers = linear_layers(transformer)
    # All of them before the first layer is wrapped: a refused adapter leaves the model as it was.
    loras = []
    for name, strength in strengths.items():
        lora = read_lora(name, layers=layers)
        check_fits(lora, layers, name)
        loras.append((lora, strength))

    # A single adapter at full strength keeps its own rank and α, and every bit of its weights.
    lora, strength = loras[0]
    if len(loras) > 1 or strength != 1:
        lora = stacked(loras)
    with blamed_on(adapter_names(strengths)):
        _inject(transformer, **peft_options(lora))
        set_adapter_state(transformer, lora.state)
    lines = []
    for name, (each, strength) in zip(strengths, loras, strict=True):
        lines.append(f"LoRA {name}: {each.facts}" + f", strength {strength:g}" * (strength != 1))
    return lines


def check_fits(lora: Lora, layers: Collection[str], source: str | Path) -> None:
    """Raise ValueError if an adapter has modules that a model has not."""
    unknown = sorted(set(lora.alphas) - set(layers))
    if unknown:
        raise ValueError(f"{source} does not fit this model: it has no layer {unknown[0]} ({len(unknown)} unknown)")


def stacked(loras: Sequence[tuple[Lora, float]]) -> Lora:
    """Stack adapters to one whose change is Σ strength · α/rank · B·A: their matrices joined along the rank."""
    state: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    for lora, strength in loras:
        for module, rank in lora.ranks.items():
            scales = {"A": 1.0, "B": strength * lora.alphas[module] / rank}
            for side, scale in scales.items():
                name = f"{module}.lora_{side}.weight"
                value = scale * lora.state[name]
                state[name] = torch.cat([state[name], value], dim=int(side == "B")) if name in state else value
            alphas[module] = alphas.get(module, 0.0) + rank
    return Lora(state, alphas)


def adapter_names(strengths: Mapping[str, float]) -> str:
    """Join adapters' names for recipes, `A:0.5 + B`, with the strengths that are not 1."""
    names = []
    for name, strength in strengths.items():
        names.append(name if strength == 1 else f"{name}:{strength:g}")
    return " + ".join(names)


def read_adapters(text: str) -> dict[str, float]:
    """Parse the form of `adapter_names` to name → strength; the text of a file's name keeps its colons."""
    strengths = {}
    for term in text.split(" + "):
        name = term.strip()
        if not name:
            continue
        source, _, number = name.rpartition(":")
        try:
            strengths[source or name] = float(number) if source else 1.0
        except ValueError:
            strengths[name] = 1.0
    return strengths


@contextmanager
def adapter_off(transformer: nn.Module) -> Iterator[None]:
    """Disable the adapter."""
    layers = lora_layers(transformer)
    # Not by `enable_adapters`, which unfreezes all adapters, even those frozen because no output depends on them.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class AdapterCopy:
    """A second set of adapter weights, to be swapped in temporarily."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.state = {name: value.clone() for name, value in adapter_state(transformer).items()}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the copy in place of the trained weights."""
        # Values are copied, not exchanged: the optimizer and FSDP reference the parameters' storage.
        trained = {name: value.clone() for name, value in adapter_state(self.transformer).items()}
        set_adapter_state(self.transformer, self.state)
        try:
            yield
        finally:
            set_adapter_state(self.transformer, trained)

    def load(self, state: Mapping[str, Any]) -> None:
        self.state = {name: shard_like(self.state[name], value).clone() for name, value in state.items()}

    @torch.no_grad()
    def approach(self, share: float) -> None:
        """Interpolate: copy ← (1 − share)·copy + share·trained."""
        for name, value in adapter_state(self.transformer).items():
            self.state[name].lerp_(value, share)


class MovingAverage(AdapterCopy):
    """The exponential moving average of an adapter, updated at every optimizer step.

    The decay warms up: update number s (from 0) uses min((1 + s)/(10 + s), decay), so that a young average follows the
    last few updates instead of the start. s follows from the optimizer step, so a resumed run needs only the average.
    """

    def __init__(self, transformer: nn.Module, *, decay: float) -> None:
        super().__init__(transformer)
        self.decay = decay

    def follow(self, optimizer_step: int) -> None:
        """Update the average after optimizer step `optimizer_step` (from 1)."""
        update = optimizer_step - 1
        self.approach(1 - min((1 + update) / (10 + update), self.decay))
