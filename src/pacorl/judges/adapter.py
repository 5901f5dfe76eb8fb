"""LoRA adapters of a judge: either spelling of their keys, and refused if they belong to another base.

Adapters trained with transformers before 4.52 name the language model `model.layers…`, later ones
`model.language_model.layers…`; the vision tower was `visual…` and is `model.visual…`.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pacorl.io.documents import read_object
from pacorl.io.weights import safetensors_errors
from pacorl.lora.formats import HUB_NAME, HUB_PATH, PEFT_CONFIG, PEFT_PREFIX, adapter_file

logger = logging.getLogger(__name__)

OLD_SPELLINGS = (
    (re.compile(r"^model\.(?=layers\.|embed_tokens\.|norm\.)"), "model.language_model."),
    (re.compile(r"^visual\."), "model.visual."),
)
FAMILY_NAMES = {"qwen2_vl": "qwen2-vl", "qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl"}
"""How the hub's names spell a family: 7B models of two families have weights of one shape."""


def base_and_adapter(checkpoint: str, adapter: str = "") -> tuple[str, str]:
    """What to load for a judge: a checkpoint that is itself a LoRA stands for its base with it.

    Args:
        checkpoint: A folder or hub name of a model, or of a PEFT LoRA, whose adapter_config.json names the base.
        adapter: The adapter that was asked for beside it.

    Returns:
        Base and adapter; what was given if the checkpoint is a model.

    Raises:
        ValueError: The checkpoint is a LoRA whose base is unknown or not here, or an adapter stands beside it.
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
    logger.warning("%s is a LoRA adapter; the judge is its base %s with it merged in", checkpoint, base)
    return base, checkpoint


def lora_config(checkpoint: str) -> dict[str, Any] | None:
    """The adapter_config.json of a folder or hub name that is a LoRA and no model; None of anything else."""
    from transformers.utils import cached_file

    if HUB_PATH.fullmatch(checkpoint) and not Path(checkpoint).exists():
        path: Path | None = adapter_file(checkpoint).parent / PEFT_CONFIG
    elif Path(checkpoint).exists():
        folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).parent
        path = None if (folder / "config.json").is_file() else folder / PEFT_CONFIG
    else:
        silent = {"_raise_exceptions_for_missing_entries": False}
        is_model = cached_file(checkpoint, "config.json", **silent)
        cached = None if is_model else cached_file(checkpoint, PEFT_CONFIG, **silent)
        path = Path(cached) if cached else None
    if path is None or not path.is_file():
        return None
    return read_object(path)


def merge_adapter(model: Any, adapter: str) -> Any:
    """The model with a PEFT LoRA merged into its weights; `adapter` is as `lora.formats.adapter_file` takes it.

    Raises ValueError if a file is missing, it is no LoRA, or it was trained on another base.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    config, state = read_adapter(model, adapter)
    config.inference_mode = True
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 by a name that it calls outdated.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted = get_peft_model(model, config)
    result = set_peft_model_state_dict(adapted, state)
    if result.unexpected_keys:
        raise ValueError(f"adapter {adapter}: {result.unexpected_keys[0]} has no place in a {_kind(model)} model")
    return adapted.merge_and_unload()


def read_adapter(model: Any, adapter: str) -> tuple[Any, dict[str, Tensor]]:
    """The PEFT config of a LoRA for `model`, and its weights by the names that PEFT gives the model's today.

    Raises ValueError if a file is missing, it is no LoRA, or it was trained on another base.
    """
    from peft import PeftConfig
    from safetensors.torch import load_file

    file = adapter_file(adapter)
    with safetensors_errors(file):
        weights = load_file(file)
    path = file.parent / PEFT_CONFIG
    if not path.is_file():
        raise ValueError(f"adapter {adapter} has no {PEFT_CONFIG} beside {file.name}; a judge takes PEFT's form alone")
    try:
        config = PeftConfig.from_pretrained(str(path.parent))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is no config of a PEFT adapter ({error})") from None
    if config.peft_type != "LORA":
        raise ValueError(f"adapter {adapter} is a {config.peft_type} adapter; a judge takes LoRA, or merged weights")
    base, config.base_model_name_or_path = config.base_model_name_or_path, None  # peft would warn of another path
    _check_family(model, base, adapter)
    state = {PEFT_PREFIX + _today(key.removeprefix(PEFT_PREFIX)): tensor for key, tensor in weights.items()}
    # The modules that the file holds, whatever its config calls them: a suffix could match more.
    config.target_modules = _targets(model, state, adapter, base=base)
    return config, state


def _today(key: str) -> str:
    """A module's name without PEFT's prefix, as transformers spells it today."""
    for old, new in OLD_SPELLINGS:
        key = old.sub(new, key)
    return key


def _check_family(model: Any, base: str | None, adapter: str) -> None:
    name = (base or "").lower()
    families = [family for family, spelling in FAMILY_NAMES.items() if spelling in name]
    if families and model.config.model_type in FAMILY_NAMES and model.config.model_type not in families:
        raise ValueError(f"adapter {adapter} was trained on {base}, and this judge is a {_kind(model)} model")


def _targets(model: nn.Module, state: Mapping[str, Tensor], adapter: str, *, base: str | None) -> list[str]:
    """The modules that the adapter changes; checks that the model has them, and of which shape."""
    modules = dict(model.named_modules())
    targets = {}
    for key, tensor in state.items():
        name, dot, factor = key.removeprefix(PEFT_PREFIX).partition(".lora_")
        if not dot:
            raise ValueError(f"adapter {adapter}: {key} is no LoRA weight; merge the adapter into its base instead")
        if not isinstance(module := modules.get(name), nn.Linear):
            raise ValueError(f"adapter {adapter} (of {base}) changes {name}, which this {_kind(model)} model has not")
        width, side = (module.in_features, 1) if factor.startswith("A.") else (module.out_features, 0)
        if factor.startswith(("A.", "B.")) and tensor.shape[side] != width:
            raise ValueError(
                f"adapter {adapter} (of {base}) has {tensor.shape[side]} where {name} of this judge has {width}; "
                "it belongs to a base of another size"
            )
        targets[name] = True
    return list(targets)


def _kind(model: Any) -> str:
    return str(model.config.model_type)
