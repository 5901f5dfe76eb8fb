"""Checkpoints of random weights in a published architecture, so that a recipe runs without a download.

    python -m research.twin flux FOLDER                  # or another model.kind, judge, or Qwen3.5-9B
    python -m research.twin judge FOLDER --width tiny    # the tiny twin's shapes; --depth 2 has fewer blocks

They make noise, at the released model's cost in memory and time. Weights are drawn and written shard by shard, in bf16:
main memory holds one shard. Tokenizers come from the tiny twins, whose vocabularies are smaller than the models'.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tests.twins import TWINS
from tests.twins.parts import QWEN_SPECIAL_TOKENS, image_text_processor, random_weight, tiny_judge, vocabulary
from torch import Tensor, nn

from pacorl.io.documents import JsonObject, read_object, write_json
from pacorl.judge.local import BASES
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import WITHOUT_WEIGHTS, Parts
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.generators import model_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = 2**31
"""Bytes of a file."""
DEPTHS = ("num_layers", "num_hidden_layers", "depth")
"""Names of a config's number of blocks."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", help="a model.kind (flux, kontext, qwen_edit, …), judge, or Qwen3.5-9B")
    parser.add_argument("folder", type=Path, help="where the checkpoint is written; a new folder")
    parser.add_argument("--width", choices=("published", "tiny"), default="published")
    parser.add_argument("--depth", type=int, help="blocks of the transformer or the judge; all by default")
    options = parser.parse_args(words)
    if options.kind == "judge" or options.kind in BASES:
        base = read_object(BASES[next(iter(BASES)) if options.kind == "judge" else options.kind])
        if options.width == "tiny":
            base = {"model": own_config(tiny_judge(vocabulary(), base["model"]["model_type"])[0])}
        write_judge(options.folder, base | {"model": at_depth(base["model"], options.depth)})
    else:
        spec = POLICIES.named(options.kind)
        parts = generator_parts(spec, tiny=options.width == "tiny", depth=options.depth)
        write_generator(options.folder, spec, parts=parts)
    written = sum(path.stat().st_size for path in options.folder.rglob("*.safetensors"))
    print(f"{options.folder}: {written / 2**30:.2f} GiB of random weights")


def generator_parts(spec: PolicySpec, *, tiny: bool, depth: int | None) -> Parts:
    """Return the configs of a generator's parts: published or the tiny twin's, with `depth` blocks or all."""
    parts = dict(spec.parts)
    if tiny:
        components = TWINS[spec.kind](vocabulary()).components
        parts = {name: own_config(part) for name, part in components.items() if isinstance(part, nn.Module)}
    # Text encoders keep their depth: a generator may read hidden layers by their numbers.
    return parts | {"transformer": at_depth(parts["transformer"], depth)}


def write_generator(
    folder: Path, spec: PolicySpec, *, parts: Parts, texts: Sequence[str] = (), weights: bool = True
) -> None:
    """Write a diffusers folder with random weights, or with empty files in their place.

    Args:
        folder: a new one.
        spec: the kind of generator.
        parts: config of each component with weights, and of others where it is not the tiny twin's.
        texts: from which the tokenizer learns; the tiny world's by default.
        weights: whether to draw them.
    """
    folder.mkdir(parents=True)
    pipeline = TWINS[spec.kind](texts or vocabulary())
    pipeline.save_config(folder)
    tokenizer = pipeline.tokenizer if "tokenizer" in pipeline.components else pipeline.processor.tokenizer
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            config = {**parts[name], **special_ids(parts[name], tokenizer)}
            write_model(config, folder / name, weights=weights)
        elif component is not None:
            if name in WITHOUT_WEIGHTS and name in parts:
                component = with_settings(name, component, parts[name])  # noqa: PLW2901
            component.save_pretrained(folder / name)


def write_judge(folder: Path, base: JsonObject, *, texts: Sequence[str] = (), weights: bool = True) -> None:
    """Write a judge's transformers folder as `write_generator` does; `base` has its model's config, and perhaps its
    processor's."""
    folder.mkdir(parents=True)
    config = base["model"]
    _, processor = tiny_judge(texts or vocabulary(), config["model_type"])
    if "processor" in base:
        processor = image_text_processor(
            tokenizer=processor.tokenizer, image_options=base["processor"], chat_template=processor.chat_template
        )
    write_model({**config, **special_ids(config, processor.tokenizer)}, folder, weights=weights)
    processor.save_pretrained(folder)


def own_config(model: Any) -> JsonObject:
    """Return the config of a model in memory, in the form of `model_of`."""
    config = dict(model.config.to_dict() if hasattr(model.config, "to_dict") else model.config)
    if "_class_name" in config:
        return config
    return {**config, "architectures": [type(model).__name__]}


def with_settings(name: str, twin: Any, config: Mapping[str, Any]) -> Any:
    """Build a scheduler or processor like the tiny twin's with a config's settings."""
    if name == "scheduler":
        return type(twin).from_config(config)
    return image_text_processor(tokenizer=twin.tokenizer, image_options=config, chat_template=twin.chat_template)


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


def write_model(config: JsonObject, folder: Path, *, weights: bool) -> None:
    """Write a model's config.json, and shards of random weights or an empty file, in the layout of its library."""
    model: Any = model_on_meta(config, dtype=torch.bfloat16)
    of_diffusers = "_class_name" in config
    stem = "diffusion_pytorch_model" if of_diffusers else "model"
    folder.mkdir(parents=True, exist_ok=True)
    if of_diffusers:
        model.save_config(folder)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(folder)
    if weights:
        write_shards(model, folder, stem)
    else:
        (folder / f"{stem}.safetensors").touch()


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
    # Names first: a shard's file name contains the number of all shards.
    shards = list(shards_of(model))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        drawn = {key: random_weight(key, tensor) for key, tensor in shard.items()}
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


if __name__ == "__main__":
    main()
