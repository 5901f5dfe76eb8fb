"""A config of one's own: what `pacorl init` derives holds together for every model, card and purpose, and trains."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from edit_twins import drawn, settings_of, source_image
from tests.twins import TWINS
from tests.twins.parts import vocabulary
from tiny_hero import make_hero
from tiny_runs import JPEG_SIZE, train_policy
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.grpo.builders import read_prompts, without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import divide
from pacorl.models.policies import POLICIES
from pacorl.plan import init as inits
from pacorl.plan.peaks import Memory
from pacorl.plan.plan import Plan
from pacorl.plan.sources import MissingFile
from pacorl.rewards import check_rewards
from pacorl.tiny import CHECKPOINTS

SCENES = ("asleep", "in snow", "in a boat", "reading")
JOBS = ("consistency", "own", "edit", "references")
CARDS = ("12", "16", "24", "80", "8x80")
EDITORS = [kind for kind, spec in POLICIES.items() if spec.edits]
SETS = [kind for kind, spec in POLICIES.items() if spec.sets]
WITH_REFERENCES = [kind for kind, spec in POLICIES.items() if spec.policy.max_references]
KINDS = {"consistency": SETS, "own": list(POLICIES), "edit": EDITORS, "references": WITH_REFERENCES}
MATRIX = [(job, kind) for job in JOBS for kind in KINDS[job]]
FIRST = {"consistency flux 24", "own sd3 12", "edit qwen_edit 8x80", "references klein 80"}
"""Of the matrix what runs every day."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with sentences, edits and a hero."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        source_image(tmp_path / f"{number}.png", height=96, width=128, seed=number)
    texts = [f"Four pictures of hero {number}: {', '.join(SCENES)}" for number in range(10)]
    (tmp_path / "sets.txt").write_text("\n".join(texts))
    edits = [{"image": f"{number}.png", "instruction": f"Give {number} a crown."} for number in range(3)]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))
    make_hero(tmp_path / "hero", pictures=3)
    return tmp_path


def start(job: str, kind: str, card: str = "24", *more: str, path: str = "my.yaml") -> Result:
    edits = job == "edit" or (not POLICIES[kind].sets and job == "own")
    words = ["init", path, "--model", kind, "--card", card, "--prompts", "edits.jsonl" if edits else "sets.txt"]
    words += more
    words += ["--reward", JPEG_SIZE] if job == "own" else []
    words += ["--references", "hero"] if job == "references" else []
    return CliRunner().invoke(app, words)


@pytest.fixture
def by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a plan's minute: the weights of the published transformer in their form."""

    def plan(config: PolicyConfig, *, card: int) -> Plan:
        size = config.generator.parameters * {"normal": 2, "low": 1, "lowest": 0}[config.memory]
        absent = [MissingFile("judge.checkpoint", config.judge.checkpoint, "")] if config.judge else []
        return Plan(memory=Memory({"train": size + 4 * 2**30}), absences=absent)

    monkeypatch.setattr(inits, "plan_training", plan)


@pytest.mark.usefixtures("by_weights")
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("job", "kind"), MATRIX)
def test_what_is_written_holds_together(job: str, kind: str, card: str) -> None:
    done = start(job, kind, card)
    assert done.exit_code == 0, done.output
    text = Path("my.yaml").read_text()
    assert len(text.splitlines()) <= 26
    assert max(map(len, text.splitlines())) <= 150
    assert ("beside the paper's" in done.output) == (kind in ("flux", "kontext", "qwen_edit"))

    # A run of it would start: its prompts are read, its rewards suit them, and its samples divide.
    config = load(PolicyConfig, Path("my.yaml"))
    train, held_out, leaks = read_prompts(config)
    assert (bool(train), bool(held_out), leaks) == (True, True, "")
    assert len(held_out) * config.evaluation.samples_per_prompt >= 16
    assert divide(config, world=config.processes).differences(config) == ""
    check_rewards(config.rewards)
    judge = without_idle_judges(config).judge
    assert (judge is None) == (job == "own")
    assert config.processes + bool(judge and judge.remote) == (8 if card == "8x80" else 1)
    assert all(prompt.references for prompt in train) == (job == "references")


@pytest.mark.usefixtures("by_weights")
def test_a_judge_that_the_next_command_starts_is_not_absent() -> None:
    assert "absent or broken: nothing" in start("consistency", "flux", "8x80").stdout
    assert "absent or broken: judge.checkpoint" in start("consistency", "flux", "80", path="one.yaml").stdout


@pytest.mark.usefixtures("by_weights")
def test_a_judge_s_reward_is_added_by_its_line_alone() -> None:
    """On a small card, whose file has a section of the evaluation, and on a large one."""
    for card in ("12", "80"):
        assert start("own", "flux", card).exit_code == 0
        text = Path("my.yaml").read_text().replace("\nrewards:", "\nrewards:\n  - {name: consistency, weight: 0.2}\n #")
        Path("my.yaml").write_text(text.replace("\nevaluation:", "\nevaluation:\n  rewards: [{name: panel_match}]"))
        config = without_idle_judges(load(PolicyConfig, Path("my.yaml")))
        assert config.judge
        assert [reward.key for reward in config.evaluation.rewards] == ["panel_match"]
        Path("my.yaml").unlink()
        rmtree("my-prompts")


@pytest.mark.usefixtures("by_weights")
def test_the_screen_shows_how_each_sentence_was_read() -> None:
    """A sentence without its number of pictures is one image, which a reward of one's own takes too."""
    Path("sets.txt").write_text("\n".join(["Three pictures of a fox: asleep, in snow, in a boat", "A bear", "A cat"]))
    shown = start("own", "klein").stdout
    read_as = [line.strip() for line in shown.partition("read as: ")[2].splitlines()[:6]]
    assert read_as[:2] == ["1 as sets of 3 panels", "sets.txt:1 'a fox | asleep | in snow | in a boat'"]
    assert read_as[2:5] == ["2 as one image", "sets.txt:2 'A bear'", "sets.txt:3 'A cat'"]
    assert read_as[5].startswith("if a set is meant (sets.txt:2, sets.txt:3), begin")


@pytest.mark.usefixtures("by_weights")
@pytest.mark.parametrize("reward", ["", "panel_match", JPEG_SIZE])
def test_the_tiny_world_s_words_train_by_its_recipe_or_the_reward_that_is_named(reward: str) -> None:
    scenes = "waving by a tree, jumping by a boat, standing by a lamp, waving by a flag"
    Path("sets.txt").write_text(
        "".join(f"Four pictures of a {shape} hero in town: {scenes}\n" for shape in ("round", "tall"))
    )
    Path("it's").mkdir()  # a quote in the path
    named = ["--reward", reward] if reward else []
    shown = start("consistency", "flux", "8x24", "--model", "tiny", *named, path="it's/my.yaml").stdout
    assert "train: pacorl train-policy it's/my.yaml" in shown  # it is for a CPU
    config = without_idle_judges(load(PolicyConfig, Path("it's/my.yaml")))
    assert [len(prompts) for prompts in read_prompts(config)[:2]] == [1, 1]
    assert config.evaluation.samples_per_prompt == 16
    assert [each.name for each in config.rewards] == ([reward] if reward else ["consistency", "panel_match"])
    assert (config.judge is None) == (reward == JPEG_SIZE)


@pytest.mark.usefixtures("by_weights")
def test_what_does_not_fit_together_is_refused_and_nothing_is_written() -> None:
    for words, named in (
        (("references", "flux"), "flux takes no reference images"),
        (("edit", "flux"), "flux generates sets and edits no images"),
        (("consistency", "flux", "24", "--model", "klien"), "did you mean 'klein'"),
        (("consistency", "flux", "4"), "--card 4"),
        (("consistency", "flux", "24GB"), "--card 24GB"),
        (("consistency", "flux", "0x80"), "--card 0x80"),
        (("consistency", "flux", "24", "--prompts", "one.txt"), "without --reward FILE:NAME: one.txt:1"),
        (("consistency", "kontext", "24", "--prompts", "edits.jsonl", "--reward", "consistency"), "edits take"),
    ):
        Path("one.txt").write_text("a fox in the snow\na bear\n")
        refused = start(*words)
        assert refused.exit_code == 1
        assert named in str(refused.exception)
        assert not list(Path().glob("my*"))
    assert start("consistency", "flux").exit_code == 0
    again = start("consistency", "klein")
    assert "my.yaml" in str(again.exception)


@pytest.mark.usefixtures("by_weights")
@pytest.mark.parametrize(
    ("job", "kind", "card"),
    [
        pytest.param(*one, card, marks=pytest.mark.slow if " ".join((*one, card)) in FIRST else pytest.mark.nightly)
        for one in MATRIX
        for card in CARDS
    ],
)
def test_what_is_written_trains_at_the_first_attempt(job: str, kind: str, card: str) -> None:
    """With random weights, in small."""
    assert start(job, kind, card).exit_code == 0
    drawn(TWINS[kind](vocabulary())).save_pretrained("checkpoint")
    model = {"checkpoint": "checkpoint", "dtype": "float32", "compile": "none", **settings_of(POLICIES[kind])}
    small: dict[str, Any] = {f"model.{name}": value for name, value in model.items()}
    small |= {"epochs": 1, "prompts_per_epoch": 2, "group_size": 4, "evaluation.steps": 2, "adapter.rank": 4}
    small |= {f"{name}.size": [64, 64] for name in ("sampling", "evaluation")}
    small |= {"prompts.evaluation_limit": 1, "trackers": []}
    if job != "own":
        small |= {"judge.checkpoint": "tiny-edits" if job == "edit" else "tiny"}
        rewards = [reward.model_dump() for reward in load(PolicyConfig, Path("my.yaml")).rewards]
        for reward in rewards:
            if reward["name"] == "panel_clip_text":
                reward["args"]["checkpoint"] = str(CHECKPOINTS / "clip")
        small["rewards"] = json.dumps(rewards)
    config = load(PolicyConfig, Path("my.yaml"), [f"{name}={value}" for name, value in small.items()])
    assert (train_policy(config) / "adapter").is_dir()


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "card"), [(kind, card) for kind in SETS for card in ("12", "24", "80")])
def test_the_plan_of_a_published_model_fits_the_card_or_is_refused(kind: str, card: str) -> None:
    done = start("consistency", kind, card)
    assert done.exit_code == 0 or "take a smaller --model" in str(done.exception)
    if not done.exit_code:
        assert f"a card of {card} GB" in done.stdout
        assert "train: pacorl train-policy my.yaml" in done.stdout
