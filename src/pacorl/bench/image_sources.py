"""The generator of a benchmark: loaded only if an image is missing, and named in each image's recipe."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from pacorl.bench.benchmarks import GeneratorBenchmarkOptions
from pacorl.config.options import packed_form
from pacorl.generate.image_queue import GenerateImages, ImageSource
from pacorl.io.files import digest
from pacorl.io.quiet import quiet_loading

PANEL = 512
"""Default side of a panel, in pixels."""


def image_source(
    options: GeneratorBenchmarkOptions,
    *,
    edits: bool,
    panel: int = PANEL,
    separate: bool = False,
    previous: bool = False,
) -> ImageSource:
    """Describe the generator of a benchmark's images.

    Args:
        edits: whether it edits images, rather than generate sets.
        panel: the side of a panel, in pixels.
        separate: whether each panel is generated as an image of its own.
        previous: whether each panel has the one before it as a reference.

    Raises:
        ValueError: the model has the other purpose, or takes no reference.
    """
    from pacorl.models.policies import POLICIES, kind_of

    kind = options.kind or kind_of(options.model, edits=edits)
    spec = POLICIES.named(kind)
    if edits and not spec.edits:
        raise ValueError(f"{options.model} is of kind {kind!r}, which makes sets")
    if not edits and not spec.sets:
        raise ValueError(f"{options.model} is of kind {kind!r}, which edits images")
    if previous and not spec.policy.max_references:
        raise ValueError(
            f"{options.model} takes no reference images, so none can be the panel before; leave out previous"
        )
    panels = {"separate": separate, "previous": previous}
    recipe = described(options, panel=panel, **panels) | {"kind": kind}
    load = partial(_load, options, kind, **panels)
    return ImageSource(load, recipe, seed=options.seed, batch=options.image_batch)


def _load(options: GeneratorBenchmarkOptions, kind: str, *, separate: bool, previous: bool) -> GenerateImages:
    from pacorl.models.policies import POLICIES

    # Before torch is imported, which takes seconds.
    POLICIES[kind].check_source(options.model, adapter=options.adapter)
    quiet_loading()
    import torch

    from pacorl.generate.generator import Generator
    from pacorl.generate.separate import sample_separately

    # Under torchrun each process uses its own GPU; without a rank, the usual choice.
    rank = os.environ.get("LOCAL_RANK")
    device = f"cuda:{rank}" if rank and torch.cuda.is_available() else ""
    generator = Generator.from_pretrained(
        options.model,
        kind=kind,
        adapter=options.adapter,
        device=device,
        memory=options.memory,
        **options.policy_options,
    )
    generator.batch = options.image_batch
    sample = partial(sample_separately, generator, previous=previous) if separate else generator.sample
    return lambda prompts, seeds: sample(prompts, seeds, size=options.size, steps=options.steps)


def described(options: GeneratorBenchmarkOptions, *, panel: int = PANEL, **panels: bool) -> dict[str, Any]:
    """Settings that change the images, for their recipes and the results; an adapter by its content.

    `panels` are `separate` and `previous` of `image_source`.
    """
    if options.images:  # finished images have no further description
        return {"images": str(options.images)}
    # Unset options are left out: a new default must not change the recipes of old images.
    given_options = {}
    for name, value in {**options.policy_options, **panels}.items():
        if value is not None and value is not False:
            given_options[name] = value
    # An adapter on the disk by its content: a run writes new weights under the same path.
    adapter = options.adapter
    if adapter:
        path = Path(adapter)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if files:
            adapter = digest(files[0])[:16]
    return {
        "model": options.model,
        "adapter": adapter,
        "size": str(options.size or ""),
        "steps": options.steps,
        "panel": panel,
        "seed": options.seed,
        **packed_form(options.memory),
    } | given_options
