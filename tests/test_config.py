"""A config that cannot be run is refused in one line that names the key, the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pacorl.config.base import ConfigError, dump, frozen_changes, load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.types import Prompt


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


def test_a_file_says_only_what_differs(tmp_path: Path) -> None:
    run = load(PolicyConfig, written(tmp_path, "epochs: 3\nsampling: {steps: 6, size: [64, 64]}\n"))
    assert (run.epochs, run.sampling.steps, run.sampling.size) == (3, 6, (64, 64))
    assert run.sampling.noise_level == PolicyConfig().sampling.noise_level
    assert load(PolicyConfig, written(tmp_path, "# nothing\n")) == PolicyConfig()


def test_off_is_a_word(tmp_path: Path) -> None:
    """YAML reads a bare `off` as false."""
    assert load(PolicyConfig, written(tmp_path, "monitor: off\n")).monitor == "off"


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "epochs: 3\noptimizer: {lr: 1.0e-3}\n")
    overrides = ["epochs=5", "optimizer.ema_decay=0.5", "sampling.sde_steps=[0, 2]", "out=runs/other"]
    run = load(PolicyConfig, path, overrides)
    assert (run.epochs, run.optimizer.lr, run.optimizer.ema_decay) == (5, 1e-3, 0.5)
    assert (run.sampling.sde_steps, run.out) == ((0, 2), Path("runs/other"))


def test_python_reads_what_a_command_reads() -> None:
    path = Path(__file__).parents[1] / "configs" / "tiny.yaml"
    assert PolicyConfig.from_yaml(path, "epochs=3") == load(PolicyConfig, path, ["epochs=3"])
    with pytest.raises(ConfigError, match="epoch: unknown key, did you mean"):
        PolicyConfig.from_yaml(str(path), "epoch=3")


def test_a_dumped_config_loads_as_itself(tmp_path: Path) -> None:
    run = load(PolicyConfig, None, ["epochs=7", "advantages.threshold=mean", "out=runs/é"])
    assert load(PolicyConfig, written(tmp_path, dump(run))) == run
    assert yaml.safe_load(dump(run))["advantages"]["threshold"] == "mean"


def test_a_config_cannot_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PolicyConfig().epochs = 3  # type: ignore[misc]


UNKNOWN = {
    "epochz=3": "epochs",
    "sampling.step=3": "sampling.steps",
    "optimizer.lrr=1": "optimizer.lr",
    "optimizer.weight_decy=1": "optimizer.weight_decay",
    "rewards=[{name: panel_match, weigt: 1}]": "rewards.weight",
    "lr=1e-4": "optimizer.lr",
    "evaluation_limit=2": "prompts.evaluation_limit",
    "batch=2": "sampling.batch' or 'evaluation.batch",
    "objective.clip_rang=1": "objective.clip_range",
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
    ("adapter.dropout: unknown key", "adapter.dropout=0.1"),
    ("advantages.std: unknown key", "advantages.aggregate=gdpo", "advantages.std=global"),
    ("objective: unknown objective 'grpo'.*; lr: unknown key", "lr=1e-4", "objective.name=grpo"),
    *(("epochs:", f"epochs={value}") for value in ("many", "true", "0", 10**30)),
    ("optimizer.lr:", "optimizer.lr=true"),
    ("group_size:", "group_size=1"),
    ("sampling.steps:", f"sampling.steps={10**30}"),
    ("adapter.rank:", "adapter.rank=5000"),
    ("seed:", f"seed={10**30}"),
    ("evaluation.samples_per_prompt:", "evaluation.samples_per_prompt=1001"),
    ("config: prompts_per_epoch 100000", "prompts_per_epoch=100000", "group_size=12"),
    ("sampling.size:", "sampling.size=64"),
    ("model.dtype:", "model.dtype=float16"),
    ("advantages.floor:", "advantages.floor=least"),
    ("monitor:", "monitor=loud"),
    ("optimizer.betas.1:", "optimizer.betas=[0.9, 1]"),
    ("optimizer.ema_decay:", "optimizer.ema_decay=1.5"),
    *(("sampling: sde_steps", f"sampling.sde_steps={steps}") for steps in ("[]", "[2, 1]", "[1, 1]")),
    ("sampling: sde_steps", "sampling.sde_steps=[6]", "sampling.steps=6"),
    ("config: sampling.noise_level", "sampling.sde_type=cps", "sampling.noise_level=1.2"),
    ("config: sampling.sde_steps: cps", "sampling.sde_type=cps", "sampling.sde_steps=[9]"),
    ("config: sampling.tree.* 8 samples and group_size is 12", "group_size=12", TREE_OF_8),
    ("config: sampling.tree.* 10 samples", "group_size=12", "sampling.tree.seeds=5"),
    ("config: sampling.tree.branches", "sampling.tree.branches=[4, 4]"),
    ("config: sampling.suffix is set", "sampling.sde_steps=[9]", "sampling.suffix.steps=2"),
    ("config: sampling.suffix is set", "sampling.sde_steps=[9]", "sampling.suffix.solver=ab2"),
    ("config: sampling.suffix.solver", "sampling.sde_steps=[8]", "sampling.suffix.solver=ab2"),
    ("config: sampling.suffix.solver", "sampling.suffix={solver: ab2, steps: 1}"),
    ("config: sampling.suffix.steps", "sampling.suffix.steps=9"),
    ("config: sampling.suffix.steps", "objective.name=diffusion_nft", "sampling.suffix.steps=11"),
    ("sampling.suffix.solver:", "sampling.suffix.solver=heun"),
    ("sampling: window.size", "sampling.window.kind=sliding", "sampling.window.size=2"),
    ("judge: address at h", "judge.checkpoint=http://sk-1@h/v1"),
    ("judge: adapter", "judge.checkpoint=http://h:1/v1", "judge.adapter=lora"),
    ("judge.overlap: unknown key", "judge.overlap=true"),
    ("learning_rate: unknown key", "learning_rate=1e-4"),
    ("config: judge.symmetric", "model.kind=qwen_edit", "judge.symmetric=true"),
    ("config: rewards is empty", "rewards=[]"),
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
    with pytest.raises(ConfigError) as caught:
        load(PolicyConfig, path)
    assert str(caught.value) == (
        f"{path}: epochs: Input should be greater than 0 (got -1); "
        "sampling.sde_type: Input should be 'flow_sde' or 'cps' (got 'euler')"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("epochs", "override 'epochs' is not of the form section.key=value"),
        ("=3", "override '=3' is not of the form section.key=value"),
        ("epochs.first=3", "override 'epochs.first=3': epochs is not a section"),
        ("sampling.size=[64", "override 'sampling.size=[64': not valid YAML"),
    ],
)
def test_a_bad_override(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(PolicyConfig, written(tmp_path, "epochs: 3\n"), [override])
    assert str(caught.value).startswith(message)


def test_another_name_leaves_the_keys_of_the_former(tmp_path: Path) -> None:
    path = written(tmp_path, "objective: {name: grpo_clip, clip_range: 0.5}\n")
    assert load(PolicyConfig, path, ["objective.name=grpo_clip"]).objective.clip_range == 0.5
    assert load(PolicyConfig, path, ["objective.name=diffusion_nft"]).objective.name == "diffusion_nft"
    overrides = ["objective.clip_range=0.25", "objective.name=grpo_guard"]
    assert load(PolicyConfig, path, overrides).objective.clip_range == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: [3", "not valid YAML: expected ',' or ']'"),
        ("- epochs\n", "a config is a mapping of keys, this is a list"),
        ("epochs", "a config is a mapping of keys, this is a str"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(PolicyConfig, path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_the_learning_rate_as_people_write_it() -> None:
    assert load(PolicyConfig, None, ["optimizer.lr=1e-4"]).optimizer.lr == 1e-4


def test_what_edits_rule_out_is_refused_with_the_prompts_of_a_kind_that_does_both(tmp_path: Path) -> None:
    """An editor's config is refused as such; of FLUX.2-klein the prompts say whether a run is one of edits."""
    edits = [Prompt(0, "Add a hat.", sources=(tmp_path / "a.png",))]
    run = load(PolicyConfig, None, ["model.kind=klein", "judge.symmetric=true"])
    run.check_prompts([Prompt(0, "A cat.")])
    with pytest.raises(ValueError, match=r"judge\.symmetric with edits by kind klein"):
        run.check_prompts(edits)


def test_edits_are_no_prompts_of_a_generator_of_sets(tmp_path: Path) -> None:
    """It would read the instruction, and never see the source."""
    edit = Prompt(3, "Add a hat.", sources=(tmp_path / "a.png",))
    with pytest.raises(ValueError, match=r"^model\.kind flux .* edits no images, and prompt 3 \('Add a hat\.'\)"):
        PolicyConfig().check_prompts([Prompt(0, "A cat."), edit])


def test_a_free_key_frees_itself_and_its_section_alone() -> None:
    changes = {key: [1, 2] for key in ("out", "output", "judge", "judge.dtype", "judged.model", "optimizer.lr")}
    assert list(frozen_changes(changes, free=("out", "judge"))) == ["output", "judged.model", "optimizer.lr"]
