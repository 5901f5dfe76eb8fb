"""One adapter in the form of every trainer: how its file would look if each of them had written it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.zoo.comfy import FLUX, targets_of
from torch import Tensor, nn

from pacorl.models.lora import save_lora

State = dict[str, Tensor]


@dataclass(frozen=True)
class Adapter:
    """An adapter as it was made."""

    model: Any
    """PEFT's model, with a second adapter named `old`."""
    pipeline: Any
    """The pipeline of its base."""
    rank: int
    alpha: int
    targets: tuple[str, ...]

    @property
    def base(self) -> nn.Module:
        base: nn.Module = self.pipeline.transformer
        return base

    @property
    def state(self) -> State:
        """`X.lora_A.weight` and `X.lora_B.weight` by the module's name X."""
        return {
            name.removeprefix("base_model.model.").replace(".default.", "."): value.detach()
            for name, value in self.model.named_parameters()
            if ".default." in name
        }

    @property
    def is_flux(self) -> bool:
        return isinstance(self.base, FLUX)

    def modules(self) -> list[str]:
        return [name.removesuffix(".lora_A.weight") for name in self.state if name.endswith(".lora_A.weight")]


def peft_folder(adapter: Adapter, folder: Path) -> Path:
    adapter.model.save_pretrained(folder, selected_adapters=["default"])
    return folder


def peft_with_old(adapter: Adapter, folder: Path) -> Path:
    """As the released code saves: the sampling policy's adapter lies in `old/`."""
    adapter.model.save_pretrained(folder)
    assert (folder / "old" / "adapter_model.safetensors").is_file()
    return folder


def diffusers_alphas(adapter: Adapter, folder: Path) -> Path:
    """FLUX's files begin with `transformer.`; diffusers takes α tensors of Qwen-Image without that prefix alone."""
    prefix = "transformer." if adapter.is_flux else ""
    return _file(folder, {prefix + name: value for name, value in (adapter.state | alphas(adapter)).items()})


def diffusers_metadata(adapter: Adapter, folder: Path) -> Path:
    config = adapter.model.peft_config["default"].to_dict()
    type(adapter.pipeline).save_lora_weights(
        folder, transformer_lora_layers=adapter.state, transformer_lora_adapter_metadata=config
    )
    return folder / "pytorch_lora_weights.safetensors"


def kohya(adapter: Adapter, folder: Path) -> Path:
    """Names without dots; FLUX's in its authors' words, q, k and v in one."""
    tensors = fused(adapter) if adapter.is_flux else adapter.state | alphas(adapter)
    return _file(folder, {_flat("lora_unet_", name): value for name, value in _down_up(tensors).items()})


def diffusion_model(adapter: Adapter, folder: Path) -> Path:
    """As ComfyUI and ai-toolkit save."""
    tensors = fused(adapter) if adapter.is_flux else adapter.state | alphas(adapter)
    return _file(folder, {f"diffusion_model.{name}": value for name, value in _down_up(tensors).items()})


def down_and_up(adapter: Adapter, folder: Path) -> Path:
    """diffusers' names with down for A and up for B; of FLUX's such files it reads no α, so the scale is in B."""
    if adapter.is_flux:
        scale = adapter.alpha / adapter.rank
        scaled = {name: value * scale if ".lora_B." in name else value for name, value in adapter.state.items()}
        return _file(folder, {f"transformer.{name}": value for name, value in _down_up(scaled).items()})
    return _file(folder, _down_up(adapter.state | alphas(adapter)))


def ours(adapter: Adapter, folder: Path) -> Path:
    save_lora(folder, adapter.state, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)
    return folder


FORMS: dict[str, Callable[[Adapter, Path], Path]] = {
    "peft": peft_folder,
    "peft with old": peft_with_old,
    "diffusers with alphas": diffusers_alphas,
    "diffusers with metadata": diffusers_metadata,
    "kohya": kohya,
    "diffusion_model": diffusion_model,
    "down and up": down_and_up,
    "ours": ours,
}


def alphas(adapter: Adapter) -> State:
    return {f"{module}.alpha": torch.tensor(float(adapter.alpha)) for module in adapter.modules()}


def fused(adapter: Adapter) -> State:
    """An adapter of FLUX for its authors' matrices, as kohya's own conversion writes it.

    The A of q, k and v lie one above the other and their B are the blocks of a diagonal, so the rank is three times
    theirs, and so is α.
    """
    by_weight: dict[str, list[str]] = {}
    targets = targets_of(adapter.base)
    for module in adapter.modules():
        by_weight.setdefault(targets[module][0], []).append(module)
    state: State = {}
    for weight, modules in by_weight.items():
        modules.sort(key=lambda module: targets[module][1].start or 0)
        state[f"{weight}.lora_A.weight"] = torch.cat([adapter.state[f"{module}.lora_A.weight"] for module in modules])
        state[f"{weight}.lora_B.weight"] = torch.block_diag(
            *(adapter.state[f"{module}.lora_B.weight"] for module in modules)
        )
        state[f"{weight}.alpha"] = torch.tensor(float(adapter.alpha * len(modules)))
    return state


def _down_up(state: Mapping[str, Tensor]) -> State:
    return {name.replace(".lora_A.", ".lora_down.").replace(".lora_B.", ".lora_up."): v for name, v in state.items()}


def _flat(prefix: str, name: str) -> str:
    module, dot, ending = name.partition(".lora_") if ".lora_" in name else name.rpartition(".")
    return prefix + module.replace(".", "_") + dot + ending


def _file(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    file = folder / "a-lora.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)
    return file
