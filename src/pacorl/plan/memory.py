"""Peak memory of a command: on the card by phase, and in main memory.

Models and adapter are those that the run's own builders make on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Literal

import torch

from pacorl.models.int8 import streamed_bytes, weight_bytes
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan.judges import Scorer
from pacorl.plan.passes import Generator, encoding_peak

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
    in_turns: bool = False,
    prompts: int = 1,
    encodes_images: bool = False,
    epoch: float = 0,
    sampling: float = 0,
    least: float = 0,
    encoded: float = 0,
    samples: float = 0,
    world: int = 1,
) -> Memory:
    """Add up models, adapter and buffers in each phase.

    Args:
        options: of the generator.
        generator: as measured. Without an adapter images are only generated, and the text encoders stay.
        scorers: judges and encoders of rewards, which work one at a time.
        in_turns: whether generator and scorers take turns on the card.
        prompts: encoded at a time.
        encodes_images: whether images pass the VAE's encoder even if the generator is no editor.
        epoch: further bytes that lie on the card in an epoch.
        sampling: further bytes during sampling and decoding, outside of an evaluation.
        least: lower bound of the sampling's peak.
        encoded: bytes of encoded prompts in main memory.
        samples: bytes of an epoch's samples in main memory.
        world: processes of a machine.
    """
    # Models on the card. Without an adapter to train, the text encoders stay with the transformer.
    figures, pipeline = generator.figures, generator.inputs.policy.pipeline
    encoders = [getattr(pipeline, name) for name in generator.inputs.policy.encoders]
    encoding: float = sum(map(weight_bytes, encoders))
    scoring = sum(scorer.weights for scorer in scorers)
    generates = not figures.adapter
    loaded = figures.weights
    if generates:
        loaded += encoding
    generating = figures.weights
    judging: float = scoring
    if not in_turns:
        generating = judging = loaded + scoring
    if generates and not in_turns:
        encoding = loaded + scoring

    # Phases: adapter and average, AdamW's two moments. An evaluated average sets the adapter aside.
    vae = weight_bytes(pipeline.vae)
    epoch += vae + 2 * figures.adapter + 2 * figures.trained
    sampled = max(max(figures.sample, least) + sampling, figures.evaluate + figures.adapter)
    decoded = max(map(add, (decoding.peak for decoding in generator.decodings), (sampling, figures.adapter)))
    phases: dict[Phase, float] = {
        "encode": vae + encoding + encoding_peak(generator, prompts=prompts, images=encodes_images),
        "sample": epoch + generating + sampled,
        "decode": epoch + generating + decoded,
    }
    if scorers:
        phases["score"] = epoch + judging + figures.adapter + max(scorer.buffers for scorer in scorers)
    if not generates:  # AdamW's step needs one number per trained parameter in addition to its moments
        phases["train"] = epoch + generating + figures.trained + max(figures.train, figures.trained)

    # Main memory: weights that are streamed, or wait for their turn.
    waiting = figures.streamed + sum(scorer.streamed for scorer in scorers)
    if generates:
        waiting += sum(map(streamed_bytes, encoders))
    working = waiting
    if in_turns:
        waiting += loaded
        working += loaded + scoring
    adapted = figures.streamed + figures.adapter
    # The largest file read meanwhile. An encoder's pages are dropped before the next one's, unless it is streamed.
    sizes = [weight_bytes(encoder) + streamed_bytes(encoder) for encoder in encoders]
    encoder_files = sum(sizes) if options.stream else max(sizes)
    file = max(encoder_files, figures.parameters * getattr(torch, options.dtype).itemsize)
    scorer_file = max((scorer.files for scorer in scorers), default=0)
    common = encoded + world * PROCESS
    return Memory(
        {phase: round(size) for phase, size in phases.items()},
        host=round(common + max(file + world * adapted, scorer_file + world * waiting, world * working + samples)),
        held=round(common + max(world * adapted, world * working + samples)),
    )
