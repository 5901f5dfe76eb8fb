"""LoRA adapters of a judge: either spelling of their keys, and refused where they belong to another base.

Adapters trained with transformers before 4.52 name the language model `model.layers…`, later ones
`model.language_model.layers…`; the vision tower was `visual…` and is `model.visual…`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pacorl.models.damage import weights_of

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OLD_SPELLINGS = (
    (re.compile(r"^model\.(?=layers\.|embed_tokens\.|norm\.)"), "model.language_model."),
    (re.compile(r"^visual\."), "model.visual."),
)
FAMILY_NAMES = {"qwen2_vl": "qwen2-vl", "qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl"}
"""How the hub's names spell a family: 7B models of two families have weights of one shape."""


def merge_adapter(model: Any, adapter: str) -> Any:
    """The model with a PEFT LoRA (a folder or hub name) merged into its weights.

    Raises ValueError where a file is missing, it is no LoRA, or it was trained on another base.
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

    Raises ValueError where a file is missing, it is no LoRA, or it was trained on another base.
    """
    from peft import PeftConfig
    from safetensors.torch import load_file

    path = _file(adapter, WEIGHTS)
    with weights_of(path):
        weights = load_file(path)
    path = _file(adapter, CONFIG)
    try:
        config = PeftConfig.from_pretrained(str(Path(path).parent))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is no config of a PEFT adapter ({error})") from None
    if config.peft_type != "LORA":
        raise ValueError(f"adapter {adapter} is a {config.peft_type} adapter; a judge takes LoRA, or merged weights")
    base, config.base_model_name_or_path = config.base_model_name_or_path, None  # peft would warn of another path
    _check_family(model, base, adapter)
    state = {PREFIX + _today(key.removeprefix(PREFIX)): tensor for key, tensor in weights.items()}
    # The modules that the file holds, whatever its config calls them: a suffix could match more.
    config.target_modules = _targets(model, state, adapter, base=base)
    return config, state


def _file(adapter: str, name: str) -> str:
    folder = Path(adapter)
    if folder.is_dir():
        if not (folder / name).is_file():
            held = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
            raise ValueError(f"adapter {adapter} has no {name} (it holds {held}); name the folder that PEFT saved")
        return str(folder / name)
    from huggingface_hub import hf_hub_download

    return str(hf_hub_download(adapter, name))


def _today(key: str) -> str:
    """A module's name without PEFT's prefix, as transformers spells it today."""
    for old, new in OLD_SPELLINGS:
        key = old.sub(new, key)
    return key


def _check_family(model: Any, base: str | None, adapter: str) -> None:
    name = (base or "").lower()
    named = [kind for kind, spelling in FAMILY_NAMES.items() if spelling in name]
    if named and model.config.model_type in FAMILY_NAMES and model.config.model_type not in named:
        raise ValueError(f"adapter {adapter} was trained on {base}, and this judge is a {_kind(model)} model")


def _targets(model: nn.Module, state: Mapping[str, Tensor], adapter: str, *, base: str | None) -> list[str]:
    """The modules that the adapter changes; checks that the model has them, and of which shape."""
    modules = dict(model.named_modules())
    found = {}
    for key, tensor in state.items():
        name, dot, part = key.removeprefix(PREFIX).partition(".lora_")
        if not dot:
            raise ValueError(f"adapter {adapter}: {key} is no LoRA weight; merge the adapter into its base instead")
        if not isinstance(module := modules.get(name), nn.Linear):
            raise ValueError(f"adapter {adapter} (of {base}) changes {name}, which this {_kind(model)} model has not")
        width, side = (module.in_features, 1) if part.startswith("A.") else (module.out_features, 0)
        if part.startswith(("A.", "B.")) and tensor.shape[side] != width:
            raise ValueError(
                f"adapter {adapter} (of {base}) has {tensor.shape[side]} where {name} of this judge has {width}; "
                "it belongs to a base of another size"
            )
        found[name] = True
    return list(found)


def _kind(model: Any) -> str:
    return str(model.config.model_type)
