"""What `pacorl benchmark` puts together: data, who judges, who paints, and the runner."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pacorl.bench.pairs import JudgePairs, PairScorer, RewardPairs, ScoreFile, Wording
from pacorl.bench.suite import Benchmark, Outcome, run
from pacorl.bench.t2is import Aesthetics, Case, JudgeTexts, RewardTexts, TextScorer
from pacorl.config.policy_run import RewardConfig
from pacorl.data.leaks import trained_on
from pacorl.engine.image_queue import GenerateImages, ImageSource, Shard
from pacorl.io.documents import parse_yaml
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.reward import Loads, Reward
from pacorl.score.reward import PacoReward
from pacorl.types import Prompt, Size

CLIP_I, DREAM_SIM = "clip-i", "dreamsim"
REWARD_OF = {CLIP_I: "panel_clip_image", DREAM_SIM: "dreamsim"}
"""The paper's scorers by their names there."""
RUN_LEVELS = 3
"""How far above an adapter its run's folder may lie: RUN/checkpoints/step-000040/adapter."""


@dataclass(frozen=True, slots=True)
class Running:
    """How a benchmark is run."""

    out: Path
    name: str
    batch: int
    shard: Shard
    trained: Path | None = None
    """The run whose training data is compared with the items."""
    adapter: str = ""
    """Where no run is named: what is measured; the run's folder that it lies in is compared, if it can be."""
    skip_bad: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None
    notice: Callable[[str], None] = lambda text: None

    def start(self, benchmark: Benchmark) -> Outcome:
        """Runs the benchmark. The leak check comes first, because it can fail and costs nothing."""
        leaked = self._leaked(benchmark)
        return run(
            benchmark,
            self.out,
            name=self.name,
            batch=self.batch,
            shard=self.shard,
            trained_on=leaked,
            skip_bad=self.skip_bad,
            progress=self.progress,
            notice=self.notice,
        )

    def _leaked(self, benchmark: Benchmark) -> Mapping[str, str]:
        if self.trained:
            return trained_on(benchmark.texts(), self.trained)
        found = run_of(self.adapter)
        try:
            return trained_on(benchmark.texts(), found) if found else {}
        except ValueError as error:
            self.notice(f"not compared with what the adapter was trained on: {error}")
            return {}


# --- who judges --------------------------------------------------------------------------------------------------


@contextmanager
def opened_judge(
    source: str, *, model: str = "", adapter: str = "", api_key_env: str = "", variants: bool = False
) -> Iterator[PacoReward]:
    """A judge by any name, closed at the end; `variants` adds up the spellings of Yes and of No.

    It declines nothing: a benchmark measures what a judge says, and a generator by all that it made.
    """
    with PacoReward.from_pretrained(
        source, model=model, adapter=adapter, api_key_env=api_key_env, variants=variants, decline=False
    ) as reward:
        yield reward


def pair_scorer(
    kind: str, *, args: Sequence[str], scores: Path | None, judge: PacoReward | None, wording: Wording
) -> PairScorer:
    """ConsistencyRank's scorer: a file of scores, a judge, or a reward of pairs (`clip-i`, `dreamsim`, any other)."""
    if scores:
        return ScoreFile(scores)
    if kind == "judge":
        assert judge is not None
        return JudgePairs(judge.judge, name=judge.name, wording=wording)
    made, name = reward_named(REWARD_OF.get(kind, kind), args)
    return RewardPairs(made, name=name)


def text_scorer(kind: str, *, args: Sequence[str], judge: PacoReward) -> TextScorer | None:
    """T2IS-Bench's prompt alignment: `judge`, `none`, the URL of a scorer, or a reward's name."""
    if kind == "none":
        return None
    if kind == "judge":
        return JudgeTexts(judge.judge, name=judge.name)
    if kind.startswith(("http://", "https://")):
        made, name = reward_named("http", [f"url={kind}", *args])
    else:
        made, name = reward_named(kind, args)
    return RewardTexts(made, name=name)


def aesthetics_named(kind: str, *, args: Sequence[str], scale: float) -> Aesthetics | None:
    """A reward of single pictures; none for an empty name."""
    if not kind:
        return None
    made, name = reward_named(kind, args)
    return Aesthetics(made, name, scale)


def reward_named(kind: str, args: Sequence[str]) -> tuple[Reward, str]:
    """A loaded reward from its name and `key=value` arguments, and what names both. Raises ValueError as rewards do."""
    import torch

    config = RewardConfig(name=kind, args=dict(_argument(text) for text in args))
    check_rewards([config], key="scorer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (made,) = build_rewards([config], judge=_NoJudge(), device=device).values()
    if isinstance(made, Loads):
        made.load()
    return made, " ".join([kind, *args])


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"argument {text!r} is not of the form name=value")
    return name, parse_yaml(value, name=f"argument {text!r}")


class _NoJudge:
    """A scorer that is named as a reward has no judge; to ask a judge, the scorer is `judge`."""

    def verdicts(self, questions: Any) -> Any:
        raise ValueError("this reward asks a judge; score with --scorer judge instead")

    explain = verdicts


# --- who paints --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Painter:
    """A generator that is not loaded yet."""

    model: str
    kind: str = ""
    adapter: str = ""
    size: Size | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    batch: int = 4
    panel: int = 512
    """Side of a panel, in pixels, where neither `size` nor the record says one."""

    def studio(self, *, edit: bool) -> ImageSource:
        """Raises ValueError where no model is named, or one that cannot do what is asked."""
        from pacorl.engine.generator import SETS, kind_of

        if not self.model:
            raise ValueError("name a generator with --model, or a folder of finished pictures with --images")
        kind = self.kind or kind_of(self.model, edit=edit)
        if edit == (kind == SETS):
            raise ValueError(f"{self.model} is of kind {kind!r}, which {'paints sets' if edit else 'edits pictures'}")
        return ImageSource(lambda: self._load(kind), self.describe() | {"kind": kind}, seed=self.seed, batch=self.batch)

    def describe(self) -> dict[str, Any]:
        """What makes its pictures; an adapter by its content."""
        named = {"model": self.model, "adapter": adapter_digest(self.adapter), "size": str(self.size or "")}
        return named | {"steps": self.steps, "guidance": self.guidance, "panel": self.panel, "seed": self.seed}

    def _load(self, kind: str) -> GenerateImages:
        from pacorl.engine.generator import Generator

        generator = Generator.load(
            self.model, kind=kind, adapter=self.adapter, guidance=self.guidance, device=_own_device()
        )
        generator.batch = self.batch
        return lambda prompts, seeds: generator.paint(prompts, seeds, size=self.size, steps=self.steps)

    def prompt_of(self, records: Mapping[str, Prompt]) -> Callable[[Case], Prompt]:
        """A case's prompt: its T2IS record where there is one, else composed from instruction and captions."""
        from pacorl.generate.compose import prompt_from

        def found(case: Case) -> Prompt:
            if records:
                if case.id not in records:
                    raise ValueError(f"case {case.id} has no record among the --prompts")
                return records[case.id]
            prompt = prompt_from(self.model, theme=case.instruction, panels=case.captions)
            return replace(prompt, size=Size(prompt.grid.rows * self.panel, prompt.grid.cols * self.panel))

        return found


def adapter_digest(source: str) -> str:
    """An adapter's content where it lies on the disk, else its name."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) if source and path.is_dir() else []
    if not files:
        return source
    with files[0].open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:16]


def _own_device() -> str:
    """The GPU of this process under torchrun; empty for the usual choice."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank and torch.cuda.is_available() else ""


# --- runs --------------------------------------------------------------------------------------------------------


def shard_of(text: str) -> Shard:
    """`--shard`, else this process's place under torchrun, else everything."""
    if text:
        return Shard.parse(text)
    return Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def run_of(adapter: str) -> Path | None:
    """The run's folder that an adapter lies in, if it does."""
    folders = [Path(adapter), *Path(adapter).resolve().parents[:RUN_LEVELS]] if adapter else []
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
