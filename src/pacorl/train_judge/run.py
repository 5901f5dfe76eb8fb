"""PaCo-Reward: teach a vision-language model to decide whether two images are consistent, and to say why.

    pacorl train-reward configs/reward/paco_reward_7b.yaml
    accelerate launch --num_processes 8 --no_python pacorl train-reward configs/reward/paco_reward_7b.yaml

Supervised fine-tuning by the weighted likelihood (arXiv 2512.04784, §3.2) on the transformers `Trainer`. A run's
folder holds config.yaml, metrics.jsonl, summary.json, checkpoints/, adapter/ (or model/), and merged/ on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from pacorl.config.base import dump
from pacorl.config.judge_run import RewardRun
from pacorl.engine.logbook import Logbook, check_trackers
from pacorl.engine.runtime import MAX_BAD_STEPS, Interrupted
from pacorl.io.documents import read_jsonl, read_object, write_json
from pacorl.io.files import write_atomic
from pacorl.train_judge.callbacks import (
    MARK,
    Checkpoints,
    Progress,
    RunLog,
    SkipBadSteps,
    StopOnSignal,
    complete_checkpoints,
    step_of,
)
from pacorl.train_judge.data import JudgeData, each_once, in_both_orders, load_data, measure_of
from pacorl.train_judge.model import load_model, merge_and_save, save_processor, source_of, tune
from pacorl.train_judge.trainer import LossSums, WeightedLikelihoodTrainer, processes, training_arguments


class JudgeTrainer:
    """One run of a judge's training, from its config to the saved adapter.

    Example:
        from pacorl import JudgeTrainer, RewardRun

        config = RewardRun(
            out="runs/judge",
            max_steps=2,
            model={"checkpoint": "tiny", "dtype": "float32", "gradient_checkpointing": False},
            data={"train": ["tiny:train:16"], "evaluation": ["tiny:dev:4"], "workers": 0},
            trackers=[],
        )
        folder = JudgeTrainer(config).run()  # folder / "adapter" is what LocalJudge loads
    """

    def __init__(self, config: RewardRun, *, resume: bool = False) -> None:
        """Take a run's config.

        Args:
            config: the run.
            resume: go on from the newest complete checkpoint in the run's folder, if there is one.

        Raises:
            ValueError: the folder holds a run already and `resume` is not set, or a tracker is not installed.
        """
        check_trackers(config.trackers)
        self.config, self.resume = config, resume
        self.checkpoint = _newest_checkpoint(config.out, resume=resume)
        self.sums = LossSums()
        self.stop_on_signal = StopOnSignal()
        self.skip_bad_steps = SkipBadSteps(limit=MAX_BAD_STEPS)

    def run(self) -> Path:
        """Train to the end of the config.

        Returns:
            The run's folder.

        Raises:
            ValueError: something cannot be trained on, or too many gradients in a row were not finite.
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
        """
        # Data and arguments are checked before the folder is touched, and weights load last: faults come early.
        data = load_data(self.config)
        evaluates = bool(data.evaluation)
        arguments = training_arguments(self.config, evaluates=evaluates, resumed=self.checkpoint is not None)
        logbook = self._open_folder()
        try:
            with self.stop_on_signal.listening():
                trainer = build_trainer(
                    self.config, data, arguments, self.sums, self._callbacks(logbook, evaluates=evaluates)
                )
                trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
            self._check_end(trainer)
            self._save(trainer, data.processor)
        finally:
            logbook.close()
        return self.config.out

    def _open_folder(self) -> Logbook:
        """Write the config, and forget the lines that a resumed run is going to write again."""
        config, main = self.config, processes().is_main_process
        settings = config.model_dump(mode="json")
        logbook = Logbook(config.out if main else None, trackers=config.trackers, axis="step", settings=settings)
        if self.resume:
            logbook.rewind(step_of(self.checkpoint) if self.checkpoint else -1)
        if main:
            write_atomic(config.out / "config.yaml", dump(config))
        if self.checkpoint and main:  # one process carries the sums of all
            self.sums.sums = read_object(self.checkpoint / MARK)["tally"]
        return logbook

    def _callbacks(self, logbook: Logbook, *, evaluates: bool) -> list[Any]:
        # In this order: a step's line is written before its checkpoint, whose resumed run begins after the line.
        log = RunLog(logbook, evaluates=evaluates)
        return [
            log,
            Checkpoints(self.sums, keep=self.config.keep_checkpoints),
            self.stop_on_signal,
            self.skip_bad_steps,
        ]

    def _check_end(self, trainer: WeightedLikelihoodTrainer) -> None:
        if self.skip_bad_steps.failure:
            raise ValueError(self.skip_bad_steps.failure)
        if self.stop_on_signal.stopped:
            raise Interrupted(f"stopped after step {trainer.state.global_step}, and saved; go on with --resume")

    def _save(self, trainer: WeightedLikelihoodTrainer, processor: Any) -> None:
        """Write the trained weights and summary.json."""
        config, full = self.config, self.config.tuning.method == "full"
        folder = config.out / ("model" if full else "adapter")
        trainer.save_model(str(folder))
        if not processes().is_main_process:
            return
        for name in ("training_args.bin", "README.md"):  # a pickle, and an empty form; config.yaml says more
            (folder / name).unlink(missing_ok=True)
        base = config.model.checkpoint
        if full:
            save_processor(processor, folder, source=source_of(base))
        elif config.merge:
            merge_and_save(base, folder, config.out / "merged", dtype=config.model.dtype, processor=processor)
        summary = {"steps": trainer.state.global_step, "seed": config.seed} | _first_and_last_evaluation(config.out)
        write_json(config.out / "summary.json", summary)


def build_trainer(
    config: RewardRun, data: JudgeData, arguments: TrainingArguments, sums: LossSums, callbacks: Sequence[Any]
) -> WeightedLikelihoodTrainer:
    """Load the model, make what the config names trainable, and give both to the transformers `Trainer`."""
    set_seed(config.seed)  # the adapter's first weights
    full = config.tuning.method == "full"
    # All weights learn in fp32, under autocast if the config says bfloat16: its steps are too coarse for AdamW's.
    model = tune(load_model(config.model.checkpoint, dtype="float32" if full else config.model.dtype), config.tuning)
    rows = in_both_orders(data.evaluation) if data.evaluation else None
    trainer = WeightedLikelihoodTrainer(
        alpha=None if config.loss.alpha == "uniform" else float(config.loss.alpha),
        yes=data.collator.yes,
        no=data.collator.no,
        sums=sums,
        measure=measure_of(rows, data.evaluation) if rows else _no_metrics,
        model=model,
        args=arguments,
        train_dataset=each_once(data.train),
        eval_dataset=rows,
        data_collator=data.collator,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(Progress())
    return trainer


def _newest_checkpoint(out: Path, *, resume: bool) -> Path | None:
    if resume:
        return next(reversed(complete_checkpoints(out / "checkpoints")), None)
    if (out / "metrics.jsonl").exists() or complete_checkpoints(out / "checkpoints"):
        raise ValueError(f"{out} holds a run already; go on with --resume, or name another folder with out=…")
    return None


def _no_metrics(p_yes: Mapping[int, float]) -> dict[str, float]:
    return {}


def _first_and_last_evaluation(out: Path) -> dict[str, Any]:
    evaluations = [line for line in read_jsonl(out / "metrics.jsonl") if line["kind"] == "evaluation"]
    return {"before": evaluations[0], "after": evaluations[-1]} if evaluations else {}
