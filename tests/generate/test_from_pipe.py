"""A generator, and a trainer, of a pipeline that diffusers has loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
from peft import LoraConfig

import pacorl
from pacorl import Generator
from pacorl.models.adapters import adapter_off

FOLDER = Path(pacorl.__file__).parent / "tiny" / "checkpoints" / "flux"


@pytest.fixture
def pipeline() -> Any:
    return diffusers.FluxPipeline.from_pretrained(FOLDER)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # peft's, of the second adapter
def test_loras_under_names_of_the_user_s_are_scaled_and_disabled(pipeline: Any) -> None:
    for name in ("ink", "fox"):
        lora = LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
        pipeline.transformer.add_adapter(lora, adapter_name=name)
    pipeline.transformer.set_adapters(["ink", "fox"])
    generator = Generator.from_pipe(pipeline, max_sequence_length=48)
    assert generator.adapter == "ink, fox"
    (plain,) = generator.sample("a hero", size=(32, 32), steps=1)
    with adapter_off(pipeline.transformer):
        (base,) = generator.sample("a hero", size=(32, 32), steps=1)
    assert not any(parameter.requires_grad for parameter in pipeline.transformer.parameters())
    pipeline.transformer.set_adapters(["ink", "fox"], [0.0, 0.0])
    (zero,) = generator.sample("a hero", size=(32, 32), steps=1)
    assert plain.tobytes() != base.tobytes() == zero.tobytes()
