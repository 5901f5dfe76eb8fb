"""Components of a command in memory and their bytes: the rows of a plan.

Models and adapter are those that the run's own builders make on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import torch

from pacorl.models.int8 import streamed_bytes, weight_bytes
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan.judges import Scorer
from pacorl.plan.passes import Generator, encoding_pass

Phase = Literal["encode", "load", "sample", "decode", "score", "train"]
Phases = tuple[Phase, ...]
Place = Literal["device", "host", "files"]

PHASES: dict[Phase, str] = {
    "encode": "encoding prompts, once",
    "load": "after loading, once",
    "sample": "sampling",
    "decode": "decoding images",
    "score": "scoring",
    "train": "training",
}
ALL: Phases = tuple(PHASES)
EPOCH: Phases = ("sample", "decode", "score", "train")

FP32 = 4
PROCESS = 2**30
"""Python, torch, diffusers and transformers took 0.33 GiB, measured without CUDA; the rest is a guess at CUDA's."""


class Row(NamedTuple):
    """A component's bytes in some phases."""

    component: str
    bytes: int
    phases: Phases = ALL
    place: Place = "device"
    """Device, main memory, or pages of files in main memory, which the system may drop and read again."""


def memory_rows(
    options: PolicyOptions,
    generator: Generator,
    scorers: Sequence[Scorer] = (),
    *,
    prompts: int,
    in_turns: bool = False,
    overlap: Sequence[int] = (0, 0),
    least: int = 0,
    world: int = 1,
) -> list[Row]:
    """List models, adapter and buffers on the device, and weights and files in main memory.

    Args:
        options: of the generator.
        generator: as measured. Without an adapter images are only generated, and the text encoders stay.
        scorers: judges and encoders of rewards.
        prompts: encoded at a time.
        in_turns: whether generator and scorers take turns on the device.
        overlap: bytes of work at the same time as each batch.
        least: lower bound of the first batch's sampling peak.
        world: processes of a machine.
    """
    inputs, adapter, trained = generator.inputs, generator.adapter, generator.trained
    generates = not adapter
    pipeline = inputs.policy.pipeline
    modules = {name: getattr(pipeline, attribute) for attribute, name in inputs.policy.encoders.items()}
    encoders = {name: weight_bytes(module) for name, module in modules.items()}
    streamed_encoders = {name: streamed_bytes(module) for name, module in modules.items()}

    # Models on the device.
    lies: Phases = ALL if generates else ("load", *EPOCH)
    if in_turns:
        lies = ("sample", "decode", "train") if generates else ("load", "sample", "decode", "train")
    stays: Phases = ALL if generates and not in_turns else ("encode",)
    scores: Phases = ("score",) if in_turns else ALL if generates else EPOCH
    rows = [Row("transformer", generator.weights, lies), Row("VAE", weight_bytes(pipeline.vae))]
    rows += [Row(name, size, stays) for name, size in encoders.items()]
    rows += [Row(scorer.name, scorer.weights, scores) for scorer in scorers]
    if scorers:  # they load and work one at a time
        working = max(scorers, key=attrgetter("buffers"))
        rows.append(Row(f"{working.name} at work", working.buffers, ("score",)))

    # The adapter, its average and moments, and a trained micro-batch with its gradients. AdamW's step needs one number
    # per trained parameter in addition to its moments.
    rows += [
        Row("adapter", adapter, ("load", *EPOCH)),
        Row("adapter's average and moments", adapter + 2 * trained, EPOCH),
        Row("adapter, set aside for the average", adapter, ("score",)),
        Row("training a batch", trained + max(generator.train, trained), ("train",)),
    ]

    # Buffers, each of the batch with the highest peak.
    largest = max((batch.size for batch in generator.batches), key=lambda size: size.height * size.width)
    sampled = [max(generator.samples[0], least), *generator.samples[1:]]
    decoded = [decoding.peak for decoding in generator.decodings]
    rows += [
        Row("encoding prompts", encoding_pass(inputs, size=largest, prompts=prompts).peak, ("encode",)),
        Row("sampling a batch", max(map(sum, zip(sampled, overlap, strict=False))), ("sample",)),
        Row("decoding an image", max(map(sum, zip(decoded, overlap, strict=False))), ("decode",)),
    ]

    # Weights that stay in main memory, and those that wait there for their turn.
    streamed = {"transformer": generator.streamed} | {scorer.name: scorer.streamed for scorer in scorers}
    streamed |= streamed_encoders if generates else {}
    rows += [Row(f"{name}, streamed", world * size, ("load", *EPOCH), "host") for name, size in streamed.items()]
    if in_turns:
        parked = generator.weights + (sum(encoders.values()) if generates else 0)
        waits: Phases = ("load", *EPOCH) if generates else EPOCH
        rows.append(Row("generator, parked", world * parked, ("load", "score"), "host"))
        rows.append(Row("scorers, parked", world * sum(scorer.weights for scorer in scorers), waits, "host"))

    # Loading. An encoder's pages are dropped before the next encoder's are read; streamed ones keep theirs. The
    # transformer's are dropped when its last layer is packed.
    sizes = [size + streamed_encoders[name] for name, size in encoders.items()]
    transformer_files = generator.parameters * getattr(torch, options.dtype).itemsize
    files = max(sum(sizes) if options.stream else max(sizes), transformer_files)
    packed = max(0, transformer_files + world * generator.streamed - files)
    rows += [
        Row("checkpoint's files", files, ("encode",), "files"),
        Row("scorers' files", max((scorer.files for scorer in scorers), default=0), ("load",), "files"),
        Row("transformer, packed beside its files", packed, ("encode",), "host"),
        Row("processes", world * PROCESS, ALL, "host"),
    ]
    return [row for row in rows if row.bytes]
