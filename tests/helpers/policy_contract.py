"""What this package's own generators promise beyond `pacorl.testing.check_policy`."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pipelines import check_against_pipeline, run_pipeline
from torch import nn

from pacorl.models.adapters import add_lora
from pacorl.models.int8 import parameter_count
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.generators import policy_on_meta
from pacorl.testing import endpoints
from pacorl.types import Conditioning, Prompt, Size


def check_generator(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size) -> None:
    """Check the contract, a text that is cut, references and idle layers."""
    check_against_pipeline(policy, prompts, size)
    check_long_text(policy, prompts[0], size)
    check_references(policy, prompts[0], size)
    check_idle_layers(policy, prompts[0], size)


def check_spec(spec: PolicySpec) -> None:
    """Check a spec's facts about the published checkpoint: the transformer's parameters and the number of steps.

    Raises:
        AssertionError: if the parameters or steps differ.
    """
    options = spec.options_for(spec.published, dtype="bfloat16")
    count = parameter_count(policy_on_meta(spec, options).transformer)
    assert count == spec.parameters, (
        f"{spec.architecture} has {count:,} parameters, and {spec.parameters:,} are declared"
    )

    default = inspect.signature(spec.pipeline_type.__call__).parameters["num_inference_steps"].default
    assert spec.steps == default or spec.kind == "qwen_edit_plus", f"steps {spec.steps}, not the pipeline's {default}"


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
    expected, _ = run_pipeline(policy, long, size=size, output_type="latent")
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def check_references(policy: PipelinePolicy, prompt: Prompt, size: Size) -> None:
    """Check that a generator without references refuses a prompt with one; `test_references.py` has the others."""
    if policy.max_references:
        return
    message = "none"
    try:
        policy.encode([replace(prompt, references=(Path("reference.png"),))], policy.size_of(prompt, size))
    except ValueError as error:
        message = str(error)
    assert "takes no reference images" in message, f"references are not refused, set max_references; error: {message}"


def layers_without_effect(policy: PipelinePolicy, conditioning: Conditioning, size: Size) -> set[str]:
    """List trainable adapted layers on which a velocity at σ = ½ does not depend."""
    x_BNC = policy.noise([0], size)
    policy.velocity(x_BNC, torch.full((1,), 0.5), conditioning, size).square().mean().backward()
    # A LoRA starts as the identity (B = 0), so its effect shows in gradients.
    idle = set()
    for name, parameter in policy.transformer.named_parameters():
        if ".lora_B." in name and parameter.requires_grad and (parameter.grad is None or not parameter.grad.any()):
            idle.add(name.split(".lora_B.")[0])
    policy.transformer.zero_grad(set_to_none=True)
    return idle


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
    idle = layers_without_effect(adapted, conditioning, image_size)
    undeclared = sorted(idle - policy.idle_layers)
    wrong = sorted(policy.idle_layers - idle)
    assert not undeclared, f"no image depends on {undeclared[0]}; add it to idle_in_last_block"
    assert not wrong, f"images depend on {wrong[0]}, which is declared idle"
