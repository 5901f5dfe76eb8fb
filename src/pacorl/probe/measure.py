"""The draws of a probe: a run's models as training builds them, each candidate's images and scores, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pacorl.config.policy_run import PolicyConfig
from pacorl.core.sampling import Sampler
from pacorl.engine.conditioning import ConditioningCache
from pacorl.engine.rollout import Draw, draw_samples, velocity_at
from pacorl.engine.rows import Row, epoch_rows, one_size_batches
from pacorl.engine.runtime import Runtime
from pacorl.engine.scoring import Scorer, overlaps
from pacorl.judges import JUDGES
from pacorl.lora.layers import fuse_lora
from pacorl.probe.design import SIZE, Candidate, Design
from pacorl.probe.readings import AS_TRAINED, Recorder, asking, recorder_of
from pacorl.probe.variance import Floats
from pacorl.rewards.consistency import JudgedReward
from pacorl.rewards.reward import Reward
from pacorl.train import builders
from pacorl.types import Prompt, Rollout, Samples

if TYPE_CHECKING:
    from pacorl.policies.policy import Policy

TIMED = 2
"""Runs of which the quicker one counts: another process's turn is not the forward's time."""


@dataclass(slots=True)
class Models:
    """What a probe asks: the run's own generator, rewards and judge."""

    config: PolicyConfig
    prompts: list[Prompt]
    """Those that are drawn, as many as the design says."""
    policy: Policy
    cache: ConditioningCache
    rewards: Mapping[str, Reward]
    recorders: Mapping[str, Recorder]
    """Reading → the judge that answers it; empty without one."""
    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0, "reward": 0.0})

    @property
    def overlap(self) -> bool:
        """Whether scoring runs beside sampling, as in training."""
        judge = self.config.judge
        in_process = judge is None or JUDGES[judge.backend].in_process
        return overlaps(judge.overlap if judge else "auto", in_process=in_process, device=self.device)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A candidate's images and their scores."""

    candidate: Candidate
    rollouts: list[Rollout]
    """Of the config's own candidate; images of the others are not kept."""
    scores: dict[tuple[str, str], Floats]
    """(reward, reading) → one score per row, NaN for a missing one. A reward without a judge is read once."""

    @property
    def images(self) -> int:
        """How many were drawn."""
        return len(next(iter(self.scores.values())))


@contextmanager
def opened(config: PolicyConfig, design: Design, train: Sequence[Prompt], readings: Sequence[str]) -> Iterator[Models]:
    """Load what a run loads, in its order, for the prompts and sizes of a design.

    Raises:
        ValueError: if there are several processes, or what the builders refuse.
    """
    runtime = Runtime()
    if runtime.world > 1:
        raise ValueError(f"pacorl probe runs in one process, and the launcher started {runtime.world}; run it alone")
    rows = epoch_rows(train, epoch=0, count=design.prompts, group_size=1, seed=config.seed)
    prompts = [row.prompt for row in rows]
    sizes = [candidate.size for candidate in design.candidates if candidate.varies == SIZE]
    # Builders encode prompts at every size of a curriculum.
    stages = tuple((1 + number, (size.height, size.width)) for number, size in enumerate(sizes))
    sized = config.model_copy(update={"sampling": config.sampling.model_copy(update={"curriculum": stages})})
    judges, device = builders.RunJudges(), runtime.device
    # A judge elsewhere is met before weights load, and one of this process is loaded after the encoders left.
    with ExitStack() as stack:
        stack.callback(judges.close)
        # Held-out measures are not probed, and their judge would be loaded for nothing.
        without_held_out = config.model_copy(
            update={"evaluation": config.evaluation.model_copy(update={"judge": None})}
        )
        judges.open(without_held_out, in_process=False, device=device, processes=1)
        policy = builders.build_adapted_policy(sized, device=device)
        cache = builders.encode_prompts(sized, policy, prompts, [], cache=ConditioningCache(policy))
        builders.place_transformer(sized, policy, cache, prompts[0], device=device)
        judges.open(without_held_out, in_process=True, device=device, processes=1)
        rewards = builders.build_run_rewards(
            config.rewards,
            {},
            judge=judges.rewards,
            device=device,
            checked=prompts,
            tried=prompts,
            size=config.sampling.size,
        )
        policy.transformer.train()  # gradient checkpointing acts in train mode only, and is part of a forward's time
        recorders = {form: recorder_of(judges.rewards) for form in (AS_TRAINED, *readings)} if judges.rewards else {}
        yield Models(config, prompts, policy, cache, rewards, recorders, device)


# --- images and scores -----------------------------------------------------------------------------------------


def draw(models: Models, candidate: Candidate, configured: Sampler, *, seeds: int) -> Drawn:
    """A candidate's samples, with the starts that every other candidate of its size has."""
    sampler, config = candidate.sampler(configured, seeds=seeds), models.config
    settings = Draw(
        models.policy,
        sampler,
        models.cache,
        seed=config.seed,
        epoch=0,
        batch=config.sampling.batch,
        fused=fuse_lora(models.policy.transformer, enabled=config.sampling.fuse_lora),
    )
    # The judge's forms are rewards of their own to the scorer, so that they wait and overlap as in training.
    readers, rollouts = _readers(models), list[Rollout]()
    with Scorer(readers, overlap=models.overlap) as scorer:
        started = time.perf_counter()
        for rows in _units(models, sampler):
            samples = Samples()
            for rollout in draw_samples(settings, rows, samples):
                scorer.submit(rollout)
            rollouts += samples.rollouts
        sampled = time.perf_counter()
        scores = scorer.results()
        models.seconds["sampling"] += sampled - started
        models.seconds["reward"] += scorer.busy_seconds
        if all(None in row for row in scores.values()):
            raise ValueError(
                f"no sample of {candidate.name} has a score: {scorer.last_error() or 'no reason is given'}"
            )
    columns = zip(*(scores[row] for row in sorted(scores)), strict=True)
    keyed = {key: np.array(column, dtype=np.float64) for key, column in zip(_keys(models), columns, strict=True)}
    return Drawn(candidate, [] if candidate.varies else rollouts, keyed)


def reread(models: Models, drawn: Drawn, *, temperature: float) -> Drawn:
    """The same images' scores at another temperature of the rewards that ask the judge, which is not asked again."""
    scores = dict(drawn.scores)
    # Rewards read rollout by rollout; scores stand by row.
    order = np.argsort([row for rollout in drawn.rollouts for row in rollout.row_B])
    for name, form in _keys(models):
        reward = models.rewards[name]
        if isinstance(reward, JudgedReward):
            reader = asking(reward, models.recorders[form], form=form, temperature=temperature)
            read = [score for rollout in drawn.rollouts for score in reader(rollout.prompts, rollout.images)]
            scores[name, form] = np.array(read, dtype=np.float64)[order]
    return Drawn(drawn.candidate, drawn.rollouts, scores)


def _keys(models: Models) -> list[tuple[str, str]]:
    return [
        (name, form)
        for name, reward in models.rewards.items()
        for form in (models.recorders if isinstance(reward, JudgedReward) else (AS_TRAINED,))
    ]


def _readers(models: Models) -> dict[str, Reward]:
    """Every reward in every form, as the scorer takes them."""
    readers: dict[str, Reward] = {}
    for name, form in _keys(models):
        reward = models.rewards[name]
        if isinstance(reward, JudgedReward):
            reward = asking(reward, models.recorders[form], form=form)
        readers[f"{name}, {form}"] = reward
    return readers


def _units(models: Models, sampler: Sampler) -> Iterator[list[Row]]:
    """The rows of whole groups of one size, in batches as large as the config's."""
    group = sampler.tree.group_size
    most = max(1, models.config.sampling.batch // group)
    for indices in one_size_batches(models.policy, models.prompts, size=sampler.size, batch=most):
        yield [Row(models.prompts[index], index * group + member) for index in indices for member in range(group)]


# --- the clock -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one call over so many latents, as a straight line between one and a whole batch."""

    single: float
    batch: int
    whole: float

    def __call__(self, count: float) -> float:
        slope = max(0.0, self.whole - self.single) / max(1, self.batch - 1)
        return self.single + slope * (count - 1)


@dataclass(frozen=True, slots=True)
class Clock:
    """What this machine needs for the parts of an epoch."""

    forward: Line
    trained: Line
    """A forward and backward."""
    decode: float
    """Per image."""
    question: float
    """Per question to the judge; 0 without one."""
    rewards: float
    """Per image, for rewards that ask no judge."""
    questions: float
    """Per image."""


def clock(models: Models, configured: Sampler, draws: Sequence[Drawn]) -> Clock:
    """Time single calls of the generator, and take the judge's time from what it was asked."""
    rollout, recorders = draws[0].rollouts[0], models.recorders.values()
    images, question_count = sum(drawn.images for drawn in draws), sum(len(recorder.answers) for recorder in recorders)
    judging = sum(recorder.seconds for recorder in recorders)
    final = rollout.final_BNC[:1].to(models.device)
    as_trained = models.recorders.get(AS_TRAINED)
    return Clock(
        _line(models, lambda count: _forward(models, configured, rollout, count)),
        _line(models, lambda count: _backward(models, configured, rollout, count)),
        _quickest(models, lambda: models.policy.decode(final, rollout.size)),
        judging / question_count if question_count else 0.0,
        max(0.0, models.seconds["reward"] - judging) / images,
        len(as_trained.answers) / images if as_trained else 0.0,
    )


@torch.no_grad()
def _forward(models: Models, configured: Sampler, rollout: Rollout, count: int) -> None:
    _velocity(models, configured, rollout, count)


def _backward(models: Models, configured: Sampler, rollout: Rollout, count: int) -> None:
    with torch.enable_grad():
        _velocity(models, configured, rollout, count).square().mean().backward()
    models.policy.transformer.zero_grad(set_to_none=True)


def _velocity(models: Models, configured: Sampler, rollout: Rollout, count: int) -> torch.Tensor:
    conditioning = models.cache.batch([rollout.prompts[0]] * count, rollout.size)
    noise = models.policy.noise(range(count), rollout.size)
    return velocity_at(models.policy, noise, rollout.sigmas_T[configured.sde_steps[0]], conditioning, rollout.size)


def _line(models: Models, call: Callable[[int], None]) -> Line:
    batch = models.config.sampling.batch
    single = _quickest(models, lambda: call(1))
    return Line(single, batch, _quickest(models, lambda: call(batch)) if batch > 1 else single)


def _quickest(models: Models, act: Callable[[], object]) -> float:
    spent = []
    for _ in range(TIMED):
        started = time.perf_counter()
        act()
        if models.device.type == "cuda":  # its calls return before they are done
            torch.cuda.synchronize(models.device)
        spent.append(time.perf_counter() - started)
    return min(spent)
