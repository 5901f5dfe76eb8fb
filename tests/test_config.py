"""A config that cannot be run is refused in one line that names the key, the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from pacorl.config.base import ConfigError, dump, frozen_changes, load
from pacorl.config.recipes import recipe
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
    run = load(PolicyConfig, written(tmp_path, "prompts: {leaks: off}\nmonitor: off\n"))
    assert (run.prompts.leaks, run.monitor) == ("off", "off")


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


FAULTS = [
    (["epochz=3"], "epochz: unknown key, did you mean 'epochs'?"),
    (["sampling.step=3"], "sampling.step: unknown key, did you mean 'sampling.steps'?"),
    (["optimizer.zzz=3"], "optimizer.zzz: unknown key"),
    (["optimizer.lrr=1"], "optimizer.lrr: unknown key, did you mean 'optimizer.lr'?"),
    (["optimizer.weight_decy=1"], "optimizer.weight_decy: unknown key, did you mean 'optimizer.weight_decay'?"),
    (["rewards=[{name: panel_match, weigt: 1}]"], "rewards.0.weigt: unknown key, did you mean 'rewards.0.weight'?"),
    (["lr=1e-4"], "lr: unknown key, did you mean 'optimizer.lr'?"),
    (["optimizer.learning_rate=1e-4"], "optimizer.learning_rate: unknown key, did you mean 'optimizer.lr'?"),
    (["evaluation_limit=2"], "evaluation_limit: unknown key, did you mean 'prompts.evaluation_limit'?"),
    (["batch_size=2"], "batch_size: unknown key, did you mean 'sampling.batch' or 'evaluation.batch'?"),
    (["num_train_epochs=2"], "num_train_epochs: unknown key, did you mean 'epochs'?"),
    (["guidance=3"], "guidance: unknown key, did you mean 'model.guidance_scale'?"),
    (["num_generations=8"], "num_generations: unknown key, did you mean 'group_size'?"),
    (["learnrate=1e-4"], "learnrate: unknown key, did you mean 'optimizer.lr'?"),
    (["objective.name=diffusion_nft", "beta=0.1"], "beta: unknown key, did you mean 'objective.beta'?"),
    (
        ["lr=1e-4", "objective.name=grpo"],
        "objective: unknown objective 'grpo'; did you mean 'grpo_clip'? there are grpo_clip, grpo_guard, "
        "diffusion_nft, awm, or your own as path/to/file.py:NAME or module:NAME; lr: unknown key, did you mean "
        "'optimizer.lr'?",
    ),
    (["epochs=many"], "epochs: Input should be a valid integer, unable to parse string as an integer (got 'many')"),
    (["epochs=true"], "epochs: a switch is no number; give one (got True)"),
    (["optimizer.lr=true"], "optimizer.lr: a switch is no number; give one (got True)"),
    (["epochs=0"], "epochs: Input should be greater than 0 (got 0)"),
    (["group_size=1"], "group_size: Input should be greater than or equal to 2 (got 1)"),
    ([f"sampling.steps={10**30}"], f"sampling.steps: Input should be less than or equal to 1000 (got {10**30})"),
    (["adapter.rank=5000"], "adapter.rank: Input should be less than or equal to 4096 (got 5000)"),
    ([f"epochs={10**30}"], f"epochs: Input should be less than or equal to 1000000 (got {10**30})"),
    ([f"seed={10**30}"], f"seed: Input should be less than or equal to {2**53} (got {10**30})"),
    (
        ["evaluation.samples_per_prompt=1001"],
        "evaluation.samples_per_prompt: Input should be less than or equal to 1000",
    ),
    (
        ["prompts_per_epoch=100000", "group_size=12"],
        "config: prompts_per_epoch 100000 with 12 samples each makes 1,200,000 samples an epoch, and at most 1,000,000",
    ),
    (["sampling.size=64"], "sampling.size: must be a list, such as sampling.size=[A,B] (got 64)"),
    (["model.dtype=float16"], "model.dtype: Input should be 'float32', 'bfloat16' or 'float64' (got 'float16')"),
    (["advantages.floor=least"], "advantages.floor: Input should be 'none', 'max' or 'add' (got 'least')"),
    (["monitor=loud"], "monitor: Input should be 'off', 'warn' or 'stop' (got 'loud')"),
    (["optimizer.betas=[0.9, 1]"], "optimizer.betas.1: Input should be less than 1 (got 1)"),
    (["optimizer.ema_decay=1.5"], "optimizer.ema_decay: Input should be less than or equal to 1 (got 1.5)"),
    (
        ["adapter.dropout=0.1"],
        "adapter.dropout: unknown key",
    ),
    (
        ["sampling.sde_steps=[]"],
        "sampling: sde_steps is empty, so nothing would be trained; name at least one step",
    ),
    (["sampling.sde_steps=[2, 1]"], "sampling: sde_steps [2, 1] must be ascending and distinct"),
    (["sampling.sde_steps=[1, 1]"], "sampling: sde_steps [1, 1] must be ascending and distinct"),
    (["sampling.sde_steps=[6]", "sampling.steps=6"], "sampling: sde_steps [6] reach beyond the 6 sampling steps"),
    (["sampling.sde_type=cps", "sampling.noise_level=1.2"], "config: sampling.noise_level 1.2 is beyond 1"),
    (
        ["group_size=12", "sampling.tree={seeds: 2, branches: [4]}"],
        "config: sampling.tree has 2 seeds × 4 branches = 8 samples and group_size is 12; make them equal",
    ),
    (["group_size=12", "sampling.tree.seeds=5"], "config: sampling.tree has 5 seeds × 2 branches = 10 samples"),
    (
        ["sampling.tree.branches=[4, 4]"],
        "config: sampling.tree.branches [4, 4] has 2 entries and an epoch has 1 stochastic steps",
    ),
    (
        ["sampling.sde_steps=[9]", "sampling.suffix.steps=2"],
        "config: sampling.suffix steps 2 and no deterministic step follows the last stochastic one; leave",
    ),
    (
        ["sampling.sde_steps=[9]", "sampling.suffix.solver=ab2"],
        "config: sampling.suffix solver ab2 and no deterministic step follows the last stochastic one",
    ),
    (
        ["objective.name=diffusion_nft", "sampling.suffix.steps=11"],
        "config: sampling.suffix.steps 11 and only 10 deterministic steps follow",
    ),
    (["sampling.suffix.steps=9"], "config: sampling.suffix.steps 9 and only 8 deterministic steps follow"),
    (
        ["sampling.suffix={solver: ab2, steps: 1}"],
        "config: sampling.suffix.solver ab2 looks back one step, and the suffix has 1; give it 2 steps",
    ),
    (["sampling.suffix.solver=heun"], "sampling.suffix.solver: Input should be 'euler' or 'ab2' (got 'heun')"),
    (
        ["sampling.sde_steps=[8]", "sampling.suffix.solver=ab2"],
        "config: sampling.suffix.solver ab2 looks back one step, and the suffix has 1; give it 2 steps",
    ),
    (
        ["sampling.window.kind=sliding", "sampling.window.size=2"],
        "sampling: window.size 2 exceeds the 1 sde_steps that it is chosen from",
    ),
    (["judge.checkpoint=http://sk-1@h/v1"], "judge: address at h may hold a password"),
    (["judge.checkpoint=http://h:1/v1", "judge.adapter=lora"], "judge: adapter lora is a server's own affair"),
    (["judge.checkpoint=http://h:1#a", "judge.model=b"], "judge: checkpoint names the model a, and model is b"),
    (
        ["model.kind=qwen_edit", "judge.symmetric=true"],
        "config: judge.symmetric with edits by kind qwen_edit: questions about them say which image is the original",
    ),
    (
        ["sampling.sde_type=cps", "sampling.sde_steps=[9]"],
        "config: sampling.sde_steps: cps adds no noise at the last step, so it cannot be trained; leave it out",
    ),
    (["rewards=[]"], "config: rewards is empty, so there is nothing to learn from; name at least one"),
    (
        ["rewards=[{name: consistency}, {name: consistency}]"],
        "config: rewards ['consistency', 'consistency'] name one reward twice; give one of them another label",
    ),
    (
        ["model.kind=qwen_edit", "prompts.record_sizes=true"],
        "config: prompts.record_sizes says nothing to edits by kind qwen_edit, whose images have their source's shape",
    ),
    (["objective.clip_rang=1"], "objective.clip_rang: unknown key, did you mean 'objective.clip_range'?"),
    (["objective.name=grpo"], "objective: unknown objective 'grpo'; did you mean 'grpo_clip'? there are grpo_clip,"),
    (["objective.beta=0.2"], "objective.beta: unknown key, did you mean 'objective.kl_weight'?"),
    (
        ["advantages.aggregate=gdpo", "advantages.std=global"],
        "advantages.std: unknown key of aggregate gdpo; there are aggregate,",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), FAULTS, ids=[overrides[0] for overrides, _ in FAULTS])
def test_a_fault_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(PolicyConfig, None, overrides)
    assert str(caught.value).startswith(message)
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
    for setting, fault in {
        "prompts.record_sizes=true": "record_sizes says nothing to edits by kind klein",
        "judge.symmetric=true": "judge.symmetric with edits by kind klein",
    }.items():
        run = load(PolicyConfig, None, ["model.kind=klein", setting])
        run.check_prompts([Prompt(0, "A cat.")])
        with pytest.raises(ValueError, match=fault):
            run.check_prompts(edits)


def test_edits_are_no_prompts_of_a_generator_of_sets(tmp_path: Path) -> None:
    """It would read the instruction, and never see the source."""
    edit = Prompt(3, "Add a hat.", sources=(tmp_path / "a.png",))
    with pytest.raises(ValueError, match=r"^model\.kind flux .* edits no images, and prompt 3 \('Add a hat\.'\)"):
        PolicyConfig().check_prompts([Prompt(0, "A cat."), edit])


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ([], False),
        (["objective.name=awm"], True),
        (["objective.name=awm", "sampling.tree.seeds=null"], False),
    ],
)
def test_endpoints_on_shared_noise_are_advised_against(overrides: list[str], warns: bool) -> None:
    warning = load(PolicyConfig, recipe(), overrides).tree_warning
    assert bool(warning) == warns
    if warns:
        assert "objective awm and sampling.tree.seeds 1 for 12 samples" in warning
        assert not load(
            PolicyConfig, recipe(), [*overrides, "sampling.tree.seeds=null", "sampling.suffix={}"]
        ).tree_warning


def test_a_free_key_frees_itself_and_its_section_alone() -> None:
    changes = {key: [1, 2] for key in ("out", "output", "judge", "judge.dtype", "judged.model", "optimizer.lr")}
    assert list(frozen_changes(changes, free=("out", "judge"))) == ["output", "judged.model", "optimizer.lr"]
