"""LoRA adapters of a judge, in either spelling of their keys; adapters of another base are refused.

Adapters trained with transformers before 4.52 name the language model `model.layers…`, later ones
`model.language_model.layers…`; the vision tower was `visual…` and is `model.visual…`.
"""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pacorl.io.documents import blamed_on, read_object
from pacorl.io.hub import check_checkpoint, fetch_files, local_file
from pacorl.models.adapters import check_fits, linear_layers, set_adapter_state
from pacorl.models.lora import PEFT_CONFIG, PEFT_WEIGHTS, Lora, adapter_file, peft_options, read_lora

OLD_SPELLINGS = {
    "model.layers.": "model.language_model.layers.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.norm.": "model.language_model.norm.",
    "visual.": "model.visual.",
}
"""Old → current prefix of keys of the language model and the vision tower."""
FAMILY_NAMES = {"qwen2_vl": "qwen2-vl", "qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl", "qwen3_5": "qwen3.5"}
"""Family → its spelling in hub names: 7B models of two families have equal shapes."""


def lora_config(checkpoint: str, *, fetch: bool = False) -> dict[str, Any]:
    """Read the adapter_config.json of a LoRA on this machine; empty for a model, and for anything else.

    Args:
        checkpoint: A folder, ORG/NAME on the hub, or ORG/NAME:FOLDER.
        fetch: Ask the hub for a name that is not here. Raises ValueError if there is no such checkpoint.
    """
    if fetch:
        check_checkpoint(checkpoint, "config.json", PEFT_CONFIG)
        if not Path(checkpoint).exists():
            fetch_files(checkpoint, "config.json", PEFT_CONFIG)
    # A folder with a config.json is a model, even if it has an adapter's config as well.
    path = local_file(checkpoint, PEFT_CONFIG)
    if path is None or local_file(checkpoint, "config.json"):
        return {}
    return read_object(path)


def base_of(checkpoint: str) -> str:
    """Return the base of a LoRA on this machine; empty for any other checkpoint."""
    return str(lora_config(checkpoint).get("base_model_name_or_path") or "")


def merge_adapter(model: Any, adapter: str) -> Any:
    """Merge a PEFT LoRA into a model's weights; `adapter` is as for `models.lora.adapter_file`.

    Raises ValueError if a file is missing, it is no LoRA, or it was trained on another base.
    """
    from peft import LoraConfig

    lora = read_adapter(model, adapter)
    adapted = with_lora(model, LoraConfig(**peft_options(lora)))
    with blamed_on(f"adapter {adapter}"):
        set_adapter_state(adapted.get_base_model(), lora.state)
        return adapted.merge_and_unload(safe_merge=True)


def with_lora(model: Any, config: Any) -> Any:
    """Call PEFT's `get_peft_model` without its warning."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft 0.21 uses a deprecated name of transformers 5.23.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, config)


def read_adapter(model: Any, adapter: str) -> Lora:
    """Read a LoRA for `model` by its current names.

    Raises ValueError if a file is missing, it is no LoRA, or it was trained on another base.
    """
    file = adapter_file(adapter)
    # In another form α would be the rank, whatever a config beside it says.
    if file.name != PEFT_WEIGHTS:
        raise ValueError(
            f"adapter {adapter} is {file.name}; a judge takes PEFT's {PEFT_WEIGHTS} and {PEFT_CONFIG} alone"
        )
    layers = linear_layers(model)
    lora = read_lora(file, layers=layers, rename=today)

    # A base of another name, such as a folder, is recognized by its layers and their shapes alone.
    families = [family for family, spelling in FAMILY_NAMES.items() if spelling in lora.base.lower()]
    kind = model.config.model_type
    if families and kind in FAMILY_NAMES and kind not in families:
        raise ValueError(f"adapter {adapter} was trained on {lora.base}, and this judge is a {kind} model")
    check_fits(lora, layers, f"adapter {adapter} (of {lora.base})")
    if not read_object(file.parent / PEFT_CONFIG).get("layers_to_transform"):
        _check_complete(lora, layers, adapter)
    return lora


def _check_complete(lora: Lora, layers: Collection[str], adapter: str) -> None:
    """Raise ValueError if only some blocks have weights for a layer of every block: a file of one shard, or cut off."""

    def by_block(names: Iterable[str]) -> Counter[str]:
        return Counter(re.sub(r"\.\d+\.", ".N.", name) for name in names)

    needed = by_block(layers)
    for name, count in by_block(lora.alphas).items():
        if count < needed[name]:
            raise ValueError(
                f"adapter {adapter} has weights for {count} of the {needed[name]} layers {name}; fetch or save it again"
            )


def today(key: str) -> str:
    """Convert a key, without PEFT's prefix, to transformers' current spelling."""
    for old, new in OLD_SPELLINGS.items():
        if key.startswith(old):
            return new + key[len(old) :]
    return key
