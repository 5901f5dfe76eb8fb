"""Every component of a run with the bytes it takes: the lines of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from pacorl.config.base import ConfigError
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import InProcessOptions
from pacorl.lab.plan import memory
from pacorl.lab.plan.sources import clip_encoders, clip_parts
from pacorl.lab.plan.work import Work
from pacorl.models.lora.adapters import add_lora
from pacorl.models.lora.layers import merged_bytes, refresh_copies
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.models.quantize import NONE
from pacorl.models.quantize.linear import parameter_count, streamed_bytes, weight_bytes
from pacorl.models.twins import META, model_on_meta
from pacorl.types import Grid, Prompt, Size

Phase = Literal["encode", "check", "sample", "decode", "score", "train"]
Place = Literal["device", "host", "disk"]

PHASES: dict[Phase, str] = {
    "encode": "encoding prompts, once",
    "check": "checking the adapter, once",
    "sample": "sampling",
    "decode": "decoding images",
    "score": "scoring",
    "train": "training",
}
AFTER_ENCODING: tuple[Phase, ...] = ("sample", "decode", "score", "train")
WITHOUT_SCORES: tuple[Phase, ...] = ("sample", "decode", "train")
PLACES: dict[Place, str] = {"device": "device", "host": "main memory", "disk": "disk"}

IMAGES = 32
"""That a CLIP takes at a time."""
QUESTION_TOKENS = 128
"""Tokens of a question's text: the template's 60 and a theme of a few sentences."""
FP32 = 4
PROCESS = 2**30
"""Python, torch, diffusers and transformers took .33 GiB, measured without CUDA; the rest is a guess at CUDA's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    component: str
    bytes: int
    parameters: int | None = None
    place: Place = "device"
    phases: tuple[Phase, ...] = tuple(PHASES)
    """When it is there; for the disk without meaning."""
    note: str = ""
    is_file: bool = False
    """Whether these are pages of a file, which the system takes back for whoever needs memory, and reads again."""


def policy_on_meta(config: PolicyConfig, configs: Parts) -> PipelinePolicy:
    """The run's generator from the configs of its parts, without weights.

    Raises:
        ConfigError: VAE and patches do not divide a size of the config; the message names the nearest.
    """
    policy = config.generator.on_meta(config.model, configs, record_sizes=config.prompts.record_sizes)
    for key, size in (("sampling.size", config.sampling.size), ("evaluation.size", config.evaluation.size)):
        try:
            policy.check_size(Size(*size))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    return policy


def rows(
    config: PolicyConfig,
    *,
    work: Work,
    policy: PipelinePolicy,
    judge: Parts,
    held_out_judge: Parts,
    prompts: Sequence[Prompt],
    world: int = 1,
) -> tuple[Row, ...]:
    """Everything that the run keeps on a device, in a machine's main memory and on disk.

    Args:
        policy: On the meta device; it is given the run's adapter.
        judge: The parts of the run's judge; of `held_out_judge`, those of the evaluation's own. They are not read for a
            judge behind HTTP, or if there is none.
        prompts: Of training and evaluation.
        world: The processes, all of one machine.

    Raises:
        ConfigError: The adapter's targets match nothing.
    """
    # The grid with the fewest panels has the largest ones, which take a judge most tokens.
    grid = min((prompt.grid for prompt in prompts), key=lambda grid: grid.count, default=Grid(2, 2))
    judges = _judge_rows(config, judge, held_out_judge, grid=grid, world=world)
    scoring = [*judges, *_reward_rows(config, panels=grid.count)]
    scoring, loading = _one_at_a_time(scoring, place="device"), _one_at_a_time(scoring, place="host")
    working = max((row.bytes for row in scoring if not row.parameters), default=0)
    in_turns = config.in_turns and bool(scoring)
    if in_turns:
        scoring = [replace(row, phases=("score",)) for row in scoring]
    transformer: tuple[Phase, ...] = WITHOUT_SCORES if in_turns else AFTER_ENCODING
    generator = generator_rows(config.model, policy, transformer=("check", *transformer), world=world)
    beside = working if not in_turns and (config.judge is None or config.judge.overlap) else 0
    # Adapter before activations and checkpoints: these are those of the transformer that it was added to.
    device = [
        *generator,
        *scoring,
        *_adapter_rows(config, policy, world=world),
        *_activation_rows(config, policy, work, beside=beside),
    ]
    return (
        *device,
        *_host_rows(config, policy, work, prompts=len(prompts), world=world),
        *loading,
        *(_parked_rows(device, world=world) if in_turns else ()),
        *_disk_rows(config, policy),
    )


def _one_at_a_time(scoring: Sequence[Row], *, place: Place) -> list[Row]:
    """The rows of a place; of what models take while they work, or are loaded, the largest alone."""
    rows = [row for row in scoring if row.place == place]
    passing = sorted((row for row in rows if len(row.phases) == 1), key=lambda row: row.bytes)
    return [row for row in rows if row not in passing[:-1]]


def generator_rows(
    model: PolicyOptions, policy: PipelinePolicy, *, transformer: tuple[Phase, ...], world: int = 1
) -> list[Row]:
    """The generator's weights; its transformer is on the device in some phases."""
    pipeline = policy.pipeline
    encoders = {name: getattr(pipeline, attribute) for attribute, name in policy.encoders.items()}
    return [
        _weights("transformer", pipeline.transformer, phases=transformer, note=_form(model)),
        *(_weights(name, encoder, phases=("encode",), note="then gone") for name, encoder in encoders.items()),
        _weights("VAE", pipeline.vae, note=model.dtype),
        *_streamed("transformer", world * streamed_bytes(pipeline.transformer)),
    ]


def generation_rows(
    options: PolicyOptions, policy: PipelinePolicy, *, size: Size, low: bool, judge: Sequence[Row] = ()
) -> tuple[Row, ...]:
    """What one image at a time takes on the device, and the rows of a judge that ranks candidates.

    With `low`, encoders, transformer and judge are there in turn.
    """
    sampling: tuple[Phase, ...] = ("encode", "sample", "decode")
    everywhere: tuple[Phase, ...] = (*sampling, "score") if judge else sampling
    # Nobody waits yet while weights are loaded, for which the check of an adapter stands here.
    loading: tuple[Phase, ...] = ("check",)
    phases = dict.fromkeys(policy.encoders.values(), sampling[:1] if low else everywhere)
    phases["transformer"] = sampling[1:] if low else everywhere
    rows = generator_rows(options, policy, transformer=sampling)
    weights = [replace(row, phases=phases.get(row.component, everywhere)) for row in rows if row.place == "device"]
    weights += [replace(row, phases=(*loading, *everywhere)) for row in rows if row.place == "host"]
    for attribute, name in policy.encoders.items():  # pages of their files, from the first prompt on
        streamed = _streamed(name, streamed_bytes(getattr(policy.pipeline, attribute)))
        weights += [replace(row, phases=everywhere) for row in streamed]
    weights += [replace(row, phases=everywhere if row.parameters and not low else ("score",)) for row in judge]
    encoders = sum(row.bytes for row in weights if row.component in policy.encoders.values())
    turns = [weight_bytes(policy.transformer), encoders, sum(row.bytes for row in judge if row.parameters)]
    parked = sum(turns) if low else 0  # where turns change, all are in main memory
    files = parameter_count(policy.transformer) * getattr(torch, options.dtype).itemsize
    return (
        *weights,
        Row("encoding a prompt", memory.encoding_peak(policy, size=size, prompts=1), phases=("encode",)),
        Row("sampling an image", memory.sampling_peak(policy, size=size, batch=1), phases=("sample",), note=f"{size}"),
        Row("decoding an image", memory.decoding_peak(policy, size=size, batch=1), phases=("decode",), note=f"{size}"),
        Row("checkpoint's files, mapped", files, place="host", phases=loading, is_file=True),
        Row("process", PROCESS, place="host", note="Python and its libraries"),
        *([Row("who waits for a turn", parked, place="host", phases=everywhere, note="memory: low")] if low else []),
    )


def _judge_rows(config: PolicyConfig, judge: Parts, held_out_judge: Parts, *, grid: Grid, world: int) -> list[Row]:
    """The weights of each judge of this process, and what it needs at work."""
    height, width = (max(sides) for sides in zip(config.sampling.size, config.evaluation.size, strict=True))
    panel, judges = Size(height // grid.rows, width // grid.cols), {"judge": (config.judge, judge)}
    judges["evaluation's judge"] = config.evaluation.judge, held_out_judge
    return [
        row
        for name, (options, configs) in judges.items()
        if isinstance(options, InProcessOptions)
        for row in judge_rows(name, options, configs, panel=panel, world=world)
    ]


def judge_rows(component: str, options: InProcessOptions, configs: Parts, *, panel: Size, world: int = 1) -> list[Row]:
    """A judge of this process: its weights, what questions about two panels take above them, and its files."""
    tokens = pair_tokens(panel, configs)
    batch = max(1, options.batch_tokens // tokens)
    weights: Any = {"dtype": options.dtype, "quantize": options.quantize, "stream": options.stream}
    cost = judge_cost(configs, **weights, questions=batch, panel=panel)
    note = f"{_form(options)}, in every process"
    # A judge is loaded when the text encoders have left.
    return [
        Row(component, cost.bytes, cost.parameters, phases=AFTER_ENCODING, note=note),
        Row(f"{component} at work", cost.peak, phases=("score",), note=f"{batch} questions of {tokens} tokens"),
        _files(component, cost.parameters * getattr(torch, options.dtype).itemsize),
        *_streamed(component, world * cost.streamed),
    ]


def _files(component: str, size: int) -> Row:
    """The files of a model that scores; it is loaded right after the adapter was checked."""
    note = "shared by all processes"
    return Row(f"{component}'s files, mapped", size, place="host", phases=("check",), note=note, is_file=True)


def pair_tokens(panel: Size, configs: Parts) -> int:
    """Of a question about two panels."""
    return 2 * image_tokens(panel, configs["processor"]) + QUESTION_TOKENS


def judge_cost(
    configs: Parts, *, dtype: str, quantize: str, questions: int, panel: Size, stream: bool = False
) -> memory.JudgeCost:
    """What so many questions about two panels take of a judge."""
    return memory.judge_cost(
        json.dumps(configs["model"]),
        dtype=getattr(torch, dtype),
        quantize=quantize,
        stream=stream,
        questions=questions,
        tokens=pair_tokens(panel, configs),
        seen=2 * image_tokens(panel, configs["processor"]),
    )


def _reward_rows(config: PolicyConfig, *, panels: int) -> Iterator[Row]:
    """The encoders of rewards, each once; they load after the text encoders have left."""
    # Rewards of one checkpoint share an encoder, which is named after the last of them.
    for key, encoder in {id(encoder): (key, encoder) for key, encoder in clip_encoders(config).items()}.values():
        model, note = (
            model_on_meta(clip_parts(encoder), dtype=getattr(torch, encoder.dtype)),
            f"{encoder.dtype}, in every process",
        )
        name, count = f"CLIP of {key.split('.')[-3]}", min(IMAGES, config.sampling.batch * panels)
        yield _weights(name, model, phases=AFTER_ENCODING, note=note)
        yield Row(f"{name} at work", memory.clip_peak(model, images=count), phases=("score",), note=f"{count} panels")
        yield _files(name, weight_bytes(model))


def _adapter_rows(config: PolicyConfig, policy: PipelinePolicy, *, world: int) -> list[Row]:
    """Adds the adapter to the meta transformer and counts it, and what sampling keeps beside it."""
    targets = config.adapter.targets or policy.lora_targets
    try:
        with META:
            add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=targets)
    except ValueError as error:
        raise ConfigError(f"adapter.targets: {error}") from None
    parameters = _adapter_count(policy)
    size = parameters * FP32
    since_check: tuple[Phase, ...] = ("check", *AFTER_ENCODING)
    rows = [
        Row("adapter", size, parameters, phases=since_check, note=f"float32, rank {config.adapter.rank}"),
        Row("adapter's moving average", size, phases=AFTER_ENCODING),
        Row("adapter's gradients", size, phases=("check", "train")),
        Row("AdamW's moments", 2 * size, phases=AFTER_ENCODING),
        Row("adapter, set aside", size, phases=("score",), note="evaluation of the average"),
    ]
    if world > 1:
        rows.append(Row("gradients' buckets", size, phases=AFTER_ENCODING, note="in which DDP sums them"))
    if copies := refresh_copies(policy.transformer):
        rows.append(
            Row(f"adapter in {config.model.dtype}", copies, phases=since_check, note="that forwards multiply by")
        )
    if merged := merged_bytes(policy.transformer) if config.sampling.fuse_lora else 0:
        rows.append(Row("merged weights", merged, phases=("sample", "decode", "score"), note="sampling.fuse_lora"))
    if OBJECTIVES[config.objective.name].needs == "endpoint":
        rows.append(Row("adapter that samples", size, phases=AFTER_ENCODING, note=config.objective.name))
    return rows


def _activation_rows(config: PolicyConfig, policy: PipelinePolicy, work: Work, *, beside: int) -> list[Row]:
    """What a batch needs in each phase; `beside` is what a model that scores takes while training samples are drawn."""
    sampling, evaluation = config.sampling, config.evaluation
    sizes = policy.nearest_size(Size(*sampling.size)), policy.nearest_size(Size(*evaluation.size))
    # After the last stochastic step a batch of samples passes the transformer, at it and in training a batch of nodes.
    jobs = [
        (sizes[0], sampling.batch, beside, ", beside what scores" * bool(beside)),
        # The average takes the adapter's place meanwhile.
        (sizes[1], evaluation.batch, _adapter_count(policy) * FP32, ", the adapter set aside"),
    ]
    nodes = work.node_batch or sampling.batch
    if config.model.gradient_checkpointing:
        policy.pipeline.transformer.enable_gradient_checkpointing()
    sampler = work.sampler.model_copy(update={"size": sizes[0]})
    trained = [memory.training_peak(policy, sampler=sampler, batch=1, with_base=False)]
    with_base = config.objective.kl_weight > 0
    if nodes > 1 or with_base:
        trained.append(memory.training_peak(policy, sampler=sampler, batch=nodes, with_base=with_base))
    checkpointed = "with" if config.model.gradient_checkpointing else "without"

    def largest(peak: Callable[..., int], *, least: int = 0) -> tuple[int, str]:
        return max(
            (max(peak(policy, size=size, batch=batch), least * (size == sizes[0])) + more, f"{batch} at {size}{note}")
            for size, batch, more, note in jobs
        )

    # If compiled, SDE steps are sampled as they are trained.
    sampled, sampled_note = largest(memory.sampling_peak, least=trained[-1] * (config.model.compile != "none"))
    decoded, decoded_note = largest(memory.decoding_peak)
    trained_note = f"{nodes} at {sampler.size}, {checkpointed} gradient checkpointing"
    # AdamW's step holds a number for each of the adapter's, beside its moments.
    step = _adapter_count(policy) * FP32
    encoded = memory.encoding_peak(
        policy, size=max(sizes, key=lambda s: s.height * s.width), prompts=policy.encode_batch
    )
    return [
        Row("encoding prompts", encoded, phases=("encode",), note=f"{policy.encode_batch} at a time"),
        Row("a forward and backward", trained[0], phases=("check",), note=f"1 at {sampler.size}"),
        Row("sampling a batch", sampled, phases=("sample",), note=sampled_note),
        Row("decoding a batch", decoded, phases=("decode",), note=decoded_note),
        Row("training a batch", max(trained[-1], step), phases=("train",), note=trained_note),
    ]


def _host_rows(config: PolicyConfig, policy: PipelinePolicy, work: Work, *, prompts: int, world: int) -> list[Row]:
    """What all processes of a machine together keep in main memory; `encode` stands for all that loads."""
    size, width = policy.nearest_size(Size(*config.sampling.size)), getattr(torch, config.model.dtype).itemsize
    (tokens,) = {tensor.numel() for tensor in policy.noise([0], size)}
    conditioning = sum(tensor.nbytes for tensor in policy.conditioning_on_meta(size, batch=1).tensors.values())
    encoded = prompts or config.prompts_per_epoch + config.prompts.evaluation_limit
    images, evaluated = config.prompts.evaluation_limit * config.evaluation.samples_per_prompt, config.evaluation.size
    rollouts = work.latents * tokens * FP32 + work.samples * 3 * size.height * size.width
    note = f"{work.samples} samples: latents of the trained steps, images"
    adapter = _adapter_count(policy)
    # An encoder's pages are let go before the next one's are read, and the transformer's.
    encoders = [getattr(policy.pipeline, name) for name in policy.encoders]
    # Streamed ones are read from their files until all is encoded.
    encoder_files = (sum if config.model.stream else max)(weight_bytes(e) + streamed_bytes(e) for e in encoders)
    transformer_files = (parameter_count(policy.transformer) - adapter) * width
    files = max(encoder_files, transformer_files)
    # The pages of the transformer's are let go when the last layer is packed.
    packed = max(0, transformer_files + world * streamed_bytes(policy.transformer) - files)
    loading: Any = {"place": "host", "phases": ("encode",)}
    return [
        Row("checkpoint's files, mapped", files, **loading, note="shared by all processes", is_file=True),
        *([Row("transformer, packed beside its files", packed, **loading)] if packed else []),
        Row("adapters, before they are placed", world * adapter * FP32, place="host", phases=("encode",)),
        Row("processes", world * PROCESS, place="host", note=f"{world}, Python and its libraries"),
        Row("an epoch's rollouts", rollouts, place="host", phases=AFTER_ENCODING, note=note),
        Row("encoded prompts", encoded * conditioning, place="host", note=f"{encoded} prompts, on disk and mapped"),
        Row(
            "an evaluation's images",
            images * 3 * evaluated[0] * evaluated[1],
            place="host",
            phases=AFTER_ENCODING,
            note=f"at most {images}",
        ),
    ]


def _parked_rows(device: Sequence[Row], *, world: int) -> Iterator[Row]:
    """With `memory: low`, what waits in main memory for its turn on the device."""
    turns = [row for row in device if row.parameters and ("score" in row.phases) != ("train" in row.phases)]
    generator = sum(row.bytes for row in turns if "train" in row.phases)
    scoring = sum(row.bytes for row in turns if "score" in row.phases)
    loading_or_scoring: tuple[Phase, ...] = ("check", "score")
    yield Row("generator, parked", world * generator, place="host", phases=loading_or_scoring, note="memory: low")
    # Also while they score: where turns change, all are in main memory.
    yield Row("models that score, parked", world * scoring, place="host", phases=AFTER_ENCODING, note="memory: low")


def _disk_rows(config: PolicyConfig, policy: PipelinePolicy) -> list[Row]:
    size, checkpoints = _adapter_count(policy) * FP32, config.keep_checkpoints
    return [
        # Adapter, average and two moments; the newest is written aside before the oldest goes.
        Row(
            "checkpoints", 4 * size * (checkpoints + 1), place="disk", note=f"{checkpoints} kept, and one being written"
        ),
        Row("adapter to use", 2 * size, place="disk", note="in PEFT and in diffusers form"),
    ]


def _weights(component: str, module: nn.Module, **more: Any) -> Row:
    return Row(component, weight_bytes(module), parameter_count(module), **more)


def _streamed(component: str, size: int) -> Iterator[Row]:
    """What of a model stays in main memory: of one process, so many bytes go over the bus in each of its forwards."""
    if size:
        phases: tuple[Phase, ...] = ("check", *AFTER_ENCODING)
        yield Row(f"{component}, streamed", size, place="host", phases=phases, note="sent in each forward")


def _form(options: PolicyOptions | InProcessOptions) -> str:
    form = options.dtype if options.quantize == NONE else f"{options.quantize} blocks, else {options.dtype}"
    return f"{form}, blocks streamed" if options.stream else form


def _adapter_count(policy: PipelinePolicy) -> int:
    return sum(parameter.numel() for parameter in policy.transformer.parameters() if parameter.requires_grad)
