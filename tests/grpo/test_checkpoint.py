"""Checkpoints that outlive anything, and what a resumed run may change."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config.base import ConfigError, Section, changes_to, check_changes, dump
from pacorl.config.reference import RUNS
from pacorl.config.reference import keys_of as all_keys
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.checkpoint import (
    FREE_KEYS,
    check_changes_since,
    identities_of,
    prune,
    settle,
    starting_point,
    write_checkpoint,
)
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import checkpoints
from pacorl.io.documents import as_read_back
from pacorl.judge.local import TINY_JUDGE
from pacorl.judge_training import judge_trainer
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.models.policies import POLICIES


def write(folder: Path, step: int) -> Path:
    """A small checkpoint whose every part says which it is."""
    target = folder / f"step-{step:06d}"
    tensors = {f"{name}/weight": torch.full((3,), float(step)) for name in ("adapter", "average")}
    write_checkpoint(target, tensors=tensors, state={"step": step})
    return target


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return state


STATE = {"epoch": 1, "seed": 42, "bad_steps": 0, "identities": {}}


def saved(config: PolicyConfig, step: int, score: float, **more: Any) -> None:
    """One save of a run, without the run."""
    target = config.out / "checkpoints" / f"step-{step:06d}"
    tensors = {f"{name}/weight": torch.full((3,), float(step)) for name in ("adapter", "average", "optimizer")}
    state = {**STATE, "step": step, "score": score, "config": config.model_dump(mode="json"), **more}

    def export(folder: Path) -> None:
        (folder / "lora").mkdir()
        (folder / "lora" / "adapter_config.json").write_text(str(step))

    write_checkpoint(target, tensors=tensors, state=state, export=export)
    settle(target, config)


def run_at(folder: Path, **settings: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {"out": folder / "run", "keep_checkpoints": 1, "model": {"checkpoint": "tiny"}, **settings}
    )


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("state.safetensors", "state.safetensors is damaged"),
        ("state.json", r"state.json:\d+: not valid JSON"),
        ("lora/adapter_config.json", "lora/adapter_config.json is damaged"),
        ("lora/adapter_config.json", "lora/adapter_config.json is missing"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_at(tmp_path, keep_checkpoints=3)
    for step in (1, 2, 3):
        saved(config, step, score=step / 10)
    newest = config.out / "checkpoints" / "step-000003"
    damaged = (newest / file).read_bytes()[:-3]
    (newest / file).unlink() if "missing" in fault else (newest / file).write_bytes(damaged)
    start = starting_point(config, resume=True)
    assert start == newest.with_name("step-000002")
    assert newest.exists()
    assert re.search(f"step-000003/{fault}.*; the checkpoint before it is taken", caplog.text)
    saved(config, 4, score=0.4)  # a damaged one beside it ends no run
    for path in checkpoints(config.out / "checkpoints"):
        (path / "state.json").write_text("")
    with pytest.raises(ValueError, match=r"no checkpoint in .*run/checkpoints is whole"):
        starting_point(config, resume=True)


def test_a_checkpoint_to_resume_from_is_chosen_by_the_folder_alone(tmp_path: Path) -> None:
    """A path would count as True, and go on from the newest."""
    config = run_at(tmp_path, keep_checkpoints=2)
    for step in (1, 2):
        saved(config, step, score=step / 10)
    for given in ("auto", config.out / "checkpoints" / "step-000001"):
        with pytest.raises(ValueError, match=r"resume=.*move the later ones out of .*checkpoints"):
            starting_point(config, resume=given)  # type: ignore[arg-type]
    (config.out / "checkpoints" / "step-000002").rename(tmp_path / "later")
    assert starting_point(config, resume=True) == config.out / "checkpoints" / "step-000001"


def test_another_config_is_refused_unless_it_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(run_at(tmp_path), 1, score=0.5)
    start = starting_point(run_at(tmp_path), resume=True)
    assert start
    longer = run_at(tmp_path, epochs=500)
    check_changes_since(start, longer, identities={})
    other = run_at(tmp_path, optimizer={"lr": 1.0}, group_size=8)
    with pytest.raises(
        ConfigError,
        match=r"keeps its settings, and group_size was 16 and is now 8; optimizer.lr was 0.0003 and is now 1.0: ",
    ):
        check_changes_since(start, other, identities={})


SERVER = {"checkpoint": "http://127.0.0.1:1/v1#m"}
LOCAL = {"checkpoint": "tiny"}
HELD_OUT = [{"name": "consistency"}]
"""Measures of an evaluation, which a judge of its own needs."""
CONFIGS: list[dict[str, Any]] = [
    {"judge": SERVER, "evaluation": {"judge": SERVER["checkpoint"], "rewards": HELD_OUT}},
    {"judge": LOCAL, "evaluation": {"judge": "other", "rewards": HELD_OUT}},
    *({"model": {"kind": kind}} for kind in POLICIES),
    *({"objective": {"name": name}} for name in OBJECTIVES),
]
"""Every section that a config may have, in at least one of them."""
ALWAYS_FREE = {
    *("out", "epochs", "save_every", "keep_checkpoints", "trackers", "evaluation.every", "monitor"),
    *("model.gradient_checkpointing", "reward_timeout", "evaluation.batch"),
}
"""Keys that a resumed run may change: no reward, no gradient and no learning rate follows from them."""
FREE_OF_A_JUDGE = {
    *("out", "log_every", "evaluate_every", "save_every", "merge", "trackers"),
    *("model.gradient_checkpointing", "data.evaluation", "data.evaluation_limit", "data.workers"),
    "optimizer.micro_batch",
}
"""A judge's learning rate always falls along a cosine, so its length is fixed."""


def test_a_run_that_begins_replaces_no_config_of_another_command(tmp_path: Path) -> None:
    """A judge's run in a generator's folder, the reverse, and a file of other software."""
    judge = JudgeConfig(out=tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    for content in ("objective: {name: grpo_clip}", "- a list"):
        config.write_text(content)
        with pytest.raises(ConfigError, match=f"{config} is not of this command"):
            judge_trainer.JudgeTrainer(judge, resume=True)
    config.write_text(dump(judge))
    assert judge_trainer.JudgeTrainer(judge, resume=True).checkpoint is None
    with pytest.raises(ConfigError, match=f"{config} is not of this command"):
        starting_point(run_at(tmp_path), resume=True)


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Every value of a dumped config: its section, its name there, and its dotted key."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield section, name, f"{prefix}{name}"


def refused(before: dict[str, Any], config: Section, free: Sequence[str]) -> bool:
    try:
        check_changes(changes_to(config, before), free=free)
    except ConfigError:
        return True
    return False


KEYS: dict[str, tuple[type[Section], list[dict[str, Any]], Sequence[str], set[str]]] = {
    "train-policy": (PolicyConfig, CONFIGS, FREE_KEYS, ALWAYS_FREE),
    "train-reward": (JudgeConfig, [{}], judge_trainer.FREE_KEYS, FREE_OF_A_JUDGE),
}


@pytest.mark.parametrize("command", KEYS)
def test_every_key_of_a_config_is_free_or_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECTIVES, "users", {})  # an objective of another test's file has options of its own
    kind, documents, free, expected = KEYS[command]
    walked: set[str] = set()
    for document in documents:
        config = kind.model_validate(document)
        before = as_read_back(config.model_dump(mode="json"))
        assert not refused(before, config, ())
        for section, name, key in leaves(before):
            if key in walked:
                continue
            walked.add(key)
            kept, section[name] = section[name], "another value"
            assert refused(before, config, free) == (key not in expected), key
            section[name] = kept
    assert walked >= keys_of(command)


def keys_of(command: str) -> set[str]:
    """Keys with a value of their own: neither sections, nor what stands in a list, which is compared as a whole."""
    keys = all_keys(RUNS[command])
    names = {key for key in keys if not key.startswith(("rewards.", "evaluation.rewards."))}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def judged_by(folder: Path, checkpoint: str) -> PolicyConfig:
    evaluation = {"judge": checkpoint, "rewards": HELD_OUT}
    return run_at(folder, judge={"checkpoint": checkpoint}, evaluation=evaluation)


def compare(start: Path, config: PolicyConfig) -> None:
    check_changes_since(start, config, identities=identities_of(config, {}, {}))


def test_another_judge_is_refused_and_the_same_one_elsewhere_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    first, moved, other = (Path(name) for name in ("first", "moved", "other"))
    shutil.copytree(TINY_JUDGE, first)
    config = judged_by(tmp_path, "first")
    saved(config, 1, score=0.5, identities=identities_of(config, {}, {}))
    start = starting_point(config, resume=True)
    assert start
    first.rename(moved)
    (moved / "README.md").write_text("It lay elsewhere.")
    compare(start, judged_by(tmp_path, "moved"))
    for key in ("judge.checkpoint", "evaluation.judge"):
        assert f"{key} was 'first' and is now 'moved'" in caplog.text

    shutil.copytree(moved, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, other / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"judge.checkpoint was 'first' and is now 'other'; .*judge was 'sha256 \w+' and is now"
    ):
        compare(start, judged_by(tmp_path, "other"))
    other.rename(first)
    with pytest.raises(ConfigError, match=r"judge was 'sha256 (\w+)' and is now 'sha256 (?!\1)\w+'"):
        compare(start, config)
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")
    with pytest.raises(ConfigError, match=r"evaluation.judge was 'sha256"):
        compare(start, judged_by(tmp_path, "moved"))


def test_an_edited_file_that_a_config_names_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    config = run_at(tmp_path, rewards=[{"name": f"{mine}:good"}])
    mine.write_text("def good(prompts, images):\n    return [1.0] * len(images)\n")
    saved(config, 1, score=0.5, identities=identities_of(config, {}, {}))
    start = starting_point(config, resume=True)
    assert start
    compare(start, config)
    mine.write_text("def good(prompts, images):\n    return [2.0] * len(images)\n")
    with pytest.raises(ConfigError, match=r"code of \S+mine.py:good was 'sha256 (\w+)' and is now 'sha256 (?!\1)\w+'"):
        compare(start, config)


def test_a_server_may_move_and_may_not_serve_another_model(tmp_path: Path) -> None:
    config = judged_by(tmp_path, "http://h:1#A")
    saved(config, 1, score=0.5, identities=identities_of(config, {}, {}))
    start = starting_point(config, resume=True)
    assert start
    compare(start, judged_by(tmp_path, "h:2#A"))
    with pytest.raises(ConfigError, match=r"judge was 'model A' and is now 'model B'"):
        compare(start, judged_by(tmp_path, "http://h:3#B"))
    # Weights that the server identifies decide, whatever their name.
    served: Any = {"rewards": Mock(identity="sha256 1")}
    assert identities_of(config, served, {}) == {"judge": "sha256 1", "evaluation.judge": "model A"}


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in range(1, 6)]
    prune(tmp_path, keep=2, newest=5, best=paths[1])
    assert checkpoints(tmp_path) == [paths[1], paths[3], paths[4]]
    # A run that went on from step 3, since steps 4 and 5 were damaged, gives up step 5 when it comes to step 4.
    prune(tmp_path, keep=2, newest=4, best=paths[1])
    assert checkpoints(tmp_path) == [paths[1], paths[3]]


@pytest.mark.parametrize(("kind", "exported"), [(PolicyConfig, "2"), (CharacterConfig, "1")])
def test_a_policy_exports_its_newest_adapter_and_a_character_its_best(
    tmp_path: Path, kind: type[PolicyConfig | CharacterConfig], exported: str
) -> None:
    config: Any = kind.model_validate({"out": tmp_path, "model": {"checkpoint": "tiny"}})
    for step, score in ((1, 0.9), (2, 0.1)):
        saved(config, step, score=score)
    assert (tmp_path / "adapter" / "adapter_config.json").read_text() == exported


def test_a_kill_before_any_change_of_the_disk_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run's first checkpoint, and of a second in its place."""

    def change(do: Callable[..., Any], left: Iterator[int], *args: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return do(*args, **options)

    for killed_at in count():
        config, left, done = run_at(tmp_path / str(killed_at)), iter(range(killed_at)), 0
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
                patched.setattr(os, name, partial(change, getattr(os, name), left))
            for score in (1, 2):
                saved(config, 1, score=score)
                done = score
        start = starting_point(config, resume=True)
        assert (state_of(start)["score"] if start else 0) in (done, min(done + 1, 2))
        assert [*(config.out / "checkpoints").glob("*")] == ([start] if start else []), "no part is left"
        if next(left, None) is not None:  # no change was left to be killed at
            break
    assert not caplog.records, "each was taken as whole"


def test_a_checkpoint_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".step-000001.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="partial"):
        write(tmp_path, 1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_steps_sort_by_number(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in (999_999, 1_000_000)]
    assert checkpoints(tmp_path) == paths


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    """The kernel refuses the write, as it does where a disk is full."""
    resource = pytest.importorskip("resource")
    kept = write(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    target = tmp_path / "step-000002"
    big = {"adapter/weight": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written .*earlier checkpoints are untouched") as caught:
            write_checkpoint(target, tensors=big, state={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert state_of(kept)["step"] == 1
