"""The contract of a generator: its pipeline's own latents and images, and prompts that do not depend on each other."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pacorl.grpo.builders import check_adapter
from pacorl.grpo.rollout import denoise
from pacorl.io.images import as_rgb, open_image
from pacorl.models.lora.adapters import add_lora
from pacorl.models.policies import POLICIES
from pacorl.models.policies.pipeline import PipelinePolicy, pack, stitch
from pacorl.models.quantize.linear import parameter_count
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from pacorl.models.policies.spec import PolicySpec

STEPS = 3
"""Denoising steps of a comparison."""
LATENTS = 1e-5
"""Largest difference of latents from the pipeline's, in fp32."""
PIXELS = 1
"""Largest difference of decoded images from the pipeline's, of 255."""


def check_policy(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size) -> None:
    """Check a generator against its diffusers pipeline.

    Args:
        policy: in float32, usually with random weights that depend on every input.
        prompts: two prompts of one image size, with texts of different lengths.
        size: size of the images, or the area of edits.

    Raises:
        AssertionError: with the fault, if the generator breaks the contract.
    """
    check_latents(policy, prompts[0], size)
    check_images(policy, prompts[0], size)
    check_batches(policy, prompts, size)
    check_long_text(policy, prompts[0], size)
    check_reference_images(policy, prompts, size)
    check_idle_layers(policy, prompts[0], size)


def check_spec(spec: PolicySpec) -> None:
    """Check a spec's facts about the published checkpoint: hub name, transformer's parameters, number of steps.

    Raises:
        AssertionError: if the name matches another kind, or the parameters or steps differ.
    """
    check_hub_name(spec)
    options = spec.options_for(spec.published, dtype="bfloat16")
    count = parameter_count(spec.on_meta(options).transformer)
    assert count == spec.parameters, (
        f"{spec.architecture} has {count:,} parameters, and {spec.parameters:,} are declared"
    )

    default = inspect.signature(spec.pipeline_type.__call__).parameters["num_inference_steps"].default
    has_source = spec.steps == default or spec.steps_source
    assert has_source, f"steps {spec.steps} are not the pipeline's {default}; state where they are from in steps_source"


def check_hub_name(spec: PolicySpec) -> None:
    """Check that the published checkpoint's name is recognised, and matches no other kind's pattern as well."""
    length = _match_length(spec, spec.published)
    assert length, f"hub_name {spec.hub_name!r} does not match the published checkpoint {spec.published}"
    for kind, other in POLICIES.items():
        if kind != spec.kind:
            other_length = _match_length(other, spec.published)
            assert other_length < length, f"{spec.published} matches hub_name {other.hub_name!r} of kind {kind} as well"


def _match_length(spec: PolicySpec, checkpoint: str) -> int:
    match = re.search(spec.hub_name, checkpoint.lower())
    return len(match[0]) if match else 0


def check_latents(policy: PipelinePolicy, prompt: Prompt, size: Size) -> None:
    """Check that sampling without noise ends in the pipeline's latents, over the scheduler's own sigmas."""
    expected, sigmas = run_pipeline(policy, prompt, size, output_type="latent")
    ours = endpoints(policy, [prompt], size)
    assert ours.std() > 0.1, "the latents are nearly constant, so that the comparison is void"
    _assert_close(ours, expected, LATENTS, "the pipeline's latents")
    assert torch.equal(policy.sigmas(STEPS, policy.size_of(prompt, size)), sigmas), "the scheduler has other sigmas"


def check_images(policy: PipelinePolicy, prompt: Prompt, size: Size) -> None:
    """Check that decoded images are the pipeline's; transparent images are laid on white."""
    (expected,), _ = run_pipeline(policy, prompt, size, output_type="pil")
    (ours,) = policy.decode(endpoints(policy, [prompt], size), policy.size_of(prompt, size))
    assert ours.size == expected.size, f"the image is {ours.size}, the pipeline's is {expected.size}"
    difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(as_rgb(expected, "the pipeline's"), dtype=int)).max()
    assert difference <= PIXELS, f"the image differs from the pipeline's by {difference} of 255"


def check_batches(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size) -> None:
    """Check that a prompt's endpoint is the same whether it is encoded and sampled alone or with another."""
    together = endpoints(policy, prompts, size)
    for number, prompt in enumerate(prompts):
        alone = endpoints(policy, [prompt], size, seeds=[number])
        _assert_close(together[number : number + 1], alone, LATENTS, f"the latents of {prompt.text[:40]!r} alone")
        expected, _ = run_pipeline(policy, prompt, size, output_type="latent", seed=number)
        _assert_close(alone, expected, LATENTS, f"the pipeline's latents of {prompt.text[:40]!r}")


def check_long_text(policy: PipelinePolicy, prompt: Prompt, size: Size) -> None:
    """Check that a text beyond `max_sequence_length` is cut as the pipeline cuts it, with a warning."""
    if not policy.long_encoder:
        return
    limit = policy.options.max_sequence_length
    text = prompt.text
    while policy.count_tokens([text])[0] <= limit:
        text = f"{text} {prompt.text}"
    long = Prompt(prompt.id, text, sources=prompt.sources)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = endpoints(policy, [long], size)
    assert any("max_sequence_length" in str(warning.message) for warning in caught), "a text is cut without a warning"
    expected, _ = run_pipeline(policy, long, size, output_type="latent")
    _assert_close(ours, expected, LATENTS, f"the pipeline's latents of a text of more than {limit} tokens")


def check_reference_images(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size) -> None:
    """Check references: the pipeline's own latents, and different numbers of them in one batch.

    The references have the generated image's size, so that neither side resizes them. FLUX.2's pipeline takes sides of
    at least 64 pixels.
    """
    if not policy.max_references:
        assert_refused(policy, prompts[0], size)
        return
    size = policy.nearest_size(size)
    with TemporaryDirectory() as folder:
        images = []
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
            images.append(Path(folder) / f"{number}.png")
            Image.fromarray(pixels).save(images[-1])
        first, second = (replace(prompt, sources=(), references=()) for prompt in prompts[:2])
        check_batches(
            policy, [replace(first, references=(images[0],)), replace(second, references=tuple(images))], size
        )


def assert_refused(policy: PipelinePolicy, prompt: Prompt, size: Size) -> None:
    """Check that a generator without references refuses a prompt with one."""
    message = "none"
    try:
        policy.encode([replace(prompt, references=(Path("reference.png"),))], policy.size_of(prompt, size))
    except ValueError as error:
        message = str(error)
    assert "takes no reference images" in message, f"references are not refused, set max_references; error: {message}"


def check_idle_layers(policy: PipelinePolicy, prompt: Prompt, size: Size) -> None:
    """Check that `idle_layers` are the linear layers on which no image depends."""
    adapted = copy.copy(policy)
    image_size = policy.size_of(prompt, size)
    adapted.transformer = copy.deepcopy(policy.transformer)
    linear = []
    for name, module in adapted.transformer.named_modules():
        if isinstance(module, nn.Linear):
            linear.append(name)

    add_lora(adapted.transformer, rank=2, alpha=4, targets=linear)

    # A layer is idle if its adapter has no gradient.
    conditioning = adapted.collate(adapted.encode([prompt], image_size))
    idle = check_adapter(adapted, conditioning, image_size, targets=())
    undeclared = sorted(idle - policy.idle_layers)
    wrong = sorted(policy.idle_layers - idle)
    assert not undeclared, f"no image depends on {undeclared[0]}; add it to idle_in_last_block"
    assert not wrong, f"images depend on {wrong[0]}, which is declared idle"


# --- both sides ------------------------------------------------------------------------------------------------


@torch.no_grad()
def endpoints(
    policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size, *, seeds: Sequence[int] | None = None
) -> Tensor:
    """(B, N, C) endpoints of the engine's loop without noise; the seeds count from 0 if left out."""
    image_size = policy.size_of(prompts[0], size)
    return denoise(
        policy,
        list(range(len(prompts)) if seeds is None else seeds),
        conditioning=policy.collate(policy.encode(prompts, image_size)),
        sigmas=policy.sigmas(STEPS, image_size),
        size=image_size,
    )


def run_pipeline(
    policy: PipelinePolicy, prompt: Prompt, size: Size, *, output_type: str, seed: int = 0
) -> tuple[Any, Tensor]:
    """Run the diffusers pipeline: packed latents (1, N, C) or images, and its sigmas."""
    image_size = policy.size_of(prompt, size)
    pipeline = _untouched(policy.pipeline)
    settings: dict[str, Any] = {
        **policy.options.model_dump(),
        "height": image_size.height,
        "width": image_size.width,
        "max_area": image_size.height * image_size.width,
        "_auto_resize": False,
    }
    module = sys.modules[type(pipeline).__module__]
    # Images in the form that this pipeline takes.
    images = []
    for path in (*prompt.sources, *prompt.references):
        images.append(open_image(path))
    if prompt.references and policy.stitched:
        images = [stitch(images, image_size)]
    elif prompt.sources and not hasattr(module, "calculate_dimensions"):
        # A pipeline that is told not to resize, or does not by itself, is given the resized source.
        images[0] = images[0].resize((image_size.width, image_size.height), Image.Resampling.LANCZOS)
    if images:
        settings["image"] = images if policy.max_sources > 1 else images[0]

    # The pipeline's last latents, before it decodes them.
    latents: list[Tensor] = []

    def keep(*step: Any) -> dict[str, Any]:
        # The latents that the pipeline returns may be scaled for its VAE already.
        latents.append(step[-1]["latents"])
        return {}

    parameters = inspect.signature(pipeline.__call__).parameters
    with _small_areas(module, size):
        output = pipeline(
            prompt=prompt.text,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(seed),
            output_type=output_type,
            callback_on_step_end=keep,
            **{name: settings[name] for name in parameters if name in settings},
        )
    sigmas = pipeline.scheduler.sigmas.cpu()
    if output_type == "pil":
        return output.images, sigmas
    return latents[-1] if latents[-1].ndim == 3 else pack(latents[-1], patch=policy.patch), sigmas


def _untouched(pipeline: Any) -> Any:
    """Copy the pipeline with a new transformer of the same weights, without the policy's changes."""
    transformer = type(pipeline.transformer).from_config(pipeline.transformer.config).eval()
    transformer.load_state_dict(pipeline.transformer.state_dict())
    untouched = copy.copy(pipeline)  # with its settings
    untouched.transformer = transformer
    return untouched


@contextmanager
def _small_areas(module: Any, size: Size) -> Iterator[None]:
    """Let a pipeline with a fixed area of 1024² generate a smaller one."""
    calculate = getattr(module, "calculate_dimensions", None)
    if calculate is None:
        yield
        return
    area = size.height * size.width
    module.calculate_dimensions = lambda pixels, ratio: calculate(min(pixels, area), ratio)
    try:
        yield
    finally:
        module.calculate_dimensions = calculate


def _assert_close(ours: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert ours.shape == expected.shape, f"{tuple(ours.shape)} is not the shape of {what}, {tuple(expected.shape)}"
    difference = float((ours - expected).abs().max())
    assert difference <= tolerance, f"{difference:.1e} from {what}; at most {tolerance:g} is rounding"
