"""A PaCo-GRPO run: the sections of its config and their defaults, the paper's for FLUX.1-dev."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from pacorl.config.base import Positive, Section, Seed, TrackerName
from pacorl.config.options import LARGEST, Memory
from pacorl.config.reward_section import MeasureConfig, RewardConfig
from pacorl.core.advantages import AdvantageOptions
from pacorl.core.objectives import OBJECTIVES, ObjectiveOptions, ObjectiveSpec
from pacorl.core.sampler import Sampler, Steps, Suffix, Tree, TreeOptions
from pacorl.core.schedule import NoiseWindow
from pacorl.core.sde import check_sde_steps
from pacorl.grpo.lora_config import AdamWConfig, AdapterConfig, LoraConfig
from pacorl.judge import JudgeSection
from pacorl.judge.judge import JudgeSettings
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.types import Size

NODES_OF_STEP = 4
"""One image of 512 px leaves a card idle for half of the time, four fill it; each of them takes memory in training."""
MonitorAction = Literal["off", "warn", "stop"]


class PromptsConfig(Section):
    """Training and evaluation prompts."""

    train: str = "data/t2is/train.jsonl"
    """A JSONL of T2IS records or of {theme, panels}, a text file of one prompt or sentence a line, or
    `tiny:train|dev|test`."""
    evaluation: str = "data/t2is/test.jsonl"
    """Evaluation prompts, named like `train`. None of them may be trained on, unless `evaluation` names the training
    prompts themselves."""
    evaluation_limit: Positive = 64
    """At most so many evaluation prompts, evenly spread over the file."""


class SamplingConfig(Section):
    """Sampling of training images: at a low resolution, with a few stochastic steps."""

    size: tuple[Positive, Positive] = (512, 512)
    """Height and width."""
    steps: Steps = 10
    """Denoising steps from noise to image."""
    sde_type: Literal["flow_sde", "cps"] = "flow_sde"
    """The stochastic step: Flow-GRPO's, or coefficients-preserving sampling."""
    noise_level: float = Field(0.7, gt=0)
    """a in σ_t = a·√(t/(1−t))."""
    sde_steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (1,)
    """Indices of the sampling steps that are stochastic, and trained. An objective of the endpoint noises endpoints to
    their sigmas, under the shift of the checkpoint's own training, and samples without noise, except to branch a tree
    of fewer seeds than samples."""
    suffix: Suffix = Suffix()
    window: NoiseWindow = NoiseWindow()
    tree: TreeOptions = TreeOptions()
    """Branching of a group's samples; by default independent noise, as in the paper."""
    batch: Positive = 1
    """Samples per forward, at most: of smaller batches, the largest that divides over updates and processes is
    taken."""

    @model_validator(mode="after")
    def _makes_sense(self) -> SamplingConfig:
        if list(self.sde_steps) != sorted(set(self.sde_steps)):
            raise ValueError(f"sde_steps {list(self.sde_steps)} must be ascending and distinct")
        if self.sde_steps[-1] >= self.steps:
            raise ValueError(f"sde_steps {list(self.sde_steps)} reach beyond the {self.steps} sampling steps")
        if self.window.kind != "fixed" and self.window.size > len(self.sde_steps):
            raise ValueError(
                f"window.size {self.window.size} exceeds the {len(self.sde_steps)} sde_steps that it is chosen from"
            )
        return self

    @property
    def stochastic_steps(self) -> int:
        """Number of stochastic steps in an epoch."""
        return len(self.sde_steps) if self.window.kind == "fixed" else self.window.size

    def sampler(self, epoch: int, *, group_size: int, seed: int, spec: ObjectiveSpec) -> Sampler:
        """Create the sampler of an epoch."""
        # An objective of the endpoint needs no noise, except to branch a tree.
        tree = self.tree.resolve(group_size, steps=self.stochastic_steps)
        stochastic = spec.needs == "path" or tree.seeds < group_size
        return Sampler(
            size=Size(*self.size),
            steps=self.steps,
            sde_type=self.sde_type,
            noise_level=self.noise_level,
            sde_steps=self.window.at(epoch, self.sde_steps, seed=seed),
            suffix=self.suffix,
            tree=tree if stochastic else Tree(group_size),
            stochastic=stochastic,
            keeps_means=spec.keeps_means,
        )


class EvaluationConfig(Section):
    """Evaluation of the policy at full resolution, without noise."""

    size: tuple[Positive, Positive] = (1024, 1024)
    """Height and width in pixels."""
    steps: Steps = 20
    """Denoising steps."""
    every: int = Field(10, ge=0)
    """Epochs between evaluations; 0 for only before and after."""
    samples_per_prompt: Annotated[int, Field(gt=0, le=1000)] = 1
    """Images per prompt, each from its own noise."""
    batch: Positive = 1
    """Images per forward."""
    rewards: tuple[MeasureConfig, ...] = ()
    """Rewards that are evaluated but not trained on; logged as held_out/…."""
    judge: str = ""
    """Checkpoint or address of the judge that answers for them: another model than the one that rewards, with the other
    settings of `judge`; empty for the same. It is neither reached nor loaded if they ask no judge."""


class OptimizerConfig(AdamWConfig):
    """AdamW, the adapter's moving average, and the updates of an epoch."""

    updates_per_epoch: Positive = 2
    """Optimizer steps per epoch, each on its share of the groups."""


class PolicyConfig(LoraConfig):
    """A PaCo-GRPO run, by default with the paper's values.

    Example:
        from pacorl import PolicyConfig

        config = PolicyConfig(epochs=20, group_size=8, model={"checkpoint": "tiny"}, rewards=[{"name": "consistency"}])
    """

    out: Path = Path("runs/policy")
    """The run's folder: log, images, page, checkpoints and adapter."""
    seed: Seed = 42
    """Every random draw follows from it."""
    epochs: Positive = 100
    """The run ends after so many."""
    prompts_per_epoch: Positive = 42
    """Groups that are sampled in an epoch."""
    group_size: Annotated[int, Field(ge=2, le=LARGEST)] = 16
    """Samples per prompt, which are compared with one another."""
    save_every: Positive = 1
    """Epochs between checkpoints, which are written while the next epoch is sampled."""
    keep_checkpoints: Positive = 3
    """Number of newest checkpoints to keep, besides the best."""
    monitor: MonitorAction = "warn"
    """Action if a sign of reward hacking goes beyond its limit: none, a warning, or the end of the run, saved."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Services that show the curves in addition to report.html; they require the extra `trackers`."""

    processes: Positive = 1
    """Processes that the run is written for, a card each: a plan computes hours for so many. A run has as many as
    accelerate or torchrun starts."""
    memory: Memory = "normal"
    """low: for a card of 16 to 24 GB. The frozen weights of the generator's and the judge's blocks are kept in int8, in
    sampling and in training alike, and generator and judge take turns on the device, so that scores are not computed
    while samples are drawn. lowest: for 8 to 12 GB; these weights and those of the text encoders also stay in main
    memory, and each is sent to the card when its layer computes: a forward sends all of them once."""

    # Defaults of tables are factories: the entry's file is imported when a config is made, and not with this one.
    model: Annotated[PolicyOptions, POLICIES] = Field(default_factory=POLICIES.default_options)
    adapter: AdapterConfig = AdapterConfig()
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    judge: JudgeSection = JudgeSettings()
    """Judge of the rewards' questions, or `none`. It is neither reached nor loaded unless a reward or a measure of
    the evaluation asks it."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (
        RewardConfig(name="consistency", weight=0.2),
        RewardConfig(name="panel_match", weight=0.8),
    )
    reward_timeout: float = Field(600.0, gt=0)
    """Seconds that a reward or judge of this process may take for a batch. An evaluation asks about all images of a
    process at once, and each of its batches adds as many. Beyond, the run saves and ends with exit code 75. Servers
    have limits of their own."""
    advantages: AdvantageOptions = AdvantageOptions()
    """Advantages from rewards."""
    objective: Annotated[ObjectiveOptions, OBJECTIVES] = Field(default_factory=OBJECTIVES.default_options)
    """Training objective."""
    optimizer: OptimizerConfig = OptimizerConfig()
    _held_out_judge: JudgeSettings | None = PrivateAttr(None)

    @property
    def held_out_judge(self) -> JudgeSettings | None:
        """Settings of `evaluation.judge`: the other ones are the run's, also if its own judge is idle. None without."""
        return self._held_out_judge if self.evaluation.judge else None

    @property
    def nodes_of_step(self) -> int:
        """Nodes that share a forward of a trained step, at least: of several prompts, if need be."""
        return NODES_OF_STEP if self.memory == "normal" else 1

    @model_validator(mode="after")
    def _makes_sense(self) -> PolicyConfig:
        # Judges of the run.
        judge = self.judge.in_memory(self.memory) if self.judge else None
        self.__dict__["judge"] = judge  # a frozen model's own field
        changes = {"checkpoint": self.evaluation.judge}
        self._held_out_judge = (judge or JudgeSettings()).model_copy(update=changes)

        for key, rewards in (("rewards", self.rewards), ("evaluation.rewards", self.evaluation.rewards)):
            # Curves, tables and absences are keyed by these names.
            names = [reward.key for reward in rewards]
            if len(set(names)) < len(names):
                raise ValueError(f"{key} {names} name one reward twice; give one of them another label")
        # Raises if the tree does not fit the group.
        sampling = self.sampling
        tree = sampling.tree.resolve(self.group_size, steps=sampling.stochastic_steps)
        is_path = OBJECTIVES[self.objective.name].needs == "path"
        is_stochastic = is_path or tree.seeds < self.group_size
        for last in sampling.sde_steps[sampling.stochastic_steps - 1 :] if is_stochastic else [-1]:
            sampling.suffix.grid(last + 1, sampling.steps)
        # A step without noise has no likelihood to train, and branches nothing.
        if is_stochastic:
            check_sde_steps(
                sampling.sde_type, sampling.sde_steps, steps=sampling.steps, noise_level=sampling.noise_level
            )
        return self
