"""Peak memory and FLOPs of a job, measured on meta tensors: models by the run's own builders, and its own passes.

All blocks of a kind are alike, so that every figure is linear in their number. A job is measured with two units of
blocks and with three, which give the figures at its own depth. The very last block is unlike its kind, since nothing
reads its text.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pacorl.grpo.builders import add_adapter
from pacorl.grpo.lora_config import LoraConfig
from pacorl.io.documents import blamed_on
from pacorl.models.int8 import streamed_bytes, weight_bytes
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.plan.generators import Inputs, policy_on_meta
from pacorl.plan.ledger import META, MemoryLedger, measured
from pacorl.types import Prompt, Size

PHASES = {
    "encode": "encoding prompts, once",
    "sample": "sampling",
    "decode": "decoding images",
    "score": "scoring",
    "train": "training",
}
PROCESS = 2**30
"""Python, torch, diffusers and transformers took 0.33 GiB, measured without CUDA; the rest is a guess at CUDA's, and at
the latents and images of an epoch."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak bytes of a command, and its work."""

    phases: Mapping[str, int]
    """Phase → bytes on each process's card."""
    host: int = 0
    """Bytes in main memory, of all processes of a machine; without pages of files, which the system may drop."""
    flops: float = 0
    """FLOPs of the generator in the run."""


class Scorer(NamedTuple):
    """Bytes of a judge or of a reward's model."""

    weights: int
    """Weights on the device."""
    buffers: int
    """Peak of a forward, with the keys and values that it reads."""
    files: int
    """Size of its checkpoint."""
    streamed: int = 0
    """Weights in main memory."""


class Batch(NamedTuple):
    """Images that are sampled together."""

    size: Size
    key: str
    """Key of the size."""
    per_forward: int = 1
    images: int = 0
    """Number of images of the run."""
    forwards: float = 0
    """Forwards of an image."""


class Training(NamedTuple):
    """The trained adapter and one of its training forwards, at the size of the job's first batch."""

    config: LoraConfig
    batch: int
    copies: int = 4
    """Tensors of the adapter's size, gradients excluded: weights, average, AdamW's two moments, and perhaps others."""
    compiles_sampling: bool = False
    """Whether samples are drawn with gradients, as compiled steps are."""
    steps: float = 0
    """Number of such forwards in the run."""
    encodes_images: bool = False
    """Whether it trains on images, which the VAE encodes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Work of a command: generating images, or also training on them."""

    options: PolicyOptions
    configs: Parts
    """config.json of each component."""
    batches: Sequence[Batch]
    """Batches to sample; in a training run, of training images and of evaluations, which use the moving average."""
    training: Training | None = None
    """None for generating, when text encoders stay with the transformer."""
    images: int = 0
    """Sources and references of a prompt."""
    prompts: Sequence[Prompt] = ()
    scorers: Sequence[Scorer] = ()
    """They work one at a time, in a training while the next batch is sampled."""
    encoded: int = 0
    """Encoded prompts that each process keeps."""
    world: int = 1
    """Processes of a machine."""

    @property
    def in_turns(self) -> bool:
        """Whether generator and scorers, or a generator and its text encoders, take turns on the card."""
        return self.options.memory != "normal" and not (self.training and not self.scorers)


def measure(job: Job) -> Memory:
    """Measure a job at the depth of its transformer.

    Raises:
        ValueError: A size does not fit the generator or a prompt's source, the adapter's targets match no module, or
            the generator is the user's own.
    """
    kind = job.options.kind
    if not job.configs:
        raise ValueError(f"model.kind {kind}: memory is planned for pacorl's own kinds; start with epochs=1")
    units = block_units(job.configs)
    # Targets of a config may name a block, which is there at the full depth alone.
    is_cut = units > 3 and not (job.training and job.training.config.adapter.targets)
    figures = list(_figures(job, with_units(job.configs, 2) if is_cut else job.configs))
    if is_cut:
        deeper = _figures(job, with_units(job.configs, 3))
        pairs = zip(figures, deeper, strict=True)
        figures = [(name, low + (units - 2) * (high - low)) for (name, low), (_, high) in pairs]

    largest: dict[str, int] = {}
    for name, figure in figures:
        largest[name] = max(largest.get(name, 0), round(figure))
    phases = {phase: largest[phase] for phase in PHASES if phase in largest}
    return Memory(phases, largest["host"], largest["flops"])


def _figures(job: Job, configs: Parts) -> Iterator[tuple[str, float]]:
    """List a job's bytes by phase, `host` bytes, and FLOPs; the largest of a name counts.

    Each is linear in the number of blocks.

    Args:
        configs: of the generator at one depth.
    """
    policy = policy_on_meta(POLICIES[job.options.kind], job.options, configs)
    # Refuse a size that the model cannot generate, before anything is measured.
    for batch in job.batches:
        with blamed_on(batch.key):
            policy.check_size(batch.size)
        for prompt in job.prompts:
            policy.size_of(prompt, batch.size)
    job = replace(job, batches=[batch._replace(size=policy.nearest_size(batch.size)) for batch in job.batches])
    training = job.training
    if training:
        with META, blamed_on("adapter.targets"):
            add_adapter(training.config, policy)
    inputs = Inputs(policy, job.images)

    # Weights on the card: together, or in turns. A training frees its text encoders before it loads the transformer.
    adapter = sum(weight.nbytes for weight in policy.transformer.parameters() if weight.requires_grad)
    frozen = weight_bytes(policy.transformer) - adapter
    # In every form all text encoders are placed together, since each pass reads them all.
    encoding = sum(map(weight_bytes, policy.text_encoders))
    scoring = sum(scorer.weights for scorer in job.scorers)
    lasting = weight_bytes(policy.pipeline.vae)
    if training:
        loaded, prompts, copies = frozen, policy.encode_batch, training.copies * adapter
    else:
        loaded, prompts, copies = frozen + encoding, 1, 0
    generating = judging = loaded + scoring
    # In turns the generator and the judges are not on the card together.
    if job.in_turns:
        generating, judging = frozen, scoring
    elif not training:
        encoding = generating

    # Encoding, judging, and the rest.
    largest = max((batch.size for batch in job.batches), key=lambda size: size.height * size.width)
    yield "encode", lasting + encoding + text_pass(inputs, largest, prompts=prompts).peak
    if policy.max_sources or (training and training.encodes_images):
        pixels = torch.empty(1, 3, largest.height, largest.width, device=META, dtype=policy.pipeline.vae.dtype)
        with measured() as vae_encoding:
            policy.encode_pixels(pixels)
        yield "encode", lasting + encoding + vae_encoding.peak
    buffers = max((scorer.buffers for scorer in job.scorers), default=0)
    if job.scorers:
        yield "score", lasting + copies + judging + adapter + buffers
    besides = buffers if training and not job.in_turns else 0
    yield from _generating(job, inputs, adapter=adapter, present=lasting + copies + generating, besides=besides)
    yield from _main_memory(job, inputs, adapter=adapter, waiting=loaded if job.in_turns else 0)


def _generating(job: Job, inputs: Inputs, *, adapter: int, present: int, besides: int) -> Iterator[tuple[str, float]]:
    """List the bytes of training, sampling and decoding, and FLOPs.

    Args:
        adapter: bytes of the trained weights.
        present: bytes on the card outside the passes.
        besides: bytes of the concurrent scoring of the previous batch.
    """
    policy = inputs.policy
    flops = 0.0
    if job.training:
        step = trained_step(inputs, job.batches[0].size, batch=job.training.batch)
        flops = job.training.steps * step.flops
        # AdamW's step needs one more number per trained weight than its moments.
        for peak in (step.peak, adapter):
            yield "train", present + adapter + peak
        if job.training.compiles_sampling:
            yield "sample", present + besides + step.peak
    for batch in job.batches:
        forward = forward_pass(inputs, batch.size, batch=batch.per_forward)
        # One image: an accelerator decodes the images of a batch one by one.
        height, width = batch.size.height // policy.code_pixels, batch.size.width // policy.code_pixels
        codes = torch.empty(1, policy.latent_channels, height, width, device=META, dtype=policy.pipeline.vae.dtype)
        with measured() as decoding:
            policy.decode_codes(codes)
        flops += batch.images * (batch.forwards / batch.per_forward * forward.flops + decoding.flops)
        yield "sample", present + besides + forward.peak
        yield "decode", present + besides + decoding.peak
        besides = adapter  # set aside: the average generates an evaluation's images
    yield "flops", flops


def _main_memory(job: Job, inputs: Inputs, *, adapter: int, waiting: int) -> Iterator[tuple[str, float]]:
    """List `host` bytes: while the transformer loads, and with all models loaded.

    Args:
        adapter: bytes of the trained weights.
        waiting: bytes of the generator while it waits for its turn on the card.
    """
    prompt = inputs.conditioning(job.batches[0].size, batch=1)
    process = PROCESS + job.encoded * sum(tensor.nbytes for tensor in prompt.tensors.values())
    streamed = streamed_bytes(inputs.policy.transformer)
    yield "host", job.world * (process + streamed + adapter)

    # A training frees its text encoders. In turns the scoring models wait as well.
    if not job.training:
        streamed += sum(map(streamed_bytes, inputs.policy.text_encoders))
    scorers = sum(scorer.streamed + job.in_turns * scorer.weights for scorer in job.scorers)
    yield "host", job.world * (process + streamed + waiting + scorers)


BLOCKS = {
    "FluxTransformer2DModel": ("num_layers", "num_single_layers"),
    "Flux2Transformer2DModel": ("num_layers", "num_single_layers"),
    "QwenImageTransformer2DModel": ("num_layers",),
    "QwenImage21Transformer2DModel": ("num_layers",),
}
"""A transformer's class → its config's keys for the number of blocks of each kind. Others are measured whole."""


def block_units(configs: Parts) -> int:
    """Return the greatest common divisor of the block counts per kind; 0 for a class not in `BLOCKS`."""
    transformer = configs["transformer"]
    return math.gcd(*(transformer[key] for key in BLOCKS.get(str(transformer.get("_class_name")), ())))


def with_units(configs: Parts, units: int) -> Parts:
    """Return a generator's configs with the blocks of some of its units."""
    transformer = dict(configs["transformer"])
    for key in BLOCKS[transformer["_class_name"]]:
        transformer[key] = transformer[key] // block_units(configs) * units
    return {**configs, "transformer": transformer}


def text_pass(inputs: Inputs, size: Size, *, prompts: int) -> MemoryLedger:
    """Measure a pass of the largest text encoder over this number of prompts."""
    encoder = getattr(inputs.policy.pipeline, inputs.policy.long_encoder or "text_encoder")
    # Without a vision tower: it reads the values of its images' grids, which meta tensors do not have.
    model = getattr(getattr(encoder, "model", None), "language_model", encoder)
    tokens = inputs.text_tokens(size)
    if model.config.model_type == "t5":
        return language_pass(model, prompts, tokens)
    # Positions and the full mask: making them from rows would read values of meta tensors.
    mask = torch.ones(prompts, 1, tokens, tokens, device=META, dtype=torch.bool)
    positions = torch.zeros(prompts, tokens, device=META, dtype=torch.long)
    options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    return language_pass(model, prompts, tokens, output_hidden_states=True, **options)


def language_pass(model: Any, rows: int, tokens: int, **options: Any) -> MemoryLedger:
    """Measure a pass of a language model over rows of embedded tokens."""
    embedded = torch.empty(rows, tokens, model.config.hidden_size, device=META, dtype=model.dtype)
    with measured() as ledger:
        model(inputs_embeds=embedded, **options)
    return ledger


def forward_pass(inputs: Inputs, size: Size, *, batch: int) -> MemoryLedger:
    """Measure a forward of so many images, or two if the generator is guided, with the prefix that steps share."""
    policy = inputs.policy
    conditioning = inputs.conditioning(size, batch=batch)
    x_BNC = policy.noise(range(batch), size)
    sigma_B = torch.empty(batch, device=META)
    with measured() as ledger:
        policy.velocity(x_BNC, sigma_B, policy.with_prefix(conditioning, size), size)
    return ledger


def trained_step(inputs: Inputs, size: Size, *, batch: int) -> MemoryLedger:
    """Measure a forward and backward of so many images, without the weights' gradients."""
    policy = inputs.policy
    conditioning = inputs.conditioning(size, batch=batch)
    x_BNC = policy.noise(range(batch), size)
    sigma_B = torch.empty(batch, device=META)
    # Gradients are allocated outside the ledger: the phases count them.
    for parameter in policy.transformer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    policy.transformer.train()
    # Each loss is a square of latents, which are small beside the activations.
    with measured(gradients=True) as ledger:
        policy.velocity(x_BNC, sigma_B, conditioning, size).float().square().mean().backward()
    return ledger
