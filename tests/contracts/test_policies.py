"""What every generator of the table promises; a new entry is tested on the day it is added."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_twins import drawn, edit, settings_of, source_image
from PIL import Image
from pipelines import check_against_pipeline, run_pipeline
from policy_contract import check_generator, check_spec
from tests.twins import TWINS
from tests.twins.parts import vocabulary
from tiny_runs import metrics
from torch import Tensor
from toy_world import toy_config

from pacorl.generate.generator import Generator
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.models.adapters import adapter_off, adapter_state, add_lora
from pacorl.models.lora import read_lora, save_lora
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.plan.generators import Inputs
from pacorl.testing import endpoints
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

KINDS = pytest.mark.parametrize("kind", POLICIES)
ROLES = pytest.mark.parametrize(
    ("kind", "edits"),
    [
        pytest.param(kind, edits, id=f"{kind}-{'edit' if edits else 'set'}")
        for kind, spec in POLICIES.items()
        for edits in (False, True)
        if (spec.edits if edits else spec.sets)
    ],
)
"""Each kind with what it generates: some do both."""
FAST = ("flux-set", "qwen_edit-edit")
FEW_ROLES = pytest.mark.parametrize(
    ROLES.args[0],
    [
        pytest.param(*role.values, id=role.id, marks=[] if role.id in FAST else pytest.mark.slow)
        for role in ROLES.args[1]
    ],
)
"""The same, of which the fast tests have a set and an edit alone, of two families."""
PLANNED_ROLES = pytest.mark.parametrize(
    ROLES.args[0],
    [
        pytest.param(*role.values, id=role.id, marks=pytest.mark.slow if role.id in FAST else pytest.mark.nightly)
        for role in ROLES.args[1]
    ],
)
"""The same for what takes seconds: loading, an epoch, a plan."""
AREA = Size(96, 96)
STEPS = 3


@cache
def twin(kind: str) -> PipelinePolicy:
    torch.manual_seed(0)
    pipeline = drawn(TWINS[kind](vocabulary()))
    if "scaling_factor" in pipeline.vae.config:  # the tiny world's own VAE is not scaled, as the published ones are
        pipeline.vae.register_to_config(scaling_factor=0.36, shift_factor=0.12)
    return POLICIES[kind].over(pipeline, dtype="float32", **settings_of(POLICIES[kind]))


@dataclass(frozen=True)
class Job:
    """A twin with something that it can generate."""

    policy: PipelinePolicy
    prompt: Prompt
    size: Size
    conditioning: Conditioning

    @torch.no_grad()
    def velocity(self) -> Tensor:
        x_BNC = self.policy.noise([0], self.size)
        return self.policy.velocity(x_BNC, torch.full((1,), 0.6), self.conditioning, self.size)


@pytest.fixture
def job(kind: str, edits: bool, tmp_path: Path) -> Job:
    """The twin's weights are the test's own, so that it may train them."""
    policy = copy.copy(twin(kind))
    policy.transformer = copy.deepcopy(policy.transformer)
    source = source_image(tmp_path / "source.png", height=90, width=140)
    prompt = edit(source) if edits else set_prompts("dev", 1)[0]
    size = policy.size_of(prompt, AREA)
    return Job(policy, prompt, size, policy.collate(policy.encode([prompt], size)))


# --- the spec --------------------------------------------------------------------------------------------------


@KINDS
def test_its_checkpoints_are_recognised(kind: str, tmp_path: Path) -> None:
    assert kind_of(POLICIES[kind].published) == kind
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": type(twin(kind).pipeline).__name__}))
    assert kind_of(str(tmp_path)) == kind


@KINDS
def test_a_bad_size_is_refused_before_weights_are_loaded(kind: str, tmp_path: Path) -> None:
    """A folder with two configs and no weights is enough."""
    spec, policy = POLICIES[kind], twin(kind)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": spec.pipeline}))
    policy.pipeline.vae.save_config(tmp_path / "vae")
    assert spec.token_pixels(policy.pipeline.vae.config) == policy.token_pixels

    too_small = Size(policy.token_pixels, policy.token_pixels // 2)
    checks: list[Callable[[Size], object]] = [
        policy.check_size,
        lambda size: spec.check_source(str(tmp_path), size=size),
    ]
    for check in checks:
        with pytest.raises(ValueError, match=f"size {too_small} must (have|be a multiple)"):
            check(too_small)
        check(policy.nearest_size(AREA))


# --- sampling --------------------------------------------------------------------------------------------------


@ROLES
@pytest.mark.parametrize(
    "dynamic", [pytest.param(False, id="static shift", marks=pytest.mark.slow), pytest.param(True, id="dynamic shift")]
)
def test_without_noise_the_loop_is_the_pipeline(kind: str, job: Job, dynamic: bool) -> None:
    policy = copy.copy(job.policy)
    config = {**policy.pipeline.scheduler.config, "use_dynamic_shifting": dynamic, "shift": 2.5}
    scheduler = type(policy.pipeline.scheduler).from_config(config)
    policy.pipeline = type(policy.pipeline)(**{**policy.pipeline.components, "scheduler": scheduler})
    check_against_pipeline(policy, [job.prompt], AREA)


@ROLES
def test_in_bf16_timesteps_round_as_the_pipeline_s(kind: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = copy.deepcopy(job.policy.pipeline)
    pipeline.transformer = copy.deepcopy(job.policy.transformer)
    pipeline.to(torch.bfloat16)
    policy: Any = POLICIES[kind].over(pipeline, dtype="bfloat16", **settings_of(POLICIES[kind]))
    monkeypatch.setattr("pacorl.testing.STEPS", 12)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []

    def recorded(function: Callable[..., Any], seen: list[Tensor]) -> Callable[..., Any]:
        def call(*args: Any, **inputs: Any) -> Any:
            seen.append(inputs["timestep"][:1].clone())
            return function(*args, **inputs)

        return call

    monkeypatch.setattr(policy, "predict", recorded(policy.predict, ours))
    endpoints(policy, [job.prompt], AREA)
    transformer = type(pipeline.transformer)
    monkeypatch.setattr(transformer, "forward", recorded(transformer.forward, theirs))
    run_pipeline(policy, job.prompt, size=AREA, output_type="latent")
    assert torch.equal(torch.cat(ours).unique(), torch.cat(theirs).unique())


@pytest.mark.slow
@FEW_ROLES
def test_it_keeps_the_contract(kind: str, job: Job) -> None:
    """Images of its pipeline, two prompts of unequal length in one batch, a text that is cut."""
    shorter = replace(job.prompt, id=1, text=" ".join(job.prompt.text.split()[:4]))
    check_generator(job.policy, [job.prompt, shorter], AREA)


@KINDS
def test_the_published_architecture_and_steps_are_declared(kind: str) -> None:
    check_spec(POLICIES[kind])


@PLANNED_ROLES
def test_a_generator_is_loaded_and_generates(kind: str, job: Job, tmp_path: Path) -> None:
    """By its folder alone; with an adapter it generates something else, and without it what it did before."""
    folder, adapter = tmp_path / "checkpoint", tmp_path / "adapter"
    twin(kind).pipeline.save_pretrained(folder)
    plain = Generator.from_pretrained(str(folder), **settings_of(POLICIES[kind]))
    assert type(plain.policy) is POLICIES[kind].policy
    assert POLICIES[kind].edits if job.prompt.sources else POLICIES[kind].sets
    (image,) = plain.sample([job.prompt], [0], size=AREA, steps=STEPS)
    assert Size(image.height, image.width) == plain.size_of(job.prompt, AREA) == job.size
    _save_drawn_adapter(job.policy, adapter)
    tuned = Generator.from_pretrained(str(folder), adapter=str(adapter), **settings_of(POLICIES[kind]))
    assert tuned.sample([job.prompt], [0], size=AREA, steps=STEPS) != [image]
    with adapter_off(tuned.policy.transformer):
        assert tuned.sample([job.prompt], [0], size=AREA, steps=STEPS) == [image]


# --- adapters --------------------------------------------------------------------------------------------------


def _save_drawn_adapter(policy: PipelinePolicy, folder: Path) -> None:
    add_lora(policy.transformer, rank=2, alpha=4, targets=policy.lora_targets)
    torch.manual_seed(1)
    for name, parameter in policy.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_lora(folder, adapter_state(policy.transformer), rank=2, alpha=4, targets=policy.lora_targets)


# --- without weights -------------------------------------------------------------------------------------------


@ROLES
def test_what_is_planned_for_a_prompt_is_what_it_is_encoded_to(kind: str, job: Job) -> None:
    """Names and shapes; texts are planned at their longest."""
    planned = Inputs(job.policy, images=len(job.prompt.sources)).conditioning(job.size, batch=1).tensors
    assert planned.keys() == job.conditioning.tensors.keys()
    for name, tensor in job.conditioning.tensors.items():
        assert planned[name].shape[2:] == tensor.shape[2:], name
        assert planned[name].shape[1] >= tensor.shape[1], name


def _overrides(kind: str, job: Job, folder: Path) -> list[str]:
    """Of a run of the twin, saved as a checkpoint, on prompts of its kind."""
    prompts = "tiny:train:2"
    if job.prompt.sources:
        record = {"image": str(job.prompt.sources[0]), "instruction": job.prompt.text}
        (folder / "edits.jsonl").write_text(json.dumps(record) + "\n")
        prompts = str(folder / "edits.jsonl")
    twin(kind).pipeline.save_pretrained(folder / "checkpoint")
    settings = {"kind": kind, "checkpoint": str(folder / "checkpoint"), **settings_of(POLICIES[kind])}
    return [
        *(f"model.{name}={value}" for name, value in settings.items()),
        *(f"prompts.{name}={prompts}" for name in ("train", "evaluation")),
        *(f"{name}.size=[64, 64]" for name in ("sampling", "evaluation")),
    ]


@PLANNED_ROLES
def test_an_epoch_starts_on_policy_and_changes_the_adapter(kind: str, job: Job, tmp_path: Path) -> None:
    def redness(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        return [np.asarray(image)[..., 0].mean() / 255 for image in images]

    overrides = [*_overrides(kind, job, tmp_path), "epochs=1", "prompts_per_epoch=1"]
    config = toy_config(tmp_path / "run", *overrides, "evaluation.steps=2", "judge=none", "rewards=[{name: redness}]")
    folder = PolicyTrainer(config, rewards={"redness": redness}).train().folder
    (epoch,) = metrics(folder, "epoch")
    assert epoch["ratio_deviation"] == 0.0, "what is trained is not what sampled"
    # PEFT starts B at zero.
    state = read_lora(folder / "adapter").state
    assert any(value.any() for name, value in state.items() if ".lora_B." in name), "nothing was trained"


@KINDS
def test_training_sigmas_follow_the_published_training(kind: str) -> None:
    """Where a kind's own training is published, or the fallback is named, by the scheduler's configuration."""
    policy = twin(kind)
    config, (rows, cols) = policy.pipeline.scheduler.config, policy.token_grid(AREA)
    ours = policy.training_sigmas(STEPS, AREA)
    if policy.training_shift == "inference":
        assert torch.equal(ours, policy.sigmas(STEPS, AREA))
        return
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (rows * cols - config.base_image_seq_len)
    even = torch.linspace(1, 1 / STEPS, STEPS, dtype=torch.float64)
    shifted = math.exp(mu) / (math.exp(mu) + 1 / even - 1)
    torch.testing.assert_close(ours.double(), torch.cat([shifted, torch.zeros(1).double()]), rtol=0, atol=1e-6)
