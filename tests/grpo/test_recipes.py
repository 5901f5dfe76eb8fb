"""The paper's recipes: what they say, that each can be planned, and that the tiny twin of each trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from research import hardware
from runs import write_edit_twins
from tiny_runs import metrics, train_policy

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES

FOLDER = Path(__file__).parents[2] / "configs"
PAPERS = ("flux_t2is", "kontext_edit", "qwen_edit")
RECIPES = (*PAPERS, "flux_t2is_1gpu", "flux_t2is_24gb", "klein_t2is_16gb")
JUDGE = "PaCo-Reward-7B"


def recipe(name: str, *overrides: str) -> PolicyConfig:
    return configs.load(PolicyConfig, FOLDER / f"{name}.yaml", overrides)


PAPER = {
    "flux_t2is": ("flux", 512, 10, 0.7, (1,), {"consistency", "panel_clip_text"}),
    "kontext_edit": ("kontext", 384, 8, 0.9, (1,), {"edit_consistency"}),
    "qwen_edit": ("qwen_edit", 384, 10, 1.0, (1, 2, 3, 4), {"edit_consistency"}),
}
"""Kind, training size, steps, a, stochastic steps and rewards (arXiv 2512.04784, §7; steps of edits from the code)."""
# Ours differ in the engine's settings, and in the generator.
PAPER |= dict.fromkeys(("flux_t2is_1gpu", "flux_t2is_24gb"), PAPER["flux_t2is"])
PAPER["klein_t2is_16gb"] = ("klein", *PAPER["flux_t2is"][1:])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_papers(name: str) -> None:
    run = recipe(name)
    kind, side, steps, noise, sde_steps, rewards = PAPER[name]
    assert (run.model.kind, run.model.checkpoint) == (kind, POLICIES[kind].published)
    assert (run.sampling.size, run.evaluation.size) == ((side, side), (1024, 1024))
    assert (run.sampling.steps, run.sampling.noise_level, run.sampling.sde_steps) == (steps, noise, sde_steps)
    assert {reward.name for reward in run.rewards} == rewards
    assert (run.optimizer.lr, run.objective.epsilon, run.objective.kl_weight, run.group_size) == (3e-4, 1e-4, 0, 16)
    assert (run.advantages.std, run.advantages.clip) == ("group", 5.0)
    assert run.out == Path("runs") / name
    if kind != "qwen_edit":
        assert run.model.guidance_scale == {"flux": 3.5, "kontext": 2.5, "klein": 4.0}[kind]
    # The adapter of an evaluation ago weighs at most 0.1 in what is evaluated now.
    assert run.optimizer.ema_decay ** (run.evaluation.every * run.optimizer.updates_per_epoch) <= 0.1
    # It divides among its processes.
    assert run.processes == (7 if name in PAPERS else 1)
    samples = run.prompts_per_epoch * run.group_size
    assert samples % (run.sampling.batch * run.optimizer.updates_per_epoch * run.processes) == 0
    assert run.judge.remote == (run.processes > 1)
    assert not run.judge.remote or run.judge.name == JUDGE


PLANNED = ("flux_t2is_1gpu",)
"""By `make test`; `make nightly` plans all."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in PLANNED else pytest.mark.nightly)
        for path in sorted(FOLDER.glob("*.yaml"))
    ],
)
def test_every_config_can_be_planned(path: Path) -> None:
    """As `--dry-run` does, wherever the weights are."""
    run = configs.load(PolicyConfig, path)
    found = hardware.planned(run)
    assert found.peak_bytes > 0
    page = (FOLDER.parent / "docs" / "running.md").read_text("utf-8")
    for row in (name for name in hardware.RECIPES if name.split()[0] == path.stem):
        assert hardware.row(row, hardware.planned(hardware.run_of(row))) in page, "python -m research.hardware"
    assert found.peak_bytes + 2 * 2**30 < 80e9, "a card of 80 GB"


# --- tiny twins ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints of the generators that the recipes name, and edits."""
    folder = tmp_path_factory.mktemp("parts")
    write_edit_twins(folder)
    return folder


@pytest.fixture
def served() -> Iterator[str]:
    with FakeServer(served=(JUDGE,)).running() as server:
        yield server.url


def twin(name: str, parts: Path, out: Path, url: str) -> PolicyConfig:
    """The recipe with everything small: one epoch of two groups of two at 64 pixels."""
    kind, edits = PAPER[name][0], "edit" in name
    small: dict[str, Any] = {
        "out": out,
        "epochs": 1,
        "prompts_per_epoch": 2,
        "group_size": 2,
        "trackers": "[]",
        "model.checkpoint": "tiny" if kind == "flux" else parts / kind,
        "model.dtype": "float32",
        "model.compile": "none",  # minutes on a CPU; tests/runtime and tests/gpu have compiled blocks
        "adapter.rank": 2,
        "adapter.alpha": 4,
        "prompts.train": parts / "train.jsonl" if edits else "tiny:train:2",
        "prompts.evaluation": parts / "dev.jsonl" if edits else "tiny:dev:2",
        "sampling.size": "[64,64]",
        "sampling.batch": 1,
        "evaluation.size": "[96,96]",
        "evaluation.steps": 2,
    }
    if kind != "qwen_edit":
        small["model.max_sequence_length"] = 144 if kind == "klein" else 48
    if not edits:
        small["rewards"] = "[{name: consistency, weight: 0.2}, {name: panel_match, weight: 0.8}]"
    if recipe(name).processes == 1:
        small["judge.checkpoint"] = "tiny"
    else:
        small["judge.checkpoint"] = url
    return recipe(name, *(f"{key}={value}" for key, value in small.items()))


TRAINED = ("flux_t2is_1gpu", "kontext_edit", "qwen_edit", "klein_t2is_16gb")
"""A recipe of each generator and of each judge; `make nightly` trains the others' twins."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TRAINED else pytest.mark.nightly) for name in RECIPES]
)
def test_the_tiny_twin_of_a_recipe_trains_an_epoch(name: str, parts: Path, tmp_path: Path, served: str) -> None:
    run = twin(name, parts, tmp_path / "run", served)
    train_policy(run)
    before, epoch, after = metrics(run.out)
    assert (before["kind"], epoch["kind"], after["kind"]) == ("evaluation", "epoch", "evaluation")
    assert epoch["ratio_deviation"] == 0.0
    assert epoch["samples/missing"] == 0.0
    assert epoch["grad_norm"] > 0
    assert epoch["step"] == 2
    assert (run.out / "report.html").exists()
    assert (run.out / "adapter" / "adapter_model.safetensors").exists()
