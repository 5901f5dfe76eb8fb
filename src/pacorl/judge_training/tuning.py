"""The trained judge: loading, trainable weights, merging and saving."""

import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from pacorl.io.documents import read_object, write_json
from pacorl.io.files import write_atomic
from pacorl.io.pretrained import pretrained
from pacorl.io.processor import load_processor
from pacorl.judge.adapter import lora_config, merge_adapter, read_adapter, with_lora
from pacorl.judge.decision import save_decision
from pacorl.judge.local import EMBEDDED
from pacorl.judge_training.judge_config import RewardTuningConfig
from pacorl.models.adapters import copy_start

VISION = "visual"
"""The vision tower's name in every model of the family."""
PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
}
VIDEO_PROCESSORS = dict.fromkeys(("qwen3_vl", "qwen3_5"), "Qwen3VLVideoProcessor")


def source_of(checkpoint: str) -> str:
    """Resolve a config's `checkpoint` to a folder or hub name.

    Raises:
        ValueError: it is an adapter, or a model of another family.
    """
    source = str(EMBEDDED.get(checkpoint, checkpoint))
    lora = lora_config(source, fetch=True)
    if lora:
        base = lora.get("base_model_name_or_path") or "BASE"
        raise ValueError(f"{checkpoint} is a LoRA adapter; set model.checkpoint={base} tuning.start={checkpoint}")
    kind = pretrained(AutoConfig, source).model_type
    if kind not in PROCESSORS:
        raise ValueError(f"{checkpoint} is a {kind}; a judge is of {', '.join(PROCESSORS)}")
    return source


def processor_of(checkpoint: str, *, max_pixels: int = 0) -> Any:
    """Load the checkpoint's processor with a limit of `max_pixels` per image (0 for its own limit)."""
    processor = load_processor(source_of(checkpoint))
    # Pixels, by transformers' names for both bounds.
    size = dict(processor.image_processor.size)
    if max_pixels and max_pixels < size["longest_edge"]:
        if max_pixels < size["shortest_edge"]:
            raise ValueError(
                f"model.max_pixels {max_pixels} is below the least that {checkpoint} takes ({size['shortest_edge']})"
            )
        processor.image_processor.size = size | {"longest_edge": max_pixels}
    return processor


def load_model(checkpoint: str, *, dtype: str) -> Any:
    """Load the checkpoint's model on the CPU. Raises ValueError if its weights are damaged."""
    return pretrained(AutoModelForImageTextToText, source_of(checkpoint), dtype=getattr(torch, dtype))


def tune(model: Any, options: RewardTuningConfig) -> Any:
    """Add a trainable LoRA to a model, freeze the rest, and return the model.

    Raises:
        ValueError: `start` is no adapter of these layers.
    """
    targets = set()
    for name, module in model.model.language_model.named_modules():
        if isinstance(module, nn.Linear):
            # A layer's own name; with its parent's if it is a number (`mlp.0`), which would match anywhere.
            targets.add(re.findall(r"[^.]+(?:\.\d+)?$", name)[0])
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=sorted(targets),
        # The paper freezes the vision tower, whose layers share names with the language model's.
        exclude_modules=rf".*\b{VISION}\b.*",
        task_type="CAUSAL_LM",
    )
    # Before PEFT wraps the model's layers.
    start = read_adapter(model, options.start) if options.start else None
    adapted = with_lora(model, config)
    if start:
        shape = {"rank": options.rank, "alpha": options.alpha}
        copy_start(adapted.get_base_model(), start, **shape, key="tuning.start", source=options.start)
    return adapted


def merge_and_save(checkpoint: str, adapter: Path, out: Path, *, dtype: str, processor: Any) -> None:
    """Write the checkpoint with an adapter merged into it and the processor, as transformers and vLLM load it."""
    model = merge_adapter(load_model(checkpoint, dtype=dtype), str(adapter))
    if isinstance(model.generation_config, GenerationConfig) and not model.generation_config.do_sample:
        # transformers refuses to save a greedy checkpoint's unused sampling settings.
        model.generation_config.update(temperature=None, top_p=None, top_k=None)
    model.save_pretrained(out)
    save_processor(processor, out, source=source_of(checkpoint))


def save_processor(processor: Any, out: Path, *, source: str) -> None:
    """Write the processor under the file names of the released checkpoints.

    vLLM's transformers loads a part for videos too, which has the images' settings.
    """
    kind = pretrained(AutoConfig, source).model_type
    out.mkdir(parents=True, exist_ok=True)
    processor.tokenizer.save_pretrained(out)

    # The tokenizer has written its own template, which may differ.
    write_atomic(out / "chat_template.jinja", processor.chat_template)
    image = processor.image_processor.to_dict() | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": PROCESSORS[kind],
    }
    write_json(out / "preprocessor_config.json", image)

    # For servers that answer decisions without pacorl.
    save_decision(out, processor)

    # The part for videos.
    video = image | {"video_processor_type": VIDEO_PROCESSORS.get(kind, "Qwen2VLVideoProcessor")}
    del video["image_processor_type"]
    write_json(out / "video_preprocessor_config.json", video)
    tokenizer = out / "tokenizer_config.json"
    write_json(tokenizer, read_object(tokenizer) | {"processor_class": PROCESSORS[kind]})
