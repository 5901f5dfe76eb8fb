"""How ComfyUI puts a LoRA file on FLUX and Qwen-Image, in small: which names it knows, and the scale it takes.

After comfy/lora.py (`model_lora_keys_unet`), comfy/utils.py (`flux_to_diffusers`) and comfy/weight_adapter/lora.py of
ComfyUI. Its models keep the names of their authors, in which q, k and v of FLUX are rows of one matrix; a map leads
from every name that a file may use to such rows. The change is alpha/rank · up @ down if the file has an alpha tensor
for that name, and up @ down if it has none: metadata is not read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor, nn

FLUX = (FluxTransformer2DModel, Flux2Transformer2DModel)
"""Models whose authors' names ComfyUI keeps."""
Target = tuple[str, slice]
"""A weight of ComfyUI's model, and the rows of it that one diffusers module is."""

WHOLE = slice(None)
SIDES = (
    ("{}.lora_up.weight", "{}.lora_down.weight"),
    ("{}_lora.up.weight", "{}_lora.down.weight"),
    ("{}.lora_B.weight", "{}.lora_A.weight"),
    ("{}.lora.up.weight", "{}.lora.down.weight"),
    ("{}.lora_B.default.weight", "{}.lora_A.default.weight"),
)
DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    # FLUX.2's
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}


def targets_of(transformer: nn.Module) -> dict[str, Target]:
    """Which rows of which weight in ComfyUI's model each linear layer of a diffusers model is."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    if not isinstance(transformer, FLUX):
        # ComfyUI's Qwen-Image has diffusers' names.
        return {name: (name, WHOLE) for name in linear}
    targets: dict[str, Target] = {}
    width = transformer.inner_dim
    thirds = [slice(start * width, (start + 1) * width) for start in range(3)]
    for number in range(len(transformer.transformer_blocks)):
        ours, theirs = f"transformer_blocks.{number}", f"double_blocks.{number}"
        for letter, rows in zip("qkv", thirds, strict=True):
            targets[f"{ours}.attn.to_{letter}"] = (f"{theirs}.img_attn.qkv", rows)
            targets[f"{ours}.attn.add_{letter}_proj"] = (f"{theirs}.txt_attn.qkv", rows)
        targets |= {f"{ours}.{name}": (f"{theirs}.{other}", WHOLE) for name, other in DOUBLE.items()}
    for number in range(len(transformer.single_transformer_blocks)):
        ours, theirs = f"single_transformer_blocks.{number}", f"single_blocks.{number}"
        for letter, rows in zip("qkv", thirds, strict=True):
            targets[f"{ours}.attn.to_{letter}"] = (f"{theirs}.linear1", rows)
        targets[f"{ours}.proj_mlp"] = (f"{theirs}.linear1", slice(3 * width, 7 * width))
        targets[f"{ours}.proj_out"] = (f"{theirs}.linear2", WHOLE)
        # FLUX.2's
        targets[f"{ours}.attn.to_qkv_mlp_proj"] = (f"{theirs}.linear1", WHOLE)
        targets[f"{ours}.attn.to_out"] = (f"{theirs}.linear2", WHOLE)
    return {name: target for name, target in targets.items() if name in linear}


def key_map(transformer: nn.Module) -> dict[str, Target]:
    """Every name that a LoRA file may use for a weight."""
    targets = targets_of(transformer)
    keys: dict[str, Target] = {}
    for weight in {weight for weight, _ in targets.values()}:
        keys[f"lora_unet_{weight.replace('.', '_')}"] = (weight, WHOLE)
        keys[f"diffusion_model.{weight}"] = (weight, WHOLE)
    flat = ("lycoris_", "lora_transformer_") if isinstance(transformer, FLUX) else ("lycoris_",)
    for name, target in targets.items():
        keys[f"transformer.{name}"] = target
        keys |= {prefix + name.replace(".", "_"): target for prefix in flat}
        if not isinstance(transformer, FLUX):
            keys[name] = target
    return keys


@torch.no_grad()
def load_in_comfy(transformer: nn.Module, file: Path) -> list[str]:
    """Changes the model's weights as ComfyUI would; returns the tensors of the file that it does not know."""
    tensors = load_file(file)
    targets = targets_of(transformer)
    weights = _joined(transformer, targets)
    read: set[str] = set()
    for name, (weight, rows) in key_map(transformer).items():
        for up, down in ((up.format(name), down.format(name)) for up, down in SIDES):
            if up not in tensors:
                continue
            read |= {up, down, f"{name}.alpha"}
            change = tensors[up].float() @ tensors[down].float()
            alpha = tensors.get(f"{name}.alpha")
            scale = 1.0 if alpha is None else alpha.item() / tensors[down].shape[0]
            weights[weight][rows] += scale * change
    for name, (weight, rows) in targets.items():
        transformer.get_submodule(name).weight.copy_(weights[weight][rows])
    return sorted(set(tensors) - read)


def _joined(transformer: nn.Module, targets: dict[str, Target]) -> dict[str, Tensor]:
    """ComfyUI's weights of a diffusers model."""
    slices: dict[str, list[tuple[int, Tensor]]] = {}
    for name, (weight, rows) in targets.items():
        slices.setdefault(weight, []).append((rows.start or 0, transformer.get_submodule(name).weight))
    return {
        weight: torch.cat([weights for _, weights in sorted(rows, key=lambda row: row[0])])
        for weight, rows in slices.items()
    }
