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
from tiny_runs import JPEG_SIZE, planned
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES
from pacorl.models.policies.flux import FLUX
from pacorl.plan import peaks, sources
from pacorl.plan.generators import Inputs, policy_on_meta
from pacorl.plan.plan import CUDA_BYTES, Plan, plan_training
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

TEXTS = [prompt.text for prompt in set_prompts("train", 24)]
JPEG = f"rewards=[{{name: '{JPEG_SIZE}'}}]"
GIB = 2**30


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
    policy, size = FLUX.load(FLUX.options_for("tiny", dtype="float32", max_sequence_length=48)), Size(128, 128)
    configs, _ = sources.generator_of(policy.options)
    inputs = Inputs(policy_on_meta(FLUX, policy.options, configs))
    conditioning = Conditioning(
        {name: torch.zeros(tensor.shape) for name, tensor in inputs.conditioning(size, batch=8).tensors.items()}
    )
    x_BNC = policy.noise(range(8), size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run, torch.no_grad():
        policy.velocity(x_BNC, torch.ones(8), conditioning, size)
    assert peaks.forward_pass(inputs, size, batch=8).peak == pytest.approx(measured_peak(run), rel=0.2)


@pytest.mark.slow
def test_two_depths_give_the_figures_of_a_deeper_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX.1-dev's widths with four and eight blocks: by two depths, and measured whole."""
    spec, config = POLICIES["flux"], PolicyConfig()
    configs = {**spec.parts, "transformer": {**spec.parts["transformer"], "num_layers": 4, "num_single_layers": 8}}
    job = peaks.Job(
        options=config.model,
        configs=configs,
        batches=[peaks.Batch(Size(512, 512), "size", forwards=1, images=1)],
        training=peaks.Training(config, 1, steps=1),
    )
    extrapolated = peaks.measure(job)
    monkeypatch.setattr(peaks, "block_units", lambda configs: 0)
    whole = peaks.measure(job)
    assert extrapolated.phases == pytest.approx(whole.phases, rel=1e-3)
    assert dataclasses.astuple(extrapolated)[1:] == pytest.approx(dataclasses.astuple(whole)[1:], rel=1e-3)


# --- a run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_phases_hold_what_lies_on_the_card_in_them() -> None:
    changes = ("seed=1", "memory=low", "sampling.tree={seeds: 1}", "objective.name=diffusion_nft")
    plain, low, nodes, endpoint = (planned(change, "sampling.batch=8").memory for change in changes)
    unjudged = planned("judge=none", JPEG, "sampling.batch=8").memory
    assert low.phases["encode"] == plain.phases["encode"]
    assert low.phases["score"] < plain.phases["score"], "they take turns"
    assert low.host > plain.host, "and who waits is in main memory"
    assert nodes.phases["train"] < plain.phases["train"]
    assert "score" not in unjudged.phases
    assert unjudged.phases["train"] < plain.phases["train"]
    assert endpoint.phases["sample"] > plain.phases["sample"], "the adapter that samples"


@pytest.mark.parametrize(("kind", "tokens"), [("qwen_edit_plus", 3 * 16), ("kontext", 64)])
def test_references_are_planned_as_they_are_encoded(kind: str, tokens: int, tmp_path: Path) -> None:
    """Memory and FLOPs grow with each, but Kontext's are one image, whatever their number."""
    image, size = tmp_path / "reference.png", Size(64, 64)
    Image.new("RGB", (64, 64), "red").save(image)
    prompts = [Prompt(0, "The hero waves.", references=(image,) * count) for count in (1, 3)]
    options = {"max_sequence_length": 48} if kind == "kontext" else {}
    policy = POLICIES[kind].over(TWINS[kind](TEXTS), true_cfg_scale=2.0, dtype="float32", **options)
    inputs = Inputs(policy, 3)
    encoded, conditioning = policy.encode(prompts[1:], size)[0].tensors, inputs.conditioning(size, batch=1).tensors
    assert conditioning["source"].shape == encoded["source"].shape
    assert encoded["source"].shape[1] == tokens
    assert encoded["tokens"].shape[1] <= conditioning["tokens"].shape[1] < encoded["tokens"].shape[1] + 128
    of_one = Inputs(policy, 1).conditioning(size, batch=1).tensors["source"].shape[1]
    assert (of_one < tokens) == (kind != "kontext")


def test_evaluations_are_before_after_and_between(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, jobs = peaks.Memory({"train": 1}), []
    monkeypatch.setattr("pacorl.plan.plan.measure", lambda job: jobs.append(job) or memory)
    for every in (0, 4, 5):
        planned("epochs=10", f"evaluation.every={every}")
    first, *others = (job.batches[1].images for job in jobs)
    assert [2 * images / first for images in others] == [4, 3]


# --- the screen ------------------------------------------------------------------------------------------------


def test_a_plan_is_one_screen_with_the_verdict_first_and_json_with_all() -> None:
    absence = sources.MissingFile("judge.checkpoint", "lab/judge", "`hf download lab/judge`", 17 * 10**9)
    memory = peaks.Memory({"encode": 4 * GIB, "train": 3 * GIB}, host=GIB)
    again = dataclasses.replace(absence, key="evaluation.judge")
    plan = Plan(memory, (absence,), facts={"leaks": "mind the gap"}, device="a card", device_bytes=8 * GIB)
    lines = str(plan).splitlines()
    assert lines[0].startswith("verdict: fits a card")
    assert lines[0].endswith("absent or broken: judge.checkpoint")
    assert len(lines) < 24
    for part in ("4.0 GiB of 8.0 GiB", "judge.checkpoint = lab/judge: `hf download", "mind the gap", "17 GB"):
        assert part in str(plan)
    document = json.loads(json.dumps(plan.to_dict()))
    assert document["memory"]["phases"]["encode"] == document["peak_bytes"] == 4 * GIB
    assert document["absences"] == [dataclasses.asdict(absence)]
    assert plan.exit_code == 2
    assert dataclasses.replace(plan, absences=(absence, again)).download_bytes == absence.bytes, "fetched once"

    def exit_code(**changes: Any) -> int:
        return dataclasses.replace(plan, absences=(), **changes).exit_code

    assert exit_code() == exit_code(device_bytes=None) == 0
    assert exit_code(device_bytes=4 * GIB + CUDA_BYTES - 1) == exit_code(main_bytes=GIB - 1) == 2
    short = dataclasses.replace(plan, device_bytes=None, main_bytes=GIB - 1)
    assert "does not fit 1.0 GiB of main memory" in short.verdict


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


@pytest.mark.slow
def test_a_run_with_functions_has_the_dry_run_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the weights."""
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("a fox in the snow\n")
    Path("test.txt").write_text("two bears at a desk\n")
    changes = [JPEG, "evaluation.rewards=[]", "judge=none", "out=run"]
    changes += ["prompts.train=train.txt", "prompts.evaluation=test.txt"]
    config = load(PolicyConfig, Path("flux_t2is_24gb"), changes)
    plan = plan_training(config, rewards=["unlike"])
    assert plan.memory.phases == pytest.approx(plan_training(config).memory.phases, rel=1e-3)
    assert [absence.key for absence in plan.absences] == ["model.checkpoint"]
    assert plan.facts["times_seen"] == config.epochs * config.prompts_per_epoch
    assert not Path("run").exists()

    # Rewards of a file are tried.
    Path("mine.py").write_text("def none(prompts, images):\n    return [0.5]\n")
    files = ["prompts.train=train.txt", "prompts.evaluation=test.txt"]
    changes = ["rewards=[{name: 'mine.py:none'}]", "evaluation.rewards=[]", "judge=none", *files]
    plan = plan_training(load(PolicyConfig, Path("flux_t2is_24gb"), changes), card=1)
    assert "returned 1 scores for 2 images" in plan.absences[0].remedy
    assert "absent or broken: rewards" in plan.verdict
    assert "mine.py:none" in plan.facts["not_counted"]
    assert "does not fit a card of 1 GB: try a smaller form of memory" in plan.verdict
