"""LoRA adapters of a judge, in either spelling of their keys; adapters of another base are refused.

Adapters trained with transformers before 4.52 name the language model `model.layers…`, later ones
`model.language_model.layers…`; the vision tower was `visual…` and is `model.visual…`.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pacorl.io.documents import blamed_on, read_object
from pacorl.io.hub import HUB_NAME
from pacorl.models.adapters import check_fits, linear_layers, set_adapter_state
from pacorl.models.lora import HUB_PATH, PEFT_CONFIG, PEFT_WEIGHTS, Lora, adapter_file, peft_options, read_lora

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
            f"{checkpoint} is a LoRA adapter {unknown}; write the base into base_model_name_or_path there (in a run's "
            "config: judge.checkpoint and judge.adapter)"
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
    if path and path.is_file():
        return read_object(path)
    return None


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
