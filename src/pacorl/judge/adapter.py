"""LoRA adapters of a judge, in either spelling of their keys; adapters of another base are refused.

Adapters trained with transformers before 4.52 name the language model `model.layers…`, later ones
`model.language_model.layers…`; the vision tower was `visual…` and is `model.visual…`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pacorl.io.documents import read_object
from pacorl.io.files import safetensors_errors
from pacorl.io.hub import HUB_NAME
from pacorl.io.net import MALFORMED
from pacorl.models.lora.formats import HUB_PATH, PEFT_CONFIG, PEFT_PREFIX, adapter_file, check_finite

OLD_SPELLINGS = {
    "model.layers.": "model.language_model.layers.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.norm.": "model.language_model.norm.",
    "visual.": "model.visual.",
}
"""Old → current prefix of keys of the language model and the vision tower."""
FAMILY_NAMES = {
    "qwen2_vl": "qwen2-vl",
    "qwen2_5_vl": "qwen2.5-vl",
    "qwen3_vl": "qwen3-vl",
    "qwen3_5": "qwen3.5",
}
"""Family → its spelling in hub names: 7B models of two families have equal shapes."""


def base_and_adapter(checkpoint: str, adapter: str = "") -> tuple[str, str]:
    """Resolve a LoRA checkpoint to its base and the adapter.

    Args:
        checkpoint: A folder or hub name of a model, or of a PEFT LoRA, whose adapter_config.json names the base.
        adapter: An additional adapter.

    Returns:
        Base and adapter; the arguments if the checkpoint is a model.

    Raises:
        ValueError: The checkpoint is a LoRA whose base is unknown or missing, or there is a second adapter.
    """
    config = lora_config(checkpoint)
    if config is None:
        return checkpoint, adapter
    if adapter:
        raise ValueError(f"{checkpoint} is a LoRA adapter, and adapter {adapter} beside it a second one; name one")
    base = config.get("base_model_name_or_path") or ""
    if not base or not (Path(base).exists() or HUB_NAME.fullmatch(base)):
        unknown = f"of {base}, which is not here" if base else f"whose {PEFT_CONFIG} names no base"
        raise ValueError(
            f"{checkpoint} is a LoRA adapter {unknown}; name both: --judge BASE --adapter {checkpoint} (in Python "
            "adapter=, in a config judge.checkpoint and judge.adapter)"
        )
    return base, checkpoint


def lora_config(checkpoint: str) -> dict[str, Any] | None:
    """Read the adapter_config.json of a LoRA folder or hub name; None for a model or anything else."""
    if HUB_PATH.fullmatch(checkpoint) and not Path(checkpoint).exists():
        path: Path | None = adapter_file(checkpoint).parent / PEFT_CONFIG
    elif Path(checkpoint).exists():
        folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).parent
        path = None if (folder / "config.json").is_file() else folder / PEFT_CONFIG
    else:
        from transformers.utils import cached_file  # imported late: it takes seconds, and folders do not need it

        # For a hub name the config.json decides, which is cached with the model.
        silent = {"_raise_exceptions_for_missing_entries": False}
        is_model = cached_file(checkpoint, "config.json", **silent)
        cached = None if is_model else cached_file(checkpoint, PEFT_CONFIG, **silent)
        path = Path(cached) if cached else None
    return read_object(path) if path and path.is_file() else None


def merge_adapter(model: Any, adapter: str) -> Any:
    """Merge a PEFT LoRA into a model's weights; `adapter` is as for `models.lora.formats.adapter_file`.

    Raises ValueError if a file is missing, it is no LoRA, or it was trained on another base.
    """
    from peft import set_peft_model_state_dict

    config, state = read_adapter(model, adapter)
    config.inference_mode = True
    try:
        adapted = with_lora(model, config)
        unexpected = set_peft_model_state_dict(adapted, state).unexpected_keys
    except (*MALFORMED, RuntimeError, ImportError) as error:  # whatever PEFT trips over
        raise ValueError(f"adapter {adapter}: its {PEFT_CONFIG} and its weights do not fit ({_line(error)})") from None
    if unexpected:
        raise ValueError(f"adapter {adapter}: {unexpected[0]} has no place in a {model.config.model_type} model")
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # finite weights whose product is not
        raise ValueError(f"adapter {adapter}: {_line(error)}; fetch it again, or train it at a lower rate") from None


def with_lora(model: Any, config: Any) -> Any:
    """Call PEFT's `get_peft_model` without its warning."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft 0.21 uses a deprecated name of transformers 5.23.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, config)


def read_adapter(model: Any, adapter: str) -> tuple[Any, dict[str, Tensor]]:
    """Read the PEFT config of a LoRA for `model`, and its weights by PEFT's current names.

    Raises ValueError if a file is missing, it is no LoRA, or it was trained on another base.
    """
    from peft import PeftConfig
    from safetensors.torch import load_file

    file = adapter_file(adapter)
    with safetensors_errors(file):
        weights = load_file(file)
    check_finite(file, weights)

    # The config.
    path = file.parent / PEFT_CONFIG
    if not path.is_file():
        raise ValueError(f"adapter {adapter} has no {PEFT_CONFIG} beside {file.name}; a judge takes PEFT's form alone")
    # Strictly, and with the file's name in its messages; peft merges no activated LoRA, and names no file.
    if read_object(path).get("alora_invocation_tokens") is not None:
        raise ValueError(f"{path} is of an activated LoRA (aLoRA), which cannot be merged; a judge takes plain LoRA")
    try:
        config = PeftConfig.from_pretrained(str(path.parent))
    except MALFORMED as error:
        raise ValueError(f"{path} is no config of a PEFT adapter ({_line(error)})") from None
    if config.peft_type != "LORA":
        raise ValueError(f"adapter {adapter} is a {config.peft_type} adapter; a judge takes LoRA, or merged weights")

    # The base's family.
    base = str(config.base_model_name_or_path or "")
    config.base_model_name_or_path = None  # peft would warn
    kind = model.config.model_type
    families = []
    for family, spelling in FAMILY_NAMES.items():
        if spelling in base.lower():
            families.append(family)

    # A base of another name, such as a folder, is recognized by its shapes alone.
    if families and kind in FAMILY_NAMES and kind not in families:
        raise ValueError(f"adapter {adapter} was trained on {base}, and this judge is a {kind} model")

    state = {}
    for key, tensor in weights.items():
        state[PEFT_PREFIX + today(key.removeprefix(PEFT_PREFIX))] = tensor

    # The modules in the file, instead of its config's suffixes, which could match more.
    config.target_modules = _targets(model, state, f"adapter {adapter}", base=base)
    return config, state


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def today(key: str) -> str:
    """Convert a key, without PEFT's prefix, to transformers' current spelling."""
    for old, new in OLD_SPELLINGS.items():
        if key.startswith(old):
            return new + key[len(old) :]
    return key


def _targets(model: Any, state: Mapping[str, Tensor], adapter: str, *, base: str) -> list[str]:
    """Return the adapted modules, after checking that the model has them in the same shapes."""
    # By name and shape: bases of one family and another size have equal names.
    modules = dict(model.named_modules())
    targets = {}
    for key, tensor in state.items():
        name, dot, factor = key.removeprefix(PEFT_PREFIX).partition(".lora_")
        if not dot:
            raise ValueError(f"{adapter}: {key} is no LoRA weight; merge the adapter into its base instead")
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            kind = model.config.model_type
            raise ValueError(f"{adapter} (of {base}) changes {name}, which this {kind} model has not")
        width, side = (module.in_features, 1) if factor.startswith("A.") else (module.out_features, 0)
        size = tensor.shape[side] if tensor.ndim > side else f"the shape {list(tensor.shape)}"
        if factor.startswith(("A.", "B.")) and size != width:
            raise ValueError(
                f"{adapter} (of {base}) has {size} where {name} of this judge has {width}; "
                "it belongs to a base of another size"
            )
        targets[name] = True  # a dict and no set, for the order of the file
    return list(targets)
