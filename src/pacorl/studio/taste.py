"""You are the reward: runs of `train-policy` whose reward is a person's ranking, mixed with the judge's scores.

    FOLDER/NAME/prompts.jsonl, config.yaml    what the run is made of
    FOLDER/NAME/rankings/                     groups and their ranks (`rewards.human`)
    FOLDER/NAME/run/                          the trainer's own folder; the LoRA is run/adapter
    FOLDER/NAME/log.txt                       what it printed

The trainer is a process of its own, so that it can be stopped at any time and goes on from its last round. One runs at
a time.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacorl.config import base as configs
from pacorl.config.options import StudioModels
from pacorl.config.reward_section import RewardConfig
from pacorl.generate.compose import prompt_from
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.policy_config import recipe as tiny_recipe
from pacorl.io.children import start_python
from pacorl.io.documents import read_json, read_jsonl, write_json
from pacorl.io.files import PRIVATE, open_regular, read_bytes, safe_name, write_atomic
from pacorl.judge import JUDGES, backend_of
from pacorl.models.policies import POLICIES, kind_of
from pacorl.records.prompts import save_prompts
from pacorl.rewards import human
from pacorl.runtime.processes import Interrupted
from pacorl.types import TINY, Prompt
from pacorl.web.guard import RefusedError

PATIENCE = 10.0
"""Seconds in which a trainer that is told to stop saves; it loses nothing if it is killed then."""
SHOWN = 4
"""Prompts of the pictures before and after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TasteRequest:
    """A run that a person starts."""

    name: str
    prompts: tuple[str, ...]
    """Each a theme and its panels with bars between, or a plain text."""
    rounds: int = 20
    groups: int = 2
    """That are ranked in a round."""
    group_size: int = 8
    judge_share: float = 0.5
    """Of the reward: 0 is the person's alone."""


def parse_prompts(model: str, lines: Sequence[str]) -> list[Prompt]:
    """The prompts of lines `theme | panel | panel …`.

    Raises:
        ValueError: naming the line, and what the model cannot make.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        theme, *panels = (part.strip() for part in line.split("|"))
        try:
            prompts.append(prompt_from(model, theme=theme, panels=panels, number=len(prompts)))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
    if not prompts:
        raise ValueError("there are no prompts; write one a line, as: what all share | first panel | second panel …")
    return prompts


def run_config(request: TasteRequest, names: StudioModels, folder: Path, recipe: Path | None) -> PolicyConfig:
    """The trainer's config: a recipe with the person among its rewards.

    Args:
        request: what was asked for.
        names: the studio's models.
        folder: of the run.
        recipe: a config of `train-policy` to begin with; without one the studio's models, and the paper's values.

    Raises:
        ValueError: if it cannot be run.
    """
    own = [] if recipe else _models(names)
    recipe = recipe or (tiny_recipe() if names.model == TINY else None)
    base = configs.load(PolicyConfig, recipe, own)
    human_share = 1 - request.judge_share
    judged, total = base.rewards, sum(reward.weight for reward in base.rewards)
    # First: the others are computed once the person has ranked, and would delay the round's last group.
    rewards = [RewardConfig(name="human_ranking", weight=human_share, args={"folder": str(folder / "rankings")})]
    if request.judge_share:
        rewards += [r.model_copy(update={"weight": request.judge_share * r.weight / total}) for r in judged]
    prompts = str(folder / "prompts.jsonl")
    settings = {
        "out": str(folder / "run"),
        "epochs": request.rounds,
        "prompts_per_epoch": request.groups,
        "group_size": request.group_size,
        # A run that is stopped saves itself; one that is killed samples again what came after its checkpoint, and
        # nobody is asked for it.
        "save_every": 5,
        "keep_checkpoints": 1,
        "best_by": "",
        "trackers": [],
        # Images of a group that share their initial noise differ in what the trained step did, so that a ranking is
        # about nothing else.
        "sampling.tree": {"seeds": 1},
        "sampling.batch": math.gcd(request.group_size, base.sampling.batch),
        "sampling.suffix.check_every": 0,  # its second finish of a group would be ranked too
        "selection": {},
        "prompts": {"train": prompts, "evaluation": prompts, "evaluation_limit": SHOWN, "leaks": "off"},
        "evaluation.every": 0,
        "evaluation.compare_sizes": False,
        "evaluation.compare_trained": False,
        "evaluation.rewards": [],
        "evaluation.judge": None,
        "optimizer.updates_per_epoch": 1,
        # At the full rate twenty rounds on the tiny world cost a third of what prompts ask for (0.84 to 0.55).
        "optimizer.lr": base.optimizer.lr / 2,
        # Ranks and P(Yes) are on different scales; gdpo normalises each reward in its group before it weighs them.
        "advantages": {"aggregate": "gdpo", "floor": {"form": "add"}},
        "rewards": [reward.model_dump(mode="json") for reward in rewards],
    }
    if not request.judge_share:
        settings["judge"] = "none"
    return configs.load(
        PolicyConfig, recipe, [*own, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    )


def _models(names: StudioModels) -> list[str]:
    """The studio's generator and judge as a config names them."""
    backend = backend_of(names.judge)
    judge: dict[str, Any] = {"backend": backend, "checkpoint": names.judge}
    if JUDGES[backend].in_process:
        judge |= {"adapter": names.judge_adapter, "dtype": "float32" if names.judge == TINY else "bfloat16"}
    else:
        judge |= {"model": names.judge_model, "api_key_env": names.api_key_env}
    model: dict[str, Any] = {"kind": names.kind or kind_of(names.model), "checkpoint": names.model}
    if names.model == TINY:
        own = POLICIES[model["kind"]].committed.options
        model |= {"dtype": "float32", "gradient_checkpointing": False, **own}
    return [f"memory={names.memory}", f"model={json.dumps(model)}", f"judge={json.dumps(judge)}"]


class TasteRuns:
    """The runs of a folder; at most one has a process."""

    def __init__(self, folder: Path, names: StudioModels, *, recipe: Path | None = None) -> None:
        self.folder, self.names, self.recipe = folder, names, recipe
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._name = self._announced = ""
        self.newest = ""
        """The run that was started or continued last."""

    def announce(self, name: str) -> None:
        """Say that a run is about to be launched; what an earlier process asked is forgotten."""
        human.prepare(self._folder(name) / "rankings")
        self.newest = self._announced = name

    def create(self, request: TasteRequest) -> str:
        """Check a request and write its files; `launch` starts it.

        Raises:
            ValueError: if it cannot be run, or the name is taken.
        """
        folder = self.folder / safe_name(request.name)
        if folder.exists():
            raise ValueError(f"there is a LoRA called {request.name} already; continue it, or give another name")
        kind = self.names.kind or kind_of(self.names.model)
        if not POLICIES.named(kind).sets:
            raise ValueError(f"{self.names.model} ({kind}) changes pictures; a taste is taught to a generator of sets")
        prompts = parse_prompts(self.names.model, request.prompts)
        config = run_config(request, self.names, folder, self.recipe)
        config.check_prompts(prompts)
        save_prompts(prompts, folder / "prompts.jsonl")
        described = {"rounds": request.rounds, "groups": request.groups}
        write_json(folder / "request.json", described, mode=PRIVATE)
        write_atomic(folder / "config.yaml", configs.dump(config), mode=PRIVATE)
        return request.name

    def launch(self, name: str) -> None:
        """Start a run's trainer, or let it go on from its last round."""
        folder = self._folder(name)
        command = ["-m", "pacorl", "train-policy", str(folder / "config.yaml"), "--resume", "auto"]
        command.append("--stop-with-stdin")  # a studio that is killed cannot end it
        flags = os.O_WRONLY | os.O_TRUNC
        with self._lock, open(open_regular(folder / "log.txt", flags), "wb") as log:
            if self._announced == name:  # else it was stopped while it waited for the studio's jobs
                self._let_go()
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
                self._name, self._process = name, start_python(*command, **pipes)
                self._announced = ""  # last: between the two it would seem to be stopped

    def check_idle(self) -> None:
        """Raises RefusedError while a trainer runs, or is about to."""
        if self.is_running or self._announced:
            name = self._announced or self._name
            raise RefusedError(f"{name} is being taught and has the machine; stop it, it can go on later", status=409)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _failed(self, name: str) -> bool:
        # A negative code is a signal's, and ours.
        code = self._process.poll() if self._process and self._name == name else None
        return code is not None and code > 0 and code != Interrupted.exit_code

    def stop(self) -> None:
        """End the trainer; its run can go on later."""
        with self._lock:
            self._announced = ""
            if self._process and self.is_running:
                self._process.terminate()
                try:
                    self._process.wait(PATIENCE)
                except subprocess.TimeoutExpired:  # it still loads, or learns
                    self._process.kill()
                    self._process.wait()
            self._let_go()

    def _let_go(self) -> None:
        """Close the pipe of a trainer that has ended."""
        if self._process and self._process.stdin:
            self._process.stdin.close()

    def names_of_runs(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("*/request.json"))

    def rank(self, name: str, group: str, ranks: Sequence[int]) -> None:
        """Keep a ranking; raises ValueError for one that does not fit what is asked."""
        human.write_ranks(self._folder(name) / "rankings", group, ranks)

    def state(self, name: str, *, group: str = "") -> dict[str, Any]:
        """Where a run stands, and the group that is to be ranked: the next one, or `group` of the same round."""
        folder = self._folder(name)
        request, rankings = read_json(folder / "request.json"), folder / "rankings"
        alive = self.is_running and self._name == name
        asked = human.asked_groups(rankings) if alive else []
        waiting = [one for one in asked if not human.read_ranks(rankings, one)]
        shown = group if group in asked and waiting else next(iter(waiting), "")
        done = rounds_done(folder / "run" / "metrics.jsonl")
        return {
            "name": name,
            **request,
            "done": done,
            "status": self._status(
                name,
                asked=len(asked),
                waiting=len(waiting),
                groups=request["groups"],
                finished=done >= request["rounds"],
            ),
            "ranked": len(list(rankings.glob("*/ranks.json"))),
            "asked": asked,
            "task": _task(name, rankings, shown) if shown else None,
            "adapter": str(folder / "run" / "adapter") if (folder / "run" / "adapter").exists() else "",
            "pictures": len(list((folder / "run" / "samples" / "evaluation-000000").glob("*.png"))),
            "error": _last_line(folder / "log.txt") if self._failed(name) else "",
        }

    def _status(self, name: str, *, asked: int, waiting: int, groups: int, finished: bool) -> str:
        if self._announced == name:
            return "starting"
        if not (self.is_running and self._name == name):
            return "failed" if self._failed(name) else "done" if finished else "stopped"
        if waiting or not asked:
            return "ranking" if waiting else "starting"
        return "sampling" if asked < groups else "learning"

    def image(self, name: str, group: str, number: int) -> bytes | None:
        path = self._folder(name) / "rankings" / safe_name(group) / f"{number}.png"
        return path.read_bytes() if path.is_file() else None

    def picture(self, name: str, when: str, number: int) -> bytes | None:
        """The base's image of a prompt, or what the newest evaluation made of it."""
        folders = sorted((self._folder(name) / "run" / "samples").glob("evaluation-*/"))
        path = folders[0 if when == "before" else -1] / f"{number:04d}.png" if folders else None
        return path.read_bytes() if path and path.is_file() else None

    def _folder(self, name: str) -> Path:
        folder = self.folder / safe_name(name)
        if not (folder / "request.json").is_file():
            raise RefusedError(f"there is no LoRA called {name[:40]!r}", status=404)
        return folder


def rounds_done(log: Path) -> int:
    """Epochs in a run's log."""
    lines = read_jsonl(log) if log.exists() else []
    return max((line["epoch"] for line in lines if line["kind"] == "epoch"), default=0)


def _task(name: str, rankings: Path, group: str) -> dict[str, Any]:
    shown = human.read_group(rankings, group)
    images = [f"/taste/{name}/{group}/{number}.png" for number in range(shown["images"])]
    return {**shown, "group": group, "images": images, "ranks": human.read_ranks(rankings, group)}


def _last_line(log: Path) -> str:
    lines = read_bytes(log).decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("pacorl: ") if lines else "the trainer ended without a word"
