"""A run whose rewards and measures ask no judge needs none: none is reached, loaded, planned or asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import JPEG_SIZE, metrics, tiny_run, train_policy

from pacorl.config import base as configs
from pacorl.grpo import checkpoint
from pacorl.grpo.builders import without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig

JPEG = f"{{name: '{JPEG_SIZE}', args: {{prefer: large}}}}"
UNREACHABLE = "judge.checkpoint=http://127.0.0.1:9/v1#paco"
OWN = """
def redness(prompts, images):
    return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]

class Asking:
    def __init__(self, judge):
        self.judge = judge
    def __call__(self, prompts, images):
        return [float(self.judge is not None) for _ in images]
"""


def records(folder: Path, epoch: int) -> list[dict[str, Any]]:
    path = folder / "samples" / f"evaluation-{epoch:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def smaller(small: list[str]) -> list[str]:
    """Two prompts of two samples, two steps, 32 px."""
    sizes = [
        "sampling.size=[32,32]",
        "evaluation.size=[32,32]",
        "sampling.steps=2",
        "sampling.suffix={}",
        "optimizer.updates_per_epoch=2",
    ]
    return [*small, *sizes, "group_size=2", "sampling.batch=2", "evaluation.batch=2"]


# --- a whole run -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_without_a_judge_trains_evaluates_resumes_and_shows_itself(smaller: list[str], own: Path) -> None:
    """The judge of the config does not answer, and nothing minds."""
    rewards = f"rewards=[{JPEG}, {{name: '{own}:redness', weight: 10}}]"
    overrides = [*smaller, rewards, f"evaluation.rewards=[{JPEG}]", "epochs=2"]
    out = train_policy(tiny_run([*overrides, UNREACHABLE]))
    lines = metrics(out)
    assert [line["kind"] for line in lines] == ["evaluation", "epoch", "epoch", "evaluation"]
    assert all(line["grad_norm"] > 0 for line in lines if line["kind"] == "epoch")
    assert not [name for line in lines for name in line if name == "p_yes" or name.startswith("judge/")]
    first, last = records(out, 0), records(out, 2)
    for record in first:
        assert record["p_yes"] == []
        assert record["reward"] == pytest.approx(record["scores"]["jpeg_size"] + 10 * record["scores"]["redness"])
    newest = checkpoint.checkpoints(out / "checkpoints")[-1]
    assert json.loads((newest / "state.json").read_text())["score"] == pytest.approx(
        sum(one["reward"] for one in last) / len(last)
    )
    assert configs.load(PolicyConfig, out / "config.yaml").judge is None

    for path in checkpoint.checkpoints(out / "checkpoints")[1:]:
        shutil.rmtree(path)
    train_policy(tiny_run([*overrides, "judge=none"]), resume=True)
    assert metrics(out) == lines


# --- who is asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "judge", "held_out"),
    [
        ([], True, False),
        ([f"rewards=[{JPEG}]"], False, False),
        ([f"rewards=[{JPEG}]", "evaluation.rewards=[{name: consistency}]"], True, False),
        ([f"rewards=[{JPEG}]", "evaluation={rewards: [{name: consistency}], judge: x}"], False, True),
        ([f"evaluation={{rewards: [{JPEG}], judge: x}}"], True, False),
        ([f"rewards=[{JPEG}]", f"evaluation={{rewards: [{JPEG}], judge: x}}"], False, False),
        (["rewards=[{name: 'OWN:redness'}]"], False, False),
        (["rewards=[{name: 'OWN:Asking'}]"], True, False),
    ],
)
def test_who_is_asked_follows_from_rewards_and_measures(
    overrides: list[str], judge: bool, held_out: bool, own: Path
) -> None:
    config = without_idle_judges(tiny_run([override.replace("OWN", str(own)) for override in overrides]))
    assert (config.judge is not None, bool(config.evaluation.judge)) == (judge, held_out)
    assert without_idle_judges(config) == config


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_none_is_no_judge_and_is_written_and_read_again(word: str, tmp_path: Path) -> None:
    config = tiny_run([f"judge={word}", f"rewards=[{JPEG}]"])
    assert config.judge is None
    (tmp_path / "config.yaml").write_text(configs.dump(config))
    assert configs.load(PolicyConfig, tmp_path / "config.yaml") == config
