"""LoRA files: all common forms are read into one, and written files load everywhere.

| Form | Names of a module X's weights | Source of α |
|---|---|---|
| PEFT | `base_model.model.X.lora_A.weight` | adapter_config.json in the same folder |
| diffusers | `transformer.X.lora_A.weight` | `X.alpha` tensors, or the file's metadata, else the rank |
| down and up | `X.lora_down.weight`, `X.lora.down.weight` | `X.alpha` tensors, else the rank |
| kohya etc. | `lora_unet_…`, `diffusion_model.…`, FLUX's own names of its blocks | `….alpha` tensors |

X is a module's name in diffusers. Files in the last row pass diffusers' own converters, which fold α into the weights.

A module's change is α/rank · B·A. ComfyUI takes the scale from α tensors and is 1 without them; diffusers reads α
tensors of Qwen-Image's files as a foreign form, and refuses them beside metadata. So the scale is folded into
B in our diffusers file: α is the rank, the default of every tool.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
ADAPTER_FILES = (PEFT_CONFIG, PEFT_WEIGHTS, DIFFUSERS_WEIGHTS)
"""Files of `write_lora`."""
HUB_PATH = re.compile(rf"(?P<repo>{HUB_NAME.pattern}):(?P<path>[^:]+)")

METADATA = "lora_adapter_metadata"
"""diffusers' own key for the adapter's config in a file's metadata, its entries prefixed with `transformer.`."""
FOLDED_ALPHA = "pacorl_alpha_before_folding"
"""Our metadata key: each module's α before α/rank was folded into B, so that training can continue from the file."""

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
"""Rows to columns of FLUX.2's layers whose names occur in FLUX.1 too (7:1, 1:5, 4:1 and 1:4 there)."""
FLUX_LINEAR1 = 21504
"""Rows of linear1 in a single block of FLUX.1: q, k, v of 3072 each and 12288 of the MLP. diffusers splits only this
shape."""
TEXT_ENCODER = re.compile(r"^(lora_te\d?_|text_encoders?\b)")

CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
"""Prefixes of PEFT's `init_lora_weights` that rewrite the base: such an adapter does not fit the published weights."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter, independent of its file's form: a module's weight W becomes W + α/rank · B·A."""

    state: dict[str, Tensor]
    """`X.lora_A.weight` (rank, in) and `X.lora_B.weight` (out, rank) by the module's name X, fp32."""
    alphas: dict[str, float]
    """α of each module."""
    base: str = ""
    """Name or folder of the base model; empty if unknown."""
    form: str = ""
    """Form of the file that it was read from."""

    @property
    def facts(self) -> str:
        """Form, modules, rank, α and base, in a line; a range where modules differ."""
        facts = [f"{self.form} form", f"{len(self.alphas)} modules"]
        for name, numbers in (("rank", self.ranks.values()), ("alpha", self.alphas.values())):
            low, high = min(numbers), max(numbers)
            facts.append(f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g}")
        return ", ".join([*facts, f"trained on {self.base}"] if self.base else facts)

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each module."""
        return {module: self.state[f"{module}.lora_A.weight"].shape[0] for module in self.alphas}


def adapter_file(source: str | Path, *, fetch: bool = True) -> Path:
    """Locate the weights file of an adapter.

    Args:
        source: A safetensors file; a folder saved by PEFT, diffusers or this project (or a checkpoint with a folder
            `lora`); ORG/NAME on the hub, or ORG/NAME:PATH for a file or folder in it.
        fetch: Allow downloads for a hub name; otherwise only the local cache is searched.

    Raises:
        ValueError: There is no adapter, or several.
    """
    path = _on_disk(str(source), fetch=fetch)
    if path.is_file():
        return path
    if (path / "lora").is_dir():
        path /= "lora"

    # The standard names first.
    for name in (PEFT_WEIGHTS, DIFFUSERS_WEIGHTS):
        if (path / name).is_file():
            return path / name
    # Regular files only: safetensors would block on a pipe.
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
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
    """Resolve a source to a local folder or file."""
    if Path(source).exists():
        return Path(source)
    in_repo = HUB_PATH.fullmatch(source)
    if not in_repo and not HUB_NAME.fullmatch(source):
        # A character's training without a held-out picture has no `best`.
        trained = Path(source).with_name("adapter")
        hint = f"; there is {trained}" if trained.is_dir() else ""
        raise ValueError(f"no adapter in {source}: there is no such file or folder{hint}")
    from huggingface_hub import snapshot_download

    if in_repo:
        repo = in_repo["repo"]
        path = Path(in_repo["path"])
        files = [str(path), f"{path}/*", str(path.parent / PEFT_CONFIG)]
    else:
        # By name: a repository may contain a whole checkpoint too.
        repo = source
        path = Path()
        files = [*ADAPTER_FILES, *(f"lora/{name}" for name in ADAPTER_FILES)]
    if fetch:
        check_checkpoint(repo, *files, f"{path}/{PEFT_WEIGHTS}", f"{path}/{DIFFUSERS_WEIGHTS}")
    return Path(snapshot_download(repo, allow_patterns=files, local_files_only=not fetch)) / path


def check_layers(
    source: str, checkpoint: str, *, component: str = "", name_of: Callable[[str], str] = lambda name: name
) -> None:
    """Check, by names and shapes in the files' headers, that an adapter belongs to a checkpoint.

    It does not if the checkpoint lacks all of its layers, or has a layer of another shape. The loaded model, whose
    names may differ from its files', is checked for completeness later. Incomplete local files are not checked, nor
    adapters in foreign names, which must be converted first.

    Args:
        source: An adapter, as for `adapter_file`.
        checkpoint: A folder or hub name.
        component: The subfolder with the weights.
        name_of: Name of a layer in either file → its name in today's code.

    Raises:
        ValueError: There is no adapter, or it belongs to another checkpoint.
    """
    # Names and shapes of both sides.
    names = {name.removeprefix(PEFT_PREFIX): shape for name, shape in _shapes(adapter_file(source)).items()}
    layers = {name_of(name): shape for name, shape in _checkpoint_shapes(checkpoint, component).items()}
    if not layers or _is_foreign(names):
        return

    # Compare each layer that both have.
    fits = False
    # The first layer that the checkpoint lacks, for the message.
    unknown = ""
    for name, shape in names.items():
        weight = WEIGHT.fullmatch(name.removeprefix("transformer.").removeprefix("diffusion_model."))
        if weight is None:
            continue
        layer = layers.get(f"{name_of(weight['module'])}.weight")
        if layer is None or len(shape) != 2 or len(layer) != 2:
            unknown = unknown or weight["module"]
            continue
        fits = True
        side = 1 if SIDES[weight["side"]] == "A" else 0
        if shape[side] != layer[side]:
            raise ValueError(
                f"{source} does not fit {checkpoint}: it has {shape[side]} where {weight['module']} has {layer[side]}; "
                "it belongs to a base of another size"
            )
    # Some unknown layers are allowed: a later check against the loaded model names them.
    if unknown and not fits:
        raise ValueError(f"{source} does not fit {checkpoint}: it has no layer {unknown}")


def _is_foreign(names: Iterable[str]) -> bool:
    """Return whether weights have names that only diffusers' converters read."""
    return any(FLUX_NAMES.search(name) or QWEN_NAMES.search(name) for name in names)


def _checkpoint_shapes(checkpoint: str, component: str) -> dict[str, list[int]]:
    """Read name → shape of a checkpoint's weights; empty unless all of its files are on this machine."""
    config = local_file(checkpoint, f"{component}/config.json".lstrip("/"))
    if config is None:
        return {}
    folder = config.parent
    for index in folder.glob("*.safetensors.index.json"):
        # Of an incomplete download, absent layers would look like those of another checkpoint.
        shards = set(read_object(index).get("weight_map", {}).values())
        if not all((folder / str(shard)).is_file() for shard in shards):
            return {}

    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        shapes |= _shapes(path)
    return shapes


def _shapes(file: Path) -> dict[str, list[int]]:
    with safetensors_errors(file), safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118


def read_lora(source: str | Path) -> Lora:
    """Read an adapter of an image generator, in any of the forms above; `source` is as for `adapter_file`.

    Raises:
        ValueError: There is no adapter, its α is missing, or it is more than plain LoRA (DoRA, weights of the text
            encoder, LoKr, …).
    """
    # The tensors, in diffusers' names.
    file = adapter_file(source)
    with safetensors_errors(file), safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = dict(opened.metadata() or {})
    # Raise ValueError for a tensor outside a plain LoRA of a transformer, which would be ignored.
    if not any("lora" in name for name in tensors):
        raise ValueError(f"{file} holds no LoRA weights (no names with 'lora')")
    for name in tensors:
        if TEXT_ENCODER.search(name):
            raise ValueError(f"{file} changes the text encoder as well ({name}), which stays as it is here")
        if not (WEIGHT.fullmatch(name) or ALPHA.fullmatch(name) or re.search(r"_lora\d?\.(down|up)\.weight$", name)):
            raise ValueError(f"{file}: {name} is no weight of a plain LoRA; merge the adapter into its base instead")
    check_finite(file, tensors)
    form = "diffusers" if any(".lora_A." in name for name in tensors) else "down and up"
    if _is_foreign(tensors):
        form = "kohya"
        tensors = _converted(file, tensors)
        metadata = {}  # the converter folds α in, which invalidates the metadata's α

    # The config, for α and the base.
    if file.name == PEFT_WEIGHTS or any(name.startswith(PEFT_PREFIX) for name in tensors):
        path = file.parent / PEFT_CONFIG
        if not path.is_file():
            raise ValueError(
                f"{file} has PEFT's names and no {PEFT_CONFIG} beside it, which says its α; fetch that too"
            )
        config = _checked(read_object(path, fix="fetch the adapter again"), path)
        form = "PEFT"
    else:
        # diffusers' metadata in the file, if there is any.
        with blamed_on(f"{file}: {METADATA} in its metadata"):
            entries = parse_object(metadata.get(METADATA, "{}"), kind="config")
        prefix = "transformer."
        of_transformer = {key.removeprefix(prefix): entries[key] for key in entries if key.startswith(prefix)}
        config = _checked(of_transformer, file)
    state, alphas = _plain(file, tensors)
    base = str(config.get("base_model_name_or_path") or "")
    lora = Lora(state, _alphas(file, state, alphas, config), base, form)
    if FOLDED_ALPHA not in metadata:
        return lora

    # Our own file: restore the trained α, and B to the bit if the scale is a power of two, such as the released 128/64,
    # and to an ulp otherwise.
    with blamed_on(f"{file}: {FOLDED_ALPHA} in its metadata"):
        alphas = typed(parse_json(metadata[FOLDED_ALPHA]), dict[str, FiniteFloat])
        if alphas.keys() != lora.alphas.keys():
            raise ValueError("it is of other modules; fetch or copy the file again")
    scales = _scales(Lora(state, alphas))
    return Lora({name: value / scales.get(name, 1.0) for name, value in state.items()}, alphas, base, form)


def check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a weight contains NaN or an infinity: all images would be black, or noise."""
    for name, value in tensors.items():
        if not value.float().isfinite().all():
            raise ValueError(f"{file}: {name} holds NaN or an infinity; its training diverged, or the file is damaged")


def _plain(file: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Collect weights by plain names, and α from tensors."""
    state = {}
    alphas = {}
    for name, value in tensors.items():
        plain = name.removeprefix(PEFT_PREFIX).removeprefix("transformer.").removeprefix("diffusion_model.")
        weight = WEIGHT.fullmatch(plain)
        alpha = ALPHA.fullmatch(plain)
        if weight:
            state[f"{weight['module']}.lora_{SIDES[weight['side']]}.weight"] = value.float()
        elif alpha:
            if value.numel() != 1:
                raise ValueError(f"{file}: {name} must be one number, and has {value.numel()}")
            alphas[alpha["module"]] = float(value)

    # Each module needs both matrices.
    counterparts = {"A": "B", "B": "A"}
    for name, value in state.items():
        if not value.numel():
            raise ValueError(f"{file}: {name} is empty; fetch or copy the file again")
        module, side = name.removesuffix(".weight").rsplit(".lora_", 1)
        counterpart = f"{module}.lora_{counterparts[side]}.weight"
        if counterpart not in state:
            raise ValueError(f"{file}: {name} is there and {counterpart} is not; fetch or copy it again")
    return state, alphas


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
    """Determine α of each module: from tensors, else from the config, else the rank."""
    from peft.utils.other import get_pattern_key

    ranks = {name.removesuffix(".lora_A.weight"): len(value) for name, value in state.items() if ".lora_A." in name}
    unknown = sorted(set(alphas) - set(ranks))
    if unknown:
        raise ValueError(f"{file}: {unknown[0]}.alpha belongs to no weights; fetch or copy the file again")
    if not config:
        return {module: alphas.get(module, float(rank)) for module, rank in ranks.items()}
    # PEFT's own matching of patterns: a key may be a regular expression, or the end of a module's name.
    with blamed_on(f"{file}: lora_alpha or alpha_pattern in its config"):
        default = typed(config.get("lora_alpha"), FiniteFloat)
        pattern = typed(config.get("alpha_pattern") or {}, dict[str, FiniteFloat])
    configured = {module: pattern.get(get_pattern_key(pattern, module), default) for module in ranks}
    for module, alpha in alphas.items():
        if alpha != configured[module]:
            raise ValueError(f"{file}: α of {module} is {alpha:g} in a tensor and {configured[module]:g} in its config")
    return configured


def _scales(lora: Lora) -> dict[str, float]:
    """Return α/rank by the name of each B."""
    return {f"{module}.lora_B.weight": lora.alphas[module] / rank for module, rank in lora.ranks.items()}


def _converted(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to diffusers' names with the matching diffusers converter, which folds α in."""
    from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin, QwenImageLoraLoaderMixin

    if _is_flux2(tensors):
        return _flux2_converted(file, tensors)

    loader = QwenImageLoraLoaderMixin
    if any(FLUX_NAMES.search(name) for name in tensors):
        loader = FluxLoraLoaderMixin
        # The converter would silently split another width at FLUX.1's offsets.
        for name, value in tensors.items():
            if re.search(r"single_blocks[._]\d+[._]linear1\.lora_(up|B)", name) and len(value) != FLUX_LINEAR1:
                raise ValueError(
                    f"{file}: {name} has {len(value)} rows, and diffusers' converter splits FLUX.1's {FLUX_LINEAR1} "
                    "only"
                )
        # The converter recognizes FLUX's foreign files by down for A and up for B; PEFT's names stay.
        renamed = {}
        for name, value in tensors.items():
            new_name = name
            if not name.startswith(PEFT_PREFIX):
                new_name = name.replace(".lora_A.", ".lora_down.").replace(".lora_B.", ".lora_up.")
                new_name = new_name.replace(".default.", ".")
            renamed[new_name] = value
        tensors = renamed

    # Convert; diffusers reports an unknown form by any of these errors.
    try:
        state: dict[str, Tensor] = loader.lora_state_dict(dict(tensors))
    except (ValueError, KeyError, AssertionError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(f"{file}: diffusers' converter of {loader.__name__} cannot read it: {reason}") from None
    # The converter cuts kohya's names at underscores, also in this layer of Qwen-Image 2.1, which it does not know.
    return {name.replace(".img_mlp.gate.layer.", ".img_mlp.gate_layer."): value for name, value in state.items()}


def _is_flux2(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether layers have FLUX.2's shapes; attention has equal names and shapes in both, and converts alike."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        weight = WEIGHT.fullmatch(name)
        if weight:
            pairs.setdefault(weight["module"].replace(".", "_"), {})[SIDES[weight["side"]]] = value

    for module, pair in pairs.items():
        for layer, (rows, columns) in FLUX2_SHAPES.items():
            if module.endswith(layer) and len(pair) == 2 and len(pair["B"]) * columns == pair["A"].shape[1] * rows:
                return True
    return False


def _flux2_converted(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert FLUX.2's weights through kohya's names, where diffusers reads α."""
    from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin

    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        plain = name.removeprefix(PEFT_PREFIX).removeprefix("diffusion_model.").removeprefix("lora_unet_")
        module = plain.removesuffix(".alpha")
        ending = "alpha"
        weight = WEIGHT.fullmatch(plain)
        if weight:
            module = weight["module"]
            ending = "lora_down.weight" if SIDES[weight["side"]] == "A" else "lora_up.weight"
        renamed[f"lora_unet_{module.replace('.', '_')}.{ending}"] = value
    state: dict[str, Tensor] = Flux2LoraLoaderMixin.lora_state_dict(renamed)
    if renamed:  # the converter pops known names, and would ignore the rest with a warning
        raise ValueError(f"{file}: diffusers' converter of FLUX.2 does not know {min(renamed)}; merge it into its base")
    return state


def save_lora(
    folder: Path, state: Mapping[str, Tensor], *, rank: int, alpha: int, targets: Sequence[str], base: str = ""
) -> None:
    """Write an adapter of one rank and one α, from weights by plain names."""
    modules = [name.removesuffix(".lora_A.weight") for name in state if ".lora_A." in name]
    assert all(len(state[f"{module}.lora_A.weight"]) == rank for module in modules)
    write_lora(folder, Lora(dict(state), dict.fromkeys(modules, float(alpha)), base), targets=targets)


def write_lora(folder: Path, lora: Lora, *, targets: Sequence[str] = ()) -> None:
    """Write an adapter in PEFT's form and, in a second file, in the form of diffusers and ComfyUI.

    `targets` are PEFT's `target_modules`, the ends of names; by default the modules' own names.
    """
    # PEFT's file and config.
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
    }
    if targets:
        config["target_modules"] = list(targets)
    write_json(folder / PEFT_CONFIG, config)

    # diffusers' file, where α is the rank, so that tools without α apply the right scale.
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
        _sort_metadata(Path(temporary))


def _sort_metadata(file: Path) -> None:
    """Sort a safetensors file's metadata in place: its writer orders them by a hash that every process draws anew."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = parse_json(stream.read(size).decode(), name=str(file))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(ordered) == size, f"{file}: the sorted header has {len(ordered)} bytes instead of {size}"
        stream.seek(8)
        stream.write(ordered)


def peft_options(lora: Lora) -> dict[str, Any]:
    """Return options of PEFT's `LoraConfig`: the most common rank and α, and patterns for modules that differ."""
    rank = Counter(lora.ranks.values()).most_common(1)[0][0]
    alpha = Counter(lora.alphas.values()).most_common(1)[0][0]
    # `^`: PEFT matches a pattern, and each name of a list, against the ends of modules' names too.
    modules: list[str] | str = sorted(lora.alphas)
    if not all("." in module for module in modules):
        modules = "|".join(map(re.escape, modules))
    # Modules that differ from the rest.
    ranks = {}
    alphas = {}
    for name, own_rank in lora.ranks.items():
        if own_rank != rank:
            ranks[f"^{re.escape(name)}"] = own_rank
        if lora.alphas[name] != alpha:
            alphas[f"^{re.escape(name)}"] = _number(lora.alphas[name])
    return {
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": modules,
    }


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
