"""Peak memory of a command: on the card by phase, and in main memory.

Models and adapter are those that the run's own builders make on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from pacorl.models.int8 import streamed_bytes, weight_bytes
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan.judges import Scorer
from pacorl.plan.ledger import measured
from pacorl.plan.passes import Generator, image_encoding_pass

Phase = Literal["encode", "sample", "decode", "score", "train"]
PHASES: dict[Phase, str] = {
    "encode": "encoding prompts, once",
    "sample": "sampling",
    "decode": "decoding images",
    "score": "judging",
    "train": "training",
}
FP32 = 4
PROCESS = 2**30
"""Python, torch, diffusers and transformers took 0.33 GiB, measured without CUDA; the rest is a guess at CUDA's."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes of a command."""

    phases: Mapping[Phase, int] = field(default_factory=dict)
    """On each process's card."""
    host: int = 0
    """In main memory, for all processes of a machine, loading included."""
    held: int = 0
    """`host` without pages of files, which the system may drop and read again."""


def memory_of(
    options: PolicyOptions,
    generator: Generator,
    scorers: Sequence[Scorer] = (),
    *,
    prompts: int,
    encodes_images: bool = False,
    in_turns: bool = False,
    overlap: Sequence[int] = (0, 0),
    least: int = 0,
    copies: int = 0,
    rollouts: int = 0,
    encoded: int = 0,
    world: int = 1,
) -> Memory:
    """Add up models, adapter and buffers in each phase.

    Args:
        options: of the generator.
        generator: as measured. Without an adapter images are only generated, and the text encoders stay.
        scorers: judges and encoders of rewards, which work one at a time.
        prompts: encoded at a time.
        encodes_images: whether images pass the VAE's encoder even if the generator is no editor.
        in_turns: whether generator and scorers take turns on the device.
        overlap: bytes of work at the same time as each batch.
        least: lower bound of the first batch's sampling peak.
        copies: further bytes that lie on the device in an epoch.
        rollouts: bytes of samples in main memory.
        encoded: bytes of encoded prompts in main memory.
        world: processes of a machine.
    """
    figures, pipeline = generator.figures, generator.inputs.policy.pipeline
    adapter, trained, transformer = figures.adapter, figures.trained, figures.weights
    generates = not adapter
    modules = [getattr(pipeline, name) for name in generator.inputs.policy.encoders]
    encoders, streamed_encoders = sum(map(weight_bytes, modules)), sum(map(streamed_bytes, modules))
    scoring = sum(scorer.weights for scorer in scorers)

    # On the device: for the whole of an epoch; while the generator computes; while images are judged.
    epoch = weight_bytes(pipeline.vae) + 2 * adapter + 2 * trained + copies
    together = 0 if in_turns else transformer + scoring + generates * encoders
    computing = together or transformer
    judging = together or scoring
    sampled = [max(figures.sample, least), figures.further][: len(generator.batches)]
    decoded = [decoding.peak for decoding in generator.decodings]
    phases: dict[Phase, float] = {
        "encode": weight_bytes(pipeline.vae) + _encoding_peak(generator, prompts=prompts, images=encodes_images),
        "sample": epoch + computing + max(map(sum, zip(sampled, overlap, strict=False))),
        "decode": epoch + computing + max(map(sum, zip(decoded, overlap, strict=False))),
    }
    phases["encode"] += together if generates and together else encoders
    if scorers:  # the evaluated average replaces the adapter, which is set aside
        phases["score"] = epoch + judging + adapter + max(scorer.buffers for scorer in scorers)
    if not generates:  # AdamW's step needs one number per trained parameter in addition to its moments
        phases["train"] = epoch + computing + trained + max(figures.train, trained)

    # Main memory. An encoder's pages are dropped before the next encoder's are read; streamed ones keep theirs. The
    # transformer's are dropped when its last layer is packed.
    sizes = [weight_bytes(module) + streamed_bytes(module) for module in modules]
    transformer_file = figures.parameters * getattr(torch, options.dtype).itemsize
    files = max(sum(sizes) if options.stream else max(sizes), transformer_file)
    packed = max(0, transformer_file + world * figures.streamed - files)
    placing = packed + world * adapter
    waiting = figures.streamed + sum(scorer.streamed for scorer in scorers) + generates * streamed_encoders
    waiting += in_turns * (transformer + generates * encoders)
    working = world * (waiting + in_turns * scoring) + rollouts
    loading_scorers = world * waiting + max((scorer.files for scorer in scorers), default=0)
    common = encoded + world * PROCESS
    return Memory(
        {phase: round(size) for phase, size in phases.items()},
        host=round(common + max(files + placing, loading_scorers, working)),
        held=round(common + max(placing, working)),
    )


def _encoding_peak(generator: Generator, *, prompts: int, images: bool) -> int:
    """Measure some prompts in the largest encoder, or an image in the VAE's if that has a higher peak."""
    size = max((batch.size for batch in generator.batches), key=lambda size: size.height * size.width)
    text = measured(generator.inputs.text_pass(size, prompts=prompts)).peak
    if not images and not generator.inputs.policy.max_sources:
        return text
    return max(text, image_encoding_pass(generator.inputs, size=size).peak)
