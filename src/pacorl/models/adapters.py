"""LoRA adapters: adding, loading, saving in PEFT and in diffusers form, and copies that follow the trained one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pacorl.models.damage import weights_of
from pacorl.models.shards import placed_like, settle, whole

PEFT_PREFIX = "base_model.model."
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def add_lora(transformer: nn.Module, *, rank: int, alpha: int, targets: Sequence[str]) -> None:
    """Adds one trainable adapter, in fp32 or better, to the modules whose names end in `targets`.

    Raises ValueError where a target matches no module: an adapter that trains nothing must not go unnoticed.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"adapter target {target!r} matches no linear layer of {type(transformer).__name__}")
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, init_lora_weights="gaussian", target_modules=list(targets)
    )
    inject_adapter_in_model(config, transformer)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def adapter_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's own weights by plain names, `blocks.0.attn.to_q.lora_A.weight`; shards where they are sharded."""
    settle(transformer)
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
        own[name].copy_(placed_like(own[name], value))


def whole_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's weights unsharded. Every process must call it."""
    return {name: whole(value) for name, value in state.items()}


def save_lora(
    folder: Path, state: Mapping[str, Tensor], *, rank: int, alpha: int, targets: Sequence[str], base: str = ""
) -> None:
    """Writes an adapter as PEFT reads it (`PeftModel.from_pretrained`) and as diffusers does (`load_lora_weights`).

    `base` is the model that it was trained on, by name or folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous().cpu() for name, value in state.items()}
    save_file({PEFT_PREFIX + name: value for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "init_lora_weights": "gaussian",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    # diffusers takes α = rank unless each module says otherwise.
    alphas = {
        name.replace("lora_A.weight", "alpha"): torch.tensor(float(alpha)) for name in tensors if "lora_A" in name
    }
    save_file({f"transformer.{name}": value for name, value in {**tensors, **alphas}.items()}, folder / DIFFUSERS_FILE)


def load_lora(folder: str | Path) -> dict[str, Tensor]:
    """Reads an adapter folder (PEFT or diffusers form) or file into plain names, as `set_adapter_state` takes it.

    Raises ValueError where there is no adapter.
    """
    found = _weights_in(Path(folder))
    state = {}
    with weights_of(found):
        weights = load_file(found)
    for name, value in weights.items():
        plain = name.removeprefix(PEFT_PREFIX).removeprefix("transformer.").replace(".default.", ".")
        if "lora_" in plain:
            state[plain] = value.float()
    if not state:
        raise ValueError(f"{found} holds no LoRA weights (no names with 'lora_')")
    return state


def adapter_file(source: str | Path) -> Path:
    """The file that holds an adapter's weights: of a folder or file in PEFT or diffusers form, or of a hub name.

    Raises ValueError where there is no adapter.
    """
    return _weights_in(_on_disk(str(source)))


def _weights_in(path: Path) -> Path:
    files = [path] if path.is_file() else [path / PEFT_FILES[1], path / DIFFUSERS_FILE]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        raise ValueError(f"no adapter in {path}: neither {files[0].name} nor {files[-1].name} is there")
    return found


def start_from(transformer: nn.Module, source: str | Path, *, rank: int, alpha: int, base: str) -> None:
    """Puts a saved adapter's weights into the one that is to be trained on: a folder or file in PEFT or diffusers
    form, a checkpoint with a `lora` folder (the released ones, or this project's), or a hub name.

    Raises ValueError, with the settings that would fit, where it is of another base, rank, α or other modules.
    """
    path = _on_disk(str(source))
    state = load_lora(path)
    _refuse_another_base(path, base)
    found = {"rank": max(value.shape[0] for name, value in state.items() if ".lora_A." in name)}
    found["alpha"] = _alpha_of(path, found["rank"])
    wrong = [key for key, wanted in (("rank", rank), ("alpha", alpha)) if found[key] != wanted]
    if wrong:
        fix = " ".join(f"adapter.{key}={found[key]}" for key in wrong)
        raise ValueError(f"adapter.start {source} has rank {found['rank']} and alpha {found['alpha']}; set {fix}")
    own = adapter_state(transformer)
    absent, strangers = set(own) - set(state), set(state) - set(own)
    if absent and not strangers:
        targets = ", ".join(sorted({_suffix(name) for name in state}))
        raise ValueError(
            f"adapter.start {source} has no weights for {len(absent)} of the {len(own)} that would be trained "
            f"(e.g. {min(absent)}); set adapter.targets=[{targets}]"
        )
    set_adapter_state(transformer, state)


def _suffix(name: str) -> str:
    """A target that matches the module of an adapter's weight: what follows the block's number."""
    module = name.rpartition(".lora_")[0]
    return re.sub(r"^.*?_blocks\.\d+\.", "", module)


def _refuse_another_base(path: Path, base: str) -> None:
    """Two models may have equal shapes (FLUX.1-dev and Kontext), so names are compared where both are a hub's."""
    config = (path.parent if path.is_file() else path) / PEFT_FILES[0]
    if not config.is_file():
        return
    trained_on = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    if HUB_NAME.fullmatch(trained_on) and HUB_NAME.fullmatch(base) and trained_on != base:
        raise ValueError(f"the adapter in {path} was trained on {trained_on}, and model.checkpoint is {base}")


def wear_lora(transformer: nn.Module, source: str | Path) -> None:
    """Puts a saved adapter on a model: a folder or file in PEFT or diffusers form, or a hub name.

    Rank, α and targets are the adapter's own. Raises ValueError where there is none, where it does not fit, or where
    it is of a kind that plain LoRA is not (DoRA, rank-stabilised, a rank or α of its own per module).
    """
    path = _on_disk(str(source))
    state = load_lora(path)
    ranks = {value.shape[0] for name, value in state.items() if name.endswith("lora_A.weight")}
    if len(ranks) != 1:
        raise ValueError(f"{source}: its modules have ranks {sorted(ranks)}; an adapter of one rank can be worn")
    (rank,) = ranks
    targets = sorted({name.rpartition(".lora_")[0] for name in state})
    names = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    strangers = [name for name in targets if name not in names]
    if strangers:
        raise ValueError(f"{source} does not fit this model: it has no layer {strangers[0]} ({len(strangers)} unknown)")
    add_lora(transformer, rank=rank, alpha=_alpha_of(path, rank), targets=targets)
    set_adapter_state(transformer, state)


def _on_disk(source: str) -> Path:
    """The adapter's folder or file: a checkpoint's `lora` folder where it has one; a hub name's files are fetched."""
    path = Path(source)
    if not path.exists() and HUB_NAME.fullmatch(source):
        from huggingface_hub import snapshot_download

        files = [*PEFT_FILES, DIFFUSERS_FILE]
        path = Path(snapshot_download(source, allow_patterns=[*files, *(f"lora/{name}" for name in files)]))
    return path / "lora" if (path / "lora").is_dir() else path


def _alpha_of(path: Path, rank: int) -> int:
    """α as PEFT's config says it or as diffusers' tensors do; without either it is the rank."""
    folder = path.parent if path.is_file() else path
    config = folder / PEFT_FILES[0]
    if config.is_file() and path.name != DIFFUSERS_FILE:
        document = json.loads(config.read_text(encoding="utf-8"))
        odd = [key for key in ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern") if document.get(key)]
        if odd:
            raise ValueError(f"{config}: {odd[0]} is set, and plain LoRA is all that can be worn; merge it first")
        return int(document["lora_alpha"])
    file = path if path.is_file() else folder / DIFFUSERS_FILE
    alphas = {float(value) for name, value in load_file(file).items() if name.endswith(".alpha")}
    if len(alphas) > 1:
        raise ValueError(f"{file}: its modules have α {sorted(alphas)}; an adapter of one α can be worn")
    return round(alphas.pop()) if alphas else rank


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
    """Weights of an adapter beside the trained ones, to be worn for a while."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.state = {name: value.clone() for name, value in adapter_state(transformer).items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model carries the copy."""
        trained = {name: value.clone() for name, value in adapter_state(self.transformer).items()}
        set_adapter_state(self.transformer, self.state)
        try:
            yield
        finally:
            set_adapter_state(self.transformer, trained)

    def load(self, state: Mapping[str, Any]) -> None:
        self.state = {name: placed_like(self.state[name], value).clone() for name, value in state.items()}

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


class SamplingCopy(AdapterCopy):
    """DiffusionNFT's sampling policy: old ← d·old + (1−d)·trained with d = min(0.001·step, 0.5) (arXiv 2509.16117).

    Early on it is the trained policy, later it lags behind, so that what is contrasted is not what just moved.
    """

    def follow(self, optimizer_step: int) -> None:
        """Call after each epoch, with the optimizer steps taken so far."""
        self._approach(1 - min(0.001 * optimizer_step, 0.5))
