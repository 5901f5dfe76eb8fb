"""A run can be held to its ledger, and an epoch of it made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_world import ToyJudge, ToyPolicy, toy_config, toy_world
from typer.testing import CliRunner

from pacorl import PolicyTrainer
from pacorl.cli import app
from pacorl.grpo.checkpoint import SEAL, _seal_of
from pacorl.grpo.evaluate import Evaluation
from pacorl.grpo.ledger import (
    FILES,
    Record,
    chained,
    line_hash,
    projection,
    read_ledger,
    sample_items,
    summary,
    weight_items,
)
from pacorl.grpo.trainer import train_policy
from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.io.files import digests
from pacorl.lab.verify.audit import audit, ranges
from pacorl.lab.verify.recompute import Comparison, recompute
from pacorl.models.lora.adapters import MovingAverage
from pacorl.report.page import write_report
from pacorl.rewards.jpeg import JpegSize
from pacorl.rewards.reward import PanelScores
from pacorl.runtime.logbook import Logbook
from pacorl.runtime.stopping import Interrupted
from pacorl.types import NodeBatch, Prompt, Rollout, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS = ["epochs=3", "keep_checkpoints=9", "evaluation.every=0", "prompts.evaluation=tiny:dev:1"]


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_world():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with toy_world():
        return train_policy(toy_config(tmp_path_factory.mktemp("verify") / "run", *SETTINGS))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run whose reward is computed again, one for each setting; `recompute` does not write to it."""

    @cache
    def finished(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("compressed") / "run"
        return train_policy(toy_config(folder, *SETTINGS, "rewards=[{name: jpeg_size}]", *overrides))

    return finished


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run to spoil: all that is checked holds in another folder too."""
    return shutil.copytree(finished, tmp_path / "run")


def made_again(run: Path, epoch: int) -> Comparison:
    comparison = recompute(run, epoch)
    assert comparison is not None
    return comparison


def rewritten(run: Path, change: Callable[[Record], None]) -> None:
    """Change the ledger's records, and chain them anew."""
    for name in FILES.values():
        chain, records = "", read_jsonl(run / name)
        for record in records:
            change(record)
            chain = record["chain"] = chained(chain, record)
        write_jsonl(run / name, records)


# --- without computing again ----------------------------------------------------------------------------------------


def test_a_run_fits_its_ledger(run: Path) -> None:
    report = audit(run)
    assert report.fine, report.findings
    texts = {finding.topic: finding.text for finding in report.findings}
    assert [*texts] == ["ledger", "config", "log", "evaluations", "checkpoints", "best", "adapter", "page"]
    assert texts["ledger"] == "epochs: 3, evaluations: 2, starts: 1; their chain is whole"
    assert texts["evaluations"] == "samples/ has the records and 2 images of 2 evaluations"
    assert "step-000002 (epoch 1), step-000004 (epoch 2), step-000006 (epoch 3)" in texts["checkpoints"]
    assert (report.epochs, report.evaluations) == ([1, 2, 3], [0, 3])
    assert 0 < report.overhead < 0.5


def other_config(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 42", "seed: 43"))


def other_line(run: Path) -> None:
    lines = read_jsonl(run / "metrics.jsonl")
    next(line for line in lines if line["kind"] == "epoch" and line["epoch"] == 2)["loss"] = 0.5
    write_jsonl(run / "metrics.jsonl", lines)


def no_line(run: Path) -> None:
    lines = read_jsonl(run / "metrics.jsonl")
    write_jsonl(run / "metrics.jsonl", [line for line in lines if line["epoch"] != 2])


def other_weights(run: Path) -> None:
    """Change a checkpoint together with its own digests and seal."""
    checkpoint = run / "checkpoints" / "step-000004"
    tensors = load_file(checkpoint / "average.safetensors")
    next(iter(tensors.values())).add_(1e-7)
    save_file(tensors, checkpoint / "average.safetensors")
    state = json.loads((checkpoint / "state.json").read_text()) | {"files": whole(checkpoint)}
    del state[SEAL]
    state[SEAL] = _seal_of(state)
    (checkpoint / "state.json").write_text(json.dumps(state))


def whole(checkpoint: Path) -> dict[str, str]:
    return {name: sha for name, sha in digests(checkpoint).items() if name != "state.json"}


def cut_checkpoint(run: Path) -> None:
    path = run / "checkpoints" / "step-000004" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def other_adapter(run: Path) -> None:
    file = next((run / "adapter").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")


def other_start(run: Path) -> None:
    train_policy(toy_config(run, *SETTINGS), resume=run / "checkpoints" / "step-000004")

    def change(record: Record) -> None:
        if record["kind"] == "start" and record["epoch"]:
            record["hashes"]["weights"] = "0" * 64

    rewritten(run, change)


@pytest.mark.parametrize(
    ("tamper", "topic", "text"),
    [
        (other_config, "config", "config.yaml is not the config that the newest start had"),
        (other_line, "log", "has another line than the run wrote for epoch 2"),
        (no_line, "log", "lacks epoch 2"),
        (other_weights, "checkpoints", "step-000004 has other weights than epoch 2 left"),
        (cut_checkpoint, "checkpoints", "optimizer.safetensors is damaged"),
        (other_adapter, "adapter", "is damaged"),
        (other_start, "ledger", "the start after epoch 2 had other weights than that epoch left"),
    ],
)
def test_what_does_not_fit_is_named(run: Path, tamper: Callable[[Path], None], topic: str, text: str) -> None:
    tamper(run)
    report = audit(run)
    # The page is built of the log and the config, so it does not fit them any more either.
    assert {finding.topic for finding in report.findings if not finding.fine} - {"page"} == {topic}
    assert text in next(finding.text for finding in report.findings if finding.topic == topic)
    result = CliRunner().invoke(app, ["verify", str(run)])
    assert (result.exit_code, "ERROR" in result.output) == (1, True)


def change_log(run: Path, change: Callable[[list[Record]], object]) -> None:
    lines = read_jsonl(run / "metrics.jsonl")
    change(lines)
    write_jsonl(run / "metrics.jsonl", lines)


def better_evaluation(run: Path) -> None:
    change_log(run, lambda lines: lines[-1].update(consistency=0.99))


def no_evaluation(run: Path) -> None:
    change_log(run, lambda lines: lines.pop())


def made_up_evaluation(run: Path) -> None:
    change_log(run, lambda lines: lines.insert(3, {**lines[-1], "epoch": 2}))


def evaluation_twice(run: Path) -> None:
    change_log(run, lambda lines: lines.append(lines[-1]))


def nameless_evaluation(run: Path) -> None:
    change_log(run, lambda lines: lines[-1].pop("kind"))


def odd_epoch(run: Path) -> None:
    """Without its number, and with seconds that are none."""
    change_log(run, lambda lines: [line.update({"seconds/x": "y"}) or line.pop("epoch") for line in lines[-2:]])


def better_best(run: Path) -> None:
    path = run / "checkpoints" / "best.json"
    best = json.loads(path.read_text())
    path.write_text(json.dumps(best | {"score": best["score"] + 0.1}))


def better_state(run: Path) -> None:
    """The score of a checkpoint, to which best.json is fitted."""
    path = run / "checkpoints" / "step-000006" / "state.json"
    state = json.loads(path.read_text())
    state["score"] += 0.1
    del state[SEAL]
    path.write_text(json.dumps(state))
    better_best(run)


def better_sample(run: Path) -> None:
    path = run / "samples" / "evaluation-000003.jsonl"
    write_jsonl(path, [{**line, "reward": 0.99} for line in read_jsonl(path)])


def exchanged_image(run: Path) -> None:
    before, after = (run / "samples" / f"evaluation-00000{epoch}" / "0000.png" for epoch in (0, 3))
    shutil.copy(before, after)


def no_image(run: Path) -> None:
    (run / "samples" / "evaluation-000003" / "0000.png").unlink()


def made_up_sample(run: Path) -> None:
    path = run / "samples" / "evaluation-000003.jsonl"
    write_jsonl(path.with_name("evaluation-000002.jsonl"), [{**line, "reward": 0.999} for line in read_jsonl(path)])


def extra_image(run: Path) -> None:
    image = run / "samples" / "evaluation-000003" / "0000.png"
    shutil.copy(image, image.with_name("0001.png"))


def better_page(run: Path) -> None:
    path = run / "report.html"
    path.write_text(path.read_text().replace("3</dd><dt>epochs", "4</dd><dt>epochs"))


FORGERIES: dict[Callable[[Path], None], tuple[str, str]] = {
    better_evaluation: ("log", "metrics.jsonl has another line than the run wrote for evaluation 3"),
    no_evaluation: ("log", "metrics.jsonl lacks evaluation 3"),
    made_up_evaluation: ("log", "metrics.jsonl has a line of evaluation 2 that the ledger lacks there"),
    evaluation_twice: ("log", "metrics.jsonl has a line of evaluation 3 that the ledger lacks there"),
    nameless_evaluation: ("log", "metrics.jsonl lacks evaluation 3"),
    odd_epoch: ("log", "metrics.jsonl lacks "),
    better_best: ("best", "best.json does not have the checkpoint with the highest score, step-000006 (epoch 3)"),
    better_state: ("best", "step-000006/state.json has another score than the evaluation of epoch 3"),
    better_sample: ("evaluations", "evaluation 3: {run}/samples/evaluation-000003.jsonl is damaged"),
    exchanged_image: ("evaluations", "evaluation 3: {run}/samples/evaluation-000003/0000.png is damaged"),
    no_image: ("evaluations", "evaluation 3: "),
    made_up_sample: ("evaluations", "{run}/samples/evaluation-000002.jsonl belongs to no recorded evaluation"),
    extra_image: ("evaluations", "{run}/samples/evaluation-000003/0001.png belongs to no recorded evaluation"),
    better_page: ("page", "report.html is not the page of the run's files after epoch 3"),
}


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(forge, marks=[] if forge in (made_up_sample, extra_image, odd_epoch) else pytest.mark.slow)
        for forge in FORGERIES
    ],
)
def test_a_forged_evaluation_is_named_with_its_file_and_epoch(run: Path, forge: Callable[[Path], None]) -> None:
    topic, text = FORGERIES[forge]
    forge(run)
    finding = next(finding for finding in audit(run).findings if finding.topic == topic)
    assert not finding.fine
    assert text.format(run=run) in finding.text
    assert "\n" not in finding.text
    result = CliRunner().invoke(app, ["verify", str(run)])
    assert (result.exit_code, f"ERROR {topic}" in result.output) == (1, True)


def test_a_page_that_is_built_again_fits(run: Path, tmp_path: Path) -> None:
    better_page(run)
    write_report(run)
    assert audit(run).fine
    assert audit(run.rename(tmp_path / "under another name")).fine


@pytest.mark.parametrize(("name", "line"), [("ledger.jsonl", 1), ("ledger.jsonl", 3), ("starts.jsonl", 1)])
def test_a_record_that_was_changed_breaks_the_chain(run: Path, name: str, line: int) -> None:
    records = read_jsonl(run / name)
    records[line - 1]["step"] += 1
    write_jsonl(run / name, records)
    with pytest.raises(ValueError, match=rf"{name}:{line}: this record"):
        audit(run)


def test_a_record_that_could_not_be_written_is_named_with_its_key(run: Path) -> None:
    """JSON's escapes can hold what UTF-8, and so no hash of a record, can."""
    path = run / "starts.jsonl"
    path.write_text(path.read_text().replace('"device": "cpu"', r'"device": "\ud800"', 1))
    result = CliRunner().invoke(app, ["verify", str(run)])
    with pytest.raises(
        ValueError, match=r"starts\.jsonl:1: environment\.device: '\\ud800' holds half of a surr"
    ) as fault:
        audit(run)
    assert (result.exit_code, str(result.exception)) == (1, str(fault.value))


def test_a_record_that_is_gone_breaks_the_chain(run: Path) -> None:
    records = read_jsonl(run / "ledger.jsonl")
    write_jsonl(run / "ledger.jsonl", [records[0], *records[2:]])
    with pytest.raises(ValueError, match=r"ledger.jsonl:2: this record"):
        audit(run)


def test_a_folder_without_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has no ledger.jsonl: it is no policy run, has no finished epoch, or is older"
    ):
        audit(tmp_path)


# --- what a run records ---------------------------------------------------------------------------------------------


def epochs_of(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "ledger.jsonl")


@pytest.mark.slow
def test_equal_runs_write_equal_records_and_other_seeds_others(run: Path, tmp_path: Path) -> None:
    twin = train_policy(toy_config(tmp_path / "twin", *SETTINGS))
    assert epochs_of(twin) == epochs_of(run)
    other = train_policy(toy_config(tmp_path / "other", *SETTINGS, "seed=43"))
    for mine, own in zip(epochs_of(other), epochs_of(run), strict=True):
        assert not set(mine["hashes"].values()) & set(own["hashes"].values())


@pytest.mark.slow
def test_what_comes_after_a_checkpoint_is_recorded_anew(run: Path) -> None:
    before = epochs_of(run)
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "epo')  # a crash within a line
    for _ in range(2):  # a start that led to nothing leaves no record
        PolicyTrainer(toy_config(run, *SETTINGS), resume=run / "checkpoints" / "step-000002").close()
    train_policy(toy_config(run, *SETTINGS), resume=run / "checkpoints" / "step-000002")
    kinds = [(record["kind"], record["epoch"]) for record in read_ledger(run)]
    before_it = [("start", 0), ("evaluation", 0), ("epoch", 1)]
    assert kinds == [*before_it, ("start", 1), ("epoch", 2), ("epoch", 3), ("evaluation", 3)]
    assert epochs_of(run) == before


def test_a_start_drops_the_samples_of_evaluations_after_it(run: Path) -> None:
    PolicyTrainer(toy_config(run, *SETTINGS), resume=run / "checkpoints" / "step-000002").close()
    assert {path.stem for path in (run / "samples").glob("evaluation-*.jsonl")} == {"evaluation-000000"}
    assert {finding.topic: finding.fine for finding in audit(run).findings}["evaluations"]


def test_a_start_says_what_bits_depend_on(run: Path) -> None:
    environment = read_ledger(run)[0]["environment"]
    assert environment["torch"] == torch.__version__
    assert (environment["processes"], environment["threads"]) == (1, torch.get_num_threads())
    assert environment.keys() >= {"python", "pacorl", "source", "diffusers", "transformers", "peft", "device"}


def test_a_start_says_how_a_bf16_run_multiplies_what_is_fp32(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run", "epochs=1", "model.dtype=bfloat16", "tf32=true")
    assert read_ledger(train_policy(config))[0]["environment"]["matmul"] == "tf32"


def test_a_sketch_says_how_far_two_states_lie_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"layer {n}": torch.randn(7 + 31 * n, 5, generator=generator) for n in range(90)}
    moved = {name: value + 1e-3 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
    sketches = [np.array(summary(weight_items(tensors, {}))[1]) for tensors in (state, moved)]
    assert np.linalg.norm(sketches[1] - sketches[0]) / np.linalg.norm(sketches[0]) == pytest.approx(1e-3, rel=0.5)
    assert projection(np.zeros(0)) == 0


# --- an epoch again -------------------------------------------------------------------------------------------------

KINDS = {
    "grpo_clip": ["sampling.tree={seeds: 2}"],
    "grpo_guard": ["objective.name=grpo_guard", "advantages.aggregate=gdpo"],
    "diffusion_nft": ["objective.name=diffusion_nft"],
    "awm": ["objective={name: awm, inner_epochs: 2}"],
    "suffix": ["sampling.steps=5", "sampling.suffix={solver: ab2, steps: 2, check_every: 1}"],
    "selection": ["selection.min_std=0.001"],
    "panel credit": ["advantages={aggregate: log_tamed, credit: 0.5}"],
    "two labels": ["rewards=[{name: consistency, label: a}, {name: jpeg_size}, {name: consistency, label: b}]"],
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in ("two labels", "panel credit") else pytest.mark.slow) for kind in KINDS],
)
def test_an_epoch_comes_out_again_and_no_judge_is_asked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_policy(toy_config(tmp_path / "run", *SETTINGS, "best_by=''", *KINDS[kind]))
    monkeypatch.setattr(ToyJudge, "verdicts", lambda *_: pytest.fail("the judge was asked"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for epoch in (1, 3):
        comparison = made_again(run, epoch)
        assert comparison.answer == "equal bits", comparison
        assert comparison.environment == {}
    names = [quantity.name for quantity in comparison.quantities]
    assert names[-4:] == ["samples", "scores", "advantages", "weights"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "the run was written to"


@pytest.mark.slow
def test_a_function_s_scores_are_replayed(tmp_path: Path) -> None:
    def red(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [image.getpixel((0, 0))[0] / 255 for image in images]

    config = toy_config(tmp_path / "run", *SETTINGS, "best_by=''", "judge=none", RED)
    run = PolicyTrainer(config, rewards={"red": red}).train().folder
    assert made_again(run, 2).answer == "equal bits"


RED = "rewards=[{name: red, weight: 0.3}]"


def test_missing_scores_are_replayed_as_missing(tmp_path: Path) -> None:
    def gaps(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [None if image.getpixel((0, 0))[0] % 3 == 0 else image.getpixel((0, 0))[0] / 255 for image in images]

    config = toy_config(tmp_path / "run", *SETTINGS, "best_by=''", "judge=none", RED, "advantages.max_missing=1")
    run = PolicyTrainer(config, rewards={"red": gaps}).train().folder
    epochs = [record for record in epochs_of(run) if record["kind"] == "epoch"]
    assert any(score is None for record in epochs for _, score in record["scores"]["scores"])
    assert made_again(run, 2).answer == "equal bits"


def jpeg_parts(first: float) -> Callable[..., list[PanelScores]]:
    def panel_scores(reward: JpegSize, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        found = []
        for prompt, score in zip(prompts, reward(prompts, images), strict=True):
            shares = [first, *range(1, prompt.grid.count)]
            found.append(PanelScores(score, [share * score for share in shares]))
        return found

    return panel_scores


@pytest.mark.slow
def test_parts_are_computed_again_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JpegSize, "panel_scores", jpeg_parts(0.0), raising=False)
    rewards = "rewards=[{name: consistency, weight: 0.2}, {name: jpeg_size, weight: 0.1}]"
    run = train_policy(toy_config(tmp_path / "run", *SETTINGS, rewards, "advantages.credit=panel"))
    assert made_again(run, 2).answer == "equal bits"
    monkeypatch.setattr(JpegSize, "panel_scores", jpeg_parts(0.5))
    comparison = made_again(run, 2)
    assert comparison.first
    assert comparison.first.name == "scores"
    assert not comparison.first.equal
    assert 0 < comparison.first.difference < np.inf


def louder_noise(patch: pytest.MonkeyPatch) -> None:
    noise = ToyPolicy.noise
    patch.setattr(ToyPolicy, "noise", lambda *args: 1.01 * noise(*args))


def other_scores(patch: pytest.MonkeyPatch) -> None:
    score = JpegSize.__call__
    patch.setattr(JpegSize, "__call__", lambda *args: [value + 0.01 for value in score(*args)])


def slower_learning(patch: pytest.MonkeyPatch) -> None:
    rate = PolicyTrainer.set_learning_rate

    def halved(trainer: PolicyTrainer) -> float:
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate(trainer) / 2
        return 0.0

    patch.setattr(PolicyTrainer, "set_learning_rate", halved)


def rounding(patch: pytest.MonkeyPatch) -> None:
    velocity = ToyPolicy.velocity
    patch.setattr(ToyPolicy, "velocity", lambda *args: velocity(*args) * (1 + 1e-7))


@pytest.mark.parametrize(
    ("change", "answer", "first"),
    [
        (louder_noise, "differs", "samples"),
        (other_scores, "differs", "scores"),
        (slower_learning, "differs", "weights"),
        (rounding, "equal within the stated tolerance", None),
    ],
)
def test_the_first_quantity_that_differs_is_named(
    compressed: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    answer: str,
    first: str,
) -> None:
    run = compressed()
    change(monkeypatch)
    comparison = made_again(run, 2)
    assert comparison.answer == answer, comparison
    assert (comparison.first and comparison.first.name) == first
    # What comes before the first is equal; what follows is at least measured.
    assert all(np.isfinite(quantity.difference) for quantity in comparison.quantities)
    assert not all(quantity.equal for quantity in comparison.quantities)


def test_half_the_learning_rate_is_half_a_step_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_policy(toy_config(tmp_path / "run", *SETTINGS, "optimizer.updates_per_epoch=1", "epochs=1"))
    slower_learning(monkeypatch)
    *_, weights = made_again(run, 1).quantities
    assert weights.difference == pytest.approx(1.0, rel=0.3)  # of what the second time changed, which is half


def test_another_environment_is_named(run: Path) -> None:
    rewritten(run, lambda record: record.get("environment", {}).update(torch="1.0", processes=8))
    comparison = made_again(run, 2)
    assert comparison.environment == {"torch": ["1.0", torch.__version__], "processes": [8, 1]}
    result = CliRunner().invoke(app, ["verify", str(run), "--epoch", "2"])
    assert result.exit_code == 0
    assert "epoch 2 equal bits; although torch was 1.0 and is" in result.output


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_is_named_with_those_that_are_here(tmp_path: Path) -> None:
    run = train_policy(toy_config(tmp_path / "run", *SETTINGS, "epochs=5", "keep_checkpoints=2", "best_by=''"))
    with pytest.raises(ValueError, match=r"epoch 3 is made again from the checkpoint after epoch 2, .*may be 1, 5$"):
        recompute(run, 3)
    with pytest.raises(ValueError, match=r"has no record of epoch 6; it has 1–5"):
        recompute(run, 6)


def test_an_epoch_is_made_again_with_the_config_that_it_had(run: Path) -> None:
    changed = toy_config(run, *SETTINGS, "optimizer.lr=0.5", "epochs=4")
    train_policy(changed, resume="auto", allow_changes=True)
    assert [made_again(run, epoch).answer for epoch in (3, 4)] == ["equal bits"] * 2
    assert audit(run).fine
    for path in (run / "checkpoints").iterdir():
        if path.is_dir() and path.name != "step-000008":
            state = json.loads((path / "state.json").read_text())
            (path / "state.json").write_text(json.dumps(state | {"config": {}}))
    with pytest.raises(ValueError, match=r"the config of the start after epoch 0 is neither in .* nor in a checkpoint"):
        recompute(run, 3)


@pytest.mark.slow
def test_a_run_that_goes_on_from_another_run(run: Path, tmp_path: Path) -> None:
    other = toy_config(tmp_path / "other", *SETTINGS, "epochs=4")
    train_policy(other, resume=run / "checkpoints" / "step-000004")
    assert audit(other.out).epochs == [3, 4]
    assert made_again(other.out, 3).answer == "equal bits"
    theirs = next(record for record in epochs_of(run) if (record["kind"], record["epoch"]) == ("epoch", 3))
    assert epochs_of(other.out)[0]["hashes"] == theirs["hashes"], "its chain begins there"


@pytest.mark.slow
def test_a_stopped_epoch_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_policy(toy_config(tmp_path / "whole", *SETTINGS))
    trainer = PolicyTrainer(toy_config(tmp_path / "run", *SETTINGS))

    def stop() -> None:
        if trainer.epoch == 1:
            raise Interrupted("told to stop")

    monkeypatch.setattr(trainer.runtime, "check_stop", stop)
    with pytest.raises(Interrupted):
        trainer.train()
    train_policy(toy_config(tmp_path / "run", *SETTINGS), resume="auto")
    assert epochs_of(tmp_path / "run") == epochs_of(whole)
    assert audit(tmp_path / "run").fine


def test_json_of_both_forms(run: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(run), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["fine"]) == (0, True)
    result = CliRunner().invoke(app, ["verify", str(run), "--epoch", "1", "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["answer"], document["first"]) == (0, "equal bits", None)
    assert document["quantities"][0]["name"] == "start"


# --- what is hashed --------------------------------------------------------------------------------------------------


def drawn_samples() -> Samples:
    """Three samples of two nodes, whose second and third share their step."""
    torch.manual_seed(0)
    prompts, size, sigmas = [Prompt(5, "five"), Prompt(5, "five"), Prompt(6, "six")], Size(8, 8), torch.ones(3)
    images = [PillowImage.effect_noise((8, 8), 50).convert("RGB") for _ in prompts]
    rollout = Rollout(prompts, [3, 4, 7], size, sigmas, torch.randn(3, 4, 2), images)
    nodes = NodeBatch(
        step=1,
        level=0,
        prompts=[prompts[0], prompts[2]],
        size=size,
        sigmas_T=sigmas,
        latents_VNC=torch.randn(2, 4, 2),
        next_latents_ENC=torch.randn(3, 4, 2),
        row_B=[3, 4, 7],
        node_B=torch.tensor([0, 0, 1]),
        child_B=torch.tensor([0, 1, 2]),
        log_prob_B=torch.randn(3),
    )
    return Samples([rollout], [nodes])


def add_to(tensor: Tensor) -> None:
    tensor[-1] += 1e-6


def change_prompt(samples: Samples) -> None:
    samples.rollouts[0].prompts[-1] = Prompt(8, "six")


def change_image(samples: Samples) -> None:
    samples.rollouts[0].images[-1].putpixel((7, 7), (1, 2, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda samples: add_to(samples.nodes[0].latents_VNC),
        lambda samples: add_to(samples.nodes[0].next_latents_ENC),
        lambda samples: add_to(samples.nodes[0].log_prob_B),
        lambda samples: add_to(samples.rollouts[0].final_BNC),
        change_prompt,
        change_image,
    ],
    ids=["latent", "next latent", "log-probability", "endpoint", "prompt", "image"],
)
def test_whatever_a_sample_is_trained_by_changes_its_hash_alone(change: Callable[[Samples], None]) -> None:
    samples = drawn_samples()
    before = sample_items([samples])
    change(samples)
    after = sample_items([samples])
    assert {row for row in before if before[row][0] != after[row][0]} == {7}


def test_a_line_is_hashed_without_its_times_and_requests_alone() -> None:
    """A retried request changes a line, and equal runs have equal ledgers."""
    line = {"kind": "epoch", "epoch": 1, "consistency/mean": 0.5, "judge/requests": 24.0, "seconds/reward": 3.0}
    assert line_hash(line | {"judge/requests": 31.0, "judge/retries": 7.0, "seconds/reward": 9.0}) == line_hash(line)
    assert line_hash(line | {"consistency/mean": 0.25}) != line_hash(line)


def test_numbers_in_a_row_are_a_range() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert ranges([]) == "none"


# --- an evaluation again ----------------------------------------------------------------------------------------

HELD_OUT = "evaluation.rewards=[{name: consistency}, {name: jpeg_size}]"


def evaluated_again(run: Path, epoch: int) -> Comparison:
    comparison = recompute(run, epoch, "evaluation")
    assert comparison is not None
    return comparison


def names_of(comparison: Comparison) -> list[str]:
    return [quantity.name for quantity in comparison.quantities]


@pytest.mark.slow
def test_an_evaluation_comes_out_again_and_no_judge_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SETTINGS, "evaluation.samples_per_prompt=3", "prompts.evaluation=tiny:dev:2", HELD_OUT]
    run = train_policy(toy_config(tmp_path / "run", *settings, "best_by=''"))
    assert read_ledger(run)[0]["recomputed"] == ["held_out/jpeg_size"]
    monkeypatch.setattr(ToyJudge, "verdicts", lambda *_: pytest.fail("the judge was asked"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for epoch in (0, 3):
        comparison = evaluated_again(run, epoch)
        assert (comparison.answer, comparison.environment) == ("equal bits", {}), comparison
        assert names_of(comparison) == ["start", "images", "scores"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, "the run was written to"


def test_scores_that_nobody_can_compute_again_are_not_compared(run: Path) -> None:
    rewritten(run, lambda record: record.update(recomputed=[]) if record["kind"] == "start" else None)
    assert names_of(evaluated_again(run, 3)) == ["start", "images"]


def trained_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MovingAverage, "swapped_in", lambda average: nullcontext())


@pytest.mark.parametrize(("change", "first"), [(trained_weights, "images"), (other_scores, "scores")])
def test_what_differs_in_an_evaluation_is_named(
    compressed: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    first: str,
) -> None:
    run = compressed("optimizer.lr=0.1")
    change(monkeypatch)
    comparison = evaluated_again(run, 3)
    assert (comparison.answer, comparison.first and comparison.first.name) == ("differs", first), comparison


def test_an_evaluation_s_files_are_checked_before_it_is_computed(run: Path) -> None:
    better_sample(run)
    with pytest.raises(ValueError, match=r"evaluation 3: .*evaluation-000003\.jsonl is damaged"):
        recompute(run, 3, "evaluation")


@pytest.mark.slow
def test_an_evaluation_that_cannot_be_computed_again(tmp_path: Path) -> None:
    run = train_policy(
        toy_config(tmp_path / "run", *SETTINGS, "keep_checkpoints=1", "evaluation.every=1", "best_by=''")
    )
    assert audit(run).evaluations == [0, 3]
    needed = r"evaluation 2 is made again from the checkpoint after epoch 2, .*--evaluation may be 0, 3$"
    with pytest.raises(ValueError, match=needed):
        recompute(run, 2, "evaluation")
    with pytest.raises(ValueError, match=r"has no record of evaluation 4; it has 0–3"):
        recompute(run, 4, "evaluation")


def test_the_command_computes_an_evaluation_again(run: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(run), "--evaluation", "0"])
    assert (result.exit_code, "evaluation 0 equal bits; in the same environment" in result.output) == (0, True)
    result = CliRunner().invoke(app, ["verify", str(run), "--evaluation", "3", "--epoch", "3"])
    assert (result.exit_code, str(result.exception)) == (
        1,
        "--epoch 3 and --evaluation 3 are two computations; name one of them",
    )


@pytest.mark.parametrize("epoch", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_stopped_in_an_evaluation_has_the_ledger_of_one_that_was_not(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*SETTINGS, "evaluation.every=1", "epochs=2"]
    whole = train_policy(toy_config(tmp_path / "whole", *settings))
    trainer = PolicyTrainer(toy_config(tmp_path / "run", *settings))
    keep = Evaluation.keep

    def stop(evaluation: Evaluation, logbook: Logbook, number: int) -> None:
        keep(evaluation, logbook, number)
        if number == epoch:
            raise Interrupted("told to stop")

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "keep", stop)
        with pytest.raises(Interrupted):
            trainer.train()
    for _ in range(2):  # a finished run that starts again has nothing left to do
        train_policy(toy_config(tmp_path / "run", *settings), resume="auto")
        assert epochs_of(tmp_path / "run") == epochs_of(whole)
        assert audit(tmp_path / "run").fine
        best = [folder / "checkpoints" / "best.json" for folder in (tmp_path / "run", whole)]
        assert best[0].read_text() == best[1].read_text()
    assert evaluated_again(tmp_path / "run", epoch).answer == "equal bits"
