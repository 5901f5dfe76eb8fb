"""Every component of a run with the bytes it takes: the lines of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pacorl.config.base import ConfigError
from pacorl.config.policy_run import PolicyRun
from pacorl.core.objectives import OBJECTIVES
from pacorl.io.processor import image_tokens
from pacorl.judges.judge import InProcessOptions
from pacorl.lora.adapters import add_lora
from pacorl.lora.layers import merged_bytes, refresh_copies
from pacorl.plan import memory
from pacorl.plan.sources import clip_encoders, clip_parts
from pacorl.plan.work import Work
from pacorl.policies.pipeline import PipelinePolicy
from pacorl.policies.policy import Parts
from pacorl.quantize import NONE
from pacorl.quantize.linear import parameter_count, weight_bytes
from pacorl.twins import META, model_on_meta
from pacorl.types import Grid, Prompt, Size

Phase = Literal["encode", "sample", "decode", "score", "train"]
Place = Literal["device", "host", "disk"]

PHASES: dict[Phase, str] = {
    "encode": "encoding prompts, once",
    "sample": "sampling",
    "decode": "decoding images",
    "score": "scoring",
    "train": "training",
}
AFTER_ENCODING: tuple[Phase, ...] = ("sample", "decode", "score", "train")
PLACES: dict[Place, str] = {"device": "device", "host": "main memory", "disk": "disk"}

QUESTION_TOKENS = 128
"""Tokens of a question's text: the template's 60 and a theme of a few sentences."""
FP32 = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    component: str
    bytes: int
    parameters: int | None = None
    place: Place = "device"
    phases: tuple[Phase, ...] = tuple(PHASES)
    """When it is on the device; for other places without meaning."""
    note: str = ""


def policy_on_meta(config: PolicyRun, configs: Parts) -> PipelinePolicy:
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
    config: PolicyRun,
    *,
    work: Work,
    policy: PipelinePolicy,
    judge: Parts,
    held_out_judge: Parts,
    prompts: Sequence[Prompt],
) -> tuple[Row, ...]:
    """Everything that the run keeps on the device, in main memory and on disk.

    Args:
        policy: On the meta device; it is given the run's adapter.
        judge: The parts of the run's judge; of `held_out_judge`, those of the evaluation's own. They are not read for a
            judge behind HTTP, or if there is none.

    Raises:
        ConfigError: The adapter's targets match nothing.
    """
    # The grid with the fewest panels has the largest ones, which take a judge most tokens.
    grid = min((prompt.grid for prompt in prompts), key=lambda grid: grid.count, default=Grid(2, 2))
    # Adapter before activations and checkpoints: these are those of the transformer that it was added to.
    return (
        *_generator_rows(config, policy),
        *_judge_rows(config, judge, held_out_judge, grid=grid),
        *_reward_rows(config),
        *_adapter_rows(config, policy),
        *_activation_rows(config, policy, work),
        *_host_rows(config, policy, work, prompts=len(prompts)),
        *_disk_rows(config, policy),
    )


def _generator_rows(config: PolicyRun, policy: PipelinePolicy) -> list[Row]:
    pipeline, model = policy.pipeline, config.model
    encoders = {name: getattr(pipeline, attribute) for attribute, name in policy.encoders.items()}
    return [
        _weights("transformer", pipeline.transformer, note=_form(model.dtype, model.quantize)),
        *(_weights(name, encoder, phases=("encode",), note="then gone") for name, encoder in encoders.items()),
        _weights("VAE", pipeline.vae, note=model.dtype),
    ]


def _judge_rows(config: PolicyRun, judge: Parts, held_out_judge: Parts, *, grid: Grid) -> list[Row]:
    """The weights of each judge of this process, and the larger of what the two need at work: one works at a time."""
    height, width = (max(sides) for sides in zip(config.sampling.size, config.evaluation.size, strict=True))
    panel, weights, working = Size(height // grid.rows, width // grid.cols), [], []
    for component, options, configs in (
        ("judge", config.judge, judge),
        ("evaluation's judge", config.evaluation.judge, held_out_judge),
    ):
        if not isinstance(options, InProcessOptions):
            continue
        dtype = getattr(torch, options.dtype)
        tokens = 2 * image_tokens(panel, configs["processor"]) + QUESTION_TOKENS
        batch = max(1, options.batch_tokens // tokens)
        parameters, size, peak = memory.judge_memory(
            json.dumps(configs["model"]), dtype=dtype, quantize=options.quantize, questions=batch, tokens=tokens
        )
        note = f"{_form(options.dtype, options.quantize)}, in every process"
        # A judge is loaded when the text encoders have left.
        weights.append(Row(component, size, parameters, phases=AFTER_ENCODING, note=note))
        working.append(
            Row(f"{component} at work", peak, phases=("score",), note=f"{batch} questions of {tokens} tokens")
        )
    return weights + sorted(working, key=lambda row: row.bytes)[-1:]


def _reward_rows(config: PolicyRun) -> Iterator[Row]:
    """The encoders of rewards, each once; they load after the text encoders have left."""
    # Rewards of one checkpoint share an encoder, which is named after the last of them.
    for key, encoder in {id(encoder): (key, encoder) for key, encoder in clip_encoders(config).items()}.values():
        model, note = (
            model_on_meta(clip_parts(encoder), dtype=getattr(torch, encoder.dtype)),
            f"{encoder.dtype}, in every process",
        )
        yield _weights(f"CLIP of {key.split('.')[-3]}", model, phases=AFTER_ENCODING, note=note)


def _adapter_rows(config: PolicyRun, policy: PipelinePolicy) -> list[Row]:
    """Adds the adapter to the meta transformer and counts it, and what sampling keeps beside it."""
    targets = config.adapter.targets or policy.lora_targets
    try:
        with META:
            add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=targets)
    except ValueError as error:
        raise ConfigError(f"adapter.targets: {error}") from None
    parameters = _adapter_count(policy)
    size = parameters * FP32
    rows = [
        Row("adapter", size, parameters, note=f"float32, rank {config.adapter.rank}"),
        Row("adapter's moving average", size),
        Row("adapter's gradients", size, phases=AFTER_ENCODING, note="twice under DDP, which sums in buckets"),
        Row("AdamW's moments", 2 * size, phases=AFTER_ENCODING),
        Row("adapter, set aside", size, phases=("sample", "decode", "score"), note="evaluation of the average"),
    ]
    if copies := refresh_copies(policy.transformer):
        rows.append(Row(f"adapter in {config.model.dtype}", copies, note="that forwards multiply by"))
    if merged := merged_bytes(policy.transformer) if config.sampling.fuse_lora else 0:
        rows.append(Row("merged weights", merged, phases=("sample", "decode", "score"), note="sampling.fuse_lora"))
    if OBJECTIVES[config.objective.name].needs == "endpoint":
        rows.append(Row("adapter that samples", size, note=config.objective.name))
    return rows


def _activation_rows(config: PolicyRun, policy: PipelinePolicy, work: Work) -> list[Row]:
    sampling, evaluation = config.sampling, config.evaluation
    sizes = policy.nearest_size(Size(*sampling.size)), policy.nearest_size(Size(*evaluation.size))
    # The largest of training's and evaluation's batches: memory grows with the number of tokens. After the last
    # stochastic step a batch of samples passes the transformer, at it and in training a batch of nodes.
    size, batch = max(
        [(sizes[0], sampling.batch), (sizes[1], evaluation.batch)],
        key=lambda job: job[0].height * job[0].width * job[1],
    )
    note, nodes = f"{batch} at {size}", work.node_batch or sampling.batch
    if config.model.gradient_checkpointing:
        policy.pipeline.transformer.enable_gradient_checkpointing()
    sampler = work.sampler.model_copy(update={"size": sizes[0]})
    training = memory.training_peak(policy, sampler=sampler, batch=nodes, with_base=config.objective.kl_weight > 0)
    checkpointed = "with" if config.model.gradient_checkpointing else "without"
    trained = f"{nodes} at {sampler.size}, {checkpointed} gradient checkpointing"
    return [
        Row("encoding a prompt", memory.encoding_peak(policy, size=size), phases=("encode",)),
        Row("sampling a batch", memory.sampling_peak(policy, size=size, batch=batch), phases=("sample",), note=note),
        Row("decoding a batch", memory.decoding_peak(policy, size=size, batch=batch), phases=("decode",), note=note),
        Row("training a batch", training, phases=("train",), note=trained),
    ]


def _host_rows(config: PolicyRun, policy: PipelinePolicy, work: Work, *, prompts: int) -> list[Row]:
    """What all processes together keep in main memory."""
    size = policy.nearest_size(Size(*config.sampling.size))
    (tokens,) = {tensor.numel() for tensor in policy.noise([0], size)}
    conditioning = sum(tensor.nbytes for tensor in policy.conditioning_on_meta(size, batch=1).tensors.values())
    encoded = prompts or config.prompts_per_epoch + config.prompts.evaluation_limit
    images, evaluated = config.prompts.evaluation_limit * config.evaluation.samples_per_prompt, config.evaluation.size
    rollouts = work.latents * tokens * FP32 + work.samples * 3 * size.height * size.width
    note = f"{work.samples} samples: latents of the trained steps, images"
    return [
        Row("an epoch's rollouts", rollouts, place="host", note=note),
        Row("encoded prompts", encoded * conditioning, place="host", note=f"{encoded} prompts, in every process"),
        Row("an evaluation's images", images * 3 * evaluated[0] * evaluated[1], place="host", note=f"at most {images}"),
    ]


def _disk_rows(config: PolicyRun, policy: PipelinePolicy) -> list[Row]:
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


def _form(dtype: str, quantize: str) -> str:
    return dtype if quantize == NONE else f"{quantize} blocks, else {dtype}"


def _adapter_count(policy: PipelinePolicy) -> int:
    return sum(parameter.numel() for parameter in policy.transformer.parameters() if parameter.requires_grad)
