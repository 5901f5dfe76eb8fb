"""Checkpoints of random weights in a published architecture, so that a recipe runs without a download.

Weights are drawn and written shard by shard, in bf16: main memory holds one shard. Tokenizers come from the tiny
twins, whose vocabularies are smaller than the models'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pacorl.io.documents import JsonObject
from pacorl.io.files import check_new, weight_write_errors
from pacorl.judge.judge import JudgeSpec
from pacorl.models.policies.policy import WITHOUT_WEIGHTS, Parts
from pacorl.models.policies.spec import PolicySpec
from pacorl.models.twins import QWEN_SPECIAL_TOKENS, model_on_meta, random_weight, tiny_judge
from pacorl.tiny.characters import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Width = Literal["published", "tiny"]
SHARD = 2**31
"""Bytes of a file."""
DEPTHS = ("num_layers", "num_hidden_layers", "depth")
"""Names of a config's number of blocks."""


def write_generator(spec: PolicySpec, folder: Path, *, width: Width, depth: int | None = None) -> None:
    """Write a diffusers folder of random weights.

    Args:
        spec: the kind of generator.
        folder: a new one.
        width: the published shapes, or the tiny twin's.
        depth: double blocks of the transformer, which then has at most twice as many single ones; None for all.

    Raises:
        ValueError: there is something at `folder`.
        OSError: the disk is full or cannot be written.
    """
    check_new(folder, fix="name another folder")
    # Tokenizers and schedulers of the tiny twin, weights in the wanted shapes.
    pipeline = spec.twin(vocabulary())
    pipeline.save_config(folder)
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            config = spec.parts[name] if width == "published" else own_config(component)
            # Text encoders keep their depth: a generator may read hidden layers by their numbers.
            blocks = depth if name == "transformer" else None
            write_model({**config, **special_ids(config, pipeline.tokenizer)}, folder / name, depth=blocks)
        elif component is not None:
            if width == "published" and name in WITHOUT_WEIGHTS:
                component = published_component(name, component, spec.parts)  # noqa: PLW2901
            component.save_pretrained(folder / name)


def write_judge(spec: JudgeSpec, folder: Path, *, base: str, width: Width, depth: int | None = None) -> None:
    """Write a transformers folder of a judge with random weights; see `write_generator`.

    Args:
        base: a name of `spec.bases`.
    """
    from pacorl.io.documents import read_object
    from pacorl.io.processor import image_text_processor

    check_new(folder, fix="name another folder")
    configs = read_object(spec.bases[base])
    model, processor = tiny_judge(vocabulary(), configs["model"]["model_type"])
    config = own_config(model)
    if width == "published":
        config = configs["model"]
        processor = image_text_processor(
            tokenizer=processor.tokenizer, image_options=configs["processor"], chat_template=processor.chat_template
        )
    write_model({**config, **special_ids(config, processor.tokenizer)}, folder, depth=depth)
    processor.save_pretrained(folder)


def own_config(model: Any) -> JsonObject:
    """Return the config of a model in memory, in the form of `model_of`."""
    config = dict(model.config.to_dict() if hasattr(model.config, "to_dict") else model.config)
    if "_class_name" in config:
        return config
    return {**config, "architectures": [type(model).__name__]}


def published_component(name: str, twin: Any, configs: Parts) -> Any:
    """Build the scheduler or processor with its published settings."""
    if name == "scheduler":
        return type(twin).from_config(configs[name])
    from pacorl.io.processor import image_text_processor

    return image_text_processor(
        tokenizer=twin.tokenizer, image_options=configs[name], chat_template=twin.tokenizer.chat_template
    )


def special_ids(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Look up the ids of image tokens in a vision-language model's tokenizer; empty for other models."""
    if "vision_config" not in config:
        return {}
    # transformers looks for images by these ids, which differ in the twin's vocabulary.
    ids = {}
    for token in QWEN_SPECIAL_TOKENS:
        name = token.strip("<|>")
        if name.startswith("vision_") and name != "vision_pad":
            ids[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(token)
        elif name in ("image_pad", "video_pad"):
            ids[f"{name.removesuffix('_pad')}_token_id"] = tokenizer.convert_tokens_to_ids(token)
    return ids


# --- one model -------------------------------------------------------------------------------------------------


def write_model(config: JsonObject, folder: Path, *, depth: int | None = None) -> None:
    """Write a model's config.json and shards of random weights, in the layout of its library."""
    model: Any = model_on_meta(at_depth(config, depth), dtype=torch.bfloat16)
    of_diffusers = "_class_name" in config
    stem = "diffusion_pytorch_model" if of_diffusers else "model"
    folder.mkdir(parents=True, exist_ok=True)
    if of_diffusers:
        model.save_config(folder)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(folder)
    write_shards(model, folder, stem)


def at_depth(config: Mapping[str, Any], depth: int | None) -> JsonObject:
    """Reduce a config to at most `depth` blocks, and twice as many single blocks."""
    if depth is None:
        return dict(config)
    fewer: JsonObject = {name: min(depth, config[name]) for name in DEPTHS if name in config}
    if "num_single_layers" in config:
        fewer["num_single_layers"] = min(2 * depth, config["num_single_layers"])
    if "layer_types" in config:
        fewer["layer_types"] = config["layer_types"][:depth]
    nested = {name: at_depth(value, depth) for name, value in config.items() if isinstance(value, Mapping)}
    return {**config, **nested, **fewer}


def write_shards(model: nn.Module, folder: Path, stem: str) -> None:
    """Write random weights as safetensors with an index, each file as soon as it is drawn."""
    from safetensors.torch import save_file

    from pacorl.io.documents import write_json

    # Names first: a shard's file name contains the number of all shards.
    shards = list(shards_of(model))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        drawn = {key: random_weight(key, tensor) for key, tensor in shard.items()}
        with weight_write_errors(folder / name):
            save_file(drawn, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / f"{stem}.safetensors.index.json", index)


def shards_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield names and shapes of a model's weights in groups of at most SHARD bytes; of tied weights only the first."""
    shard: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > SHARD:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
