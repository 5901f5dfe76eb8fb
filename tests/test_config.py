"""A config that cannot be run is refused in one line that names the key, the value and the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pacorl.config.base import ConfigError, check_changes, dump, load
from pacorl.grpo.policy_config import PolicyConfig


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults_are_the_papers_recipe() -> None:
    run = load(PolicyConfig, None)
    assert (run.sampling.size, run.evaluation.size) == ((512, 512), (1024, 1024))
    assert (run.group_size, run.prompts_per_epoch, run.optimizer.lr) == (16, 42, 3e-4)
    assert (run.sampling.noise_level, run.sampling.sde_steps, run.sampling.steps) == (0.7, (1,), 10)
    assert (run.adapter.rank, run.adapter.alpha, run.objective.epsilon) == (64, 128, 1e-4)
    assert (run.advantages.aggregate, run.advantages.threshold, run.advantages.std) == ("log_tamed", 0.2, "group")


def test_a_file_says_only_what_differs_and_overrides_win(tmp_path: Path) -> None:
    path = written(tmp_path, "epochs: 3\nsampling: {steps: 6, size: [64, 64]}\nmonitor: off\n")
    run = load(PolicyConfig, path)
    assert (run.epochs, run.sampling.steps, run.sampling.size) == (3, 6, (64, 64))
    assert run.monitor == "off"  # a word, which YAML 1.1 read as false
    assert run.sampling.noise_level == PolicyConfig().sampling.noise_level
    overrides = ["epochs=5", "optimizer.lr=1e-4", "sampling.sde_steps=[0, 2]", "out=runs/é"]
    run = load(PolicyConfig, path, overrides)
    assert (run.epochs, run.optimizer.lr, run.sampling.steps) == (5, 1e-4, 6)
    assert (run.sampling.sde_steps, run.out) == ((0, 2), Path("runs/é"))
    assert PolicyConfig.from_yaml(path, *overrides) == run
    assert load(PolicyConfig, written(tmp_path, dump(run))) == run
    assert load(PolicyConfig, written(tmp_path, "# nothing\n")) == PolicyConfig()


def test_a_config_cannot_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PolicyConfig().epochs = 3  # type: ignore[misc]


UNKNOWN = {
    "epochz=3": "epochs",
    "sampling.step=3": "sampling.steps",
    "rewards=[{name: panel_match, weigt: 1}]": "rewards.weight",
    "lr=1e-4": "optimizer.lr",
    "optimizer.learning_rate=1e-4": "optimizer.lr",
    "batch=2": "sampling.batch",
    "objective.clip_rang=1": "objective.clip_range",
    "objective.clip=1": "objective.clip_range",
    "objective.name=diffusion_nft beta=0.1": "objective.beta",
    "objective.name=grpo": "grpo_clip",
}
"""Overrides → the key that was meant."""


@pytest.mark.parametrize(("overrides", "meant"), UNKNOWN.items())
def test_an_unknown_key_names_the_one_that_was_meant(overrides: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        load(PolicyConfig, None, overrides.split() if "{" not in overrides else [overrides])


TREE_OF_8 = "sampling.tree={seeds: 2, branches: [4]}"
FAULTS = [
    ("optimizer.zzz: unknown key", "optimizer.zzz=3"),
    ("objective.clip_range: .* grpo_clip or", "objective.name=diffusion_nft", "objective.clip_range=1"),
    ("adapter.dropout: unknown key", "adapter.dropout=0.1"),
    ("advantages: threshold 0.5", "advantages.aggregate=weighted_sum", "advantages.threshold=0.5"),
    ("objective: unknown objective 'grpo'.*; lr: unknown key", "lr=1e-4", "objective.name=grpo"),
    *(("epochs:", f"epochs={value}") for value in ("0", 10**30)),
    ("sampling.size: give a list in brackets", "sampling.size=64"),
    (r"rewards.0.weigth: [^;]*$", "rewards=[{name: consistency, weigth: 1}]"),
    *((r"sampling\W+sde_steps", f"sampling.sde_steps={steps}") for steps in ("[]", "[2, 1]", "[1, 1]")),
    ("sampling: sde_steps", "sampling.sde_steps=[6]", "sampling.steps=6"),
    ("config: sampling.noise_level", "sampling.sde_type=cps", "sampling.noise_level=1.2"),
    ("config: sampling.sde_steps: cps", "sampling.sde_type=cps", "sampling.sde_steps=[9]"),
    ("config: sampling.tree.* 8 samples and group_size is 12", "group_size=12", TREE_OF_8),
    ("config: sampling.tree.* 10 samples", "group_size=12", "sampling.tree.seeds=5"),
    ("config: sampling.tree.branches", "sampling.tree.branches=[4, 4]"),
    ("config: sampling.suffix", "sampling.sde_steps=[9]", "sampling.suffix.solver=ab2"),
    ("config: sampling.suffix", "sampling.suffix={solver: ab2, steps: 1}"),
    ("config: sampling.suffix", "objective.name=diffusion_nft", "sampling.suffix.steps=11"),
    ("sampling.suffix.solver:", "sampling.suffix.solver=heun"),
    ("sampling: window.size", "sampling.window.kind=sliding", "sampling.window.size=2"),
    ("judge: address at h", "judge.checkpoint=http://sk-1@h/v1"),
    ("rewards: ", "rewards=[]"),
    ("advantages.credit: .* or ", "advantages.credit=3"),
    ("config: rewards .*twice", "rewards=[{name: consistency}, {name: consistency}]"),
]
"""The key that a message begins with, and overrides."""


@pytest.mark.parametrize(("named", "overrides"), [(named, overrides) for named, *overrides in FAULTS])
def test_a_fault_in_one_line(named: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{named}") as caught:
        load(PolicyConfig, None, overrides)
    assert "\n" not in str(caught.value)


def test_several_faults_are_one_line_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "epochs: -1\nsampling: {sde_type: euler}\n")
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(str(path))}: epochs: .*-1\); sampling\.sde_type: .*'euler'\)$"
    ):
        load(PolicyConfig, path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs", "override 'epochs' is not of the form section.key=value"),
        ("=3", "override '=3' is not of the form section.key=value"),
        ("epochs.first=3", "override 'epochs.first=3': epochs is no section"),
        ("rewards.0.weight=3", "override 'rewards.0.weight=3': rewards is no section"),
        ("rewards=[{name: a, weight: b}]", "run.yaml: rewards.0.weight: "),
        ("sampling.size=[64", "override 'sampling.size=[64' (quote one with spaces): not valid YAML"),
        ("epochs = no", "run.yaml: epochs: "),
        ("model.kind=no", "run.yaml: model: "),
    ],
)
def test_a_bad_override(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(PolicyConfig, written(tmp_path, "epochs: 3\nrewards: [{name: aesthetic}]\n"), [override])


def test_another_name_leaves_the_keys_of_the_former(tmp_path: Path) -> None:
    path = written(tmp_path, "objective: {name: grpo_clip, clip_range: 0.5}\n")
    assert load(PolicyConfig, path, ["objective.name=grpo_clip"]).objective.clip_range == 0.5
    assert load(PolicyConfig, path, ["objective.name=diffusion_nft"]).objective.name == "diffusion_nft"
    overrides = ["objective.clip_range=0.25", "objective.name=grpo_guard"]
    assert load(PolicyConfig, path, overrides).objective.clip_range == 0.25


@pytest.mark.parametrize(
    ("text", "message"), [("epochs: [3", "not valid YAML"), ("- epochs\n", "list"), ("epochs", "str")]
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
        load(PolicyConfig, path)


def test_a_free_key_frees_itself_and_its_section_alone() -> None:
    changes = {key: [1, 2] for key in ("out", "judge", "judge.dtype")}
    check_changes(changes, free=("out", "judge"))
    for key in ("output", "judged.model", "optimizer.lr"):
        with pytest.raises(ConfigError, match=f"{key} was 1 and is now 2"):
            check_changes(changes | {key: [1, 2]}, free=("out", "judge"))
