"""A probe from a config to its findings: draw samples, split the variance of their rewards, count the cost.

    findings = probe(config, ProbeOptions(epochs=2))
    findings.candidates[0].signal.value

Draws are nested: prompts × starts × children per stochastic step × readings by the judge. Candidates share prompts and
starts, so that they differ in their one changed setting only. Images are drawn and scored as in training. Everything
but seconds follows from the config's seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pacorl.config.options import LARGEST
from pacorl.core.advantages import zero_std_share
from pacorl.core.grid import join, split
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.core.schedule import seed_of
from pacorl.core.sde import SDE_TYPES
from pacorl.grpo import builders
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, draw_samples, velocity_at
from pacorl.grpo.rows import Row, epoch_rows, one_size_batches
from pacorl.grpo.scoring import Scorer, scoring_overlaps
from pacorl.io.documents import JsonObject
from pacorl.lab.plan.work import Work, work_of
from pacorl.lab.probe.credit import CreditFinding, measure_credit
from pacorl.lab.probe.options import ProbeOptions
from pacorl.lab.probe.variance import JUDGE, START, Estimate, Floats, Variances, nested_variances
from pacorl.rewards.consistency import JudgedReward
from pacorl.rewards.reward import Reward
from pacorl.runtime.processes import Runtime
from pacorl.types import Prompt, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.policy import Policy

SCHEMA = 3
"""Version of the document; it rises if a key changes its meaning or is removed."""
STEP = "step"
NOISE_LEVEL = "noise_level"
SIZE = "size"
CHILDREN = 2
"""Children of each latent at each stochastic step: for a fixed number of samples, pairs leave most to upper levels."""
NOISE_FACTORS = (0.7, 1.4)
"""Default noise levels, as multiples of the configured one: half and twice its variance."""
READING = 0.5
"""Cost of another reading by the judge, in samples: half of an epoch of `tiny` is judging."""
LEAST_PROMPTS = 2
"""Prompts that the budget must pay for before a default candidate is added."""
AS_TRAINED = "as trained"
TURNED = "turned"
WIDE = 0.5
"""Width of an interval of the start's share above which a note recommends more draws."""
TIMED = 2
"""Timed runs, of which the quicker one counts: the other may include another process's turn."""


# --- the design ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to sample, which differs from the config's own in one setting at most."""

    varies: str
    """step, noise_level or size; empty for the config's own."""
    sde_steps: tuple[int, ...]
    noise_level: float
    size: Size
    weight: float = 1.0
    """Cost of a sample in samples of the config: the ratio of their pixels."""

    @property
    def name(self) -> str:
        """Label in tables."""
        if self.varies == STEP:
            return f"step {self.sde_steps[0]}"
        return {NOISE_LEVEL: f"noise {self.noise_level:g}", SIZE: f"size {self.size}"}.get(self.varies, "as configured")

    @property
    def leaves(self) -> int:
        """Samples per start."""
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
        ValueError: if its objective trains on endpoints.
    """
    spec = OBJECTIVES[config.objective.name]
    if spec.needs != "path":
        raise ValueError(
            f"objective.name {config.objective.name} trains on finished samples, and the probe measures SDE steps; "
            "probe with objective.name=grpo_clip"
        )
    return config.sampling.sampler(
        0,
        group_size=config.group_size,
        seed=config.seed,
        spec=spec,
        evaluation_size=Size(*config.evaluation.size),
    )


def plan_design(
    config: PolicyConfig, configured: Sampler, options: ProbeOptions, *, prompts: int, readings: int = 1
) -> Design:
    """Choose candidates, then as many prompts of each as the budget pays for, then as many starts.

    Args:
        config: the run.
        configured: the sampler of its first epoch.
        options: the budget and the candidates.
        prompts: number of training prompts.
        readings: readings of each image by the judge.

    Raises:
        ValueError: if the budget does not pay for two starts with two children each of every requested candidate; the
            message names a sufficient budget.
    """
    # The budget in samples.
    epoch = config.prompts_per_epoch * config.group_size
    budget = options.epochs * epoch
    if not 1 <= budget <= LARGEST:
        raise ValueError(
            f"the probe has a budget of {budget:g} samples; give --epochs (each has {epoch}) for 1 to {LARGEST:,}"
        )
    # The requested candidates, each of which must be affordable.
    candidates = [Candidate("", configured.sde_steps, configured.noise_level, configured.size)]
    candidates += _varied(configured, options.steps or (), options.noise_levels or (), options.sizes or ())
    for candidate in candidates[1:]:
        _check(candidate, configured)

    # Default candidates as far as the budget reaches; a refused one is named with its reason.
    most = min(prompts, config.prompts_per_epoch)
    per_start = 1 + READING * (readings - 1)
    left_out = []
    # Settings without options have default candidates.
    half = Size(configured.size.height // 2, configured.size.width // 2)
    levels = [round(configured.noise_level * factor, 2) for factor in NOISE_FACTORS]
    defaults = _varied(
        configured,
        () if options.steps else range(configured.steps),
        () if options.noise_levels else levels,
        () if options.sizes else [half],
    )
    for candidate in defaults:
        try:
            _check(candidate, configured)
        except ValueError as refusal:
            left_out.append(f"{candidate.name}: {refusal}")
            continue
        if 2 * per_start * min(LEAST_PROMPTS, most) * _cost([*candidates, candidate]) <= int(budget):
            candidates.append(candidate)
        else:
            left_out.append(f"{candidate.name}: the budget does not reach so far")

    # Two starts per prompt at least.
    cost = 2 * per_start * _cost(candidates)
    if int(budget) < cost:
        raise ValueError(
            f"a budget of {int(budget)} samples is too small for {len(candidates)} candidates with two starts and two "
            f"children each; give --epochs {math.ceil(1000 * (cost / epoch)) / 1000:g} or more, or fewer candidates"
        )
    # The rest of the budget goes to prompts first, then to starts.
    count = min(most, int(int(budget) / cost))
    seeds = int(2 * int(budget) / (count * cost))
    return Design(tuple(candidates), count, seeds, int(budget), tuple(left_out))


def _cost(candidates: Sequence[Candidate]) -> float:
    """Cost of one start of one prompt of each candidate, in samples of the config's size."""
    return sum(candidate.weight * candidate.leaves for candidate in candidates)


def _varied(
    configured: Sampler, steps: Sequence[int], noise_levels: Sequence[float], sizes: Sequence[Size]
) -> Iterator[Candidate]:
    """List one candidate per value that differs from the config's."""
    # A sample of another size costs as much as it has pixels.
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
    outside = []
    for step in candidate.sde_steps:
        if not 0 <= step < configured.steps:
            outside.append(step)

    if outside:
        raise ValueError(
            f"--steps {outside[0]}: sampling.steps {configured.steps} has the steps 0 to {configured.steps - 1}"
        )
    if not candidate.noise_level > 0:
        raise ValueError(f"--noise-levels {candidate.noise_level:g} adds no noise; give a level above 0")
    SDE_TYPES[configured.sde_type].check(candidate.sde_steps, steps=configured.steps, noise_level=candidate.noise_level)
    configured.suffix.grid(candidate.sde_steps[-1] + 1, configured.steps)


# --- readings of the judge -------------------------------------------------------------------------------------


def readings_of(config: PolicyConfig, *, edits: bool) -> tuple[str, ...]:
    """List the readings of each image: a second one with the panels turned, if the judge may depend on their order.

    Questions about edits state which image is the original, so that edits are not turned.
    """
    if config.judge is None or config.judge.symmetric or edits:
        return (AS_TRAINED,)
    return (AS_TRAINED, TURNED)


class TurnedReward:
    """Reward of the panels in reverse order, in which the judge sees each pair in the other order."""

    def __init__(self, reward: JudgedReward) -> None:
        self.reward = reward
        self.judge = reward.judge

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Accept the prompts that the reward accepts."""
        self.reward.check(prompts)  # type: ignore[attr-defined]

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        turned_prompts = []
        turned_images = []
        for prompt, image in zip(prompts, images, strict=True):
            turned_prompt, turned_image = turn(prompt, image)
            turned_prompts.append(turned_prompt)
            turned_images.append(turned_image)
        scores: list[float | None] = self.reward(turned_prompts, turned_images)  # type: ignore[operator]
        return scores


def turn(prompt: Prompt, image: Image) -> tuple[Prompt, Image]:
    """Reverse the panels, each with its text."""
    panels = split(image, prompt.grid)[::-1]
    return replace(prompt, panels=prompt.panels[::-1]), join(panels, prompt.grid)


# --- models and scores -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Models:
    """The run's own generator and rewards."""

    config: PolicyConfig
    prompts: list[Prompt]
    """Drawn prompts, as many as the design has."""
    credited: list[Prompt]
    """Prompts of the groups that compare credits."""
    policy: Policy
    cache: ConditioningCache
    rewards: Mapping[str, Reward]
    readings: Sequence[str]
    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0, "reward": 0.0})

    def draw(self, sampler: Sampler) -> Draw:
        """Create the parameters of rollouts, as of the run's first epoch."""
        config = self.config
        fused = builders.ode_form(self.policy.transformer, config.sampling.products, fuse=config.sampling.fuse_lora)
        return Draw(
            self.policy, sampler, self.cache, seed=config.seed, epoch=0, batch=config.sampling.batch, fused=fused
        )


@contextmanager
def opened(
    config: PolicyConfig, design: Design, train: Sequence[Prompt], readings: Sequence[str], *, credit: int = 0
) -> Iterator[Models]:
    """Load a run's models, in its order, for the prompts and sizes of a design, and for `credit` groups.

    Raises:
        ValueError: if there are several processes, or a builder refuses the config.
    """
    # One process: draws are not divided among ranks.
    runtime = Runtime()
    device = runtime.device
    if runtime.world > 1:
        raise ValueError(f"pacorl probe runs in one process, and the launcher started {runtime.world}; run it alone")
    count = max(design.prompts, credit)
    rows = epoch_rows(train, epoch=0, count=count, group_size=1, seed=config.seed)
    prompts = [row.prompt for row in rows]

    # Builders encode prompts at every size of a curriculum.
    sizes = []
    for candidate in design.candidates:
        if candidate.varies == SIZE:
            sizes.append(candidate.size)

    stages = tuple((1 + number, (size.height, size.width)) for number, size in enumerate(sizes))
    sized = config.model_copy(update={"sampling": config.sampling.model_copy(update={"curriculum": stages})})
    # Held-out measures are not probed, so their judge is not loaded.
    judged = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"judge": None})})

    # A remote judge is contacted before weights load, and a local one is loaded after the encoders are dropped.
    judges = builders.RunJudges()
    with ExitStack() as stack:
        stack.callback(judges.close)
        judges.open(judged, in_process=False, device=device, processes=1)
        policy = builders.build_adapted_policy(sized, device=device)
        cache = builders.encode_prompts(sized, policy, prompts, [], cache=ConditioningCache(policy))
        builders.place_transformer(sized, policy, cache, prompts[0], device=device)
        judges.open(judged, in_process=True, device=device, processes=1)
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
        yield Models(config, prompts[: design.prompts], prompts[:credit], policy, cache, rewards, readings, device)


def draw(models: Models, candidate: Candidate, configured: Sampler, *, seeds: int) -> Floats:
    """Draw and score a candidate's samples, from the same starts as other candidates of its size.

    Returns:
        (B, J) weighted sums of the rewards, per reading; NaN for a missing one.

    Raises:
        ValueError: if no sample has a score.
    """
    config = models.config
    sampler = candidate.sampler(configured, seeds=seeds)
    settings = models.draw(sampler)

    # Each reading is a separate reward of the scorer, so that readings wait and overlap as in training.
    readers = dict(models.rewards)
    turned = {}
    if TURNED in models.readings:
        for name, judged in models.rewards.items():
            if isinstance(judged, JudgedReward):
                turned[name] = f"{name}, {TURNED}"
                readers[turned[name]] = TurnedReward(judged)

    # Sample and score at the same time, if the judge permits it.
    overlap = scoring_overlaps(config.judge, device=models.device)
    with Scorer(readers, overlap=overlap, timeout=config.reward_timeout) as scorer:
        started = time.perf_counter()
        for rows in _units(models, sampler):
            for rollout in draw_samples(settings, rows, Samples()):
                scorer.submit(rollout)
        models.seconds["sampling"] += time.perf_counter() - started
        scores = scorer.results()
        models.seconds["reward"] += scorer.busy_seconds
        if all(None in row for row in scores.values()):
            raise ValueError(
                f"no sample of {candidate.name} has a score: {scorer.last_error() or 'no reason is given'}"
            )

    # A reward without a judge is read once, and the same in all readings.
    table = np.array([scores[row] for row in sorted(scores)], dtype=np.float64)
    columns = dict(zip(readers, table.T, strict=True))
    score_BJ = np.zeros((len(table), len(models.readings)))
    for reward in config.rewards:
        for number, reading in enumerate(models.readings):
            key = turned.get(reward.key, reward.key) if reading == TURNED else reward.key
            score_BJ[:, number] += reward.weight * columns[key]
    return score_BJ


def _units(models: Models, sampler: Sampler) -> Iterator[list[Row]]:
    """Cut the rows into whole groups of one size, in batches as large as the config's."""
    group = sampler.tree.group_size
    most = max(1, models.config.sampling.batch // group)
    for indices in one_size_batches(models.policy, models.prompts, size=sampler.size, batch=most):
        rows = []
        for index in indices:
            rows += [Row(models.prompts[index], index * group + member) for member in range(group)]
        yield rows


# --- the cost of an epoch --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one epoch as configured, and its seconds on this machine."""

    forwards: int
    """Forwards in sampling, one per distinct latent."""
    trained: int
    """Forwards with a backward."""
    questions: int
    seconds: dict[str, float]
    """Seconds of sampling, reward and update, one phase after the other."""


def epoch_cost(models: Models, work: Work, *, images: int) -> Cost:
    """Multiply the work of an epoch by the seconds of single calls; `images` were scored in `models.seconds`."""
    # Counts of forwards and questions.
    per_image = {}
    for phase, count in work.forwards_per_image.items():
        per_image[phase] = count / work.passes

    judged = [reward for reward in models.rewards.values() if isinstance(reward, JudgedReward)]
    questions = sum(reward.questions(models.prompts[0]) for reward in judged)

    # Timed are a forward of a batch, a trained step of a batch of nodes, and the decoding of an image.
    batch = models.config.sampling.batch
    nodes = max(1, work.node_batch)
    size = models.policy.size_of(models.prompts[0], work.sampler.size)
    latent = models.policy.noise([0], size)

    # Any prompt and any σ: the cost of a forward depends on neither.
    def velocity(count: int) -> torch.Tensor:
        conditioning = models.cache.batch([models.prompts[0]] * count, size)
        noise = models.policy.noise(range(count), size)
        return velocity_at(models.policy, noise, torch.tensor(0.5), conditioning, size)

    def train() -> None:
        velocity(nodes).square().mean().backward()
        models.policy.transformer.zero_grad(set_to_none=True)

    # Seconds of each, per image. Sampling keeps no activations.
    with torch.no_grad():
        forward = _quickest(models, lambda: velocity(batch)) / batch
        decode = _quickest(models, lambda: models.policy.decode(latent, size))
    with torch.enable_grad():
        trained = _quickest(models, train) / nodes
    score = models.seconds["reward"] / (images * len(models.readings))
    seconds = {
        "sampling": work.samples * (per_image["sampling"] * forward + decode),
        "reward": work.samples * score,
        "update": work.samples * (per_image["training"] * trained + per_image["other_policies"] * forward),
    }
    return Cost(
        round(work.samples * per_image["sampling"]),
        round(work.samples * per_image["training"]),
        work.samples * questions,
        seconds,
    )


def _quickest(models: Models, act: Callable[[], object]) -> float:
    spent = []
    for _ in range(TIMED):
        started = time.perf_counter()
        act()
        if models.device.type == "cuda":  # its calls return before they are done
            torch.cuda.synchronize(models.device)
        spent.append(time.perf_counter() - started)
    return min(spent)


# --- the probe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """Variances of one way to sample."""

    candidate: Candidate
    mean: float
    """Mean of the weighted rewards."""
    variances: Variances
    signal: Estimate
    """Share of a group's variance that training can move, in the config's tree."""
    alike: float
    """Share of drawn groups whose scores are all but equal."""
    missing_groups: int
    """Groups left out because a score in them is missing."""

    def document(self) -> JsonObject:
        """Return the finding for programs."""
        levels = {}
        for name in self.variances.names:
            share = asdict(self.variances.share(name)) if name in self.variances.within else None
            levels[name] = {"variance": asdict(self.variances.variance(name)), "share": share}
        return {
            "name": self.candidate.name,
            "sde_steps": list(self.candidate.sde_steps),
            "noise_level": self.candidate.noise_level,
            "size": [self.candidate.size.height, self.candidate.size.width],
            "mean": self.mean,
            "levels": levels,
            "signal": asdict(self.signal),
            "groups_alike": self.alike,
            "groups_missing": self.missing_groups,
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a probe."""

    design: Design
    readings: tuple[str, ...]
    candidates: tuple[Finding, ...]
    """The config's own first."""
    cost: Cost
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    """Seconds of this probe."""
    credit: CreditFinding | None = None
    """Panel credit beside set credit, if it was asked for."""

    def document(self) -> JsonObject:
        """Return the whole probe for programs; undefined figures are null."""
        design = self.design
        document = {
            "schema": SCHEMA,
            "design": {
                "prompts": design.prompts,
                "starts": design.seeds,
                "children": CHILDREN,
                "readings": list(self.readings),
                "samples": design.samples,
                "budget": design.budget,
            },
            "candidates": [finding.document() for finding in self.candidates],
            "cost": asdict(self.cost),
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
        }
        if self.credit is not None:
            document["credit"] = asdict(self.credit) | {"share": self.credit.share, "advice": self.credit.advice}
        return _without_nan(document)  # type: ignore[no-any-return]


def probe(
    config: PolicyConfig,
    options: ProbeOptions = ProbeOptions(),
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """Draw starts, step noises and readings of the judge, and split the variance of the reward.

    Args:
        config: the run.
        options: the budget and the candidates.
        advance: called with the number of samples so far and of all samples.

    Raises:
        ValueError: if the budget is too small, the objective has no stochastic step, or the run could not start.
    """
    # Plan the draws within the budget.
    started = time.perf_counter()
    config = builders.checked_config(config, {})
    train, _, _ = builders.read_prompts(config)
    configured = configured_sampler(config)
    work = work_of(config, world=1)
    readings = readings_of(config, edits=any(prompt.sources for prompt in train))
    design = plan_design(config, configured, options, prompts=len(train), readings=len(readings))

    # Draw, score and split the variance, one candidate after the other.
    drawn = 0
    findings = []
    credit = None
    total = design.samples + options.credit * config.group_size
    with opened(config, design, train, readings, credit=options.credit) as models:
        for candidate in design.candidates:
            score_BJ = draw(models, candidate, configured, seeds=design.seeds)
            findings.append(_finding(config, configured, design, candidate, score_BJ))
            drawn += len(score_BJ)
            advance(drawn, total)
        cost = epoch_cost(models, work, images=drawn)
        if options.credit:
            credit = measure_credit(
                config,
                models.draw(configured),
                models.rewards,
                models.credited,
                advance=lambda groups: advance(drawn + groups * config.group_size, total),
            )

    # Findings, with what the reader should know of them.
    notes = _notes(design, findings[0])
    seconds = {"probe": time.perf_counter() - started, **models.seconds}
    return Findings(design, readings, tuple(findings), cost, tuple(notes), seconds, credit)


def _finding(
    config: PolicyConfig, configured: Sampler, design: Design, candidate: Candidate, score_BJ: Floats
) -> Finding:
    # Only prompts with every score: a nested analysis of variance needs balanced groups.
    whole_P = np.isfinite(score_BJ).reshape(design.prompts, -1).all(1)
    if not whole_P.any():
        raise ValueError(
            f"every prompt of {candidate.name} lacks a score, and nested draws need whole groups; see why the rewards "
            "give none (`pacorl doctor CONFIG`)"
        )
    shape = (design.prompts, design.seeds, *[CHILDREN] * len(candidate.sde_steps), score_BJ.shape[1])
    score_PSMJ = score_BJ.reshape(shape)[whole_P]

    # Split the variance by level.
    rng = np.random.default_rng(seed_of(config.seed, "probe", candidate.name, "None"))
    names = [f"step {step}" for step in candidate.sde_steps]
    variances = nested_variances(score_PSMJ, steps=names, rng=rng)
    counts = level_counts(config, configured, candidate, variances)

    # Training reads each image once: means and likeness come from the first reading.
    read_PG = score_PSMJ[..., 0].reshape(len(score_PSMJ), -1)
    groups = torch.arange(len(read_PG)).repeat_interleave(read_PG.shape[1])
    return Finding(
        candidate,
        float(read_PG.mean()),
        variances,
        variances.signal(counts),
        zero_std_share(torch.from_numpy(read_PG.reshape(-1)), groups),
        int((~whole_P).sum()),
    )


def level_counts(
    config: PolicyConfig, configured: Sampler, candidate: Candidate, variances: Variances
) -> dict[str, int]:
    """Count the distinct draws of each level among the samples that an advantage compares, in the config's tree.

    With another number of stochastic steps, all children are at the first one. With `advantages.among: siblings` the
    samples of one start are compared.
    """
    tree = configured.tree
    steps = len(candidate.sde_steps)
    if steps != len(tree.branches):
        tree = Tree(tree.seeds, (tree.leaves(0), *[1] * (steps - 1)))
    if config.advantages.among == "siblings":
        tree = replace(tree, seeds=1)
    # Distinct latents of each level among the samples of a prompt.
    nodes = []
    for level in range(len(tree.branches) + 1):
        nodes.append(tree.group_size // tree.leaves(level))
    return {**dict(zip(variances.within, nodes, strict=False)), JUDGE: tree.group_size}


def _notes(design: Design, baseline: Finding) -> list[str]:
    notes = [f"left out {reason}" for reason in design.left_out]
    variances = baseline.variances
    if variances.clamped:
        notes.append(f"below 0, and taken as 0: the variance of {', '.join(variances.clamped)}")
    if JUDGE not in variances.names:
        notes.append("the judge read each image once, so that its share is within that of the last stochastic step")
    if baseline.missing_groups:
        notes.append(f"{baseline.missing_groups} of {design.prompts} groups lack a score, and are left out")
    start = variances.share(START)
    if start.high - start.low > WIDE:
        notes.append("the intervals are wide; a budget of several epochs (--epochs) narrows them")
    return notes


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
