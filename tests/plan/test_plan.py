"""The dry run: what it lists, what it refuses, and whether its memory table is what a step really takes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer
from PIL import Image
from tests.twins import TWINS, tiny_flux
from tests.twins.parts import tiny_judge
from tiny_runs import JPEG_SIZE
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.config.base import ConfigError, load
from pacorl.config.recipes import recipe
from pacorl.core.sampler import Sampler
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.adapters import MovingAverage, adapter_state, add_lora
from pacorl.models.int8 import parameter_count
from pacorl.models.policies import POLICIES
from pacorl.models.policies.flux import FLUX, FluxPolicy
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.plan import passes, sources
from pacorl.plan.generators import Inputs, model_on_meta, policy_on_meta
from pacorl.plan.ledger import META, MemoryLedger, fused_attention
from pacorl.plan.memory import ALL, Row
from pacorl.plan.passes import Training, measure_generator
from pacorl.plan.plan import (
    CARD_MARGIN,
    Plan,
    decided,
    plan_policy,
    plan_training,
    shortages,
)
from pacorl.tiny.world import set_prompts
from pacorl.types import Conditioning, Prompt, Size

TEXTS = [prompt.text for prompt in set_prompts("train", 24)]


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
            f"model.checkpoint={checkpoints / 'flux'}",
            "model.dtype=float32",
            "model.max_sequence_length=48",
            f"judge.checkpoint={checkpoints / 'judge'}",
            "prompts={train: 'tiny:train', evaluation: 'tiny:test', evaluation_limit: 8}",
            "sampling={size: [128, 128], batch: 8}",
            "evaluation={size: [128, 128]}",
            "adapter={rank: 16, alpha: 32}",
            *overrides,
        ],
    )


def bytes_of(plan: Plan, *names: str) -> int:
    by_name = {row.component: row.bytes for row in plan.rows}
    return sum(by_name[name] for name in names)


# --- the table against reality ---------------------------------------------------------------------------------


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
    trained = [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
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


def generator(config: PolicyConfig) -> sources.Checkpoint:
    return sources.generator_of(config.model, config.generator)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_training_rows_are_within_a_fifth_of_the_measured_peak(checkpoints: Path, checkpointing: bool) -> None:
    config = tiny_run(checkpoints, f"model.gradient_checkpointing={checkpointing}")

    plan = plan_policy(config)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        train_for_real(config)

    planned = bytes_of(
        plan,
        *("transformer", "VAE", "CLIP text encoder", "T5 text encoder"),
        *("adapter", "adapter's average and moments", "training a batch"),
    )
    assert bytes_of(plan, "training a batch") > planned / 2  # else weights alone would decide
    assert planned == pytest.approx(measured_peak(run), rel=0.2)


@pytest.mark.slow
def test_auto_checkpoints_only_if_the_run_does_not_fit_the_card_without(checkpoints: Path) -> None:
    config = tiny_run(checkpoints, "model.gradient_checkpointing=auto")
    peaks = {
        choice: plan_policy(tiny_run(checkpoints, f"model.gradient_checkpointing={choice}")).peak_bytes
        for choice in (True, False)
    }
    assert peaks[True] < peaks[False]
    for card_bytes, checkpointed in (
        (peaks[False] + CARD_MARGIN, False),
        (peaks[False] + CARD_MARGIN - 1, True),
        (None, False),  # a CPU, to which memory is no card's
    ):
        assert decided(config, card_bytes=card_bytes).model.gradient_checkpointing is checkpointed


@pytest.mark.slow
def test_without_a_card_auto_is_planned_as_the_smallest_card_runs_it(checkpoints: Path) -> None:
    auto, on = (
        plan_policy(tiny_run(checkpoints, f"model.gradient_checkpointing={choice}")) for choice in ("auto", "true")
    )
    assert auto == on


def test_a_sampling_forward_is_within_a_fifth_of_the_measured_peak(checkpoints: Path, policy: FluxPolicy) -> None:
    config, size = tiny_run(checkpoints), Size(128, 128)
    planned = passes.sampling_pass(
        Inputs(policy_on_meta(config.generator, config.model, generator(config).configs)),
        size=size,
        batch=8,
    ).peak
    conditioning = Conditioning({"tokens": torch.randn(8, 48, 64), "pooled": torch.randn(8, 64)})
    x_BNC = policy.noise(range(8), size)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run, torch.no_grad():
        policy.velocity(x_BNC, torch.ones(8), conditioning, size)

    assert planned == pytest.approx(measured_peak(run), rel=0.2)


def test_decoding_takes_what_is_planned_and_scratch_space(checkpoints: Path, policy: FluxPolicy) -> None:
    config = tiny_run(checkpoints)
    planned = passes.decoding_pass(
        Inputs(policy_on_meta(config.generator, config.model, generator(config).configs)),
        size=Size(128, 128),
        batch=4,
    ).peak
    vae = policy.pipeline.vae
    codes = torch.randn(4, vae.config.latent_channels, 32, 32)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run, torch.no_grad():
        vae.decode(codes, return_dict=False)

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


def test_fused_attention_touches_meta_tensors_alone() -> None:
    query = torch.randn(1, 2, 3, 4)
    plain = nn.functional.scaled_dot_product_attention(query, query, query)

    with fused_attention():
        inside = nn.functional.scaled_dot_product_attention(query, query, query)

    assert torch.equal(plain, inside)


# --- the published models --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_published_architectures_have_the_published_sizes() -> None:
    config = PolicyConfig()
    policy = policy_on_meta(config.generator, config.model)
    names = ("PaCo-Reward-7B", "Qwen/Qwen3.5-9B")
    judges = [model_on_meta(sources.published_judge(name)[1]["model"], dtype=torch.bfloat16) for name in names]
    pipeline = policy.pipeline
    parts = (pipeline.transformer, pipeline.text_encoder_2, pipeline.text_encoder, pipeline.vae, *judges)

    assert [parameter_count(part) for part in parts] == [
        pytest.approx(size, rel=1e-3) for size in (11.901e9, 4.762e9, 123.1e6, 83.82e6, 8.292e9, 9.410e9)
    ]
    assert {parameter.device.type for part in parts for parameter in part.parameters()} == {"meta"}

    with META:
        add_lora(policy.transformer, rank=64, alpha=128, targets=policy.lora_targets)
    state = adapter_state(policy.transformer)
    assert len(state) == 2 * 342
    assert sum(map(Tensor.numel, state.values())) == 179_306_496


# --- what is absent --------------------------------------------------------------------------------------------


def test_absent_sources_are_listed_with_where_to_get_them(tmp_path: Path) -> None:
    config = load(PolicyConfig, None, [f"prompts={{train: {tmp_path / 'a.jsonl'}, evaluation: 'tiny:test'}}"])
    config = config.model_copy(update={"adapter": config.adapter.model_copy(update={"start": "runs/one/adapter/"})})
    checkpoints = [generator(config), sources.judge(config.judge, key="judge")]

    remedies = {absence.key: absence.remedy for absence in sources.all_absences(config, checkpoints)}

    assert all(checkpoint.note for checkpoint in checkpoints)
    assert set(remedies) == {"prompts.train", "model.checkpoint", "judge.checkpoint", "adapter.start"}
    assert "`pacorl data t2is`" in remedies["prompts.train"]
    assert "gated" in remedies["model.checkpoint"]
    assert "`hf download black-forest-labs/FLUX.1-dev --include model_index.json" in remedies["model.checkpoint"]
    assert remedies["model.checkpoint"].endswith("`, 34 GB")
    assert remedies["judge.checkpoint"].endswith("`hf download X-GenGroup/PaCo-Reward-7B`, 17 GB")
    assert "folder runs/one/adapter/" in remedies["adapter.start"]


def test_a_local_checkpoint_is_read_and_its_missing_weights_are_named(checkpoints: Path, tmp_path: Path) -> None:
    whole = generator(tiny_run(checkpoints))
    for file in (checkpoints / "flux").rglob("*.json"):
        copy = tmp_path / "flux" / file.relative_to(checkpoints / "flux")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    bare = generator(tiny_run(tmp_path))

    assert (whole.absences, whole.note) == ((), "")
    assert bare.configs == whole.configs
    assert "the weights of transformer, vae, text_encoder, text_encoder_2" in bare.absences[0].remedy


def test_a_sharded_checkpoint_needs_every_shard(checkpoints: Path, tmp_path: Path) -> None:
    config = tiny_run(checkpoints, f"judge.checkpoint={tmp_path}")
    (tmp_path / "config.json").write_text((checkpoints / "judge" / "config.json").read_text())
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    assert sources.judge(config.judge, key="judge").absences

    (tmp_path / "model-2.safetensors").touch()
    assert not sources.judge(config.judge, key="judge").absences


# --- what is refused -------------------------------------------------------------------------------------------


def edit_options(kind: str) -> PolicyOptions:
    own = {"max_sequence_length": 48} if kind == "kontext" else {}
    return POLICIES[kind].options(true_cfg_scale=2.0, dtype="float32", **own)  # type: ignore[call-arg, arg-type]


def edit_twin(kind: str) -> PipelinePolicy:
    return POLICIES[kind].policy(TWINS[kind](TEXTS), edit_options(kind))


def edit_twin_on_meta(kind: str) -> PipelinePolicy:
    return policy_on_meta(POLICIES[kind], edit_options(kind), edit_parts(kind))


def edit_parts(kind: str) -> Parts:
    pipeline = TWINS[kind](TEXTS)
    parts = {name: dict(getattr(pipeline, name).config) for name in ("transformer", "vae")}
    parts |= {name: getattr(pipeline, name).config.to_dict() for name in POLICIES[kind].policy.encoders}
    if kind != "kontext":
        parts["processor"] = sources.image_options(pipeline.processor.image_processor.to_dict())
    return parts


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
    encoded = edit_twin(kind).encode(prompts[1:], size)[0].tensors
    planned = inputs.conditioning(size, batch=1).tensors
    assert planned["source"].shape == encoded["source"].shape
    assert encoded["source"].shape[1] == tokens
    assert encoded["tokens"].shape[1] <= planned["tokens"].shape[1] < encoded["tokens"].shape[1] + 128
    three = passes.sampling_pass(inputs, size=size, batch=1)
    assert (three.flops > one.flops, three.peak > one.peak) == ((True, True) if kind != "kontext" else (False, False))


def test_layers_that_no_image_depends_on_are_planned_as_the_run_freezes_them() -> None:
    spec = POLICIES["qwen_edit"]
    policy = edit_twin_on_meta("qwen_edit")
    sampler = Sampler(size=Size(64, 64), steps=4)

    def planned(*settings: str) -> Any:
        config = load(PolicyConfig, None, ["model.kind=qwen_edit", *settings])
        training = Training(config, sampler, 1)
        parts = edit_parts("qwen_edit")
        return measure_generator(spec, edit_options("qwen_edit"), parts, images=1, batches=[], training=training)

    found = planned("adapter={rank: 4, alpha: 8}")
    assert 0 < found.trained < found.adapter
    idle = sorted(policy.idle_layers)[0]
    with pytest.raises(ConfigError, match=f"adapter.targets: .*{re.escape(idle)}.* changes nothing"):
        planned(f"adapter.targets=[{idle}]")


@pytest.mark.slow
def test_the_plan_trains_nodes(tmp_path: Path) -> None:
    """The dry run's memory and forwards are the tree's."""

    def dry_run(*settings: str) -> dict[str, Any]:
        arguments = ["train-policy", str(recipe()), "--dry-run", "--json", f"out={tmp_path}", *settings]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    own, node = (dry_run("sampling.suffix={}", f"sampling.tree={tree}") for tree in ("{}", "{seeds: 1}"))
    assert own["facts"]["forwards_per_image"] == {"sampling": 6.0, "training": 1.0, "other_policies": 0.0}
    assert node["facts"]["forwards_per_image"] == pytest.approx(
        {"sampling": 4 + 2 / 12, "training": 1 / 12, "other_policies": 0}
    )
    rows = [{row["component"]: row for row in plan["rows"]} for plan in (own, node)]
    trained = [by_name["training a batch"] for by_name in rows]
    assert trained[1]["bytes"] < trained[0]["bytes"] / 3
    assert (
        rows[1]["rollouts, and an evaluation's images"]["bytes"]
        < rows[0]["rollouts, and an evaluation's images"]["bytes"]
    )


@pytest.mark.slow
def test_panel_credit_keeps_a_log_probability_of_each_token(checkpoints: Path) -> None:
    by_set, by_panel = (
        plan_policy(tiny_run(checkpoints, f"advantages.credit={credit}")) for credit in ("set", "panel")
    )
    config = tiny_run(checkpoints)
    samples = config.prompts_per_epoch * config.group_size
    tokens = 16 * 16  # of an image of 128 px
    assert (
        bytes_of(by_panel, "rollouts, and an evaluation's images")
        - bytes_of(by_set, "rollouts, and an evaluation's images")
        == 4 * samples * tokens
    )


# --- showing it ------------------------------------------------------------------------------------------------


def test_a_plan_is_one_screen_with_the_verdict_first_and_json_with_all() -> None:
    absence = sources.MissingFile("judge.checkpoint", "lab/judge", "`hf download lab/judge`", 17 * 10**9)
    rows = (
        Row("transformer", 3 * 2**30),
        Row("T5 text encoder", 2**30, ("encode",)),
        Row("adapters", 2**30, ("train",), "host"),
        Row("checkpoint's files", 5 * 2**30, ("encode",), "files"),
    )
    plan = Plan((absence,), notes=("mind the gap",), rows=rows, device="a card", device_bytes=8 * 2**30)
    lines = str(plan).splitlines()
    assert lines[0] == "verdict: it would not run: 1 absent (judge.checkpoint)"
    assert len(lines) < 24
    for part in ("4.0 GiB of 8.0 GiB", "judge.checkpoint = lab/judge: `hf download", "mind the gap", "download 17 GB"):
        assert part in str(plan)
    document = json.loads(plan.to_json())
    assert document["phases"]["encode"] == document["peak_bytes"] == 4 * 2**30
    assert document["phases"]["train"] == 3 * 2**30
    assert document["absences"] == [dataclasses.asdict(absence)]
    assert (plan.host_bytes, plan.held_bytes) == (5 * 2**30, 2**30)


def test_a_machine_with_too_little_of_anything_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tuple(Row("x", 9 * 2**30, ALL, place) for place in ("device", "host", "files"))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**21}.__getitem__)
    config = load(PolicyConfig, None, [f"out={tmp_path / 'run'}"])

    def noted(*rows: Row, disk: int = 0, card: int | None = 2**40) -> list[str]:
        plan = Plan(rows=rows, disk_bytes=disk, device="a card", device_bytes=card)
        return [note.split()[1] for note in shortages(config, plan)]

    assert noted(*rows, disk=2**60, card=2**30) == ["device", "machine", "="]
    assert noted(rows[2]) == []  # pages of files may be dropped
    assert noted(rows[1], card=None) == []


@pytest.mark.slow
def test_a_dry_run_begins_with_one_verdict_line_and_says_by_its_exit_code_what_it_is(tmp_path: Path) -> None:
    """In a narrow terminal too, where the table wraps."""

    def dry_run(*overrides: str) -> Result:
        arguments = ["train-policy", str(recipe()), "--dry-run", f"out={tmp_path}", *overrides]
        return CliRunner().invoke(app, arguments, env={"COLUMNS": "60"})

    ready = dry_run()
    assert ready.exit_code == 0, ready.output
    assert ready.stdout.splitlines()[0] == "verdict: all that it needs is here"
    absent = "a/very/long/name/of/an/adapter/that/does/not/fit/into/sixty/columns"
    lacking = dry_run(f"adapter.start={absent}", "prompts.train=no.jsonl")
    assert lacking.exit_code == 2
    lines = lacking.stdout.splitlines()
    assert lines[0] == "verdict: it would not run: 2 absent (prompts.train, adapter.start)"
    assert f"absent adapter.start = {absent}: a LoRA adapter: put it into the folder {absent}" in lacking.stdout
    document = dry_run("--json", f"adapter.start={absent}")
    assert document.exit_code == 2
    assert json.loads(document.stdout)["verdict"] == "verdict: it would not run: 1 absent (adapter.start)"


@pytest.mark.slow
def test_a_dry_run_asks_a_judge_over_http_whether_it_answers(tmp_path: Path) -> None:
    def dry_run(url: str, *overrides: str) -> list[str]:
        judge = [f"judge.checkpoint={url}#judge"]
        arguments = ["train-policy", str(recipe()), "--dry-run", f"out={tmp_path}", *judge, *overrides]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == (2 if "absent" in result.stdout else 0), result.output
        return result.stdout.splitlines()

    with FakeServer().running() as server:
        assert dry_run(server.url)[0].startswith("verdict: all that it needs is here")
        _, named, *_ = dry_run(server.url, f"judge.checkpoint={server.url}#other")
        assert "serves no model 'other'; it serves judge" in named
    verdict, silent, *_ = dry_run(server.url)
    assert verdict.startswith("verdict: it would not run: 1 absent (judge.checkpoint)")
    assert silent.startswith(f"absent judge.checkpoint = {server.url}#judge: no judge at {server.url}: no connection")
    assert "pacorl serve CHECKPOINT --port" in silent
    assert (
        dry_run(server.url, f"rewards=[{{name: '{JPEG_SIZE}'}}]")[0] == "verdict: all that it needs is here"
    )  # asks none


@pytest.mark.slow
def test_copies_and_a_judge_elsewhere_are_planned_as_the_engine_makes_them(checkpoints: Path) -> None:
    other = tiny_run(
        checkpoints,
        "objective.name=diffusion_nft",
        "judge.checkpoint=http://127.0.0.1:9/v1#paco",
    )
    plan = plan_policy(other)
    names = {row.component: row for row in plan.rows}
    assert names["adapter that samples"].bytes == names["adapter"].bytes
    assert not {"judge", "judge at work"} & set(names)
    assert not [absence for absence in plan.absences if absence.key == "judge.checkpoint"]


def test_a_trainer_s_arguments_have_the_dry_run_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the weights, and without a call of the function."""
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("a fox in the snow\n")
    Path("test.txt").write_text("two bears at a desk\n")
    settings: dict[str, Any] = {"judge": None, "out": "run"}
    sources = {"prompts": "train.txt", "evaluation_prompts": "test.txt"}
    plan = plan_training("flux_t2is_24gb", rewards=[JPEG_SIZE, unlike], **sources, **settings)
    changes = [f"rewards=[{{name: '{JPEG_SIZE}'}}]", "evaluation.rewards=[]", "judge=none", "out=run"]
    changes += ["prompts.train=train.txt", "prompts.evaluation=test.txt"]
    of_command = plan_policy(load(PolicyConfig, Path("flux_t2is_24gb"), changes))
    assert [row.component for row in plan.rows] == [row.component for row in of_command.rows]
    assert [absence.key for absence in plan.absences] == ["model.checkpoint"]
    assert plan.notes == (*of_command.notes, "the memory of reward 'unlike', a function, is not in the plan")
    lines = str(plan).splitlines()
    assert lines[0] == plan.verdict
    assert not Path("run").exists()


def unlike(prompts: object, images: object) -> list[float]:
    raise AssertionError("a dry run scores nothing")
