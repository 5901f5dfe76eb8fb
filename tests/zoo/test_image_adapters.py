"""Every form of an adapter by us, and our form by every tool: outputs are PEFT's own for the adapter as it was made.

The scale α/rank is 2, as the released adapters', so that folding it into weights rounds nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from edit_twins import drawn, edit, qwen_image_21_pipeline, qwen_pipeline, source_image
from peft import LoraConfig, PeftModel, get_peft_model
from tests.twins import tiny_flux, tiny_flux_transformer, tiny_klein, tiny_kontext, tiny_qwen_image
from tests.twins.parts import vocabulary
from tests.zoo.comfy import load_in_comfy
from tests.zoo.forms import FORMS, Adapter
from torch import Tensor, nn

from pacorl.models.adapters import load_lora
from pacorl.models.lora import DIFFUSERS_WEIGHTS
from pacorl.models.policies.flux import FLUX
from pacorl.models.policies.klein import KLEIN
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.qwen_image import QWEN_EDIT, QWEN_EDIT_PLUS, QWEN_IMAGE
from pacorl.models.policies.qwen_image_21 import QWEN_IMAGE_21
from pacorl.tiny.world import set_prompts
from pacorl.types import Size

RANK, ALPHA = 4, 8
SIZE = Size(32, 32)


class Zoo:
    """A generator, one adapter of all its modules, and what it makes of fixed inputs."""

    def __init__(self, policy: PipelinePolicy, source: Path) -> None:
        self.policy = policy
        self.pipeline: Any = policy.pipeline  # type: ignore[attr-defined]
        self.base = copy.deepcopy(policy.transformer)
        prompt = edit(source) if policy.max_sources else set_prompts("dev", 1)[0]  # type: ignore[attr-defined]
        self.size = policy.size_of(prompt, SIZE)
        self.conditioning = policy.collate(policy.encode([prompt], self.size))

    @torch.no_grad()
    def output(self, transformer: nn.Module) -> Tensor:
        """The velocity of one noise at σ = 0.6."""
        self.policy.transformer = transformer
        noise = self.policy.noise([0], self.size)
        return self.policy.velocity(noise, torch.tensor([0.6]), self.conditioning, self.size)

    def fresh(self) -> Any:
        return copy.deepcopy(self.base)

    def pipeline_with(self, transformer: nn.Module) -> Any:
        return type(self.pipeline)(**{**self.pipeline.components, "transformer": transformer})

    @cache  # noqa: B019
    def adapter(self, blocks: str = r"(single_)?transformer_blocks") -> Adapter:
        """An adapter by PEFT's own hands whose weights are all drawn."""
        targets = self.policy.lora_targets  # type: ignore[attr-defined]
        modules = [
            re.escape(name)
            for name, module in self.base.named_modules()
            if isinstance(module, nn.Linear) and re.match(blocks, name) and name.endswith(targets)
        ]
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="|".join(modules))
        torch.manual_seed(1)
        model = get_peft_model(self.fresh(), config)
        model.add_adapter("old", copy.deepcopy(config))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return Adapter(model, self.pipeline_with(self.fresh()), RANK, ALPHA, targets)

    @cache  # noqa: B019
    def plain(self) -> Tensor:
        """The output without an adapter."""
        return self.output(self.fresh())

    @cache  # noqa: B019
    def truth(self, adapter: Adapter, *, merged: bool) -> Tensor:
        """What PEFT makes of the adapter; `merged` into the weights, as ComfyUI does it."""
        model = copy.deepcopy(adapter.model)
        model.set_adapter("default")
        return self.output(model.merge_and_unload(adapter_names=["default"]) if merged else model.base_model.model)


def flux_pipeline() -> Any:
    """FLUX in even smaller: what is asked of it here depends on its names alone."""
    pipeline = tiny_flux(vocabulary())
    pipeline.transformer = tiny_flux_transformer(width=64, heads=2, double_blocks=1, single_blocks=2)
    return drawn(pipeline)


POLICIES: dict[str, Callable[[], PipelinePolicy]] = {
    "flux": lambda: FLUX.over(flux_pipeline(), guidance_scale=3.5, max_sequence_length=48),
    "kontext": lambda: KONTEXT.over(tiny_kontext(flux_pipeline()), guidance_scale=2.5, max_sequence_length=48),
    "qwen_image": lambda: QWEN_IMAGE.over(drawn(tiny_qwen_image(vocabulary())), max_sequence_length=144),
    "qwen_edit": lambda: QWEN_EDIT.over(qwen_pipeline()),
    "qwen_edit_plus": lambda: QWEN_EDIT_PLUS.over(qwen_pipeline(plus=True)),
    "klein": lambda: KLEIN.over(drawn(tiny_klein(vocabulary())), max_sequence_length=48),
    "qwen_image_21": lambda: QWEN_IMAGE_21.over(qwen_image_21_pipeline()),
}


FAST = {"flux", "klein"}
"""One of each family of names: Kontext has FLUX's transformer, and Qwen-Image no form that the two lack."""


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[] if kind in FAST else pytest.mark.nightly) for kind in POLICIES]
)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    torch.manual_seed(0)
    source = source_image(tmp_path_factory.mktemp("sources") / "source.png", height=48, width=48)
    return Zoo(POLICIES[request.param](), source)


# --- tools: each puts the adapter at a path on a fresh model ---------------------------------------------------------


def by_ours(zoo: Zoo, path: Path) -> nn.Module:
    transformer: nn.Module = zoo.fresh()
    load_lora(transformer, {str(path): 1.0})
    return transformer


def by_peft(zoo: Zoo, path: Path) -> nn.Module:
    model: nn.Module = PeftModel.from_pretrained(zoo.fresh(), path).base_model.model
    return model


def by_diffusers(zoo: Zoo, path: Path) -> nn.Module:
    pipeline = zoo.pipeline_with(zoo.fresh())
    pipeline.load_lora_weights(path)  # as docs/models.md says
    transformer: nn.Module = pipeline.transformer
    return transformer


def by_comfy(zoo: Zoo, path: Path) -> nn.Module:
    transformer: nn.Module = zoo.fresh()
    assert load_in_comfy(transformer, path / DIFFUSERS_WEIGHTS) == [], "lora key not loaded"
    return transformer


TOOLS = {"ours": by_ours, "peft": by_peft, "diffusers": by_diffusers, "comfy": by_comfy}
SPLIT_AT_FULL_WIDTH = ("kohya", "diffusion_model")
"""FLUX.1's single blocks are one matrix there, which diffusers cuts at 3072 and 12288 rows, whatever the model: such
files hold the double blocks alone here, and tests/models/test_lora.py reads single blocks at FLUX.1's width."""


@pytest.mark.parametrize(
    ("form", "tool"), [*((form, "ours") for form in FORMS), *(("ours", tool) for tool in TOOLS if tool != "ours")]
)
def test_the_output_is_that_of_the_adapter_as_it_was_made(zoo: Zoo, form: str, tool: str, tmp_path: Path) -> None:
    """We read every form, and every tool reads ours."""
    is_split = isinstance(zoo.base, FluxTransformer2DModel) and form in SPLIT_AT_FULL_WIDTH
    adapter = zoo.adapter("transformer_blocks") if is_split else zoo.adapter()
    truth = zoo.truth(adapter, merged=tool == "comfy")
    assert (truth - zoo.plain()).abs().max() > 0.02, "the adapter changes nothing, so nothing is compared"
    path = FORMS[form](adapter, tmp_path / "adapter")
    assert (zoo.output(TOOLS[tool](zoo, path)) - truth).abs().max() == 0.0
