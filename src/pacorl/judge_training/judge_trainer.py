"""PaCo-Reward: teach a vision-language model to decide whether two images are consistent, and to say why.

    pacorl train-reward configs/reward/paco_reward_7b.yaml
    accelerate launch --num_processes 8 --no_python pacorl train-reward configs/reward/paco_reward_7b.yaml

Supervised fine-tuning by the weighted likelihood (arXiv 2512.04784, §3.2) on the transformers `Trainer`. A run's
folder holds config.yaml, metrics.jsonl, held_out/, summary.json, report.html, checkpoints/, adapter/, and merged/ on
request.
"""

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, modeling_utils, set_seed
from transformers import __version__ as transformers_version
from transformers.trainer_callback import PrinterCallback

from pacorl.config.base import changes_to, check_changes, check_replaces
from pacorl.grpo.checkpoint import newest_whole
from pacorl.io.documents import read_object, read_yaml, typed, write_json
from pacorl.io.files import (
    aside_of,
    check_digests,
    check_start,
    disk_errors,
    open_aside,
    own_folder,
    replacing,
    weight_write_errors,
)
from pacorl.judge.decision import save_decision
from pacorl.judge_training.examples import JudgeData, load_data, rows_of
from pacorl.judge_training.held_out import ACCURACY, HeldOut
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.loop import DIGESTS, WeightedLikelihoodTrainer, processes, training_arguments
from pacorl.judge_training.tuning import load_model, merge_and_save, tune
from pacorl.runtime.logbook import Logbook, Progress
from pacorl.runtime.processes import MAX_BAD_STEPS, lost_ranks
from pacorl.runtime.stopping import Interrupted, StopSignals

logger = logging.getLogger(__name__)

FREE_KEYS = (
    *("out", "log_every", "evaluate_every", "save_every", "merge", "trackers"),
    *("model.gradient_checkpointing", "data.evaluation", "data.evaluation_limit", "data.workers"),
    "optimizer.micro_batch",  # it changes the rounding of sums alone
)
"""Config keys that a resumed run may change; not its length, which determines the learning rate's cosine."""
UNUSED_FILES = ("training_args.bin", "README.md")
"""Further files by transformers and PEFT: a pickle, and an empty form (config.yaml contains more)."""
NOTHING_HELD_OUT = "No pairs were held out, so nothing says whether the judge has improved."
UNLOGGED = ("epoch", "runtime", "samples_per_second", "steps_per_second")


class JudgeTrainer:
    """One run of a judge's training, from its config to the saved adapter.

    Example:
        from pacorl import JudgeTrainer, JudgeConfig

        config = JudgeConfig(
            out="runs/judge",
            max_steps=2,
            model={"checkpoint": "tiny", "dtype": "float32", "gradient_checkpointing": False},
            data={"train": ["tiny:train:16"], "evaluation": ["tiny:dev:4"], "workers": 0},
            trackers=[],
        )
        folder = JudgeTrainer(config).train()  # LocalJudge loads folder / "adapter"
    """

    def __init__(self, config: JudgeConfig, *, resume: bool = False) -> None:
        """Take a run's config.

        Args:
            resume: go on from the newest whole checkpoint in the run's folder, if there is one.

        Raises:
            ValueError: transformers is too old, or the folder holds a run already and `resume` is not set.
        """
        # Everything else runs with transformers 5.17.
        if not hasattr(modeling_utils, "slice_logits_to_keep"):
            raise ValueError(f"training a judge needs transformers 5.23, and this is {transformers_version}; update it")
        self.config = config
        check_start(config.out, resume=resume)
        existing = checkpoints(config.out / "checkpoints") if resume else []
        self.checkpoint = newest_whole(existing, check_whole) if existing else None
        """The checkpoint for resuming; None at the start."""
        if self.checkpoint:
            changes = changes_to(config, read_yaml(config.out / "config.yaml"))
            check_changes(changes, free=FREE_KEYS, lora_key="tuning.start", warns=processes().is_main_process)
        else:
            check_replaces(config)

    def train(self) -> Path:
        """Train to the end of the config; return the run's folder.

        Raises:
            ValueError: for invalid data, or too many non-finite gradients in a row.
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
        """
        rank = processes().process_index
        with (
            lost_ranks(rank, processes().num_processes),
            own_folder(self.config.out) if processes().is_main_process else nullcontext(),
            disk_errors(self.config.out),
        ):
            return self._run()

    def _run(self) -> Path:
        # Check data and arguments before changing the folder, and load weights last, for early faults.
        data = load_data(self.config)
        held_out = HeldOut(data.evaluation, self.config.out / "held_out")
        evaluates = bool(data.evaluation)
        arguments = training_arguments(self.config, evaluates=evaluates, resumed=self.checkpoint is not None)
        # Log lines that a resumed run will write again are dropped.
        step = step_of(self.checkpoint) if self.checkpoint else -1
        main = processes().is_main_process
        logbook = Logbook(self.config, step=step, main=main)
        keeper = RunKeeper(logbook, StopSignals(), evaluates=evaluates)
        try:
            # A run may have been stopped after its last step.
            with keeper.signals, suppress(AlreadyTrained):
                trainer = build_trainer(self.config, data, held_out, arguments, callbacks=[keeper])
                trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
            if keeper.failure:
                raise ValueError(keeper.failure)
            if keeper.stopped:
                step = trainer.state.global_step
                raise Interrupted(f"stopped after step {step}, and saved; go on with --resume auto")
            self._save(trainer, data.collator.processor)
            if processes().is_main_process:
                summary = {"steps": trainer.state.global_step, "seed": self.config.seed}
                measured = held_out.summary() if evaluates else {"verdict": [NOTHING_HELD_OUT]}
                write_json(self.config.out / "summary.json", summary | measured)
        finally:
            logbook.close()
        return self.config.out

    def _save(self, trainer: WeightedLikelihoodTrainer, processor: Any) -> None:
        """Write the trained weights."""
        config = self.config
        # Save to a temporary folder.
        folder = config.out / "adapter"
        if processes().is_main_process:
            open_aside(folder)
        processes().wait_for_everyone()
        aside = aside_of(folder)
        if trainer.is_fsdp_enabled:  # of sharded weights the Trainer saves nothing
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        with weight_write_errors(folder):
            trainer.save_model(str(aside))
        if not processes().is_main_process:
            return

        # Move file by file: a user's own files in the folder, such as a model card, stay.
        save_decision(aside, processor)
        for path in sorted(aside.iterdir()):
            if path.name not in UNUSED_FILES:
                with replacing(folder / path.name) as temporary:
                    path.replace(temporary)
        shutil.rmtree(aside)

        if config.merge:
            source, dtype = config.model.checkpoint, config.model.dtype
            merge_and_save(source, folder, config.out / "merged", dtype=dtype, processor=processor)


def build_trainer(
    config: JudgeConfig, data: JudgeData, held_out: HeldOut, arguments: TrainingArguments, *, callbacks: Sequence[Any]
) -> WeightedLikelihoodTrainer:
    """Build the transformers `Trainer` with the loaded model, its trainable weights and the data."""
    # The model.
    set_seed(config.seed)  # the adapter's first weights
    model = tune(load_model(config.model.checkpoint, dtype=config.model.dtype), config.tuning)

    # The trainer.
    trainer = WeightedLikelihoodTrainer(
        loss=config.loss,
        measure=held_out.measure,
        model=model,
        args=arguments,
        train_dataset=rows_of(data.train),
        eval_dataset=held_out.rows,
        data_collator=data.collator,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that were written to the end, oldest first."""
    return sorted((path.parent for path in folder.glob(f"checkpoint-[0-9]*/{DIGESTS}")), key=step_of)


def check_whole(checkpoint: Path) -> None:
    """Raise ValueError, naming the file, if a checkpoint is damaged."""
    check_digests(checkpoint, typed(read_object(checkpoint / DIGESTS), dict[str, str]))


def step_of(checkpoint: Path) -> int:
    """Parse the optimizer step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


class AlreadyTrained(Exception):
    """The checkpoint has every step; transformers would take one more if `max_steps` ends within an epoch."""


class RunKeeper(TrainerCallback):  # type: ignore[misc]
    """Callback for the log, non-finite gradients, and signals."""

    def __init__(self, logbook: Logbook, signals: StopSignals, *, evaluates: bool) -> None:
        self.logbook = logbook
        self.signals = signals
        self.evaluates = evaluates
        self.progress = Progress(epochs=0, shown=logbook.folder is not None)
        self.stopped = False
        self.bad_steps = 0
        self.failure = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End a resumed training that has no step left."""
        if state.global_step >= state.max_steps:
            raise AlreadyTrained

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Skip a step with non-finite gradients, on all processes."""
        # All processes must agree, since a skipped step would part their weights.
        bad = 0.0
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                bad = 1.0
        if not reduce(torch.tensor(bad, device=args.device), "sum").item():
            self.bad_steps = 0
            return
        self.bad_steps += 1
        for parameter in model.parameters():
            parameter.grad = None  # AdamW skips it: neither weights nor moments change

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Log, evaluate and save at the last step; stop after a signal or too many bad steps in a row."""
        # The end of the run.
        if state.global_step >= state.max_steps:
            control.should_log = control.should_save = True
            control.should_evaluate = self.evaluates

        # A signal may reach only one process, and all must stop at the same step, before the next collective.
        if reduce(torch.tensor(float(self.signals.told), device=args.device), "sum").item():
            self.stopped = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True

        # A diverged run.
        if self.bad_steps >= MAX_BAD_STEPS:
            self.failure = (
                f"{self.bad_steps} optimizer steps in a row had gradients that are not finite; the state is saved. "
                "Lower optimizer.lr or look for an image or answer that is broken"
            )
            control.should_save = control.should_training_stop = True

        # A checkpoint ends a line of the log, so that a resumed run logs the same lines.
        control.should_log |= control.should_save
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the Trainer's logs as lines of kind `train` and `evaluation`."""
        # The Trainer logs both kinds, and its own sum of a run, through one callback.
        values = {name.removeprefix("eval_"): number for name, number in (logs or {}).items()}
        if "train_runtime" in values:
            return
        kind = "evaluation" if "runtime" in values else "train"
        for name in UNLOGGED:
            values.pop(name, None)

        # The epoch from the step, since the Trainer's own epoch is rounded.
        share = state.global_step / state.max_steps * state.num_train_epochs
        self.logbook.write(kind, epoch=math.floor(share + 1e-9), step=state.global_step, values=values)
        # A terminal has the Trainer's bar.
        if args.disable_tqdm:
            accuracy = values.get(ACCURACY, 0.0)
            self.progress.say(f"{kind}, step {state.global_step} of {state.max_steps}, accuracy {accuracy:.3f}")
