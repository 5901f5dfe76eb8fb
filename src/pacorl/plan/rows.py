"""Components of a run and their bytes: the rows of a plan.

Models and adapter are those that the run's own builders make on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import torch

from pacorl.models.int8 import streamed_bytes, weight_bytes
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import passes
from pacorl.plan.judges import Scorer
from pacorl.plan.passes import Batch, Generator

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


def model_rows(
    options: PolicyOptions,
    generator: Generator,
    scorers: Sequence[Scorer],
    *,
    in_turns: bool,
    generates: bool = False,
    world: int = 1,
) -> list[Row]:
    """List the models: weights on the device and in main memory, and the files that they are read from.

    Args:
        options: of the generator.
        generator: as measured.
        scorers: judges and encoders of rewards.
        in_turns: whether generator and scorers take turns on the device.
        generates: whether images are generated, and nothing is trained: the text encoders then stay.
        world: processes of a machine.
    """
    pipeline = generator.inputs.policy.pipeline
    modules = {name: getattr(pipeline, attribute) for attribute, name in generator.inputs.policy.encoders.items()}
    encoders = {name: weight_bytes(module) for name, module in modules.items()}
    streamed_encoders = {name: streamed_bytes(module) for name, module in modules.items()}
    scoring = sum(scorer.weights for scorer in scorers)

    # The device.
    together: Phases = ALL if generates else EPOCH
    lies: Phases = ALL if generates else ("load", *EPOCH)
    if in_turns:
        lies = ("sample", "decode", "train") if generates else ("load", "sample", "decode", "train")
    stays: Phases = ALL if generates and not in_turns else ("encode",)
    rows = [Row("transformer", generator.weights, lies), Row("VAE", weight_bytes(pipeline.vae))]
    rows += [Row(name, size, stays) for name, size in encoders.items()]
    rows += [Row(scorer.name, scorer.weights, ("score",) if in_turns else together) for scorer in scorers]
    if scorers:  # they load and work one at a time
        working = max(scorers, key=attrgetter("buffers"))
        rows.append(Row(f"{working.name} at work", working.buffers, ("score",)))
        rows.append(Row("scorers' files", max(scorer.files for scorer in scorers), ("load",), "files"))

    # Weights that stay in main memory, and those that wait there for their turn.
    streamed = {"transformer": generator.streamed} | {scorer.name: scorer.streamed for scorer in scorers}
    if generates:
        streamed |= streamed_encoders
    for name, size in streamed.items():
        rows.append(Row(f"{name}, streamed", world * size, ("load", *EPOCH), "host"))
    if in_turns:
        parked = generator.weights + (sum(encoders.values()) if generates else 0)
        rows.append(Row("generator, parked", world * parked, ("load", "score"), "host"))
        waits: Phases = ("load", *EPOCH) if generates else EPOCH
        rows.append(Row("scorers, parked", world * scoring, waits, "host"))

    # Loading. An encoder's pages are dropped before the next encoder's are read; streamed ones keep theirs. The
    # transformer's are dropped when its last layer is packed.
    sizes = [size + streamed_encoders[name] for name, size in encoders.items()]
    transformer_files = generator.parameters * getattr(torch, options.dtype).itemsize
    files = max(sum(sizes) if options.stream else max(sizes), transformer_files)
    packed = max(0, transformer_files + world * generator.streamed - files)
    rows.append(Row("checkpoint's files", files, ("encode",), "files"))
    rows.append(Row("transformer, packed beside its files", packed, ("encode",), "host"))
    rows.append(Row("processes", world * PROCESS, ALL, "host"))
    return [row for row in rows if row.bytes]


def adapter_rows(generator: Generator) -> list[Row]:
    """List a run's adapter, its gradients, its optimizer's state and its average, and a trained micro-batch."""
    size, trained = generator.adapter, generator.trained
    return [
        Row("adapter", size, ("load", *EPOCH)),
        Row("adapter's moving average", size, EPOCH),
        Row("adapter's gradients", trained, ("train",)),
        Row("AdamW's moments", 2 * trained, EPOCH),
        Row("adapter, set aside for the average", size, ("score",)),
        # AdamW's step needs one number per trained parameter in addition to its moments.
        Row("training a batch", max(generator.train, trained), ("train",)),
    ]


def pass_rows(
    generator: Generator, batches: Sequence[Batch], *, overlap: Sequence[int], least: int = 0, prompts: int
) -> list[Row]:
    """List the buffers of encoding, sampling and decoding, each of the batch with the highest peak.

    Args:
        generator: as measured with these batches.
        batches: that are sampled.
        overlap: bytes of work at the same time as each.
        least: lower bound of the first batch's sampling peak.
        prompts: encoded at a time.
    """
    inputs = generator.inputs
    largest = max((batch.size for batch in batches), key=lambda size: size.height * size.width)
    sampled = [max(generator.samples[0], least), *generator.samples[1:]]
    decoded = [passes.decoding_pass(inputs, size=batch.size).peak for batch in batches]
    return [
        Row("encoding prompts", passes.encoding_pass(inputs, size=largest, prompts=prompts).peak, ("encode",)),
        Row("sampling a batch", max(map(sum, zip(sampled, overlap, strict=True))), ("sample",)),
        Row("decoding an image", max(map(sum, zip(decoded, overlap, strict=True))), ("decode",)),
    ]


def disk_bytes(adapter: int, *, keep: int) -> int:
    """Compute the bytes of a run's files: checkpoints and the adapter in PEFT and diffusers form."""
    # Adapter, average and two moments; the newest checkpoint is written aside before the oldest is deleted.
    return 4 * adapter * (keep + 1) + 2 * adapter


def in_phases(rows: Sequence[Row], phases: Phases) -> tuple[Row, ...]:
    """Leave out the phases that a command does not have."""
    return tuple(row._replace(phases=tuple(phase for phase in row.phases if phase in phases)) for row in rows)
