"""Every kind's diffusers pipeline, which a policy is compared with."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pacorl import testing
from pacorl.io.images import as_rgb, open_image
from pacorl.models.policies.pipeline import PipelinePolicy, pack, stitch
from pacorl.types import Prompt, Size


def diffusers_own(pipeline: Any) -> Any:
    """The pipeline with a new transformer of the same weights, on which a policy has set nothing."""
    own, source = copy.copy(pipeline), pipeline.transformer
    own.transformer = type(source).from_config(source.config).to(source.dtype).eval()
    own.transformer.load_state_dict(source.state_dict())
    return own


def check_against_pipeline(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size) -> None:
    """Check a policy against the pipeline that it holds: latents, sigmas, and the decoded image of the first prompt."""

    def latents(prompt: Prompt, seed: int) -> Tensor:
        found, sigmas = run_pipeline(policy, prompt, size=size, output_type="latent", seed=seed)
        assert torch.equal(policy.sigmas(testing.STEPS, image_size), sigmas), "the scheduler has other sigmas"
        return Tensor(found)

    image_size = policy.size_of(prompts[0], size)
    testing.check_policy(policy, prompts, size, pipeline=latents)
    (image,), _ = run_pipeline(policy, prompts[0], size=size, output_type="pil")
    (ours,) = policy.decode(testing.endpoints(policy, prompts[:1], size), image_size)
    # A transparent image is shown on white.
    difference = np.asarray(ours, dtype=int) - np.asarray(as_rgb(image, "the pipeline's"), dtype=int)
    assert np.abs(difference).max() <= 1, f"the image differs from the pipeline's by {np.abs(difference).max()} of 255"


def run_pipeline(
    policy: PipelinePolicy, prompt: Prompt, *, size: Size, output_type: str, seed: int = 0
) -> tuple[Any, Tensor]:
    """Run the diffusers pipeline: packed latents (1, N, C) or images, and its sigmas."""
    image_size = policy.size_of(prompt, size)
    pipeline = diffusers_own(policy.pipeline)
    settings: dict[str, Any] = {
        **policy.options.model_dump(),
        "height": image_size.height,
        "width": image_size.width,
        "max_area": image_size.height * image_size.width,
        "_auto_resize": False,
    }
    module = sys.modules[type(pipeline).__module__]
    # Images in the form that this pipeline takes.
    images = [open_image(path) for path in (*prompt.sources, *prompt.references)]
    if prompt.references and policy.stitched:
        images = [stitch(images, image_size)]
    elif prompt.sources and not hasattr(module, "calculate_dimensions"):
        # A pipeline that is told not to resize, or does not by itself, is given the resized source.
        images[0] = images[0].resize((image_size.width, image_size.height), Image.Resampling.LANCZOS)
    if images:
        settings["image"] = images if policy.max_sources > 1 else images[0]

    # The pipeline's last latents, before it decodes them: those that it returns may be scaled for its VAE already.
    latents: list[Tensor] = []

    def keep(*step: Any) -> dict[str, Any]:
        latents.append(step[-1]["latents"])
        return {}

    parameters = inspect.signature(pipeline.__call__).parameters
    with _small_areas(module, size):
        output = pipeline(
            prompt=prompt.text,
            num_inference_steps=testing.STEPS,
            generator=torch.Generator().manual_seed(seed),
            output_type=output_type,
            callback_on_step_end=keep,
            **{name: settings[name] for name in parameters if name in settings},
        )
    sigmas = pipeline.scheduler.sigmas.cpu()
    if output_type == "pil":
        return output.images, sigmas
    return latents[-1] if latents[-1].ndim == 3 else pack(latents[-1], patch=policy.patch), sigmas


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
