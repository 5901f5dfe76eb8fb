"""LoRA files: every form that users meet is read into one, and what is written loads everywhere.

| Form | Names of a module X's weights | Where α stands |
|---|---|---|
| PEFT | `base_model.model.X.lora_A.weight` | adapter_config.json beside the file |
| diffusers | `transformer.X.lora_A.weight` | `X.alpha` tensors, or the file's metadata, or nowhere: α is the rank |
| down and up | `X.lora_down.weight`, `X.lora.down.weight` | `X.alpha` tensors, or nowhere |
| kohya and others | `lora_unet_…`, `diffusion_model.…`, FLUX's own names of its blocks | `….alpha` tensors |

X is a module's name in diffusers. Files in the last row pass diffusers' own converters, which fold α into the weights.

A module's change is α/rank · B·A. ComfyUI takes the scale from α tensors and is 1 without them; diffusers reads α
tensors of Qwen-Image's files as a foreign form, and refuses them beside metadata. So the diffusers file written here
has the scale folded into B: α is the rank, which every tool takes it to be.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pacorl.io.documents import blamed_on, parse_json, parse_object, read_object, typed, write_json
from pacorl.io.files import replacing, safetensors_errors
from pacorl.io.hub import HUB_NAME, check_checkpoint, local_file

PEFT_PREFIX = "base_model.model."
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
ADAPTER_FILES = (PEFT_CONFIG, PEFT_WEIGHTS, DIFFUSERS_WEIGHTS)
"""What `write_lora` writes."""
HUB_PATH = re.compile(rf"(?P<repo>{HUB_NAME.pattern}):(?P<path>[^:]+)")

METADATA = "lora_adapter_metadata"
"""diffusers' own key for the adapter's config in a file's metadata, its entries prefixed with `transformer.`."""
FOLDED_ALPHA = "pacorl_alpha_before_folding"
"""Our key beside it: each module's α before α/rank was folded into B, so that training can go on from the file."""

SIDES = {"lora_A": "A", "lora_B": "B", "lora_down": "A", "lora_up": "B", "lora.down": "A", "lora.up": "B"}
WEIGHT = re.compile(
    r"(?P<module>.+?)\.(?P<side>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(\.default)?\.weight"
)
ALPHA = re.compile(r"(?P<module>.+)\.alpha")
FLUX_NAMES = re.compile(
    r"^lora_unet_(double|single)_blocks_|^lora_transformer_"
    r"|^(diffusion_model\.|base_model\.model\.)?(double|single)_blocks\."
)
QWEN_NAMES = re.compile(r"^lora_unet_transformer_blocks_")
FLUX2_SHAPES = {"linear1": (9, 1), "linear2": (1, 4), "mlp_0": (6, 1), "mlp_2": (1, 3)}
"""Rows to columns of the layers that FLUX.2 has by the names of FLUX.1 (7:1, 1:5, 4:1 and 1:4 there)."""
FLUX_LINEAR1 = 21504
"""Rows of linear1 in a single block of FLUX.1: q, k, v of 3072 each and 12288 of the MLP. diffusers splits no other."""
TEXT_ENCODER = re.compile(r"^(lora_te\d?_|text_encoders?\b)")

CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Starts of PEFT's `init_lora_weights` that rewrite the base: on published weights such an adapter means nothing."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter in one form, whatever its file's: a module's weight W becomes W + α/rank · B·A."""

    state: dict[str, Tensor]
    """`X.lora_A.weight` (rank, in) and `X.lora_B.weight` (out, rank) by the module's name X, fp32."""
    alphas: dict[str, float]
    """α of each module."""
    base: str = ""
    """The model that it was trained on, by name or folder; empty if its files do not say."""

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each module."""
        return {module: self.state[f"{module}.lora_A.weight"].shape[0] for module in self.alphas}


def adapter_file(source: str | Path, *, fetch: bool = True) -> Path:
    """The file that holds an adapter's weights.

    Args:
        source: A safetensors file; a folder that PEFT, diffusers or this project saved (or a checkpoint with one
            named `lora`); ORG/NAME on the hub, or ORG/NAME:PATH for a file or folder in it.
        fetch: Whether what a hub name needs may be downloaded; else it is looked for in the local cache alone.

    Raises:
        ValueError: No adapter is there, or several are.
    """
    path = _on_disk(str(source), fetch=fetch)
    if path.is_file():
        return path
    if (path / "lora").is_dir():
        path /= "lora"
    usual = [path / name for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS) if (path / name).is_file()]
    # Of a pipe safetensors would wait for the end.
    files = usual[:1] or sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(f"{source} holds {', '.join(file.name for file in files)}; name the one that is meant")
    entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) if path.is_dir() else ""
    raise ValueError(
        f"no adapter in {source}: neither {PEFT_WEIGHTS} nor {DIFFUSERS_WEIGHTS} is there (it holds "
        f"{entries or 'nothing'}); name the file, one in a hub's repository as ORG/NAME:FOLDER/FILE"
    )


def _on_disk(source: str, *, fetch: bool) -> Path:
    """The folder or file that a source names."""
    if Path(source).exists():
        return Path(source)
    in_repo = HUB_PATH.fullmatch(source)
    if not in_repo and not HUB_NAME.fullmatch(source):
        raise ValueError(f"no adapter in {source}: there is no such file or folder")
    from huggingface_hub import snapshot_download

    if in_repo:
        repo, path = in_repo["repo"], Path(in_repo["path"])
        files = [str(path), f"{path}/*", str(path.parent / PEFT_CONFIG)]
    else:
        # By name: a repository may hold a whole checkpoint beside the adapter.
        repo, path, usual = source, Path(), ADAPTER_FILES
        files = [*usual, *(f"lora/{name}" for name in usual)]
    if fetch:
        check_checkpoint(repo, *files, *(f"{path}/{name}" for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS)))
    return Path(snapshot_download(repo, allow_patterns=files, local_files_only=not fetch)) / path


def check_layers(
    source: str, checkpoint: str, *, component: str = "", name_of: Callable[[str], str] = lambda name: name
) -> None:
    """Check, by names and shapes in files' headers alone, that an adapter is one of a checkpoint.

    It is one of another if none of its layers is there, or one has another shape. Whether all are there says the loaded
    model, whose names may differ from its files'. Nothing is checked of what is not whole on this machine, and of
    adapters in names of others, which must be converted first.

    Args:
        source: An adapter, as `adapter_file` takes it.
        checkpoint: A folder or hub name.
        component: The folder within it that has the weights.
        name_of: What today's code calls a layer of either file.

    Raises:
        ValueError: There is no adapter, or it belongs to another checkpoint.
    """
    names = {name.removeprefix(PEFT_PREFIX): shape for name, shape in _shapes(adapter_file(source)).items()}
    layers = {name_of(name): shape for name, shape in _checkpoint_shapes(checkpoint, component).items()}
    if not layers or any(FLUX_NAMES.search(name) or QWEN_NAMES.search(name) for name in names):
        return
    fitting = 0
    for name, shape in names.items():
        weight = WEIGHT.fullmatch(name.removeprefix("transformer.").removeprefix("diffusion_model."))
        layer = layers.get(f"{name_of(weight['module'])}.weight") if weight else None
        if weight is None or layer is None or len(shape) != 2 or len(layer) != 2:
            continue
        fitting += 1
        side = 1 if SIDES[weight["side"]] == "A" else 0
        if shape[side] != layer[side]:
            raise ValueError(
                f"{source} does not fit {checkpoint}: it has {shape[side]} where {weight['module']} has {layer[side]}; "
                "it belongs to a base of another size"
            )
    if first := next((weight["module"] for name in names if (weight := WEIGHT.fullmatch(name)) and not fitting), ""):
        raise ValueError(f"{source} does not fit {checkpoint}: it has no layer {first}")


def _checkpoint_shapes(checkpoint: str, component: str) -> dict[str, list[int]]:
    """Name → shape of a checkpoint's weights; empty unless all of its files are on this machine."""
    config = local_file(checkpoint, f"{component}/config.json".lstrip("/"))
    if config is None:
        return {}
    indices = [read_object(path) for path in config.parent.glob("*.safetensors.index.json")]
    shards = {config.parent / str(name) for index in indices for name in index.get("weight_map", {}).values()}
    if not all(path.is_file() for path in shards):
        return {}
    files = config.parent.glob("*.safetensors")
    return {name: shape for path in files for name, shape in _shapes(path).items()}


def _shapes(file: Path) -> dict[str, list[int]]:
    with safetensors_errors(file), safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118


def read_lora(source: str | Path) -> Lora:
    """Read an adapter of an image generator, in any of the forms above; `source` is as `adapter_file` takes it.

    Raises:
        ValueError: There is no adapter, its files say no α, or it is more than plain LoRA (DoRA, weights of the text
            encoder, LoKr, …).
    """
    file = adapter_file(source)
    with safetensors_errors(file), safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = dict(opened.metadata() or {})
    _check_names(file, tensors)
    check_finite(file, tensors)
    if any(FLUX_NAMES.search(name) or QWEN_NAMES.search(name) for name in tensors):
        # The converter folds α in, so that what the metadata says of α is no longer true.
        tensors, metadata = _converted(file, tensors), {}
    if file.name == PEFT_WEIGHTS or any(name.startswith(PEFT_PREFIX) for name in tensors):
        path = file.parent / PEFT_CONFIG
        if not path.is_file():
            raise ValueError(
                f"{file} has PEFT's names and no {PEFT_CONFIG} beside it, which says its α; fetch that too"
            )
        config = _checked(read_object(path, fix="fetch the adapter again"), path)
    else:
        config = _checked(_config_in(file, metadata), file)
    state, alphas = _plain(file, tensors)
    lora = Lora(state, _alphas(file, state, alphas, config), base=str(config.get("base_model_name_or_path") or ""))
    if FOLDED_ALPHA not in metadata:
        return lora
    # A file of ours: the α that it was trained with, and B as it was, to the bit if the scale is a power of two, as the
    # released 128/64 is, and to an ulp otherwise.
    with blamed_on(f"{file}: {FOLDED_ALPHA} in its metadata"):
        alphas = typed(parse_json(metadata[FOLDED_ALPHA]), dict[str, FiniteFloat])
        if alphas.keys() != lora.alphas.keys():
            raise ValueError("it is of other modules; fetch or copy the file again")
    scales = _scales(Lora(state, alphas))
    return Lora({name: value / scales.get(name, 1.0) for name, value in state.items()}, alphas, lora.base)


def check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight holds NaN or an infinity: every image made with it would be black, or noise."""
    for name, value in tensors.items():
        if not value.float().isfinite().all():
            raise ValueError(f"{file}: {name} holds NaN or an infinity; its training diverged, or the file is damaged")


def _check_names(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor is nothing that a plain LoRA of a transformer has: it would be left out."""
    if not any("lora" in name for name in tensors):
        raise ValueError(f"{file} holds no LoRA weights (no names with 'lora')")
    for name in tensors:
        if TEXT_ENCODER.search(name):
            raise ValueError(f"{file} changes the text encoder as well ({name}), which stays as it is here")
        if not (WEIGHT.fullmatch(name) or ALPHA.fullmatch(name) or re.search(r"_lora\d?\.(down|up)\.weight$", name)):
            raise ValueError(f"{file}: {name} is no weight of a plain LoRA; merge the adapter into its base instead")


def _plain(file: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights by plain names, and the α that tensors say."""
    state, alphas = {}, {}
    for name, value in tensors.items():
        plain = name.removeprefix(PEFT_PREFIX).removeprefix("transformer.").removeprefix("diffusion_model.")
        if weight := WEIGHT.fullmatch(plain):
            state[f"{weight['module']}.lora_{SIDES[weight['side']]}.weight"] = value.float()
        elif alpha := ALPHA.fullmatch(plain):
            if value.numel() != 1:
                raise ValueError(f"{file}: {name} must be one number, and has {value.numel()}")
            alphas[alpha["module"]] = float(value)
    for name, value in state.items():
        if not value.numel():
            raise ValueError(f"{file}: {name} is empty; fetch or copy the file again")
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in state:
            raise ValueError(f"{file}: {name} is there and {other} is not; fetch or copy it again")
    return state, alphas


def _config_in(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What diffusers wrote of the adapter's config into the file's metadata; empty if it did not."""
    with blamed_on(f"{file}: {METADATA} in its metadata"):
        entries = parse_object(metadata.get(METADATA, "{}"), kind="config")
    prefix = "transformer."
    return {key.removeprefix(prefix): entries[key] for key in entries if key.startswith(prefix)}


def _checked(config: dict[str, Any], file: Path) -> dict[str, Any]:
    odd = next((key for key in ("use_dora", "use_rslora") if config.get(key)), None)
    if str(config.get("init_lora_weights")).startswith(CHANGED_BASES):
        odd = f"init_lora_weights={config['init_lora_weights']}"
    if odd:
        raise ValueError(f"{file}: {odd} is set, and plain LoRA is all that can be loaded; merge it first")
    return config


def _alphas(
    file: Path, state: Mapping[str, Tensor], alphas: Mapping[str, float], config: Mapping[str, Any]
) -> dict[str, float]:
    """α of each module: as tensors say it, else as the config does, else the rank."""
    from peft.utils.other import get_pattern_key

    ranks = {name.removesuffix(".lora_A.weight"): len(value) for name, value in state.items() if ".lora_A." in name}
    if unknown := sorted(set(alphas) - set(ranks)):
        raise ValueError(f"{file}: {unknown[0]}.alpha belongs to no weights; fetch or copy the file again")
    if not config:
        return {module: alphas.get(module, float(rank)) for module, rank in ranks.items()}
    # PEFT's own matching of patterns: a key may be a regular expression, or the end of a module's name.
    with blamed_on(f"{file}: lora_alpha or alpha_pattern in its config"):
        default = typed(config.get("lora_alpha"), FiniteFloat)
        pattern = typed(config.get("alpha_pattern") or {}, dict[str, FiniteFloat])
    configured = {module: pattern.get(get_pattern_key(pattern, module), default) for module in ranks}
    if clash := next((module for module, alpha in alphas.items() if alpha != configured[module]), None):
        raise ValueError(
            f"{file}: α of {clash} is {alphas[clash]:g} in a tensor and {configured[clash]:g} in its config"
        )
    return configured


def _scales(lora: Lora) -> dict[str, float]:
    """α/rank by the name of each B."""
    return {f"{module}.lora_B.weight": lora.alphas[module] / rank for module, rank in lora.ranks.items()}


def _converted(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in diffusers' names, by diffusers' converter for the model that the names are of; α is folded in."""
    from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin, QwenImageLoraLoaderMixin

    loader = QwenImageLoraLoaderMixin
    if _is_flux2(tensors):
        return _flux2_converted(file, tensors)
    if any(map(FLUX_NAMES.search, tensors)):
        loader = FluxLoraLoaderMixin
        # The converter would cut another width at FLUX.1's places without a word.
        for name, value in tensors.items():
            if re.search(r"single_blocks[._]\d+[._]linear1\.lora_(up|B)", name) and len(value) != FLUX_LINEAR1:
                raise ValueError(
                    f"{file}: {name} has {len(value)} rows, and diffusers' converter splits FLUX.1's {FLUX_LINEAR1} "
                    "only"
                )
        # By down for A and up for B the converter tells FLUX's foreign files from diffusers' own; PEFT's are left.
        renames = {".lora_A.": ".lora_down.", ".lora_B.": ".lora_up.", ".default.": "."}
        for old, new in renames.items():
            tensors = {n if n.startswith(PEFT_PREFIX) else n.replace(old, new): t for n, t in tensors.items()}
    try:
        state: dict[str, Tensor] = loader.lora_state_dict(dict(tensors))
    except (ValueError, KeyError, AssertionError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(f"{file}: diffusers' converter of {loader.__name__} cannot read it: {reason}") from None
    return state


def _is_flux2(tensors: Mapping[str, Tensor]) -> bool:
    """Whether layers have FLUX.2's shapes; attention alone is shaped and named alike in both, and converted alike."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if weight := WEIGHT.fullmatch(name):
            sides.setdefault(weight["module"].replace(".", "_"), {})[SIDES[weight["side"]]] = value
    return any(
        module.endswith(layer) and len(pair) == 2 and len(pair["B"]) * columns == pair["A"].shape[1] * rows
        for module, pair in sides.items()
        for layer, (rows, columns) in FLUX2_SHAPES.items()
    )


def _flux2_converted(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `_converted`, by kohya's names: of those alone diffusers reads the α of FLUX.2's files."""
    from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin

    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        plain = name.removeprefix(PEFT_PREFIX).removeprefix("diffusion_model.").removeprefix("lora_unet_")
        weight = WEIGHT.fullmatch(plain)
        module = weight["module"] if weight else plain.removesuffix(".alpha")
        ending = {"A": "lora_down.weight", "B": "lora_up.weight"}[SIDES[weight["side"]]] if weight else "alpha"
        renamed[f"lora_unet_{module.replace('.', '_')}.{ending}"] = value
    state: dict[str, Tensor] = Flux2LoraLoaderMixin.lora_state_dict(renamed)
    if renamed:  # the converter takes out what it knows, and would leave out the rest with a warning
        raise ValueError(f"{file}: diffusers' converter of FLUX.2 does not know {min(renamed)}; merge it into its base")
    return state


def save_lora(
    folder: Path, state: Mapping[str, Tensor], *, rank: int, alpha: int, targets: Sequence[str], base: str = ""
) -> None:
    """Write an adapter of one rank and one α, its weights by plain names, as `write_lora` does."""
    modules = [name.removesuffix(".lora_A.weight") for name in state if ".lora_A." in name]
    assert all(len(state[f"{module}.lora_A.weight"]) == rank for module in modules)
    write_lora(folder, Lora(dict(state), dict.fromkeys(modules, float(alpha)), base), targets=targets)


def write_lora(folder: Path, lora: Lora, *, targets: Sequence[str] = ()) -> None:
    """Write an adapter as PEFT reads it and, in a second file, as diffusers and ComfyUI do.

    `targets` are PEFT's `target_modules`, the ends of names; by default the modules' own names.
    """
    tensors = {name: value.contiguous().cpu() for name, value in lora.state.items()}
    with replacing(folder / PEFT_WEIGHTS) as temporary:  # safetensors' own files are private
        save_file({PEFT_PREFIX + name: value for name, value in tensors.items()}, temporary)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": lora.base or None,
        **peft_options(lora),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": "gaussian",
        "inference_mode": True,
    } | ({"target_modules": list(targets)} if targets else {})
    write_json(folder / PEFT_CONFIG, config)
    # In diffusers' file α is the rank, so that tools which read no α apply the right scale.
    scales = _scales(lora)
    folded = Lora(
        {name: value * scales.get(name, 1.0) for name, value in tensors.items()},
        {module: float(rank) for module, rank in lora.ranks.items()},
    )
    entries = {f"transformer.{key}": value for key, value in peft_options(folded).items()}
    metadata = {
        "format": "pt",
        METADATA: json.dumps(entries, indent=2, sort_keys=True),
        FOLDED_ALPHA: json.dumps(lora.alphas, sort_keys=True),
    }
    folded_state = {f"transformer.{name}": value for name, value in folded.state.items()}
    with replacing(folder / DIFFUSERS_WEIGHTS) as temporary:
        save_file(folded_state, temporary, metadata=metadata)


def peft_options(lora: Lora) -> dict[str, Any]:
    """Rank, α and modules as PEFT's `LoraConfig` takes them: the commonest, and patterns for modules that differ."""
    rank = Counter(lora.ranks.values()).most_common(1)[0][0]
    alpha = Counter(lora.alphas.values()).most_common(1)[0][0]
    # `^`: PEFT takes a pattern, and each name of a list, for the ends of other modules' names too.
    modules: list[str] | str = sorted(lora.alphas)
    if not all("." in module for module in modules):
        modules = "|".join(map(re.escape, modules))
    return {
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {f"^{re.escape(name)}": value for name, value in lora.ranks.items() if value != rank},
        "alpha_pattern": {
            f"^{re.escape(name)}": _number(value) for name, value in lora.alphas.items() if value != alpha
        },
        "target_modules": modules,
    }


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
