"""The dry run: what it lists, what it refuses, and whether its memory is what a step really takes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer
from PIL import Image
from tests.twins import TWINS, tiny_flux
from tests.twins.parts import tiny_judge
from tiny_runs import JPEG_SIZE
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.adapters import MovingAverage, adapter_state, add_lora
from pacorl.models.int8 import parameter_count
from pacorl.models.policies import POLICIES
from pacorl.models.policies.flux import FLUX, FluxPolicy
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.plan import passes, sources
from pacorl.plan.generators import Inputs, model_on_meta, policy_on_meta
from pacorl.plan.ledger import META, MemoryLedger
from pacorl.plan.memory import Memory
from pacorl.plan.plan import CARD_MARGIN, CUDA_BYTES, Plan, decided, plan_policy, plan_training
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

TEXTS = [prompt.text for prompt in set_prompts("train", 24)]
GIB = 2**30


@pytest.fixture(scope="session")
def policy() -> FluxPolicy:
    """A real tiny generator."""
    return FLUX.over(tiny_flux(TEXTS), max_sequence_length=48)


@pytest.fixture(scope="session")
def checkpoints(policy: FluxPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny generator and a tiny judge, as they are committed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    policy.pipeline.save_pretrained(folder / "flux")
    model, processor = tiny_judge(TEXTS)
    model.save_pretrained(folder / "judge")
    processor.save_pretrained(folder / "judge")
    return folder


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def tiny_run(checkpoints: Path, *overrides: str) -> PolicyConfig:
    return load(
        PolicyConfig,
        None,
        [
            f"model={{checkpoint: '{checkpoints / 'flux'}', dtype: float32, max_sequence_length: 48}}",
            f"judge.checkpoint={checkpoints / 'judge'}",
            "prompts={train: 'tiny:train', evaluation: 'tiny:test', evaluation_limit: 8}",
            "sampling={size: [128, 128], batch: 8}",
            "evaluation={size: [128, 128]}",
            "adapter={rank: 16, alpha: 32}",
            *overrides,
        ],
    )


# --- against reality -------------------------------------------------------------------------------------------


def measured_peak(run: profile) -> int:
    """The highest sum of what the CPU allocator handed out and took back."""
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def train_for_real(config: PolicyConfig) -> None:
    """Two optimizer steps of the adapter on a real tiny transformer, which is built here too."""
    pipeline = tiny_flux(TEXTS)
    policy = FLUX.over(pipeline, max_sequence_length=config.model.max_sequence_length)
    add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=policy.lora_targets)
    if config.model.gradient_checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()
    average = MovingAverage(policy.transformer, decay=0.9)
    optimizer = torch.optim.AdamW([weight for weight in policy.transformer.parameters() if weight.requires_grad])
    batch, size = config.sampling.batch, Size(*config.sampling.size)
    conditioning = Conditioning(
        {"tokens": torch.randn(batch, config.model.max_sequence_length, 64), "pooled": torch.randn(batch, 64)}
    )
    for step in (1, 2):
        optimizer.zero_grad(set_to_none=True)
        velocity = policy.velocity(policy.noise(range(batch), size), torch.full((batch,), 0.9), conditioning, size)
        velocity.square().mean().backward()
        optimizer.step()
        average.follow(step)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_is_within_a_fifth_of_the_measured_peak(checkpoints: Path, checkpointing: bool) -> None:
    config = tiny_run(checkpoints, f"model.gradient_checkpointing={checkpointing}")
    server = config.model_copy(update={"judge": None, "rewards": load(PolicyConfig, None, [JPEG]).rewards})
    planned = plan_policy(server).memory.phases
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        train_for_real(config)
    # The plan's text encoders are gone by then, and this pipeline's are not.
    encoders = planned["encode"]
    assert planned["train"] > encoders
    assert planned["train"] + encoders == pytest.approx(measured_peak(run), rel=0.2)


JPEG = f"rewards=[{{name: '{JPEG_SIZE}'}}]"


def test_a_sampling_forward_is_within_a_fifth_of_the_measured_peak(checkpoints: Path, policy: FluxPolicy) -> None:
    config, size = tiny_run(checkpoints), Size(128, 128)
    configs = sources.generator_of(config.model, config.generator).configs
    inputs = Inputs(policy_on_meta(config.generator, config.model, configs))
    conditioning = Conditioning({"tokens": torch.randn(8, 48, 64), "pooled": torch.randn(8, 64)})
    x_BNC = policy.noise(range(8), size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run, torch.no_grad():
        policy.velocity(x_BNC, torch.ones(8), conditioning, size)
    assert passes.sampling_pass(inputs, size=size, batch=8).peak == pytest.approx(measured_peak(run), rel=0.2)

    vae = policy.pipeline.vae
    codes = torch.randn(1, vae.config.latent_channels, 32, 32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run, torch.no_grad():
        vae.decode(codes, return_dict=False)
    planned = passes.decoding_pass(inputs, size=size).peak
    assert planned <= measured_peak(run) < 1.5 * planned


def test_the_ledger_counts_what_is_made_and_forgets_what_is_dropped() -> None:
    weight = torch.empty(256, device=META)
    with MemoryLedger() as ledger:
        first = weight * 2  # 1,024 bytes
        second = first.view(16, 16) + 1  # a view is nothing new; its sum is
        del first
        third = second.t()
    assert (ledger.peak, ledger.live) == (2048, 1024)
    del second, third
    assert ledger.live == 0


@pytest.mark.slow
def test_the_published_architectures_have_the_published_sizes() -> None:
    judges = []
    for name in ("lab/PaCo-Reward-7B", "Qwen/Qwen3.5-9B"):
        checkpoint = sources.vision_language_model(name, key="judge.checkpoint")
        judges.append(parameter_count(model_on_meta(checkpoint.configs["model"], dtype=torch.bfloat16)))
    assert judges == pytest.approx([8.292e9, 9.410e9], rel=1e-3)
    config = PolicyConfig()
    policy = policy_on_meta(config.generator, config.model)
    encoders = [parameter_count(getattr(policy.pipeline, name)) for name in policy.encoders]
    assert sorted(encoders) == pytest.approx([123.1e6, 4.762e9], rel=1e-3)
    with META:
        add_lora(policy.transformer, rank=64, alpha=128, targets=policy.lora_targets)
    assert sum(map(Tensor.numel, adapter_state(policy.transformer).values())) == 179_306_496


# --- a run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_auto_checkpoints_only_if_the_run_does_not_fit_the_card_without(checkpoints: Path) -> None:
    auto, on, off = (
        tiny_run(checkpoints, f"model.gradient_checkpointing={choice}") for choice in ("auto", "true", "false")
    )
    without = plan_policy(off).peak_bytes
    assert plan_policy(auto) == plan_policy(on), "without a card, as the smallest card runs it"
    assert plan_policy(on).peak_bytes < without
    for card_bytes, checkpointed in ((without + CARD_MARGIN, False), (without + CARD_MARGIN - 1, True), (None, False)):
        assert decided(auto, card_bytes=card_bytes).model.gradient_checkpointing is checkpointed


@pytest.mark.slow
def test_phases_hold_what_lies_on_the_card_in_them(checkpoints: Path) -> None:
    plans = {
        name: plan_policy(tiny_run(checkpoints, *overrides)).memory
        for name, overrides in {
            "plain": [],
            "low": ["memory=low"],
            "nodes": ["sampling.tree={seeds: 1}"],
            "served": ["judge.checkpoint=http://127.0.0.1:9/v1#paco"],
            "endpoint": ["objective.name=diffusion_nft"],
        }.items()
    }
    plain, low = plans["plain"], plans["low"]
    assert low.phases["encode"] == plain.phases["encode"]
    assert low.phases["score"] < plain.phases["score"], "they take turns"
    assert low.host > plain.host, "and who waits is in main memory"
    assert plans["nodes"].phases["train"] < plain.phases["train"]
    assert plans["nodes"].host < plain.host, "a distinct latent is kept once"
    assert "score" not in plans["served"].phases
    assert plans["served"].phases["train"] < plain.phases["train"]
    assert plans["endpoint"].phases["sample"] > plain.phases["sample"], "the adapter that samples"


def edit_options(kind: str) -> PolicyOptions:
    own = {"max_sequence_length": 48} if kind == "kontext" else {}
    return POLICIES[kind].options(true_cfg_scale=2.0, dtype="float32", **own)  # type: ignore[call-arg, arg-type]


def edit_parts(kind: str) -> Parts:
    pipeline = TWINS[kind](TEXTS)
    parts = {name: dict(getattr(pipeline, name).config) for name in ("transformer", "vae")}
    parts |= {name: getattr(pipeline, name).config.to_dict() for name in POLICIES[kind].policy.encoders}
    if kind != "kontext":
        parts["processor"] = sources.image_options(pipeline.processor.image_processor.to_dict())
    return parts


def edit_twin_on_meta(kind: str) -> PipelinePolicy:
    return policy_on_meta(POLICIES[kind], edit_options(kind), edit_parts(kind))


@pytest.mark.parametrize(("kind", "tokens"), [("qwen_edit_plus", 3 * 16), ("kontext", 64)])
def test_references_are_planned_as_they_are_encoded(kind: str, tokens: int, tmp_path: Path) -> None:
    """Memory and FLOPs grow with each, but Kontext's are one image, whatever their number."""
    image = tmp_path / "reference.png"
    Image.new("RGB", (64, 64), "red").save(image)
    size = Size(64, 64)
    prompts = [Prompt(0, "The hero waves.", references=(image,) * count) for count in (1, 3)]
    count = sources.planned_images(load(PolicyConfig, None, [f"model.kind={kind}"]), prompts)
    assert count == 3

    inputs = Inputs(edit_twin_on_meta(kind))
    one = passes.sampling_pass(inputs, size=size, batch=1)
    inputs.images = count
    policy = POLICIES[kind].policy(TWINS[kind](TEXTS), edit_options(kind))
    encoded = policy.encode(prompts[1:], size)[0].tensors
    planned = inputs.conditioning(size, batch=1).tensors
    assert planned["source"].shape == encoded["source"].shape
    assert encoded["source"].shape[1] == tokens
    assert encoded["tokens"].shape[1] <= planned["tokens"].shape[1] < encoded["tokens"].shape[1] + 128
    three = passes.sampling_pass(inputs, size=size, batch=1)
    assert (three.flops > one.flops, three.peak > one.peak) == ((True, True) if kind != "kontext" else (False, False))


# --- the screen ------------------------------------------------------------------------------------------------


def test_a_plan_is_one_screen_with_the_verdict_first_and_json_with_all() -> None:
    absence = sources.MissingFile("judge.checkpoint", "lab/judge", "`hf download lab/judge`", 17 * 10**9)
    memory = Memory({"encode": 4 * GIB, "train": 3 * GIB}, host=5 * GIB, held=GIB)
    plan = Plan((absence,), notes=("mind the gap",), memory=memory, device="a card", device_bytes=8 * GIB)
    lines = str(plan).splitlines()
    assert lines[0] == "verdict: fits this card; 1 absent (judge.checkpoint)"
    assert len(lines) < 24
    for part in ("4.0 GiB of 8.0 GiB", "judge.checkpoint = lab/judge: `hf download", "mind the gap", "download: 17 GB"):
        assert part in str(plan)
    document = json.loads(plan.to_json())
    assert document["memory"]["phases"]["encode"] == document["peak_bytes"] == 4 * GIB
    assert document["absences"] == [dataclasses.asdict(absence)]

    # What fits, and the exit code.
    def verdict(**changes: Any) -> tuple[str, int]:
        changed = dataclasses.replace(plan, absences=(), **changes)
        return str(changed).splitlines()[0].removeprefix("verdict: ").partition(";")[0], changed.exit_code

    assert verdict() == ("fits this card", 0)
    assert verdict(device_bytes=4 * GIB + CUDA_BYTES - 1) == ("does not fit this card", 2)
    assert verdict(device_bytes=None) == ("no card here", 0)
    assert verdict(main_bytes=GIB - 1) == ("does not fit this card", 2), "for want of main memory"
    assert plan.exit_code == 2


@pytest.mark.slow
def test_a_dry_run_lists_what_is_absent_and_says_by_its_exit_code_what_it_is(tmp_path: Path) -> None:
    def absent(*overrides: str) -> dict[str, str]:
        words = ["train-policy", str(recipe()), "--dry-run", "--json", f"out={tmp_path}", *overrides]
        result = CliRunner().invoke(app, words)
        absences = {one["key"]: one["remedy"] for one in json.loads(result.stdout)["absences"]}
        assert result.exit_code == (2 if absences else 0), result.output
        return absences

    assert list(absent("adapter.start=an/adapter/elsewhere", "prompts.train=no.jsonl")) == [
        "prompts.train",
        "adapter.start",
    ]
    # A judge over HTTP is asked for its models.
    with FakeServer().running() as server:
        assert absent(f"judge.checkpoint={server.url}#judge") == {}
        assert "'other'" in absent(f"judge.checkpoint={server.url}#other")["judge.checkpoint"]
    gone = f"judge.checkpoint={server.url}#judge"
    assert server.url in absent(gone)["judge.checkpoint"]
    assert absent(gone, JPEG) == {}, "which asks none"


def test_a_run_with_functions_has_the_dry_run_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the weights."""
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("a fox in the snow\n")
    Path("test.txt").write_text("two bears at a desk\n")
    changes = [JPEG, "evaluation.rewards=[]", "judge=none", "out=run"]
    changes += ["prompts.train=train.txt", "prompts.evaluation=test.txt"]
    config = load(PolicyConfig, Path("flux_t2is_24gb"), changes)
    plan, of_command = plan_training(config, rewards=["unlike"]), plan_policy(config)
    assert plan.memory.phases == pytest.approx(of_command.memory.phases, rel=1e-3)
    assert [absence.key for absence in plan.absences] == ["model.checkpoint"]
    assert any("'unlike'" in note for note in plan.notes)
    assert not Path("run").exists()
