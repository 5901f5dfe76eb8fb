"""You are the reward: runs of `train-policy` whose reward is a person's ranking, mixed with the judge's scores.

    FOLDER/NAME/prompts.jsonl, config.yaml    inputs of the run
    FOLDER/NAME/rankings/                     groups and their ranks (`rewards.human`)
    FOLDER/NAME/run/                          the trainer's own folder; the LoRA is run/adapter
    FOLDER/NAME/log.txt                       the trainer's output

The trainer is a separate process, so that it can be stopped at any time and resumed from its last round. One runs at a
time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pacorl.config import base as configs
from pacorl.config.options import AUTO, StudioModels
from pacorl.config.recipes import recipe as tiny_recipe
from pacorl.config.reward_section import RewardConfig
from pacorl.generate.compose import prompt_from
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import blamed_on, read_json, read_jsonl, typed, write_json
from pacorl.io.files import PRIVATE, safe_name, write_atomic
from pacorl.judge import JUDGES, backend_of
from pacorl.models.policies import POLICIES, kind_of
from pacorl.records.prompts import save_prompts
from pacorl.rewards import human
from pacorl.studio.model_choice import with_memory
from pacorl.studio.trainer_process import TrainerProcess
from pacorl.types import TINY, Prompt
from pacorl.web.guard import RefusedError

SHOWN = 4
"""Prompts of the pictures before and after."""


class Plan(BaseModel):
    """request.json of a run."""

    rounds: int
    groups: int


class LogLine(BaseModel):
    """A line of a run's log."""

    kind: str
    epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TasteRequest:
    """Settings of a person's run."""

    name: str
    prompts: tuple[str, ...]
    """Themes with their panels, separated by bars, or plain texts."""
    rounds: int = 20
    groups: int = 2
    """Groups to rank in a round."""
    group_size: int = 8
    judge_share: float = 0.5
    """Judge's share of the reward; at 0 the person's ranking is the only reward."""


def parse_prompts(model: str, lines: Sequence[str]) -> list[Prompt]:
    """Parse prompts of lines `theme | panel | panel …`; blank lines are left out.

    Raises:
        ValueError: the model cannot generate a prompt; the message names its number.
    """
    prompts: list[Prompt] = []
    for line in lines:
        if line.strip():
            theme, *panels = [text.strip() for text in line.split("|")]
            try:
                prompts.append(prompt_from(model, theme=theme, panels=panels, number=len(prompts)))
            except ValueError as error:
                raise ValueError(f"prompt {len(prompts) + 1}: {error}") from None
    if not prompts:
        raise ValueError("there are no prompts; write one a line, as: what all share | first panel | second panel …")
    return prompts


def run_config(request: TasteRequest, names: StudioModels, folder: Path, recipe: Path | None) -> PolicyConfig:
    """Build the trainer's config: a recipe with the person among its rewards.

    Args:
        recipe: a config of `train-policy` to begin with; without it the studio's models, and the paper's values.

    Raises:
        ValueError: the settings are invalid.
    """
    # The recipe.
    overrides = [] if recipe else _models(names)
    if recipe is None and names.model == TINY:
        recipe = tiny_recipe()
    base = configs.load(PolicyConfig, recipe, overrides)

    # The person's ranking is the first reward: computing the others takes time, after the person has ranked.
    human_share = 1 - request.judge_share
    rewards = [RewardConfig(name="human_ranking", weight=human_share, args={"folder": str(folder / "rankings")})]
    if request.judge_share:
        total = sum(reward.weight for reward in base.rewards)
        for reward in base.rewards:
            rewards.append(reward.model_copy(update={"weight": request.judge_share * reward.weight / total}))

    prompts = str(folder / "prompts.jsonl")
    settings = {
        "out": str(folder / "run"),
        "epochs": request.rounds,
        "prompts_per_epoch": request.groups,
        "group_size": request.group_size,
        # A stopped run saves itself. A killed run repeats the epochs after its checkpoint, without asking the person.
        "save_every": 5,
        "keep_checkpoints": 1,
        "best_by": "",
        "trackers": [],
        # Images with one initial noise differ by the trained step alone, and so a ranking is about this step.
        "sampling.tree": {"seeds": 1},
        "sampling.batch": math.gcd(request.group_size, base.sampling.batch),
        "selection": {},
        "prompts": {"train": prompts, "evaluation": prompts, "evaluation_limit": SHOWN, "leaks": "off"},
        "evaluation.every": 0,
        "evaluation.rewards": [],
        "evaluation.judge": None,
        "optimizer.updates_per_epoch": 1,
        # At the full rate, twenty rounds on the tiny world reduced prompt adherence by a third (0.84 to 0.55).
        "optimizer.lr": base.optimizer.lr / 2,
        # Ranks and P(Yes) are on different scales; gdpo normalises each reward in its group before it weighs them.
        "advantages": {"aggregate": "gdpo", "floor": {"form": "add"}},
        "rewards": [reward.model_dump(mode="json") for reward in rewards],
    }
    if not request.judge_share:
        settings["judge"] = "none"
    overrides += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return configs.load(PolicyConfig, recipe, overrides)


def _models(names: StudioModels) -> list[str]:
    """Format the studio's generator and judge as settings of a config."""
    backend = backend_of(names.judge)
    judge: dict[str, Any] = {"backend": backend, "checkpoint": names.judge}
    if JUDGES[backend].in_process:
        judge |= {"adapter": names.judge_adapter, "dtype": "float32" if names.judge == TINY else "bfloat16"}
    else:
        judge |= {"model": names.judge_model, "api_key_env": names.api_key_env}
    model: dict[str, Any] = {"kind": names.kind or kind_of(names.model), "checkpoint": names.model}
    if names.model == TINY:
        model |= {"dtype": "float32", "gradient_checkpointing": False, **POLICIES[model["kind"]].committed.options}
    memory = "normal" if names.memory == AUTO else names.memory
    return [f"memory={memory}", f"model={json.dumps(model)}", f"judge={json.dumps(judge)}"]


class TasteRuns:
    """The runs of a folder; at most one has a process."""

    def __init__(
        self, folder: Path, names: StudioModels, *, recipe: Path | None = None, trainer: TrainerProcess | None = None
    ) -> None:
        self.folder = folder
        self.names = names
        self.recipe = recipe
        self.trainer = trainer or TrainerProcess()
        self.newest = ""
        """The run started or continued last."""

    def announce(self, name: str) -> None:
        """Announce the launch of a run, and forget an earlier process' open groups."""
        folder = self._folder(name)
        human.prepare(folder / "rankings")
        self.trainer.announce(folder)
        self.newest = name

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
        names = self.names if self.recipe else with_memory(self.names, self.names.model, kind)
        config = run_config(request, names, folder, self.recipe)
        config.check_prompts(prompts)
        # Files only after all checks: a refused request leaves no folder, and its name stays free.
        save_prompts(prompts, folder / "prompts.jsonl", mode=PRIVATE)
        described = {"rounds": request.rounds, "groups": request.groups}
        write_json(folder / "request.json", described, mode=PRIVATE)
        write_atomic(folder / "config.yaml", configs.dump(config), mode=PRIVATE)
        return request.name

    def launch(self, name: str) -> None:
        """Start a run's trainer, or let it go on from its last round."""
        folder = self._folder(name)
        self.trainer.launch(folder, "train-policy", str(folder / "config.yaml"))

    def names_of_runs(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("*/request.json"))

    def rank(self, name: str, group: str, ranks: Sequence[int]) -> None:
        """Keep a ranking; raises ValueError if it does not fit the group."""
        human.write_ranks(self._folder(name) / "rankings", group, ranks)

    def state(self, name: str, *, group: str = "") -> dict[str, Any]:
        """Describe a run's progress, and the group to rank: the next group, or `group` of the same round."""
        # The request, and the folder of the people's rankings.
        folder = self._folder(name)
        request = read_json(folder / "request.json")
        with blamed_on(folder / "request.json"):
            plan = typed(request, Plan)
        rankings = folder / "rankings"

        # The groups of this round.
        groups = human.asked_groups(rankings) if self.trainer.runs(folder) else []
        waiting = []
        for label in groups:
            if not human.read_ranks(rankings, label):
                waiting.append(label)

        # Progress in rounds of the log.
        shown = ""
        if waiting:
            shown = group if group in groups else waiting[0]

        done = rounds_done(folder / "run" / "metrics.jsonl")
        finished = done >= plan.rounds
        return {
            "name": name,
            **plan.model_dump(),
            "done": done,
            "status": self._status(folder, len(groups), len(waiting), groups=plan.groups, finished=finished),
            "ranked": len(list(rankings.glob("*/ranks.json"))),
            "asked": groups,
            "task": _task(name, rankings, shown) if shown else None,
            "adapter": str(folder / "run" / "adapter") if (folder / "run" / "adapter").exists() else "",
            "pictures": len(list((folder / "run" / "samples" / "evaluation-000000").glob("*.png"))),
            "error": self.trainer.fault(folder),
        }

    def _status(self, folder: Path, sampled: int, waiting: int, *, groups: int, finished: bool) -> str:
        if self.trainer.waits(folder):
            return "starting"
        if not self.trainer.runs(folder):
            if self.trainer.fault(folder):
                return "failed"
            return "done" if finished else "stopped"
        if waiting:
            return "ranking"
        if not sampled:
            return "starting"
        return "sampling" if sampled < groups else "learning"

    def image(self, name: str, group: str, number: int) -> bytes | None:
        path = self._folder(name) / "rankings" / safe_name(group) / f"{number}.png"
        if path.is_file():
            return path.read_bytes()
        return None

    def _folder(self, name: str) -> Path:
        folder = self.folder / safe_name(name)
        if not (folder / "request.json").is_file():
            raise RefusedError(f"there is no LoRA called {name[:40]!r}", status=404)
        return folder


def rounds_done(log: Path) -> int:
    """Count the epochs in a run's log."""
    document = read_jsonl(log) if log.exists() else []
    with blamed_on(log):
        lines = typed(document, list[LogLine])
    return max([line.epoch for line in lines if line.kind == "epoch"], default=0)


def _task(name: str, rankings: Path, group: str) -> dict[str, Any]:
    shown = human.read_group(rankings, group)
    images = []
    for number in range(shown["images"]):
        images.append(f"/taste/{name}/{group}/{number}.png")
    return {**shown, "group": group, "images": images, "ranks": human.read_ranks(rankings, group)}
