"""Components of a run and their bytes: the rows of a plan.

Each component is listed once, for training and for generating. Models and adapter are those that the run's own builders
make on the meta device, and passing buffers are measured by `memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import torch

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config.base import ConfigError
from pacorl.core.devices import NONE
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler
from pacorl.grpo.builders import add_adapter
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import JudgeSettings
from pacorl.models.adapters import adapter_state
from pacorl.models.int8 import parameter_count, streamed_bytes, weight_bytes
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.plan import generators, memory
from pacorl.plan.generators import META, Inputs, model_on_meta
from pacorl.plan.sources import clip_encoders, clip_parts
from pacorl.plan.work import Work
from pacorl.types import Grid, Prompt, Size

Phase = Literal["encode", "check", "sample", "decode", "score", "train"]
Phases = tuple[Phase, ...]
Place = Literal["device", "host", "disk"]

PHASES: dict[Phase, str] = {
    "encode": "encoding prompts, once",
    "check": "checking the adapter, once",
    "sample": "sampling",
    "decode": "decoding images",
    "score": "scoring",
    "train": "training",
}
EPOCH: Phases = ("sample", "decode", "score", "train")
PLACES: dict[Place, str] = {"device": "device", "host": "main memory", "disk": "disk"}

CLIP_BATCH = 32
"""Images per forward of a CLIP."""
FP32 = 4
PROCESS = 2**30
"""Python, torch, diffusers and transformers took 0.33 GiB, measured without CUDA; the rest is a guess at CUDA's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    component: str
    bytes: int
    parameters: int | None = None
    place: Place = "device"
    phases: Phases = tuple(PHASES)
    """Phases that need it; without meaning for the disk."""
    note: str = ""
    is_file: bool = False
    """Whether these are pages of a file, which the system may drop and read again."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Phases in which each kind of model is on the device."""

    encoders: Phases
    transformer: Phases
    scorers: Phases
    always: Phases
    """All phases."""
    keeps_encoders: bool = False
    """Whether the text encoders stay in memory after the prompts are encoded."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A judge or reward model of this process; sizes in bytes."""

    name: str
    parameters: int
    weights: int
    """On the device."""
    streamed: int
    """Weights that stay in main memory."""
    buffers: int
    files: int
    form: str
    batch: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Images that are sampled and decoded together."""

    size: Size
    count: int
    concurrent: int = 0
    """Bytes of concurrent work."""
    least: int = 0
    """Lower bound of the sampling peak."""
    note: str = ""


def inputs_on_meta(config: PolicyConfig, configs: Parts) -> Inputs:
    """Build the run's generator from the configs of its parts, without weights.

    Args:
        config: the run.
        configs: config.json of each component.

    Raises:
        ConfigError: VAE and patches do not divide a size of the config; the message names the nearest.
    """
    spec = config.generator
    policy = generators.policy_on_meta(spec, config.model, configs, record_sizes=config.prompts.record_sizes)
    # Both sizes, since an evaluation may have its own.
    for key, size in (("sampling.size", config.sampling.size), ("evaluation.size", config.evaluation.size)):
        try:
            policy.check_size(Size(*size))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    return Inputs.of(policy)


# --- the lists -------------------------------------------------------------------------------------------------


def training_rows(
    config: PolicyConfig,
    *,
    work: Work,
    inputs: Inputs,
    judge: Parts,
    held_out_judge: Parts,
    prompts: Sequence[Prompt],
    world: int = 1,
) -> tuple[Row, ...]:
    """List the components of a run on a device, in a machine's main memory and on disk.

    Args:
        config: the run.
        work: its forwards and latents.
        inputs: of the policy on the meta device, which receives the run's adapter.
        judge: parts of the run's judge, ignored unless it runs in this process.
        held_out_judge: parts of the evaluation's judge, likewise.
        prompts: prompts of training and evaluation.
        world: processes, all on one machine.

    Raises:
        ConfigError: The adapter's targets match no module.
    """
    policy = inputs.policy
    # With little memory, generator and scorers take turns on the device.
    scorers = _scorers(config, judge, held_out_judge, prompts)
    in_turns = config.in_turns and bool(scorers)
    schedule = Schedule(
        encoders=("encode",),
        transformer=("check", "sample", "decode", "train") if in_turns else ("check", *EPOCH),
        scorers=("score",) if in_turns else EPOCH,
        always=tuple(PHASES),
    )
    # Scorers may work during sampling.
    overlaps = not in_turns and (config.judge is None or config.judge.overlap)
    concurrent = max((scorer.buffers for scorer in scorers), default=0) if overlaps else 0
    return (
        # Models before the adapter, which changes the transformer, and the adapter before its forwards.
        *_model_rows(config.model, policy, schedule, scorers, in_turns=in_turns, world=world),
        *adapter_rows(config, policy, world=world),
        *_training_buffers(config, inputs, work, concurrent=concurrent),
        *_record_rows(config, inputs, work, prompts=len(prompts), world=world),
    )


def generation_rows(
    options: PolicyOptions, inputs: Inputs, *, size: Size, low: bool, judge: Scorer | None = None
) -> tuple[Row, ...]:
    """List the components of generating one image at a time, and of the judge of candidates.

    With `low` encoders, transformer and judge share the device.
    """
    policy = inputs.policy
    phases: Phases = ("encode", "sample", "decode", "score") if judge else ("encode", "sample", "decode")
    schedule = Schedule(
        encoders=("encode",) if low else phases,
        transformer=("sample", "decode") if low else phases,
        scorers=("score",) if low else phases,
        always=phases,
        keeps_encoders=True,
    )
    # Models, then the passes of one image.
    rows = _model_rows(options, policy, schedule, [judge] if judge else [], in_turns=low)
    rows += _buffers(inputs, [Batch(size, 1)], prompts=1)
    # Generating checks no adapter: this phase is the moment after loading, when all models are in main memory.
    return in_phases(rows, ("check", *phases))


def character_rows(config: CharacterConfig, inputs: Inputs, *, images: int) -> tuple[Row, ...]:
    """List the components of a character's training on `images` images.

    Raises:
        ConfigError: The adapter's targets match no module.
    """
    policy = inputs.policy
    size = Size(*config.size)
    batch = config.optimizer.micro_batch
    phases: Phases = ("encode", "check", "sample", "decode", "train")
    schedule = Schedule(encoders=("encode",), transformer=phases[1:], scorers=(), always=phases)

    # Models before the adapter, which changes the transformer, and the adapter before its forwards.
    rows = _model_rows(config.model, policy, schedule, [], in_turns=False)
    rows += lora_rows(config, policy)
    rows += _buffers(inputs, [Batch(size, batch, adapter_bytes(policy))], prompts=policy.encode_batch)

    # Training and the check of the adapter; the loss is of the unguided velocity.
    policy.options = config.model.unguided
    sampler = Sampler(size=size, steps=config.gallery.steps)
    single = memory.training_pass(inputs, sampler=sampler, batch=1, with_base=False).peak
    trained = memory.training_pass(inputs, sampler=sampler, batch=batch, with_base=False).peak
    policy.options = config.model
    checkpointing = "with" if config.model.gradient_checkpointing else "without"
    note = f"{batch} at {size}, {checkpointing} gradient checkpointing"
    rows.append(Row("a forward and backward", single, phases=("check",), note=f"1 at {size}"))
    rows.append(Row("training a batch", max(trained, trained_bytes(policy)), phases=("train",), note=note))

    # Images and files.
    encoded = memory.image_encoding_pass(inputs, size=size).peak
    rows.append(Row("encoding an image", encoded, phases=("encode",), note=f"1 at {size}"))
    latents = images * policy.noise([0], size).numel() * FP32
    rows.append(_host("latents of the images", latents, phases, note=f"{images} images"))
    rows += _adapter_files(config, adapter_bytes(policy))
    return in_phases(rows, phases)


def in_phases(rows: Sequence[Row], phases: Phases) -> tuple[Row, ...]:
    """Leave out the phases that a command does not have, and rows of these phases alone."""
    trimmed = []
    for row in rows:
        used = tuple(phase for phase in row.phases if phase in phases)
        if used:
            trimmed.append(replace(row, phases=used))
    return tuple(trimmed)


# --- models ----------------------------------------------------------------------------------------------------


def _model_rows(
    options: PolicyOptions,
    policy: PipelinePolicy,
    schedule: Schedule,
    scorers: Sequence[Scorer],
    *,
    in_turns: bool,
    world: int = 1,
) -> list[Row]:
    """List the models: weights on the device and in main memory, the scorers' buffers, and the mapped files."""
    # Weights on the device.
    pipeline = policy.pipeline
    transformer = Row(
        "transformer",
        weight_bytes(pipeline.transformer),
        parameter_count(pipeline.transformer),
        phases=schedule.transformer,
        note=_form(options),
    )
    encoders = []
    note = "" if schedule.keeps_encoders else "then gone"
    for attribute, name in policy.encoders.items():
        encoder = getattr(pipeline, attribute)
        row = Row(name, weight_bytes(encoder), parameter_count(encoder), phases=schedule.encoders, note=note)
        encoders.append(row)
    weights = weight_bytes(pipeline.vae)
    vae = Row("VAE", weights, parameter_count(pipeline.vae), phases=schedule.always, note=options.dtype)
    scoring = []
    for scorer in scorers:
        note = f"{scorer.form}, in every process"
        scoring.append(Row(scorer.name, scorer.weights, scorer.parameters, phases=schedule.scorers, note=note))
    rows = [transformer, *encoders, vae, *scoring]

    # Scorers load and work one at a time.
    if scorers:
        working = max(scorers, key=attrgetter("buffers"))
        mapped = max(scorers, key=attrgetter("files"))
        rows.append(Row(f"{working.name} at work", working.buffers, phases=("score",), note=working.batch))
        rows.append(_mapped(f"{mapped.name}'s files, mapped", mapped.files, phases=("check",)))

    # Weights that stay in main memory.
    streamed = {"transformer": world * streamed_bytes(pipeline.transformer)}
    if schedule.keeps_encoders:
        streamed |= {name: streamed_bytes(getattr(pipeline, attribute)) for attribute, name in policy.encoders.items()}
    streamed |= {scorer.name: world * scorer.streamed for scorer in scorers}
    for name, size in streamed.items():
        if size:
            rows.append(_host(f"{name}, streamed", size, ("check", *EPOCH), note="sent in each forward"))

    # Weights that wait for their turn on the device. All are in main memory while turns change.
    if in_turns:
        generator = [transformer, *encoders] if schedule.keeps_encoders else [transformer]
        parked = world * sum(row.bytes for row in generator)
        rows.append(_host("generator, parked", parked, ("check", "score"), note="memory: low"))
        parked = world * sum(row.bytes for row in scoring)
        # Generating counts a judge's pages and its parked weights together; a run parks it after its pages are dropped.
        phases: Phases = ("check", *EPOCH) if schedule.keeps_encoders else EPOCH
        if parked:
            rows.append(_host("models that score, parked", parked, phases, note="memory: low"))
    return [*rows, *_loading_rows(options, policy, world=world)]


def _loading_rows(options: PolicyOptions, policy: PipelinePolicy, *, world: int) -> list[Row]:
    """List the processes, and the files that they map while the generator is loaded."""
    # An encoder's pages are dropped before the next encoder's are read. Streamed encoders keep theirs until the end.
    encoders = [getattr(policy.pipeline, name) for name in policy.encoders]
    sizes = [weight_bytes(encoder) + streamed_bytes(encoder) for encoder in encoders]
    encoder_files = sum(sizes) if options.stream else max(sizes)
    transformer_files = parameter_count(policy.transformer) * getattr(torch, options.dtype).itemsize
    files = max(encoder_files, transformer_files)
    rows = [
        _mapped("checkpoint's files, mapped", files, phases=("encode",)),
        _host("processes", world * PROCESS, tuple(PHASES), note=f"{world}, Python and its libraries"),
    ]
    # The transformer's pages are dropped when its last layer is packed.
    packed = transformer_files + world * streamed_bytes(policy.transformer) - files
    if packed > 0:
        rows.append(_host("transformer, packed beside its files", packed, ("encode",)))
    return rows


def _scorers(config: PolicyConfig, judge: Parts, held_out_judge: Parts, prompts: Sequence[Prompt]) -> list[Scorer]:
    """Measure the judges and the encoders of rewards that run in this process."""
    # The grid with the fewest panels has the largest panels, and so the most tokens per question.
    grid = min((prompt.grid for prompt in prompts), key=attrgetter("count"), default=Grid(2, 2))
    height = max(config.sampling.size[0], config.evaluation.size[0])
    width = max(config.sampling.size[1], config.evaluation.size[1])
    panel = Size(height // grid.rows, width // grid.cols)

    # Judges of this process; a judge behind HTTP takes no memory here.
    judges = [("judge", config.judge, judge), ("evaluation's judge", config.evaluation.judge, held_out_judge)]
    scorers = []
    for name, options, configs in judges:
        if options and not options.remote:
            scorers.append(judge_scorer(name, options, configs, panel=panel))

    # Rewards of one checkpoint share an encoder, which is named after the last of them.
    encoders = {id(encoder): (key, encoder) for key, encoder in clip_encoders(config).items()}
    images = min(CLIP_BATCH, config.sampling.batch * grid.count)
    for key, encoder in encoders.values():
        model = model_on_meta(clip_parts(encoder), dtype=getattr(torch, encoder.dtype))
        scorer = Scorer(
            f"CLIP of {key.split('.')[-3]}",
            parameter_count(model),
            weight_bytes(model),
            streamed=0,
            buffers=memory.clip_pass(model, images=images).peak,
            files=weight_bytes(model),
            form=encoder.dtype,
            batch=f"{images} panels",
        )
        scorers.append(scorer)
    return scorers


def judge_scorer(name: str, options: JudgeSettings, configs: Parts, *, panel: Size) -> Scorer:
    """Measure a judge of this process, and its batch of questions about two panels each."""
    cost, questions = memory.judge_batch(options, configs, panel=panel)
    return Scorer(
        name,
        cost.parameters,
        cost.bytes,
        cost.streamed,
        buffers=cost.peak,
        files=cost.parameters * getattr(torch, options.dtype).itemsize,
        form=_form(options),
        batch=f"{questions} questions of {memory.pair_tokens(panel, configs)} tokens",
    )


# --- adapter and optimizer -------------------------------------------------------------------------------------


def lora_rows(config: LoraConfig, policy: PipelinePolicy) -> list[Row]:
    """Add a run's adapter to the policy, and list it with its gradients and optimizer state."""
    try:
        with META:
            add_adapter(config, policy)
    except ValueError as error:
        raise ConfigError(f"adapter.targets: {error}") from None

    # The weights and all that is as large: average, gradients, AdamW's two moments, the copy set aside.
    size = adapter_bytes(policy)
    trained = trained_bytes(policy)
    since_check: Phases = ("check", *EPOCH)
    return [
        Row("adapter", size, size // FP32, phases=since_check, note=f"float32, rank {config.adapter.rank}"),
        Row("adapter's moving average", size, phases=EPOCH),
        Row("adapter's gradients", trained, phases=("check", "train")),
        Row("AdamW's moments", 2 * trained, phases=EPOCH),
        Row("adapter, set aside", size, phases=("score",), note="evaluation of the average"),
    ]


def adapter_rows(config: PolicyConfig, policy: PipelinePolicy, *, world: int) -> list[Row]:
    """List `lora_rows`, and the further copies of the adapter by the run's settings."""
    rows = lora_rows(config, policy)
    if world > 1:
        note = "in which DDP sums them"
        rows.append(Row("gradients' buckets", trained_bytes(policy), phases=EPOCH, note=note))
    if OBJECTIVES[config.objective.name].needs == "endpoint":
        rows.append(Row("adapter that samples", adapter_bytes(policy), phases=EPOCH, note=config.objective.name))
    return rows


def adapter_bytes(policy: PipelinePolicy) -> int:
    """Add up the adapter's weights."""
    return sum(weight.nbytes for weight in adapter_state(policy.transformer).values())


def trained_bytes(policy: PipelinePolicy) -> int:
    """Add up the weights that receive gradients."""
    return sum(parameter.nbytes for parameter in policy.transformer.parameters() if parameter.requires_grad)


# --- passing buffers -------------------------------------------------------------------------------------------


def _training_buffers(config: PolicyConfig, inputs: Inputs, work: Work, *, concurrent: int) -> list[Row]:
    """Measure the peak of one batch per phase; `concurrent`: bytes that scorers use during sampling."""
    policy = inputs.policy
    size = policy.nearest_size(Size(*config.sampling.size))
    evaluation_size = policy.nearest_size(Size(*config.evaluation.size))

    # Training: a batch of nodes if the tree branches, else a batch of samples.
    sampler = work.sampler.model_copy(update={"size": size})
    nodes = work.node_batch or config.sampling.batch
    with_base = config.objective.kl_weight > 0
    single = memory.training_pass(inputs, sampler=sampler, batch=1, with_base=False).peak
    trained = single
    if nodes > 1 or with_base:
        trained = memory.training_pass(inputs, sampler=sampler, batch=nodes, with_base=with_base).peak

    # Compiled SDE steps are sampled as they are trained. The average replaces the adapter during an evaluation.
    least = trained if config.model.compile != "none" and work.node_batch else 0
    note = ", beside what scores" if concurrent else ""
    batches = [
        Batch(size, config.sampling.batch, concurrent, least, note),
        Batch(evaluation_size, config.evaluation.batch, adapter_bytes(policy), note=", the adapter set aside"),
    ]

    # AdamW's step needs one number per trained parameter in addition to its moments.
    step = trained_bytes(policy)
    checkpointing = "with" if config.model.gradient_checkpointing else "without"
    note = f"{nodes} at {size}, {checkpointing} gradient checkpointing"
    return [
        *_buffers(inputs, batches, prompts=policy.encode_batch),
        Row("a forward and backward", single, phases=("check",), note=f"1 at {size}"),
        Row("training a batch", max(trained, step), phases=("train",), note=note),
    ]


def _buffers(inputs: Inputs, batches: Sequence[Batch], *, prompts: int) -> list[Row]:
    """Measure encoding, sampling and decoding, each for the batch with the highest peak."""
    size = max((batch.size for batch in batches), key=lambda size: size.height * size.width)
    encoded = memory.encoding_pass(inputs, size=size, prompts=prompts).peak

    # The batch with the highest peak may differ between sampling and decoding.
    sampled = []
    decoded = []
    for batch in batches:
        note = f"{batch.count} at {batch.size}{batch.note}"
        peak = max(batch.least, memory.sampling_pass(inputs, size=batch.size, batch=batch.count).peak)
        sampled.append(Row("sampling a batch", peak + batch.concurrent, phases=("sample",), note=note))
        # An accelerator decodes the images of a batch one by one.
        peak = memory.decoding_pass(inputs, size=batch.size, batch=1).peak
        note = f"1 at {batch.size}{batch.note}"
        decoded.append(Row("decoding an image", peak + batch.concurrent, phases=("decode",), note=note))
    return [
        Row("encoding prompts", encoded, phases=("encode",), note=f"{prompts} at a time"),
        max(sampled, key=attrgetter("bytes")),
        max(decoded, key=attrgetter("bytes")),
    ]


# --- samples, prompts and checkpoints --------------------------------------------------------------------------


def _record_rows(config: PolicyConfig, inputs: Inputs, work: Work, *, prompts: int, world: int) -> list[Row]:
    """List samples, prompts and adapters in main memory, and checkpoints on disk."""
    policy = inputs.policy
    size = policy.nearest_size(Size(*config.sampling.size))
    adapter = adapter_bytes(policy)

    # Rollouts: latents of the trained steps in fp32, 8-bit images, and with panel credit a log-probability per token.
    noise_BNC = policy.noise([0], size)
    rollouts = work.latents * noise_BNC.numel() * FP32 + work.samples * 3 * size.height * size.width
    if config.advantages.panel_share:
        rollouts += work.samples * len(work.sampler.stochastic_steps) * noise_BNC.shape[1] * FP32
    rollout_note = f"{work.samples} samples: latents of the trained steps, images"

    # Encoded prompts, in one file for all processes.
    conditioning = inputs.conditioning(size, batch=1).tensors.values()
    encoded = prompts or config.prompts_per_epoch + config.prompts.evaluation_limit
    encoded_bytes = encoded * sum(tensor.nbytes for tensor in conditioning)

    # An evaluation's 8-bit images.
    images = config.prompts.evaluation_limit * config.evaluation.samples_per_prompt
    evaluated = policy.nearest_size(Size(*config.evaluation.size))
    image_bytes = images * 3 * evaluated.height * evaluated.width

    return [
        _host("adapters, before they are placed", world * adapter, ("encode",)),
        _host("an epoch's rollouts", rollouts, EPOCH, note=rollout_note),
        _host("encoded prompts", encoded_bytes, tuple(PHASES), note=f"{encoded} prompts, on disk and mapped"),
        _host("an evaluation's images", image_bytes, EPOCH, note=f"at most {images}"),
        *_adapter_files(config, adapter),
    ]


def _adapter_files(config: LoraConfig, adapter: int) -> list[Row]:
    """List the files of an adapter of so many bytes."""
    # Adapter, average and two moments; the newest is written aside before the oldest is deleted.
    checkpoints = 4 * adapter * (config.keep_checkpoints + 1)
    # In both forms, so that pacorl, PEFT, diffusers and ComfyUI read it.
    return [
        Row("checkpoints", checkpoints, place="disk", note=f"{config.keep_checkpoints} kept, and one being written"),
        Row("adapter to use", 2 * adapter, place="disk", note="in PEFT and in diffusers form"),
    ]


def _host(component: str, size: int, phases: Phases, *, note: str = "") -> Row:
    return Row(component, size, place="host", phases=phases, note=note)


def _mapped(component: str, size: int, *, phases: Phases) -> Row:
    return Row(component, size, place="host", phases=phases, note="shared by all processes", is_file=True)


def _form(options: PolicyOptions | JudgeSettings) -> str:
    form = options.dtype if options.quantize == NONE else f"{options.quantize} blocks, else {options.dtype}"
    if options.stream:
        return f"{form}, blocks streamed"
    return form
