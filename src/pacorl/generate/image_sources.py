"""The generator of a queue of images: described by its settings, loaded only if an image is missing."""

from __future__ import annotations

import os
from functools import partial

from pacorl.config.options import GeneratorOptions, packed_form
from pacorl.generate.image_queue import GenerateImages, ImageSource
from pacorl.io.documents import JsonObject
from pacorl.io.files import digest
from pacorl.io.quiet import quiet_loading
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.spec import NO_ADAPTER
from pacorl.types import TINY


def image_source(
    options: GeneratorOptions, *, edits: bool | None = None, memory: str = "normal", batch: int = 4
) -> ImageSource:
    """Describe a generator by any name, without loading it.

    Args:
        options: an adapter is in a recipe by its content, and a size is that of every image, not the records' own.
        edits: whether it must edit images, or generate sets; None for either.
        memory: see `Generator.from_pretrained`.

    Raises:
        ValueError: the kind has the other purpose, or no such option.
    """
    from pacorl.models.lora import adapter_file

    # Resolve the defaults of the kind.
    checkpoint, size, steps = options.model, options.size, options.steps
    kind = options.kind or kind_of(checkpoint, edits=bool(edits))
    spec = POLICIES.named(kind)
    if edits is not None and not (spec.edits if edits else spec.sets):
        raise ValueError(f"{checkpoint} is of kind {kind!r}, which {'makes sets' if edits else 'edits images'}")
    dtype = "float32" if checkpoint == TINY else "bfloat16"
    policy_options = options.policy_options
    settings = spec.options_for(checkpoint, dtype=dtype, **policy_options)

    # Describe the settings that change an image.
    description: JsonObject = {"checkpoint": checkpoint, "steps": steps}
    for name in ("guidance_scale", "max_sequence_length"):
        if hasattr(settings, name):
            description[name] = getattr(settings, name)
    for name, value in policy_options.items():
        if value is not None:
            description[name] = value
    description |= {"dtype": dtype, **packed_form(memory)}
    if size:
        description["size"] = str(size)
    # The base, unless an adapter is named: the tiny generator's own would make a benchmark of something else.
    adapter = options.adapter or NO_ADAPTER
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
        generator = Generator.from_pretrained(checkpoint, **names, **policy_options)
        # Not in the recipe: each image has its own seed, so a batch changes speed and at most last bits.
        generator.batch = batch
        return partial(generator.sample, size=size, steps=steps)

    return ImageSource(load, description, seed=options.seed, batch=batch)
