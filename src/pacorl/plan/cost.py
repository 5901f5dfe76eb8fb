"""FLOPs and bytes of a run, and the time that they take on a card by a roofline.

A pass is measured on meta tensors at the run's batch, and multiplied by the number of times that the run makes it. Each
question to a judge is counted by itself: prefix caches make judging cheaper than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacorl.core.devices import NONE
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import split_address
from pacorl.models.int8 import streamed_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import memory, sources
from pacorl.plan.generators import Inputs
from pacorl.plan.work import Work
from pacorl.rewards.consistency import JudgedReward
from pacorl.types import Character, Grid, Prompt, Size

PRODUCTS_SHARE = 0.5
"""Share of a card's peak that the products of a phase are assumed to reach; not measured."""
COPIES_SHARE = 0.8
"""Share of the rates of memory and bus that copies are assumed to reach; not measured."""
MUCH = 0.25
"""Share of a run's FLOPs above which its evaluations deserve a note."""
LITTLE = 1e17
"""FLOPs of evaluation below which no note is made: six minutes of an H100."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a phase."""

    flops: float
    moved: float = 0.0
    """Bytes that kernels read and write in the card's memory."""
    sent: float = 0.0
    """Bytes of streamed weights, from main memory."""

    def __add__(self, other: Load) -> Load:
        return Load(self.flops + other.flops, self.moved + other.moved, self.sent + other.sent)

    def __mul__(self, count: float) -> Load:
        return Load(self.flops * count, self.moved * count, self.sent * count)


@dataclass(frozen=True, slots=True)
class Card:
    """A card by the name that torch reports."""

    name: str
    gigabytes: int
    """10^9 bytes."""
    tflops: float
    """Peak of dense bf16 products that are summed in fp32, in TFLOP/s."""
    memory_rate: float
    """Peak of the card's memory, in 10^9 bytes/s."""
    bus_rate: float
    """Peak of 16 PCIe lanes in one direction, in 10^9 bytes/s."""


CARDS = (
    Card("NVIDIA GeForce RTX 3060", 12, 25.5, 360, 31.5),
    Card("NVIDIA GeForce RTX 4080", 16, 97.5, 717, 31.5),
    Card("NVIDIA GeForce RTX 4090", 24, 165.2, 1008, 31.5),
    Card("NVIDIA L40S", 48, 362.0, 864, 31.5),
    Card("NVIDIA A100-SXM4-80GB", 80, 312.0, 2039, 31.5),
    Card("NVIDIA H100 80GB HBM3", 80, 989.4, 3350, 63),
    Card("NVIDIA H200", 141, 989.4, 4800, 63),
)
"""From NVIDIA's data sheets of A100, H100, H200 and L40S, and its whitepaper of the AD102. The RTX 3060's follows from
the whitepaper of the GA102: 512 FLOP a cycle on each of 28 multiprocessors at 1.78 GHz."""


def roofline(card: Card, load: Load) -> tuple[float, str]:
    """Return the seconds of a phase on a card, and what bounds it: its products, the card's memory or the bus.

    The three overlap: the slowest alone counts.
    """
    seconds = {
        "products": load.flops / (PRODUCTS_SHARE * card.tflops * 1e12),
        "memory": load.moved / (COPIES_SHARE * card.memory_rate * 1e9),
        "bus": load.sent / (COPIES_SHARE * card.bus_rate * 1e9),
    }
    bound = max(seconds, key=seconds.__getitem__)
    return seconds[bound], bound


def roofline_seconds(card: Card, loads: Iterable[Load]) -> float:
    """Add up the seconds of phases that follow each other on a card."""
    return sum(roofline(card, load)[0] for load in loads)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a run on all its processes; plain numbers are FLOPs."""

    phases: Mapping[str, Load]
    """Of a training image, from noise to its share of the update."""
    judged: Load
    """Of all questions about a training image; nothing if no reward asks a judge."""
    questions: int
    judges_here: bool
    """Whether the judge computes on the cards of the run."""
    judge_servers: int
    """Servers of the judge; 0 for a judge of this process."""
    samples: int
    """Training images of an epoch."""
    epochs: int
    evaluations: tuple[Load, ...]
    """Of each evaluation, in the order of the run."""
    world: int
    """Processes of the run."""

    @property
    def image(self) -> float:
        """Of a training image, without the judge's."""
        return sum(load.flops for load in self.phases.values())

    @property
    def epoch_phases(self) -> dict[str, Load]:
        """Work of an epoch by phase, with the judge's if it computes on the cards of the run."""
        phases = dict(self.phases)
        if self.judges_here:
            phases["judging"] = self.judged
        return {phase: load * self.samples for phase, load in phases.items()}

    @property
    def epoch(self) -> float:
        """Of an epoch."""
        return sum(load.flops for load in self.epoch_phases.values())

    @property
    def judge_cards(self) -> int:
        """Cards that judge as fast as the processes train."""
        return math.ceil(self.world * self.judged.flops / self.image)

    @property
    def balance_line(self) -> str:
        """Judge cards per trainer in one line, if both sides reach the same share of a card's peak."""
        cards, keep = f"{self.judge_cards} judge cards of the trainers' kind", "keep"
        if self.judge_cards == 1:
            cards, keep = "1 judge card of the trainers' kind", "keeps"
        judged = self.judged.flops
        return (
            f"balance: an image takes {self.image / 1e12:.0f} TFLOP of training and {judged / 1e12:.1f} of judging "
            f"({self.questions} questions); {cards} {keep} up with {self.world} that train, and one with "
            f"{self.image / judged:.1f}"
        )

    @property
    def evaluation(self) -> float:
        """Of all evaluations."""
        return sum(load.flops for load in self.evaluations)

    @property
    def total(self) -> float:
        """Of the whole run."""
        return self.epochs * self.epoch + self.evaluation

    @property
    def evaluation_share(self) -> float:
        """Share of the evaluations in the whole run."""
        return self.evaluation / self.total

    @property
    def evaluation_line(self) -> str:
        """The evaluations in one line."""
        return (
            f"evaluation: {len(self.evaluations)} evaluations are {self.evaluation_share:.0%} of the run's FLOPs, "
            f"{self.evaluation / 1e15:.3g} of {self.total / 1e15:.3g} PFLOP"
        )

    def hours(self, card: Card) -> float:
        """Hours of the run with such a card for each process; an evaluation counts as one phase."""
        epoch = roofline_seconds(card, self.epoch_phases.values())
        seconds = self.epochs * epoch + roofline_seconds(card, self.evaluations)
        return seconds / self.world / 3600

    def time_line(self, cards: Sequence[Card], setting: str = "") -> str:
        """The hours on some cards in one line; `setting` follows the word "hours"."""
        hours = ", ".join(f"{self.hours(card):.3g} on {card.name}" for card in cards)
        return f"hours{setting}, computed by a roofline at {PRODUCTS_SHARE:.0%} of the peak in bf16: {hours}"

    def warnings(self) -> list[str]:
        """Notes about costly evaluations and a slow judge."""
        notes = []
        if self.evaluation > LITTLE and self.evaluation_share > MUCH:
            notes.append(
                f"evaluation takes {self.evaluation_share:.0%} of the run's FLOPs: lower evaluation.size, "
                "evaluation.steps or prompts.evaluation_limit, or raise evaluation.every"
            )
        if self.judge_cards > self.judge_servers > 0:
            notes.append(
                f"the judge is the slower side: its servers are {self.judge_servers}, and {self.judge_cards} cards "
                f"would keep up with {self.world} processes that train; serve it on more cards, or train on fewer"
            )
        return notes


def cost_of(
    config: PolicyConfig,
    *,
    work: Work,
    inputs: Inputs,
    judge: Parts,
    prompts: Sequence[Prompt],
    evaluated: int,
    world: int,
) -> Cost:
    """Count the FLOPs and bytes of a run.

    Args:
        config: the run.
        work: its forwards.
        inputs: of the policy on the meta device, with the run's adapter.
        judge: parts of the judge; empty for a judge behind HTTP, for which the published one is assumed.
        prompts: training prompts; without them a grid of 2 × 2 with one reference is assumed.
        evaluated: number of prompts of an evaluation; 0 if they are absent, for which the limit is assumed.
        world: number of processes.
    """
    policy = inputs.policy
    # Questions of the judge per training image.
    shown = (Character("", "", (Path(),)),)
    prompt = prompts[0] if prompts else Prompt(0, "", grid=Grid(2, 2), characters=shown)
    rewards = [reward for key, reward in sources.rewards_of(config) if not key.startswith("evaluation.")]
    questions = sum(reward.questions(prompt) for reward in rewards if isinstance(reward, JudgedReward))
    questions = questions if config.judge else 0
    here = bool(questions and config.judge and not config.judge.remote)
    size, full = (policy.nearest_size(Size(*sides)) for sides in (config.sampling.size, config.evaluation.size))

    # A training image: `forwards_per_image` counts a guided velocity as two forwards, and a measured pass has both.
    sent = work.passes * streamed_bytes(policy.transformer)
    forward = _velocity(inputs, size, config.sampling.batch, sent=sent)
    # Weights are sent for the forwards of a trained step and for its backward.
    nodes = work.node_batch or config.sampling.batch
    sampler = work.sampler.model_copy(update={"size": size})
    step = memory.training_pass(inputs, sampler=sampler, batch=nodes, with_base=False)
    trained = _per_image(step, nodes, sent=sent * (3 if config.model.gradient_checkpointing else 2))
    velocities = {}
    for phase, count in work.forwards_per_image.items():
        velocities[phase] = count / work.passes
    phases = {
        "sampling": forward * velocities["sampling"],
        "training": trained * velocities["training"] + forward * velocities["other_policies"],
        "decoding": _decoding(inputs, size),
    }
    judged = _judged(config, judge, prompt, questions, size)

    # An image of an evaluation.
    evaluation = _velocity(inputs, full, config.evaluation.batch, sent=sent) * config.evaluation.steps
    evaluation += _decoding(inputs, full)
    # Judges in other processes cost this machine no FLOPs.
    if here:
        evaluation += _judged(config, judge, prompt, questions, full)

    return Cost(
        phases=phases,
        judged=judged,
        questions=questions,
        judges_here=here,
        judge_servers=_servers(config) if questions else 0,
        samples=work.samples,
        epochs=_epochs(config),
        evaluations=_evaluations(config, evaluation, evaluated or config.prompts.evaluation_limit),
        world=world,
    )


def _velocity(inputs: Inputs, size: Size, batch: int, *, sent: int) -> Load:
    """Measure an image's share of a velocity, for which so many bytes of weights are sent."""
    return _per_image(memory.sampling_pass(inputs, size=size, batch=batch), batch, sent=sent)


def _decoding(inputs: Inputs, size: Size) -> Load:
    """Measure the decoding of an image."""
    return _per_image(memory.decoding_pass(inputs, size=size, batch=1), 1)


def _per_image(measured: memory.MemoryLedger | memory.JudgeCost, count: int, *, sent: int = 0) -> Load:
    """Divide a pass of `count` images; meta tensors stand for main memory too, from which `sent` bytes were read."""
    return Load(measured.flops, measured.moved - sent, sent) * (1 / count)


def _judged(config: PolicyConfig, judge: Parts, prompt: Prompt, questions: int, size: Size) -> Load:
    """Measure some questions about an image of this size, each by itself."""
    if not questions or config.judge is None:
        return Load(0)
    panel = Size(size.height // prompt.grid.rows, size.width // prompt.grid.cols)
    asked = questions * (1 + config.judge.symmetric)
    if config.judge.remote:
        configs = judge or sources.published_judge(config.judge.name)[1]
        served = memory.judge_cost(configs, dtype="bfloat16", quantize=NONE, questions=1, panel=panel)
        return _per_image(served, 1) * asked
    cost, batch = memory.judge_batch(config.judge, judge, panel=panel)
    return _per_image(cost, batch, sent=cost.streamed) * asked


def _servers(config: PolicyConfig) -> int:
    """Count the judge's servers."""
    if config.judge is None or not config.judge.remote:
        return 0
    return len(split_address(config.judge.checkpoint)[0])


def _epochs(config: PolicyConfig) -> int:
    """Epochs of the run, which `max_steps` may end earlier."""
    if not config.max_steps:
        return config.epochs
    return min(config.epochs, math.ceil(config.max_steps / config.optimizer.updates_per_epoch))


def _evaluations(config: PolicyConfig, image: Load, prompts: int) -> tuple[Load, ...]:
    """Work of each evaluation: before the first epoch, after the last, and every so many between."""
    options = config.evaluation
    between = (_epochs(config) - 1) // options.every if options.every else 0
    return (image * (prompts * options.samples_per_prompt),) * (between + 2)
