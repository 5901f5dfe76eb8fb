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
from tests.twins import TWINS
from tiny_runs import JPEG_SIZE, TINY_SETS, planned
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.adapters import adapter_state, add_lora
from pacorl.models.int8 import parameter_count
from pacorl.models.policies import POLICIES
from pacorl.models.policies.flux import FLUX
from pacorl.plan import passes, sources
from pacorl.plan.generators import Inputs, model_on_meta, policy_on_meta
from pacorl.plan.ledger import META, MemoryLedger
from pacorl.plan.memory import Memory
from pacorl.plan.plan import CARD_MARGIN, CUDA_BYTES, Plan, decided, plan_policy, plan_training
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

TEXTS = [prompt.text for prompt in set_prompts("train", 24)]
JPEG = f"rewards=[{{name: '{JPEG_SIZE}'}}]"
GIB = 2**30


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


# --- against reality; tests/fullsize has whole runs --------------------------------------------------------------


def measured_peak(run: profile) -> int:
    """The highest sum of what the CPU allocator handed out and took back."""
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_a_sampling_forward_is_within_a_fifth_of_the_measured_peak() -> None:
    policy, size = FLUX.from_pretrained("tiny", max_sequence_length=48), Size(128, 128)
    configs = sources.generator_of(policy.options, FLUX).configs
    inputs = Inputs(policy_on_meta(FLUX, policy.options, configs))
    conditioning = Conditioning(
        {name: torch.zeros(tensor.shape) for name, tensor in inputs.conditioning(size, batch=8).tensors.items()}
    )
    x_BNC = policy.noise(range(8), size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run, torch.no_grad():
        policy.velocity(x_BNC, torch.ones(8), conditioning, size)
    assert passes.sampling_pass(inputs, size=size, batch=8).peak == pytest.approx(measured_peak(run), rel=0.2)


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
def test_auto_checkpoints_only_if_the_run_does_not_fit_the_card_without() -> None:
    plans = {choice: planned(f"model.gradient_checkpointing={choice}") for choice in ("auto", "true", "false")}
    peaks = {choice: plan.memory.phases["train"] for choice, plan in plans.items()}
    # Without a card, as the smallest card runs it.
    assert peaks["auto"] == pytest.approx(peaks["true"], rel=1e-3)
    assert peaks["true"] < peaks["false"]
    without = plans["false"].peak_bytes
    auto = load(PolicyConfig, None, [*TINY_SETS, "model.gradient_checkpointing=auto"])
    for card_bytes, checkpointed in ((without + CARD_MARGIN, False), (without + CARD_MARGIN - 1, True), (None, False)):
        assert decided(auto, card_bytes=card_bytes).model.gradient_checkpointing is checkpointed


@pytest.mark.slow
def test_phases_hold_what_lies_on_the_card_in_them() -> None:
    plain = planned("sampling.batch=8").memory
    low, nodes, served, endpoint = (
        planned("sampling.batch=8", change).memory
        for change in (
            "memory=low",
            "sampling.tree={seeds: 1}",
            "judge.checkpoint=http://127.0.0.1:9/v1#paco",
            "objective.name=diffusion_nft",
        )
    )
    assert low.phases["encode"] == plain.phases["encode"]
    assert low.phases["score"] < plain.phases["score"], "they take turns"
    assert low.host > plain.host, "and who waits is in main memory"
    assert nodes.phases["train"] < plain.phases["train"]
    assert nodes.host < plain.host, "a distinct latent is kept once"
    assert "score" not in served.phases
    assert served.phases["train"] < plain.phases["train"]
    assert endpoint.phases["sample"] > plain.phases["sample"], "the adapter that samples"


@pytest.mark.parametrize(("kind", "tokens"), [("qwen_edit_plus", 3 * 16), ("kontext", 64)])
def test_references_are_planned_as_they_are_encoded(kind: str, tokens: int, tmp_path: Path) -> None:
    """Memory and FLOPs grow with each, but Kontext's are one image, whatever their number."""
    image, size = tmp_path / "reference.png", Size(64, 64)
    Image.new("RGB", (64, 64), "red").save(image)
    prompts = [Prompt(0, "The hero waves.", references=(image,) * count) for count in (1, 3)]
    count = sources.planned_images(load(PolicyConfig, None, [f"model.kind={kind}"]), prompts)
    assert count == 3

    options = {"max_sequence_length": 48} if kind == "kontext" else {}
    policy = POLICIES[kind].over(TWINS[kind](TEXTS), true_cfg_scale=2.0, dtype="float32", **options)
    inputs = Inputs(policy, count)
    encoded, conditioning = policy.encode(prompts[1:], size)[0].tensors, inputs.conditioning(size, batch=1).tensors
    assert conditioning["source"].shape == encoded["source"].shape
    assert encoded["source"].shape[1] == tokens
    assert encoded["tokens"].shape[1] <= conditioning["tokens"].shape[1] < encoded["tokens"].shape[1] + 128
    of_one = Inputs(policy, 1).conditioning(size, batch=1).tensors["source"].shape[1]
    assert (of_one < tokens) == (kind != "kontext")


# --- the screen ------------------------------------------------------------------------------------------------


def test_a_plan_is_one_screen_with_the_verdict_first_and_json_with_all() -> None:
    absence = sources.MissingFile("judge.checkpoint", "lab/judge", "`hf download lab/judge`", 17 * 10**9)
    memory = Memory({"encode": 4 * GIB, "train": 3 * GIB}, host=5 * GIB, held=GIB)
    plan = Plan((absence,), notes=("mind the gap",), memory=memory, device="a card", device_bytes=8 * GIB)
    lines = str(plan).splitlines()
    assert lines[0].startswith("verdict: fits this card")
    assert len(lines) < 24
    for part in ("4.0 GiB of 8.0 GiB", "judge.checkpoint = lab/judge: `hf download", "mind the gap", "17 GB"):
        assert part in str(plan)
    document = json.loads(plan.to_json())
    assert document["memory"]["phases"]["encode"] == document["peak_bytes"] == 4 * GIB
    assert document["absences"] == [dataclasses.asdict(absence)]
    assert plan.exit_code == 2

    def exit_code(**changes: Any) -> int:
        return dataclasses.replace(plan, absences=(), **changes).exit_code

    assert exit_code() == exit_code(device_bytes=None) == 0
    assert exit_code(device_bytes=4 * GIB + CUDA_BYTES - 1) == exit_code(main_bytes=GIB - 1) == 2


@pytest.mark.slow
def test_a_dry_run_lists_what_is_absent_and_says_by_its_exit_code_what_it_is(tmp_path: Path) -> None:
    def absent(*overrides: str) -> dict[str, str]:
        words = ["train-policy", str(recipe()), "--dry-run", "--json", f"out={tmp_path}", *overrides]
        result = CliRunner().invoke(app, words)
        absences = {absence["key"]: absence["remedy"] for absence in json.loads(result.stdout)["absences"]}
        assert result.exit_code == (2 if absences else 0), result.output
        return absences

    assert list(absent("adapter.start=a/lora", "prompts.train=no.jsonl")) == ["prompts.train", "adapter.start"]
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
    plan = plan_training(config, rewards=["unlike"])
    assert plan.memory.phases == pytest.approx(plan_policy(config).memory.phases, rel=1e-3)
    assert [absence.key for absence in plan.absences] == ["model.checkpoint"]
    assert any("'unlike'" in note for note in plan.notes)
    assert plan.facts["times_seen"] == config.epochs * config.prompts_per_epoch
    assert not Path("run").exists()
