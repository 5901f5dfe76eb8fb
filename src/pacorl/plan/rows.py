"""Components of a run and their bytes: the rows of a plan.

Each component is listed once, for training and for generating. Models and adapter are those that the run's own builders
make on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import torch

from pacorl.config.base import ConfigError
from pacorl.core.devices import NONE
from pacorl.core.sampler import Sampler
from pacorl.grpo.builders import add_adapter
from pacorl.grpo.lora_config import LoraConfig
from pacorl.models.adapters import adapter_state
from pacorl.models.int8 import parameter_count, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan import passes
from pacorl.plan.generators import META, Inputs, policy_on_meta
from pacorl.plan.judges import Scorer
from pacorl.types import Size

Phase = Literal["encode", "load", "sample", "decode", "score", "train"]
Phases = tuple[Phase, ...]
Place = Literal["device", "host", "disk"]

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


@dataclass(frozen=True, slots=True)
class Row:
    """A component's bytes in some phases."""

    component: str
    bytes: int
    parameters: int | None = None
    place: Place = "device"
    phases: Phases = ALL
    """Phases that need it; without meaning for the disk."""
    note: str = ""
    is_file: bool = False
    """Whether these are pages of a file, which the system may drop and read again."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Images that are sampled together."""

    size: Size
    count: int
    beside: int = 0
    """Bytes of work at the same time."""
    least: int = 0
    """Lower bound of the sampling peak."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a run trains: its adapter, and its largest micro-batch."""

    config: LoraConfig
    sampler: Sampler
    batch: int
    with_base: bool = False


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator's bytes and FLOPs, at its full depth."""

    inputs: Inputs
    """Of the policy with the fewest blocks."""
    parameters: int
    weights: int
    """On the device."""
    streamed: int
    adapter: int
    """Bytes of the adapter's weights."""
    trained: int
    """Bytes of the weights that receive gradients."""
    train: int
    """Peak of a trained micro-batch."""
    samples: tuple[int, ...]
    """Peak of sampling each batch."""
    train_flops: float
    """FLOPs of a trained micro-batch."""
    sample_flops: tuple[float, ...]
    """FLOPs of a forward of each batch."""


def measure_generator(
    spec: PolicySpec,
    options: PolicyOptions,
    configs: Parts,
    *,
    images: int | None,
    batches: Sequence[Batch],
    training: Training | None = None,
    record_sizes: bool = False,
) -> Generator:
    """Measure a generator's transformer in a run.

    Args:
        spec: of its kind.
        options: of its weights.
        configs: config.json of each component.
        images: sources and references of a prompt; by default one for an editor.
        batches: that are sampled.
        training: None for generating.
        record_sizes: whether sets have their records' sizes.

    Raises:
        ConfigError: The adapter's targets match no module.
    """
    found: list[Inputs] = []

    def measure(parts: Parts) -> dict[str, float]:
        policy = policy_on_meta(spec, options, parts, record_sizes=record_sizes)
        inputs = Inputs.of(policy)
        inputs.images = inputs.images if images is None else images
        found.append(inputs)
        figures: dict[str, float] = {
            "parameters": parameter_count(policy.transformer),
            "weights": weight_bytes(policy.transformer),
            "streamed": streamed_bytes(policy.transformer),
        }
        if training:
            try:
                with META:
                    add_adapter(training.config, policy)
            except ValueError as error:
                raise ConfigError(f"adapter.targets: {error}") from None
            trained = [weight.nbytes for weight in policy.transformer.parameters() if weight.requires_grad]
            figures |= {
                "adapter": sum(weight.nbytes for weight in adapter_state(policy.transformer).values()),
                "trained": sum(trained),
            }
            step = passes.training_pass(
                inputs, sampler=training.sampler, batch=training.batch, with_base=training.with_base
            )
            figures |= {"train": step.peak, "train_flops": step.flops}
        for number, batch in enumerate(batches):
            forward = passes.sampling_pass(inputs, size=batch.size, batch=batch.count)
            figures |= {f"sample {number}": forward.peak, f"sample_flops {number}": forward.flops}
        return figures

    # Targets that name a block are found at the full depth alone.
    targets = training.config.adapter.targets if training else ()
    names_block = any(re.search(r"blocks\.\d", target) for target in targets)
    figures = measure(configs) if names_block else passes.at_full_depth(configs, measure)

    def whole(name: str) -> int:
        return round(figures.get(name, 0))

    numbers = range(len(batches))
    return Generator(
        found[0],
        parameters=whole("parameters"),
        weights=whole("weights"),
        streamed=whole("streamed"),
        adapter=whole("adapter"),
        trained=whole("trained"),
        train=whole("train"),
        samples=tuple(whole(f"sample {number}") for number in numbers),
        train_flops=figures.get("train_flops", 0.0),
        sample_flops=tuple(figures[f"sample_flops {number}"] for number in numbers),
    )


# --- models ----------------------------------------------------------------------------------------------------


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
    policy = generator.inputs.policy
    pipeline = policy.pipeline
    lies: Phases = ("load", "sample", "decode", "train") if in_turns else ("load", *EPOCH)
    if generates:
        lies = tuple(phase for phase in lies if phase != "load") if in_turns else ALL
    form = options.dtype if options.quantize == NONE else f"{options.quantize} blocks, else {options.dtype}"
    form += ", blocks streamed" if options.stream else ""
    transformer = Row("transformer", generator.weights, generator.parameters, phases=lies, note=form)
    encoders = []
    for attribute, name in policy.encoders.items():
        encoder = getattr(pipeline, attribute)
        stays: Phases = ALL if generates and not in_turns else ("encode",)
        encoders.append(Row(name, weight_bytes(encoder), parameter_count(encoder), phases=stays))
    vae = Row("VAE", weight_bytes(pipeline.vae), parameter_count(pipeline.vae), note=options.dtype)
    asked: Phases = ("score",) if in_turns else (ALL if generates else EPOCH)
    scoring = [Row(each.name, each.weights, each.parameters, phases=asked, note=each.note) for each in scorers]
    rows = [transformer, *encoders, vae, *scoring]

    # Scorers load and work one at a time.
    if scorers:
        working, mapped = max(scorers, key=attrgetter("buffers")), max(scorers, key=attrgetter("files"))
        rows.append(Row(f"{working.name} at work", working.buffers, phases=("score",)))
        rows.append(_host(f"{mapped.name}'s files, mapped", mapped.files, ("load",), is_file=True))

    # Weights that stay in main memory.
    streamed = {"transformer": world * generator.streamed} | {each.name: world * each.streamed for each in scorers}
    if generates:
        streamed |= {name: streamed_bytes(getattr(pipeline, attribute)) for attribute, name in policy.encoders.items()}
    rows += [_host(f"{name}, streamed", size, ("load", *EPOCH)) for name, size in streamed.items() if size]

    # Weights that wait for their turn on the device. All are in main memory while turns change.
    if in_turns:
        parked = world * sum(row.bytes for row in ([transformer, *encoders] if generates else [transformer]))
        rows.append(_host("generator, parked", parked, ("load", "score")))
        parked = world * sum(row.bytes for row in scoring)
        # Generating counts a judge's pages and its parked weights together; a run parks it after its pages are dropped.
        if parked:
            rows.append(_host("models that score, parked", parked, ("load", *EPOCH) if generates else EPOCH))

    # Loading. An encoder's pages are dropped before the next encoder's are read; streamed ones keep theirs.
    sizes = [row.bytes + streamed_bytes(getattr(pipeline, name)) for row, name in zip(encoders, policy.encoders)]  # noqa: B905
    encoder_files = sum(sizes) if options.stream else max(sizes)
    transformer_files = generator.parameters * getattr(torch, options.dtype).itemsize
    files = max(encoder_files, transformer_files)
    rows.append(_host("checkpoint's files, mapped", files, ("encode",), is_file=True))
    rows.append(_host("processes", world * PROCESS, ALL, note=f"{world}, Python and its libraries"))
    # The transformer's pages are dropped when its last layer is packed.
    packed = transformer_files + world * generator.streamed - files
    if packed > 0:
        rows.append(_host("transformer, packed beside its files", packed, ("encode",)))
    return rows


def adapter_rows(generator: Generator) -> list[Row]:
    """List a run's adapter with its gradients, its optimizer's state and its average."""
    size, trained = generator.adapter, generator.trained
    since_loading: Phases = ("load", *EPOCH)
    return [
        Row("adapter", size, size // FP32, phases=since_loading, note="float32"),
        Row("adapter's moving average", size, phases=EPOCH),
        Row("adapter's gradients", trained, phases=("train",)),
        Row("AdamW's moments", 2 * trained, phases=EPOCH),
        Row("adapter, set aside", size, phases=("score",), note="evaluation of the average"),
    ]


def pass_rows(generator: Generator, batches: Sequence[Batch], *, prompts: int) -> list[Row]:
    """List the buffers of encoding, sampling and decoding, each of the batch with the highest peak."""
    inputs = generator.inputs
    largest = max((batch.size for batch in batches), key=lambda size: size.height * size.width)
    encoded = passes.encoding_pass(inputs, size=largest, prompts=prompts).peak
    sampled, decoded = [], []
    for batch, peak in zip(batches, generator.samples, strict=True):
        note = f"{batch.count} at {batch.size}"
        sampled.append(Row("sampling a batch", max(batch.least, peak) + batch.beside, phases=("sample",), note=note))
        decoder = passes.decoding_pass(inputs, size=batch.size).peak
        decoded.append(Row("decoding an image", decoder + batch.beside, phases=("decode",), note=f"1 at {batch.size}"))
    return [
        Row("encoding prompts", encoded, phases=("encode",), note=f"{prompts} at a time"),
        max(sampled, key=attrgetter("bytes")),
        max(decoded, key=attrgetter("bytes")),
    ]


def training_rows(generator: Generator, training: Training) -> list[Row]:
    """List the buffers of a trained micro-batch."""
    checkpointing = "with" if training.config.model.gradient_checkpointing else "without"
    note = f"{training.batch} at {training.sampler.size}, {checkpointing} gradient checkpointing"
    # AdamW's step needs one number per trained parameter in addition to its moments.
    return [
        Row("training a batch", max(generator.train, generator.trained), phases=("train",), note=note),
    ]


def file_rows(config: LoraConfig, adapter: int) -> list[Row]:
    """List the files of a run with an adapter of so many bytes."""
    # Adapter, average and two moments; the newest is written aside before the oldest is deleted.
    checkpoints = 4 * adapter * (config.keep_checkpoints + 1)
    return [
        Row("checkpoints", checkpoints, place="disk", note=f"{config.keep_checkpoints} kept, and one being written"),
        Row("adapter to use", 2 * adapter, place="disk", note="in PEFT and in diffusers form"),
    ]


def host_row(component: str, size: int, phases: Phases, *, note: str = "") -> Row:
    """List bytes of main memory."""
    return _host(component, size, phases, note=note)


def in_phases(rows: Sequence[Row], phases: Phases) -> tuple[Row, ...]:
    """Leave out the phases that a command does not have, and rows of these phases alone."""
    trimmed = []
    for row in rows:
        used = tuple(phase for phase in row.phases if phase in phases)
        if used:
            trimmed.append(replace(row, phases=used))
    return tuple(trimmed)


def _host(component: str, size: int, phases: Phases, *, note: str = "", is_file: bool = False) -> Row:
    return Row(component, size, place="host", phases=phases, note=note, is_file=is_file)
