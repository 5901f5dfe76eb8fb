"""A run whose rewards and measures ask no judge needs none: none is reached, loaded, planned or asked."""

from pathlib import Path

import pytest
from tiny_runs import JPEG_SIZE, tiny_run

from pacorl.config import base as configs
from pacorl.grpo.builders import without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig

JPEG = f"{{name: '{JPEG_SIZE}', args: {{prefer: large}}}}"
OWN = """
class Asking:
    def __init__(self, judge):
        self.judge = judge
    def __call__(self, prompts, images):
        return [float(self.judge is not None) for _ in images]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("overrides", "judge", "held_out"),
    [
        ([], True, False),
        ([f"rewards=[{JPEG}]"], False, False),
        ([f"rewards=[{JPEG}]", "evaluation.rewards=[{name: consistency}]"], True, False),
        ([f"rewards=[{JPEG}]", "evaluation={rewards: [{name: consistency}], judge: x}"], False, True),
        ([f"evaluation={{rewards: [{JPEG}], judge: x}}"], True, False),
        ([f"rewards=[{JPEG}]", f"evaluation={{rewards: [{JPEG}], judge: x}}"], False, False),
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
