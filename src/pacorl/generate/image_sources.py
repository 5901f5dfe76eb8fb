"""The generator of a queue of images: described by its settings, loaded only if an image is missing."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from pacorl.config.options import packed_form
from pacorl.generate.image_queue import GenerateImages, ImageSource
from pacorl.io.documents import JsonObject
from pacorl.io.files import digest
from pacorl.io.quiet import quiet_loading
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.spec import NO_ADAPTER
from pacorl.types import TINY, Size


def image_source(
    checkpoint: str,
    *,
    kind: str = "",
    edits: bool | None = None,
    adapter: str = "",
    size: Size | None = None,
    steps: int | None = 20,
    memory: str = "normal",
    batch: int = 4,
    seed: int = 0,
    **options: Any,
) -> ImageSource:
    """Describe a generator by any name, without loading it.

    Args:
        checkpoint: a diffusers folder, a hub name, or "tiny".
        kind: a key of POLICIES; detected from the checkpoint if empty.
        edits: whether it must edit images, or generate sets; None for either.
        adapter: a LoRA in any form; a recipe identifies it by its content.
        size: for every prompt; None for the records' own.
        steps: denoising steps; None for the kind's own.
        memory: see `Generator.from_pretrained`.
        options: of the kind by name, such as guidance_scale; None for the checkpoint's default.

    Raises:
        ValueError: the kind has the other purpose, or no such option.
    """
    from pacorl.models.lora import adapter_file

    # Resolve the defaults of the kind.
    kind = kind or kind_of(checkpoint, edits=bool(edits))
    spec = POLICIES.named(kind)
    if edits is not None and not (spec.edits if edits else spec.sets):
        raise ValueError(f"{checkpoint} is of kind {kind!r}, which {'makes sets' if edits else 'edits images'}")
    dtype = "float32" if checkpoint == TINY else "bfloat16"
    settings = spec.options_for(checkpoint, dtype=dtype, **options)

    # Describe the settings that change an image.
    description: JsonObject = {"checkpoint": checkpoint, "steps": steps}
    for name in ("guidance_scale", "max_sequence_length"):
        if hasattr(settings, name):
            description[name] = getattr(settings, name)
    for name, value in options.items():
        if value is not None:
            description[name] = value
    description |= {"dtype": dtype, **packed_form(memory)}
    if size:
        description["size"] = str(size)
    # The base, unless an adapter is named: the tiny generator's own would make a benchmark of something else.
    adapter = adapter or NO_ADAPTER
    adapters = spec.adapters_of(checkpoint, {adapter: 1.0})
    for name in adapters:
        description["adapter"] = digest(adapter_file(spec.adapter_source(checkpoint, name)))
    if edits:
        description["kind"] = kind

    # Loaded late: a folder without missing images needs no weights.
    def load() -> GenerateImages:
        spec.check_source(checkpoint, adapters=adapters)  # before torch is imported
        quiet_loading()
        import torch

        from pacorl.generate.generator import Generator

        # Under torchrun each process uses its own GPU; without a rank, the usual choice.
        rank = os.environ.get("LOCAL_RANK")
        device = f"cuda:{rank}" if rank and torch.cuda.is_available() else ""
        names = {"kind": kind, "adapter": adapter, "dtype": dtype, "memory": memory, "device": device}
        generator = Generator.from_pretrained(checkpoint, **names, **options)
        # Not in the recipe: each image has its own seed, so a batch changes speed and at most last bits.
        generator.batch = batch
        return partial(generator.sample, size=size, steps=steps)

    return ImageSource(load, description, seed=seed, batch=batch)
