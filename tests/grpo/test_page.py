"""The page that grows with the run, and records that say their own size."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from PIL import Image
from tiny_runs import tiny_run, train_policy

from pacorl.grpo.trainer import PolicyTrainer
from pacorl.records.prompts import save_prompts
from pacorl.report import page
from pacorl.report.page import write_report
from pacorl.tiny.world import set_prompts
from pacorl.types import Size


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_the_page_grows_with_the_run(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs, evaluated before and after: pages at 0, at every second epoch, and at the end."""
    seen: list[str] = []

    def spy(run: Path) -> Path:
        path = write_report(run)
        seen.append(path.read_text())
        assert not list(run.glob("report.html.*")), "written aside and renamed"
        return path

    monkeypatch.setattr(page, "write_report", spy)
    config = tiny_run([*small, "epochs=3", "save_every=2"])
    train_policy(config)
    assert len(seen) == 3
    start, middle, end = seen
    assert "Generated so far" in start
    assert "--resume auto" in middle, "the command that goes on"
    assert "Reward of training samples" in middle
    assert "Reward of training samples" not in start
    assert "Drag the handle" in end
    assert "--resume auto" not in end
    assert len(start) < len(middle) < len(end)


@pytest.mark.usefixtures("toy")
def test_a_page_that_cannot_be_built_does_not_end_the_run(
    small: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(run: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "write_report", full)
    with caplog.at_level(logging.WARNING):
        out = train_policy(tiny_run([*small, "save_every=9"]))
    assert sum("report.html was not built" in message for message in caplog.messages) == 2
    assert (out / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_records_are_sampled_at_their_own_size(small: list[str], tmp_path: Path) -> None:
    """Without the key the config's sizes hold; with it only for the record that says none."""
    prompts = set_prompts("train", 3)
    own = [dataclasses.replace(prompts[0], size=Size(64, 96)), dataclasses.replace(prompts[1], size=Size(32, 48))]
    save_prompts([*own, prompts[2]], tmp_path / "train.jsonl")
    save_prompts([dataclasses.replace(set_prompts("dev", 1)[0], size=Size(64, 96))], tmp_path / "dev.jsonl")
    overrides = [
        *small,
        f"prompts.train={tmp_path / 'train.jsonl'}",
        f"prompts.evaluation={tmp_path / 'dev.jsonl'}",
        "prompts_per_epoch=3",
        "optimizer.updates_per_epoch=1",
        "prompts.record_sizes=true",
    ]
    config = tiny_run(overrides)
    out = train_policy(config)
    with Image.open(out / "samples" / "evaluation-000001" / "0000.png") as image:
        assert image.size == (96, 64)
    epoch = json.loads((out / "metrics.jsonl").read_text().splitlines()[1])
    assert epoch["ratio_deviation/1"] == 0.0


def test_sizes_of_records_come_from_the_policy(small: list[str]) -> None:
    training = PolicyTrainer(tiny_run([*small, "prompts.record_sizes=true"]))
    training.close()
    (prompt,) = set_prompts("train", 1)
    asks = dataclasses.replace(prompt, size=Size(32, 48))
    assert training.policy.size_of(asks, Size(64, 64)) == Size(32, 48)
    assert training.policy.size_of(prompt, Size(64, 64)) == Size(64, 64)
    with pytest.raises(ValueError, match=r"prompt 0, its own size 30x50 must be a multiple of 16 .* nearest is 32x48"):
        training.policy.size_of(dataclasses.replace(prompt, size=Size(30, 50)), Size(64, 64))
