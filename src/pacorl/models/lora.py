"""LoRA files: every common form is read into one, and written files load in PEFT, diffusers and ComfyUI.

| Form | Names of a module X's weights | Source of α |
|---|---|---|
| PEFT | `base_model.model.X.lora_A.weight` | adapter_config.json in the same folder |
| diffusers | `transformer.X.lora_A.weight` | `X.alpha` tensors, or the file's metadata, else the rank |
| down and up | `X.lora_down.weight` | `X.alpha` tensors, else the rank |
| kohya, ComfyUI | `lora_unet_…`, FLUX's own names of its blocks | `….alpha` tensors |

Names of the last row pass diffusers' converters. A module's change is α/rank · B·A.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import FiniteFloat
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pacorl.io.documents import blamed_on, parse_object, read_object, typed, write_json
from pacorl.io.files import replacing, safetensors_errors
from pacorl.io.hub import HUB_NAME, check_checkpoint, fetch_files

ADAPTER = "default"
"""PEFT's name of a model's only adapter."""
PEFT_PREFIX = "base_model.model."
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
ADAPTER_FILES = (PEFT_CONFIG, PEFT_WEIGHTS, DIFFUSERS_WEIGHTS)
"""Files of `save_lora`."""
METADATA = "lora_adapter_metadata"
"""diffusers' own key for the adapter's config in a file's metadata, its entries prefixed with `transformer.`."""

WRAPPERS = (PEFT_PREFIX, "module.", "transformer.", "model.diffusion_model.", "diffusion_model.")
"""Prefixes that PEFT, DDP, pipelines and ComfyUI put before a module's name."""
SIDES = {"lora_A": "A", "lora_B": "B", "lora_down": "A", "lora_up": "B"}
WEIGHT = re.compile(r"(?P<module>.+?)\.((?P<side>lora_A|lora_B|lora_down|lora_up)(\.\w+)?\.weight|alpha)")
FOREIGN = re.compile(r"lora_unet_|lora_transformer_|(double|single)_blocks\.")
"""Names of kohya and of FLUX's authors, which diffusers' converters read."""
CONVERTERS = {".ff.linear_in": "Flux2", ".img_mlp.": "QwenImage", ".ff.net.": "Flux"}
"""Part of the names of a model's layers → prefix of diffusers' class with its converter."""
NOT_PLAIN = ("use_dora", "alora_invocation_tokens", "layer_replication")
"""Keys of PEFT's config that make an adapter more than a sum with the base's weights."""
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Prefixes of PEFT's `init_lora_weights` that rewrite the base: such an adapter does not fit the published weights."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter, independent of its file's form: a module's weight W becomes W + α/rank · B·A."""

    state: dict[str, Tensor]
    """`X.lora_A.weight` (rank, in) and `X.lora_B.weight` (out, rank) by the module's name X, fp32 or fp64."""
    alphas: dict[str, float]
    """α of each module."""
    base: str = ""
    """Name or folder of the base model; empty if unknown."""

    @property
    def facts(self) -> str:
        """Modules, ranks, α and base, in a line."""
        origin = f", trained on {self.base}" if self.base else ""
        return f"{len(self.alphas)} modules, rank {_distinct(self.ranks)}, alpha {_distinct(self.alphas)}{origin}"

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each module."""
        return {module: self.state[f"{module}.lora_A.weight"].shape[0] for module in self.alphas}


def _distinct(values: Mapping[str, float]) -> str:
    """Join the values of all modules, each once: `16/32`."""
    return "/".join(f"{value:g}" for value in sorted(set(values.values())))


def adapter_file(source: str | Path, *, fetch: bool = True) -> Path:
    """Locate the weights file of an adapter.

    Args:
        source: A safetensors file; a folder saved by PEFT, diffusers or this project (or its run or checkpoint, which
            have it in `adapter` and `lora`); ORG/NAME on the hub, or ORG/NAME:PATH for a file or folder in it.
        fetch: Allow downloads for a hub name; otherwise only the local cache is searched.

    Raises:
        ValueError: There is no adapter, or several.
    """
    path = Path(source) if Path(source).exists() else _from_hub(str(source), fetch=fetch)
    if path.is_file():
        return path
    for name in ("adapter", "lora"):  # a run, a checkpoint
        if (path / name).is_dir():
            path /= name

    # The standard names first.
    for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS):
        if (path / name).is_file():
            return path / name
    # Regular files only: safetensors would block on a pipe.
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if len(files) == 1:
        return files[0]
    listing = ", ".join(file.name for file in files) or "no safetensors file"
    raise ValueError(
        f"no adapter in {source}: it holds {listing}; name the file, one in a hub's repository as ORG/NAME:FOLDER/FILE"
    )


def _from_hub(source: str, *, fetch: bool) -> Path:
    """Return the local copy of a hub's file or folder."""
    repo, _, path = source.partition(":")
    if not HUB_NAME.fullmatch(repo) or repo.endswith(".safetensors"):
        raise ValueError(f"no adapter in {source}: there is no such file or folder; name one, or ORG/NAME of the hub")
    # By name: a repository may contain a whole checkpoint too.
    files = [*ADAPTER_FILES, *(f"lora/{name}" for name in ADAPTER_FILES)]
    if path:
        files = [path, f"{path}/*", str(Path(path).parent / PEFT_CONFIG)]
    if fetch:
        check_checkpoint(repo, *files, *(f"{path}/{name}" for name in ADAPTER_FILES if path))
    return fetch_files(repo, *files, fetch=fetch) / path


def read_lora(source: str | Path, *, layers: Collection[str] = (), rename: Callable[[str], str] = str) -> Lora:
    """Read an adapter in any of the forms above.

    Args:
        layers: Names of the model's layers: prefixes of wrappers are stripped until one fits. Without layers, all
            prefixes are stripped, and kohya's names stay.
        rename: Name of a module in the file → its name in today's code.

    Raises:
        ValueError: It is damaged, not plain LoRA (DoRA and its kin), or its config contradicts its weights.
    """
    file = adapter_file(source)
    with safetensors_errors(file), safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata() or {}
    config = _config(file, tensors, metadata)

    # Weights and α by module, under its name in today's code.
    pairs: dict[str, dict[str, Tensor]] = defaultdict(dict)
    names_in_file: dict[str, str] = {}
    for name, value in tensors.items():
        match = WEIGHT.fullmatch(name)
        if not match:
            raise ValueError(f"{file}: {name} is no weight of a plain LoRA; merge the adapter into its base instead")
        in_file = _unwrapped(match["module"], layers)
        module = rename(in_file)
        names_in_file[module] = in_file
        side = SIDES[match["side"]] if match["side"] else "alpha"
        if side in pairs[module]:
            raise ValueError(f"{file} holds several adapters, one of them with {name}; save the one that is meant")
        # NaN would make all images black, or noise.
        if not value.numel() or (side == "alpha" and value.numel() > 1) or not value.float().isfinite().all():
            shape = list(value.shape)
            raise ValueError(f"{file}: {name} of the shape {shape} is damaged, or holds NaN; fetch the file again")
        pairs[module][side] = value if value.dtype == torch.float64 else value.float()
    if not pairs:
        raise ValueError(f"{file} holds no LoRA weights")

    # Both matrices of each module.
    state: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    for module, pair in pairs.items():
        for side in "AB":
            if side not in pair:
                raise ValueError(f"{file}: {module} has no lora_{side}; fetch or copy the file again")
            state[f"{module}.lora_{side}.weight"] = pair[side]
        with blamed_on(f"{file}: its config"):
            alphas[module] = _alpha(pair, config, names_in_file[module])
    lora = Lora(state, alphas, str(config.get("base_model_name_or_path") or ""))
    # Names of other projects fit no layer, and only diffusers can translate them.
    if layers and any(FOREIGN.match(module) for module in alphas):
        return _translated(file, lora, layers)
    return lora


def _config(file: Path, tensors: Collection[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read PEFT's config of a file: in the file's folder, or in diffusers' metadata; empty without one."""
    # PEFT has its config in a file beside the weights, diffusers in their metadata.
    source = file
    if file.name == PEFT_WEIGHTS or any(name.startswith(PEFT_PREFIX) for name in tensors):
        source = file.parent / PEFT_CONFIG
        if not source.is_file():
            raise ValueError(f"{file} has PEFT's names and no {PEFT_CONFIG} beside it, with its α; fetch that too")
        config = read_object(source, fix="fetch the adapter again")
    else:
        with blamed_on(f"{file}: {METADATA} in its metadata"):
            entries = parse_object(metadata.get(METADATA, "{}"))
        prefix = "transformer."
        config = {key.removeprefix(prefix): entries[key] for key in entries if key.startswith(prefix)}

    # Relatives of LoRA compute other weights from tensors of the same names.
    unusual = {key: config[key] for key in NOT_PLAIN if config.get(key)}
    if config.get("peft_type", "LORA") != "LORA":
        unusual["peft_type"] = config["peft_type"]
    if str(config.get("init_lora_weights")).startswith(CHANGED_BASES):
        unusual["init_lora_weights"] = config["init_lora_weights"]
    if unusual:
        raise ValueError(f"{source}: {unusual}, and plain LoRA is all that can be loaded; merge it first")
    return config


def _unwrapped(name: str, layers: Collection[str]) -> str:
    """Strip the prefixes of wrappers until a layer fits."""
    name = name.replace("_orig_mod.", "")  # torch.compile's, at any depth
    while name not in layers:
        prefix = next((prefix for prefix in WRAPPERS if name.startswith(prefix)), "")
        if not prefix:
            break
        name = name.removeprefix(prefix)
    return name


def _alpha(pair: Mapping[str, Tensor], config: Mapping[str, Any], module: str) -> float:
    """Determine a module's α: from PEFT's config if there is one, else from its tensor, else the rank.

    Args:
        pair: Its matrices "A" and "B", and "alpha" if there is a tensor.
        config: PEFT's, may be empty.

    Raises:
        ValueError: The config contradicts the weights or the tensor.
    """
    from peft.utils.other import get_pattern_key

    def configured(key: str, pattern: str) -> Any:
        # PEFT's own matching: a pattern may be a regular expression, or the end of a module's name.
        values = typed(config.get(pattern) or {}, dict[str, Any])
        return values.get(get_pattern_key(list(values), module), config.get(key))

    rank = len(pair["A"])
    stored = float(pair.get("alpha", rank))
    if not config:
        return stored
    expected = configured("r", "rank_pattern")
    if expected not in (None, rank):
        raise ValueError(f"r of {module} is {expected}, and its weights have rank {rank}; fetch both again")
    alpha = typed(configured("lora_alpha", "alpha_pattern"), FiniteFloat)
    if "alpha" in pair and stored != alpha:
        raise ValueError(f"α of {module} is {stored:g} in a tensor and {alpha:g} in the config")
    # Rank-stabilised: the scale is α/√rank.
    if config.get("use_rslora"):
        return alpha * math.sqrt(rank)
    return alpha


def _translated(file: Path, lora: Lora, layers: Collection[str]) -> Lora:
    """Translate the names of kohya and of FLUX's authors by diffusers' converters, which fold α in."""
    from diffusers.loaders import lora_pipeline

    # kohya's spelling of all of them, where the converters read α.
    tensors: dict[str, Tensor] = {}
    for module, alpha in lora.alphas.items():
        name = module.replace(".", "_")
        if not name.startswith("lora_"):
            name = f"lora_unet_{name}"
        tensors[f"{name}.lora_down.weight"] = lora.state[f"{module}.lora_A.weight"]
        tensors[f"{name}.lora_up.weight"] = lora.state[f"{module}.lora_B.weight"]
        tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=torch.float64)

    # A converter belongs to one architecture, which the names of its layers identify.
    kind = "Flux"
    for mark, family in CONVERTERS.items():
        if any(mark in layer for layer in layers):
            kind = family
            break
    try:
        converted: dict[str, Tensor] = getattr(lora_pipeline, f"{kind}LoraLoaderMixin").lora_state_dict(tensors)
    # diffusers reports an unknown form by any of these errors.
    except (ValueError, KeyError, AssertionError, AttributeError, RuntimeError):
        known = f"{len(lora.alphas)} modules, such as {min(lora.alphas)}"
        raise ValueError(f"{file} is no LoRA of {kind}, or is of another width: it has {known}") from None
    # The converter cuts kohya's names at underscores, also in this layer of Qwen-Image 2.1, which it does not know.
    state = {
        name.removeprefix("transformer.").replace(".img_mlp.gate.layer.", ".img_mlp.gate_layer."): value
        for name, value in converted.items()
    }
    alphas = {name.removesuffix(".lora_A.weight"): float(len(state[name])) for name in state if ".lora_A." in name}
    # FLUX.2's converter removes the names it supports from the tensors, and ignores the rest; the one for
    # `lora_transformer_` gives several modules one name.
    if len(alphas) < len(lora.alphas) or (kind == "Flux2" and tensors):
        lost = min(tensors, default="several modules")
        raise ValueError(f"{file}: diffusers' converter of {kind} does not know {lost}; merge it into its base")
    return Lora(state, alphas, lora.base)


def save_lora(
    folder: Path, state: Mapping[str, Tensor], *, rank: int, alpha: int, targets: Sequence[str], base: str = ""
) -> None:
    """Write an adapter of one rank and one α in PEFT's form and, in a second file, in that of diffusers and ComfyUI.

    Args:
        state: Weights by plain names.
        targets: PEFT's `target_modules`, the ends of names.
    """
    tensors = {name: value.contiguous().cpu() for name, value in state.items()}
    # PEFT's file and config.
    with replacing(folder / PEFT_WEIGHTS) as temporary:  # safetensors' own files are private
        save_file({PEFT_PREFIX + name: value for name, value in tensors.items()}, temporary)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": "gaussian",
        "inference_mode": True,
    }
    write_json(folder / PEFT_CONFIG, config)

    # diffusers' file. The scale is folded into B, so that α is the rank, every tool's default: ComfyUI reads α from
    # tensors alone, and diffusers refuses tensors beside metadata.
    folded = {name: value * (alpha / rank) if ".lora_B." in name else value for name, value in tensors.items()}
    modules = [name.removesuffix(".lora_A.weight") for name in state if ".lora_A." in name]
    options = peft_options(Lora(folded, dict.fromkeys(modules, float(rank))))
    entries = {f"transformer.{key}": value for key, value in options.items()}
    # One entry alone: safetensors orders several by a hash that every process draws anew.
    metadata = {METADATA: json.dumps(entries, indent=2, sort_keys=True)}
    with replacing(folder / DIFFUSERS_WEIGHTS) as temporary:
        save_file({f"transformer.{name}": value for name, value in folded.items()}, temporary, metadata=metadata)


def peft_options(lora: Lora) -> dict[str, Any]:
    """Return options of PEFT's `LoraConfig`: the most common rank and α, and patterns for modules that differ."""
    ranks = lora.ranks
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(lora.alphas.values()).most_common(1)[0][0]
    # `^`: PEFT matches a pattern, and each name of a list, against the ends of modules' names too.
    modules: list[str] | str = sorted(ranks)
    if not all("." in module for module in modules):
        modules = "|".join(map(re.escape, modules))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{re.escape(name)}": ranks[name] for name in ranks if ranks[name] != rank},
        "alpha_pattern": {f"^{re.escape(name)}": lora.alphas[name] for name in ranks if lora.alphas[name] != alpha},
        "target_modules": modules,
    }
