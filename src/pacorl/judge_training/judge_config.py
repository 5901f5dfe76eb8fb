"""A PaCo-Reward run: the sections of its config and their defaults, the paper's."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pacorl.config.base import Positive, Rank, Section, Seed, TrackerName
from pacorl.config.options import LARGEST, WORKERS
from pacorl.core.objectives.decision_weighted import Form


class RewardModelConfig(Section):
    """The trained judge."""

    checkpoint: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    """A transformers folder of a Qwen-VL family, a hub name, or `tiny` for the committed judge."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the frozen weights; adapters are always fp32."""
    max_pixels: int = Field(2_097_152, ge=0)
    """Maximum pixels of an image; larger images are shrunk. 0 for the checkpoint's own limit."""
    gradient_checkpointing: bool = True
    """Whether activations are computed again in the backward, for less memory."""


class RewardTuningConfig(Section):
    """LoRA on the language model's linear layers; the vision tower stays frozen."""

    rank: Rank = 32
    """r of the added product BA."""
    alpha: Positive = 64
    """α of the adapter's scale α/r."""
    start: str = ""
    """Initial adapter of this shape: a folder or a hub name, in either spelling of its keys."""


class ComparisonsConfig(Section):
    """Training and evaluation data."""

    train: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "data/PaCo-Dataset:consistency_reward_cot_train",
        "data/PaCo-Dataset:sharegpt_editing_cot",
    )
    """Sources: FILE.jsonl, FOLDER:NAME, FILE.json or tiny:train."""
    evaluation: tuple[str, ...] = ("data/PaCo-Dataset:consistency_reward_cot_test",)
    """Sources; empty for none."""
    evaluation_limit: Positive = 512
    """Maximum number of comparisons per evaluation source, evenly spread."""
    workers: int = Field(4, ge=0, le=WORKERS)
    """Number of processes for image preparation; 0 for the training process itself."""


class DecisionLossConfig(Section):
    """The weighted likelihood (§3.2)."""

    form: Form = "mean"
    """mean: the paper's second version, in which the decision has α of each comparison's weight. sum: the article's
    plain sum over tokens. released: the released code's, divided by the batch's tokens."""
    alpha: Annotated[float, Field(gt=0, le=1)] | Literal["uniform"] = 0.1
    """Weight of the decision token, which is the score; further tokens share the rest. `uniform` weighs all alike:
    plain SFT."""
    target: Literal["reasons", "label"] = "reasons"
    """Target text: decision and reasons; or `Yes.` or `No.` (the paper's Fast judge)."""


class RewardOptimizerConfig(Section):
    """AdamW without weight decay, under a cosine schedule with warm-up."""

    lr: float = Field(2e-4, gt=0, le=1)
    """AdamW's learning rate, at its highest."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm; 0 for no clipping."""
    warmup: float = Field(0.1, ge=0, lt=1)
    """Warm-up's share of the steps."""
    batch: Positive = 8
    """Comparisons per optimizer step, over all processes."""
    micro_batch: Positive = 8
    """Maximum comparisons per forward; affects memory and time, not the result."""


class JudgeConfig(Section):
    """A PaCo-Reward run (arXiv 2512.04784, §7): LoRA r 32 on Qwen2.5-VL-7B, lr 2e-4, batch 8, 2 epochs, α = 0.1."""

    out: Path = Path("runs/reward")
    """The run's folder: log, page, checkpoints and adapter."""
    seed: Seed = 42
    """Seed of every random draw."""
    epochs: float = Field(2.0, gt=0, le=LARGEST)
    """Passes over the comparisons; a fraction is a part of one."""
    max_steps: int = Field(0, ge=0, le=LARGEST)
    """Maximum optimizer steps; 0 for the end of the epochs."""
    log_every: Positive = 10
    """Optimizer steps between lines of the log."""
    evaluate_every: int = Field(500, ge=0)
    """Optimizer steps between evaluations; 0 for only before and after."""
    save_every: Positive = 500
    """Optimizer steps between checkpoints; the newest two are kept."""
    merge: bool = False
    """Whether to save merged weights too, which vLLM serves without an adapter."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers of curves, in addition to report.html; the services need the extra `trackers`."""

    model: RewardModelConfig = RewardModelConfig()
    tuning: RewardTuningConfig = RewardTuningConfig()
    data: ComparisonsConfig = ComparisonsConfig()
    loss: DecisionLossConfig = DecisionLossConfig()
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()
