"""The watch, leaks, and held-out rewards inside a run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from PIL import Image
from tiny_runs import metrics, tiny_run, train_policy
from toy_world import ToyPolicy

from pacorl.core.metric_names import SIGN_MEANINGS
from pacorl.grpo import checkpoint
from pacorl.grpo.monitor import LIMITS

OWN = """
def brightness(prompts, images):
    return [sum(image.convert("L").tobytes()) / image.width / image.height / 255 for image in images]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def dark_from_epoch_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy whose training images go dark after its first epoch, as a hacked one's do."""
    decode, calls = ToyPolicy.decode, iter(range(10**6))

    def dark(self: ToyPolicy, *args: object) -> list[Image.Image]:
        images = decode(self, *args)  # type: ignore[arg-type]
        return images if next(calls) < 3 else [Image.new("RGB", image.size, (8, 8, 12)) for image in images]

    monkeypatch.setattr(ToyPolicy, "decode", dark)


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_held_out_rewards_are_logged_and_never_trained_on(small: list[str], own: Path) -> None:
    plain = train_policy(tiny_run([*small, "evaluation.every=0"]))
    judge = "evaluation.judge=tiny"
    rewards = f"evaluation.rewards=[{{name: panel_match}}, {{name: '{own}:brightness', label: light}}]"
    held = train_policy(tiny_run([*small, f"out={plain.parent / 'held'}", judge, rewards]))
    first, epoch, _ = metrics(held)
    assert 0 < first["held_out/light"] < 1
    assert 0 < first["held_out/panel_match"] < 1
    assert not any(name.startswith("held_out") for name in epoch)
    record = json.loads((held / "samples" / "evaluation-000000.jsonl").read_text().splitlines()[0])
    assert {"held_out/panel_match", "held_out/light"} <= set(record["scores"])
    assert epoch["loss"] == metrics(plain)[1]["loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("toy", "dark_from_epoch_two")
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_hacked_run_warns_or_is_stopped_and_saved(
    small: list[str], caplog: pytest.LogCaptureFixture, action: str
) -> None:
    config = tiny_run([*small, "epochs=5", f"monitor={action}", "save_every=100"])
    with pytest.raises(ValueError, match="stopped after epoch 4, and saved") if action == "stop" else nullcontext():
        train_policy(config)
    epochs = metrics(config.out, "epoch")
    assert ["alarm/duplicates" in line for line in epochs] == [False, False, False, True, True][: len(epochs)]
    assert caplog.text.count("duplicates went from") == 1, "said once"
    saved = [path.name for path in checkpoint.checkpoints(config.out / "checkpoints")]
    assert saved == ["step-000008" if action == "stop" else "step-000010"]


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_resumed_run_remembers_where_the_signs_stood(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ["prompts.train=tiny:train:12", "prompts_per_epoch=4", "group_size=2"]
    # The least change of any sign raises an alarm.
    for sign in SIGN_MEANINGS:
        monkeypatch.setitem(LIMITS, sign, 1e-9)
    settings = [*small, *several]
    whole = train_policy(tiny_run([*settings, f"out={tmp_path / 'whole'}", "epochs=9"]))
    part = train_policy(tiny_run([*settings, f"out={tmp_path / 'part'}", "epochs=4", "evaluation.every=0"]))
    train_policy(tiny_run([*settings, f"out={part}", "epochs=9", "evaluation.every=0"]), resume=True)
    signs = [
        [{k: v for k, v in line.items() if k.startswith(("monitor/", "alarm/"))} for line in metrics(folder, "epoch")]
        for folder in (whole, part)
    ]
    assert signs[0] == signs[1]
    assert any(name.startswith("alarm/") for line in signs[0][1:] for name in line), "no alarm, so nothing is shown"


@pytest.mark.usefixtures("toy")
def test_prompts_that_are_also_measured_on_are_refused(small: list[str], caplog: pytest.LogCaptureFixture) -> None:
    shared = [*small, "prompts.train=tiny:train:3", "prompts.evaluation=tiny:train"]
    with pytest.raises(ValueError, match="1 of 3 training prompts are measured on"):
        train_policy(tiny_run(shared))
    train_policy(tiny_run([*small, "prompts.train=tiny:train:3", "prompts.evaluation=tiny:train:3"]))
    assert "3 of 3 training prompts are measured on" in caplog.text
