"""The nested draws of a probe: prompts × starts × children per stochastic step × readings by the judge.

Candidates share prompts and starts, so that they differ in their one changed setting alone. Images are drawn and
scored as training draws and scores them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pacorl.config.options import LARGEST
from pacorl.core.grid import join, split
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.core.sde import SDE_TYPES
from pacorl.grpo import builders
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, draw_samples, velocity_at
from pacorl.grpo.rows import Row, epoch_rows, one_size_batches
from pacorl.grpo.scoring import Scorer, scoring_overlaps
from pacorl.judge.judge import Counters, Judge, RemoteJudge
from pacorl.lab.probe.variance import Floats
from pacorl.rewards.consistency import JudgedReward
from pacorl.rewards.reward import Reward
from pacorl.runtime.processes import Runtime
from pacorl.types import Prompt, Question, Rollout, Samples, Size, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.policy import Policy

STEP, NOISE_LEVEL, SIZE = "step", "noise_level", "size"
CHILDREN = 2
"""Children of each latent at each stochastic step: of a number of samples, pairs leave most to the levels above."""
NOISE_FACTORS = (0.7, 1.4)
"""Default noise levels, as multiples of the configured one: half and twice its variance."""
READING = 0.5
"""The cost of another reading by the judge, in samples: half of the quickstart's epoch is judging."""
LEAST_PROMPTS = 2
"""Prompts that the budget must pay for before a default candidate is added."""
TIMED = 2
"""Timed runs, of which the quicker one counts: the other may hold another process's turn."""


# --- the design ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Budget and candidates of a probe; None stands for the default."""

    epochs: float = 1.0
    """The budget, in epochs of the config."""
    samples: int | None = None
    """The budget in samples of the config's size, in place of `epochs`."""
    steps: tuple[int, ...] | None = None
    noise_levels: tuple[float, ...] | None = None
    sizes: tuple[Size, ...] | None = None
    judge_repeats: tuple[str, ...] | None = None
    """Names of `READINGS`; None for the default of the config."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to sample, which differs from the config's own in one setting at most."""

    varies: str
    """step, noise_level or size; empty for the config's own."""
    sde_steps: tuple[int, ...]
    noise_level: float
    size: Size
    weight: float = 1.0
    """The cost of a sample in samples of the config: the ratio of their pixels."""

    @property
    def name(self) -> str:
        """Label in tables."""
        if self.varies == STEP:
            return f"step {self.sde_steps[0]}"
        return {NOISE_LEVEL: f"noise {self.noise_level:g}", SIZE: f"size {self.size}"}.get(self.varies, "as configured")

    @property
    def leaves(self) -> int:
        """Samples of one start."""
        return int(CHILDREN ** len(self.sde_steps))

    def sampler(self, configured: Sampler, *, seeds: int) -> Sampler:
        """Build its sampler, with `seeds` starts per prompt."""
        tree = Tree(seeds, (CHILDREN,) * len(self.sde_steps))
        settings = {"sde_steps": self.sde_steps, "noise_level": self.noise_level, "size": self.size, "tree": tree}
        return configured.model_copy(update=settings)


@dataclass(frozen=True, slots=True)
class Design:
    """Candidates, and the number of draws of each that the budget pays for."""

    candidates: tuple[Candidate, ...]
    """The config's own first."""
    prompts: int
    seeds: int
    """Starts per prompt."""
    budget: int
    """Samples of the config's size."""
    left_out: tuple[str, ...] = ()
    """Default candidates that the budget does not reach or the sampler refuses, with the reason."""

    @property
    def samples(self) -> int:
        """Number of images."""
        return self.prompts * self.seeds * sum(candidate.leaves for candidate in self.candidates)


def configured_sampler(config: PolicyConfig) -> Sampler:
    """Build the sampler of the config's first epoch.

    Raises:
        ValueError: if its objective samples without noise.
    """
    spec = OBJECTIVES[config.objective.name]
    if spec.needs != "path":
        raise ValueError(
            f"objective.name {config.objective.name} samples without noise, so that the start owns all that differs in "
            "a group and there is no stochastic step to probe; probe with objective.name=grpo_clip"
        )
    return config.sampling.sampler(
        0,
        group_size=config.group_size,
        seed=config.seed,
        spec=spec,
        evaluation_size=Size(*config.evaluation.size),
    )


def plan_design(
    config: PolicyConfig, configured: Sampler, options: ProbeOptions, *, prompts: int, readings: int = 0
) -> Design:
    """Choose candidates, then as many prompts of each as the budget pays for, then as many starts.

    Args:
        config: the run.
        configured: the sampler of its first epoch.
        options: the budget and what to compare.
        prompts: number of training prompts.
        readings: further readings of each image by the judge.

    Raises:
        ValueError: if the budget does not pay for two starts with two children each of every requested candidate; the
            message names a sufficient budget.
    """
    budget = _budget(config, options)
    candidates = [Candidate("", configured.sde_steps, configured.noise_level, configured.size)]
    candidates += _varied(configured, options.steps or (), options.noise_levels or (), options.sizes or ())
    for candidate in candidates[1:]:
        _check(candidate, configured)

    most = min(prompts, config.prompts_per_epoch)
    each = 1 + READING * readings
    left_out = []
    for candidate in _defaults(configured, options):
        try:
            _check(candidate, configured)
        except ValueError as refusal:
            left_out.append(f"{candidate.name}: {refusal}")
            continue
        if 2 * each * min(LEAST_PROMPTS, most) * _cost([*candidates, candidate]) <= budget:
            candidates.append(candidate)
        else:
            left_out.append(f"{candidate.name}: the budget does not reach so far")

    cost = 2 * each * _cost(candidates)
    if budget < cost:
        raise ValueError(
            f"a budget of {budget} samples is too small for {len(candidates)} candidates with two starts and two "
            f"children each; give --samples {math.ceil(cost)} or more, or fewer candidates"
        )
    count = min(most, int(budget / cost))
    return Design(tuple(candidates), count, int(budget / (count * cost / 2)), budget, tuple(left_out))


def _budget(config: PolicyConfig, options: ProbeOptions) -> int:
    epoch = config.prompts_per_epoch * config.group_size
    budget = options.epochs * epoch if options.samples is None else options.samples
    if not 1 <= budget <= LARGEST:
        raise ValueError(
            f"the probe has a budget of {budget:g} samples; give --epochs (each has {epoch}) or --samples for 1 to "
            f"{LARGEST:,}"
        )
    return int(budget)


def _cost(candidates: Sequence[Candidate]) -> float:
    """Cost of one start of one prompt of each candidate, in samples of the config's size."""
    return sum(candidate.weight * candidate.leaves for candidate in candidates)


def _defaults(configured: Sampler, options: ProbeOptions) -> Iterator[Candidate]:
    """List the default candidates of each setting that the options leave open."""
    half = Size(configured.size.height // 2, configured.size.width // 2)
    levels = [round(configured.noise_level * factor, 2) for factor in NOISE_FACTORS]
    return _varied(
        configured,
        () if options.steps else range(configured.steps),
        () if options.noise_levels else levels,
        () if options.sizes else [half],
    )


def _varied(
    configured: Sampler, steps: Sequence[int], noise_levels: Sequence[float], sizes: Sequence[Size]
) -> Iterator[Candidate]:
    """Make one candidate for each value that is not the config's own."""
    area = configured.size.height * configured.size.width
    for step in steps:
        if (step,) != configured.sde_steps:
            yield Candidate(STEP, (step,), configured.noise_level, configured.size)
    for level in noise_levels:
        if level != configured.noise_level:
            yield Candidate(NOISE_LEVEL, configured.sde_steps, level, configured.size)
    for size in sizes:
        if size != configured.size:
            yield Candidate(SIZE, configured.sde_steps, configured.noise_level, size, size.height * size.width / area)


def _check(candidate: Candidate, configured: Sampler) -> None:
    """Raise ValueError if a candidate cannot be sampled."""
    outside = [step for step in candidate.sde_steps if not 0 <= step < configured.steps]
    if outside:
        raise ValueError(
            f"--steps {outside[0]}: sampling.steps {configured.steps} has the steps 0 to {configured.steps - 1}"
        )
    if not candidate.noise_level > 0:
        raise ValueError(f"--noise-levels {candidate.noise_level:g} adds no noise; give a level above 0")
    SDE_TYPES[configured.sde_type].check(candidate.sde_steps, steps=configured.steps, noise_level=candidate.noise_level)
    configured.suffix.grid(candidate.sde_steps[-1] + 1, configured.steps)


# --- readings of the judge -------------------------------------------------------------------------------------

Form = Callable[[Prompt, "Image"], tuple[Prompt, "Image"]]
"""How an image and its prompt are shown to a reward."""

AS_TRAINED = "as trained"
SHRINK = 7 / 8
"""Factor of the sides of a `resized` image: small enough to look alike, large enough for other patches."""


def again(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """Repeat the question: a server's own sampling, batching and retries may change the answer."""
    return prompt, image


def turned(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """Reverse the panels, so that each pair is asked about in the other order; consistency has none."""
    panels = split(image, prompt.grid)[::-1]
    return replace(prompt, panels=prompt.panels[::-1]), join(panels, prompt.grid)


def resized(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """Shrink the sides to seven eighths, which the judge cuts into other patches."""
    return prompt, image.resize((round(image.width * SHRINK), round(image.height * SHRINK)))


READINGS: Mapping[str, Form] = {"again": again, "turned": turned, "resized": resized}


def readings_of(config: PolicyConfig, requested: Sequence[str] | None, *, edits: bool) -> tuple[str, ...]:
    """Choose the further readings of each image; by default turned, if pairs have no order.

    Args:
        config: the run.
        requested: names of `READINGS`, or None.
        edits: whether the prompts are edits, whose questions have an order.

    Raises:
        ValueError: if a reading is unknown, the config has no judge, or edits would be turned.
    """
    if requested is None:
        ordered = config.judge is None or config.judge.symmetric or edits
        return () if ordered else ("turned",)
    for name in requested:
        if name not in READINGS:
            raise ValueError(f"--judge-repeats {name!r} is none of {', '.join(READINGS)} or none")
        if config.judge is None:
            raise ValueError(f"--judge-repeats {name}: no reward of this config asks a judge; leave it out")
    if "turned" in requested and edits:
        raise ValueError(
            f"--judge-repeats turned with edits by kind {config.model.kind}: questions about edits say which image is "
            "the original; take again or resized"
        )
    return tuple(requested)


class RereadReward:
    """A reward that sees its prompts and images in another form."""

    def __init__(self, reward: Reward, form: Form, *, judge: Judge) -> None:
        self.reward, self.form, self.judge = reward, form, judge

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Accept what the reward accepts."""
        self.reward.check(prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        forms = [self.form(prompt, image) for prompt, image in zip(prompts, images, strict=True)]
        return self.reward([prompt for prompt, _ in forms], [image for _, image in forms])


class TimedJudge:
    """A judge that counts its questions and their seconds."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.calls: list[tuple[int, float]] = []
        """(questions, seconds) of each call. Several threads append."""

    @property
    def questions(self) -> int:
        """Number of questions so far."""
        return sum(count for count, _ in self.calls)

    @property
    def seconds(self) -> float:
        """Seconds of all calls."""
        return sum(seconds for _, seconds in self.calls)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order."""
        started = time.perf_counter()
        verdicts = self.judge.verdicts(questions)
        self.calls.append((len(questions), time.perf_counter() - started))
        return verdicts

    def explain(self, question: Question) -> str:
        """The answer in words."""
        return self.judge.explain(question)


class TimedRemoteJudge(TimedJudge):
    """A timed judge outside of this process, which several threads may ask at once."""

    @property
    def counters(self) -> Counters:
        """The judge's own."""
        assert isinstance(self.judge, RemoteJudge)
        return self.judge.counters

    def close(self) -> None:
        """Leave the judge open: the run's own judges close it."""


def timed(judge: Judge) -> TimedJudge:
    """Wrap a judge so that scoring still tells a remote one by its type."""
    return TimedRemoteJudge(judge) if isinstance(judge, RemoteJudge) else TimedJudge(judge)


# --- models ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Models:
    """The run's own generator, rewards and judge."""

    config: PolicyConfig
    prompts: list[Prompt]
    """Drawn prompts, as many as the design has."""
    policy: Policy
    cache: ConditioningCache
    rewards: Mapping[str, Reward]
    judges: Mapping[str, TimedJudge]
    """Reading → the judge that answers it; empty without a judge."""
    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0, "reward": 0.0})

    @property
    def overlap(self) -> bool:
        """Whether scoring overlaps with sampling, as in training."""
        return scoring_overlaps(self.config.judge, device=self.device)


@contextmanager
def opened(config: PolicyConfig, design: Design, train: Sequence[Prompt], readings: Sequence[str]) -> Iterator[Models]:
    """Load a run's models, in its order, for the prompts and sizes of a design.

    Raises:
        ValueError: if there are several processes, or what the builders refuse.
    """
    runtime = Runtime()
    if runtime.world > 1:
        raise ValueError(f"pacorl probe runs in one process, and the launcher started {runtime.world}; run it alone")
    rows = epoch_rows(train, epoch=0, count=design.prompts, group_size=1, seed=config.seed)
    prompts = [row.prompt for row in rows]

    # Builders encode prompts at every size of a curriculum.
    sizes = [candidate.size for candidate in design.candidates if candidate.varies == SIZE]
    stages = tuple((1 + number, (size.height, size.width)) for number, size in enumerate(sizes))
    sized = config.model_copy(update={"sampling": config.sampling.model_copy(update={"curriculum": stages})})
    # Held-out measures are not probed, and their judge would be loaded for nothing.
    without_held_out = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"judge": None})})

    # A remote judge is met before weights load, and one of this process is loaded after the encoders left.
    judges = builders.RunJudges()
    device = runtime.device
    with ExitStack() as stack:
        stack.callback(judges.close)
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
        timed_judges = {form: timed(judges.rewards) for form in (AS_TRAINED, *readings)} if judges.rewards else {}
        yield Models(config, prompts, policy, cache, rewards, timed_judges, device)


# --- images and scores -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """Images of a candidate and their scores."""

    candidate: Candidate
    rollouts: list[Rollout]
    """Samples of the config's own candidate; the images of other candidates are not kept."""
    scores: dict[tuple[str, str], Floats]
    """(reward, reading) → one score per row, NaN for a missing one. A reward without a judge is read once."""

    @property
    def images(self) -> int:
        """Number of images."""
        return len(next(iter(self.scores.values())))


def draw(models: Models, candidate: Candidate, configured: Sampler, *, seeds: int) -> Drawn:
    """Draw and score a candidate's samples, from the starts that every other candidate of its size has.

    Raises:
        ValueError: if no sample has a score.
    """
    sampler = candidate.sampler(configured, seeds=seeds)
    config = models.config
    settings = Draw(
        models.policy,
        sampler,
        models.cache,
        seed=config.seed,
        epoch=0,
        batch=config.sampling.batch,
        fused=builders.ode_form(models.policy.transformer, config.sampling.products, fuse=config.sampling.fuse_lora),
    )
    # Each reading is a reward of its own to the scorer, so that readings wait and overlap as in training.
    readers = {key: _reader(models, *key) for key in _keys(models)}
    rollouts = list[Rollout]()
    with Scorer({", ".join(key): reader for key, reader in readers.items()}, overlap=models.overlap) as scorer:
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
    keyed = {key: np.array(column, dtype=np.float64) for key, column in zip(readers, columns, strict=True)}
    return Drawn(candidate, [] if candidate.varies else rollouts, keyed)


def _keys(models: Models) -> Iterator[tuple[str, str]]:
    """List (reward, reading); a reward without a judge is read once."""
    for name, reward in models.rewards.items():
        for form in models.judges if isinstance(reward, JudgedReward) else (AS_TRAINED,):
            yield name, form


def _reader(models: Models, name: str, form: str) -> Reward:
    reward = models.rewards[name]
    if not isinstance(reward, JudgedReward):
        return reward
    judge = models.judges[form]
    reader: Any = copy(reward)
    reader.judge = judge
    return reader if form == AS_TRAINED else RereadReward(reader, READINGS[form], judge=judge)


def _units(models: Models, sampler: Sampler) -> Iterator[list[Row]]:
    """Cut the rows into whole groups of one size, in batches as large as the config's."""
    group = sampler.tree.group_size
    most = max(1, models.config.sampling.batch // group)
    for indices in one_size_batches(models.policy, models.prompts, size=sampler.size, batch=most):
        yield [Row(models.prompts[index], index * group + member) for index in indices for member in range(group)]


# --- the clock -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one call by its number of latents: a straight line from one latent to a whole batch."""

    single: float
    batch: int
    whole: float

    def __call__(self, count: float) -> float:
        slope = max(0.0, self.whole - self.single) / max(1, self.batch - 1)
        return self.single + slope * (count - 1)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of the parts of an epoch on this machine."""

    forward: Line
    trained: Line
    """A forward and its backward."""
    decode: float
    """Per image."""
    question: float
    """Per question to the judge; 0 without one."""
    rewards: float
    """Per image, for rewards without a judge."""
    questions: float
    """Number of questions per image."""


def clock(models: Models, configured: Sampler, draws: Iterable[Drawn]) -> Clock:
    """Time single calls of the generator, and divide the judge's seconds by its questions."""
    draws = list(draws)
    rollout = draws[0].rollouts[0]
    images = sum(drawn.images for drawn in draws)
    judges = models.judges.values()
    questions = sum(judge.questions for judge in judges)
    judging = sum(judge.seconds for judge in judges)
    final = rollout.final_BNC[:1].to(models.device)
    as_trained = models.judges.get(AS_TRAINED)
    return Clock(
        _line(models, lambda count: _forward(models, configured, rollout, count)),
        _line(models, lambda count: _backward(models, configured, rollout, count)),
        _quickest(models, lambda: models.policy.decode(final, rollout.size)),
        judging / questions if questions else 0.0,
        max(0.0, models.seconds["reward"] - judging) / images,
        as_trained.questions / images if as_trained else 0.0,
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
