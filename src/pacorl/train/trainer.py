"""PaCo-GRPO: paint groups, judge them, and make what was better than its group more likely.

    pacorl train-policy configs/flux_t2is.yaml

One epoch: draw `prompts_per_epoch` groups at the training size with a few stochastic steps, score them, turn scores
into advantages, take `updates_per_epoch` optimizer steps. Evaluation is at full size, without noise, with the
averaged adapter (arXiv 2512.04784, §3.3 and §7).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pacorl.config import base as configs
from pacorl.config.policy_run import PolicyRun
from pacorl.core.advantages import advantages
from pacorl.core.objectives import RATIO_DEVIATION
from pacorl.core.sampling import Sampler
from pacorl.core.schedule import learning_rate
from pacorl.data.leaks import check_leaks
from pacorl.data.records import prompts_from
from pacorl.engine.adapter_check import check_adapter
from pacorl.engine.logbook import Logbook
from pacorl.engine.monitor import HackingMonitor
from pacorl.engine.progress import Bars
from pacorl.engine.rollout import ConditioningCache, Row, assign_groups, check_mixed_sizes, collect, epoch_rows
from pacorl.engine.runtime import Interrupted, Runtime, SharedFault
from pacorl.engine.scoring import Scorer, Scores, beside
from pacorl.engine.trackers import check_trackers
from pacorl.io.files import write_atomic
from pacorl.judges import JUDGES
from pacorl.judges.judge import Judge, JudgeOptions, close_judge, counts_of
from pacorl.lora.adapters import MovingAverage, OldPolicy, add_lora, start_from
from pacorl.lora.fuse import FusedLora, merge
from pacorl.policies import build_policy
from pacorl.policies.policy import Policy
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.reward import smoke_test
from pacorl.train.alarms import heed, panel_statistics_of, remembered, watched
from pacorl.train.checkpointing import Resume, restore, save, starting_point
from pacorl.train.evaluate import evaluate
from pacorl.train.judging import load_judge, reach_judge, without_idle_judges
from pacorl.train.page import judged_since, write_page_where_due
from pacorl.train.training import Grade, Training
from pacorl.train.update import Batch, PolicyLoss, update_policy
from pacorl.types import Advantages, Prompt, RewardTable, Rollout, Size

logger = logging.getLogger(__name__)


def train_policy(config: PolicyRun, *, resume: Resume = False, grade: Grade | None = None) -> Path:
    """Runs a config to its end and returns the run's folder.

    With `resume` the run goes on from its newest checkpoint, if there is one, or from the one that is named. Raises
    Interrupted after a SIGTERM or SIGINT, when the state is saved.
    """
    training = prepare(config, resume=resume)
    try:
        with training.runtime.signals():
            _run(training, grade)
    finally:
        training.logbook.close()
        close_judge(training.judge)
        close_judge(training.held_out_judge)
    return config.out


def prepare(config: PolicyRun, *, resume: Resume = False) -> Training:
    """Loads and checks everything that a run needs; cheap checks come first."""
    check_trackers(config.trackers)
    check_rewards(config.rewards)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards")
    config = without_idle_judges(config)
    train_prompts = prompts_from(config.prompts.train, limit=None)
    evaluation_prompts = prompts_from(config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    leaks = check_leaks(
        train_prompts,
        evaluation_prompts,
        benchmarks={name: prompts_from(name) for name in config.prompts.benchmarks},
        action=config.prompts.leaks,
        near=config.prompts.near,
    )
    runtime = Runtime()
    if leaks and runtime.is_main:
        logger.warning(leaks)
    start = runtime.on_main(partial(starting_point, config, resume))
    _refuse_what_does_not_divide(config, runtime)
    with ExitStack() as on_fault:
        served, held_out = (_reached(named, runtime, on_fault) for named in (config.judge, config.evaluation.judge))
        training = _load(
            config,
            runtime=runtime,
            served=(served, held_out),
            train_prompts=train_prompts,
            evaluation_prompts=evaluation_prompts,
            start=start,
        )
        on_fault.pop_all()  # the run closes them
    return training


def _reached(config: JudgeOptions | None, runtime: Runtime, on_fault: ExitStack) -> Judge | None:
    """A judge behind HTTP, met before weights load; None if nothing asks one, or it is of this process."""
    judge = reach_judge(config, processes=runtime.world) if config else None
    on_fault.callback(close_judge, judge)
    return judge


def _load(
    config: PolicyRun,
    *,
    runtime: Runtime,
    served: tuple[Judge | None, Judge | None],
    train_prompts: list[Prompt],
    evaluation_prompts: list[Prompt],
    start: Path | None,
) -> Training:
    """`served`: the judges behind HTTP that were met already, the run's and the evaluation's."""
    torch.manual_seed(config.seed)  # the adapter's first weights
    policy = _build_policy(config, runtime)
    targets = config.adapter.targets or policy.lora_targets
    add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=targets)
    if config.adapter.start:
        start_from(
            policy.transformer,
            config.adapter.start,
            rank=config.adapter.rank,
            alpha=config.adapter.alpha,
            base=config.model.checkpoint,
        )
    cache = _encoded(config, policy, train_prompts, evaluation_prompts)
    painted = policy.size_of(train_prompts[0], Size(*config.sampling.size))
    check_adapter(policy, cache.batch(train_prompts[:1], painted), painted, targets=tuple(targets))
    policy.free_encoders()  # before the judge is loaded, so that both never lie on the device together
    judge = served[0] or (load_judge(config.judge, device=runtime.device) if config.judge else None)
    rewards = build_rewards(config.rewards, judge=judge, device=runtime.device)
    for reward in rewards.values():
        reward.check([*train_prompts, *evaluation_prompts])
    named = config.evaluation.judge
    held_out_judge = served[1] or (load_judge(named, device=runtime.device) if named else judge)
    held_out = build_rewards(config.evaluation.rewards, judge=held_out_judge, device=runtime.device)
    for reward in held_out.values():
        reward.check(evaluation_prompts)
    for prompts, size, several in (
        (train_prompts, config.sampling.size, rewards),
        (evaluation_prompts, config.evaluation.size, held_out),
    ):
        # A judge was met before; whatever else scores is tried now, not after the first epoch was painted.
        smoke_test({key: one for key, one in several.items() if not hasattr(one, "judge")}, prompts, size=Size(*size))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        [p for p in policy.transformer.parameters() if p.requires_grad],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
    )
    # Gradient checkpointing acts in train mode only; there is no dropout, so nothing else changes with it.
    policy.transformer.train()
    policy.transformer, optimizer = runtime.prepare(
        policy.transformer, optimizer, batch=config.sampling.batch, max_norm=config.optimizer.max_grad_norm
    )
    training = Training(
        config=config,
        runtime=runtime,
        policy=policy,
        judge=judge,
        rewards=rewards,
        train_prompts=train_prompts,
        evaluation_prompts=evaluation_prompts,
        logbook=Logbook(
            config.out if runtime.is_main else None,
            trackers=config.trackers,
            settings=config.model_dump(mode="json"),
        ),
        optimizer=optimizer,
        average=MovingAverage(
            runtime.bare(policy.transformer), decay=config.optimizer.ema_decay, interval=config.optimizer.ema_interval
        ),
        cache=cache,
        targets=tuple(targets),
        bars=Bars(total=config.epochs, done=0, shown=runtime.is_main),
        held_out=held_out,
        held_out_judge=held_out_judge,
        watch=HackingMonitor.of(config.watch),
    )
    if training.objective.needs == "endpoint":
        training.old = OldPolicy(training.bare)
    # What a crash left behind the checkpoint, or before the first one, is written again.
    training.logbook.cut_to(restore(training, start) if start else 0)
    if start:
        training.watch.recall(runtime.on_main(partial(remembered, config.out / "metrics.jsonl")))
    if runtime.is_main:
        write_atomic(config.out / "config.yaml", configs.dump(config))
    return training


def _refuse_what_does_not_divide(config: PolicyRun, runtime: Runtime) -> None:
    rows = range(config.prompts_per_epoch * config.group_size)
    updates = config.optimizer.updates_per_epoch
    assign_groups(rows, batch=config.sampling.batch, updates=updates, world=runtime.world, rank=runtime.rank)


def _build_policy(config: PolicyRun, runtime: Runtime) -> Policy:
    policy = build_policy(config.model, device=runtime.device, record_sizes=config.prompts.record_sizes)
    for size in (*config.sampling.sizes, config.evaluation.size):
        policy.check_size(Size(*size))
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    return policy


def _encoded(
    config: PolicyRun, policy: Policy, train_prompts: Sequence[Prompt], evaluation_prompts: Sequence[Prompt]
) -> ConditioningCache:
    """Every prompt at every size that it will be painted at, encoded once."""
    cache = ConditioningCache(policy)
    for size in (Size(*size) for size in config.sampling.sizes):
        check_mixed_sizes(policy, train_prompts, size=size, group_size=config.group_size, batch=config.sampling.batch)
        cache.prepare(train_prompts, size)
        if config.evaluation.compare_sizes:
            cache.prepare(evaluation_prompts, size)
    cache.prepare(evaluation_prompts, Size(*config.evaluation.size))
    return cache


def _run(training: Training, grade: Grade | None) -> None:
    config = training.config
    with training.bars as bars:
        bars.epoch(training.epoch, note="")
        try:
            _evaluate_where_due(training, grade)
            write_page_where_due(training)
            while not training.finished:
                line = run_epoch(training)
                bars.epoch(training.epoch, note=_note(line))
                _evaluate_where_due(training, grade)
                write_page_where_due(training)
                if training.finished or training.epoch % config.save_every == 0:
                    save(training)
                heed(training)
        except Interrupted:
            save(training)
            raise Interrupted(f"stopped after epoch {training.epoch}, and saved; go on with --resume auto") from None


def _evaluate_where_due(training: Training, grade: Grade | None) -> None:
    """Before the first epoch, after the last, and every so many between; once each, also where the run was stopped
    meanwhile."""
    every = training.config.evaluation.every
    due = training.epoch == 0 or training.finished or (every and training.epoch % every == 0)
    if due and training.evaluated != training.epoch:
        evaluate(training, grade)


def run_epoch(training: Training) -> dict[str, float]:
    """One epoch; returns its line in the log.

    Told to stop while it paints, it is abandoned: nothing has changed yet, and a resumed run paints the same again.
    Once it updates, it is finished.
    """
    config, started, asked = training.config, dict(training.seconds), counts_of(training.judge)
    rows = epoch_rows(
        training.train_prompts,
        epoch=training.epoch,
        count=config.prompts_per_epoch,
        group_size=config.group_size,
        seed=config.seed,
    )
    with Scorer(training.rewards, beside=_scores_beside(training)) as scorer:
        rollouts = _paint_all(training, rows, scorer)
        scores = _scores(training, scorer)
        found = advantages(
            _table(training, scores, rows),
            config.advantages,
            weights=[reward.weight for reward in config.rewards],
        )
        line = dict(found.stats) | {"samples/not_finite": _share_not_finite(scores)}
        _refuse_too_many_missing(training, line, scorer)
    line |= judged_since(training, asked)
    line |= _sampling_facts(training) | _learn(training, rollouts, found)
    line |= {f"seconds/{phase}": spent - started.get(phase, 0.0) for phase, spent in training.seconds.items()}
    if scorer.beside:
        line["seconds/hidden_reward"] = max(0.0, scorer.busy_seconds - line["seconds/reward"])
    looks = [look for update in rollouts for part in update for look in panel_statistics_of(part.prompts, part.images)]
    line |= watched(training, "epoch", [look for part in training.runtime.gather(looks) for look in part], line)
    training.epoch += 1
    training.logbook.write("epoch", epoch=training.epoch, step=training.step, values=line)
    if training.epoch % config.save_every == 0 or training.epoch == 1:
        training.logbook.picture(f"epoch-{training.epoch:06d}", rollouts[0][0].images[0])
    return line


# --- an epoch's samples and their scores -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What all batches of an epoch are painted with."""

    sampler: Sampler
    merged: FusedLora | None
    prefixes: dict[int, Tensor] | None
    """The latents at which groups part, by their start; None where each batch computes its own."""


def _paint_all(training: Training, rows: Sequence[Row], scorer: Scorer) -> list[list[Rollout]]:
    """This rank's rollouts, [update][micro-batch]; each goes to the scorer as soon as it is decoded."""
    config, runtime = training.config, training.runtime
    updates = assign_groups(
        rows,
        batch=config.sampling.batch,
        updates=config.optimizer.updates_per_epoch,
        world=runtime.world,
        rank=runtime.rank,
    )
    sampling_weights: AbstractContextManager[None] = training.old.swapped_in() if training.old else nullcontext()
    with training.bars.phase("sampling", total=len(rows) // runtime.world) as advance, sampling_weights:
        with training.timed("rollout"):
            merged = merge(training.bare, wanted=config.sampling.fuse_lora)
        # Where a forward needs every process, all must make as many: none may find a prefix that others do not.
        easel = SamplingContext(training.sampler, merged, prefixes=None if runtime.sharded else {})

        def paint(part: Sequence[Row]) -> Rollout:
            rollout = _paint(training, part, easel)
            scorer.submit(rollout)
            advance(len(rollout))
            return rollout

        return [[paint(part) for part in update] for update in updates]


def _paint(training: Training, rows: Sequence[Row], easel: SamplingContext) -> Rollout:
    training.runtime.check_stop()
    with training.timed("rollout"):
        return collect(
            training.policy,
            rows,
            sampler=easel.sampler,
            cache=training.cache,
            seed=training.config.seed,
            epoch=training.epoch,
            prefixes=easel.prefixes,
            merged=easel.merged,
        )


def _scores_beside(training: Training) -> bool:
    judge = training.config.judge
    in_process = judge is None or JUDGES[judge.backend].in_process
    return beside(judge.overlap if judge else "auto", in_process=in_process, device=training.runtime.device)


def _scores(training: Training, scorer: Scorer) -> dict[int, Scores]:
    """Global row → one score per reward, from every rank. Saves, and raises on every rank, what a reward raised."""
    try:
        with training.timed("reward"), training.bars.phase("scoring", total=1):
            return training.runtime.gather_rows(scorer.results)
    except SharedFault as error:
        save(training)
        raise error.fault from None


def _table(training: Training, scores: Mapping[int, Scores], rows: Sequence[Row]) -> RewardTable:
    known = [[math.nan if value is None else value for value in scores[row.number]] for row in rows]
    score_RB = torch.tensor(known, dtype=torch.float64).T
    return RewardTable(
        names=tuple(training.rewards),
        score_RB=score_RB,
        valid_RB=score_RB.isfinite(),
        group_B=torch.tensor([row.prompt.id for row in rows], dtype=torch.int64),
    )


def _share_not_finite(scores: Mapping[int, Scores]) -> float:
    values = [value is not None and not math.isfinite(value) for row in scores.values() for value in row]
    return sum(values) / len(values)


def _refuse_too_many_missing(training: Training, line: Mapping[str, float], scorer: Scorer) -> None:
    """Saves and raises ValueError with the cause where the failure budget is spent."""
    missing, budget = line["samples/missing"], training.config.advantages.max_missing
    if missing <= budget:
        return
    errors = sorted({last_error for last_error in training.runtime.gather(scorer.last_error()) if last_error})
    if line["samples/not_finite"]:
        errors.append(f"{line['samples/not_finite']:.0%} were no finite numbers")
    save(training)
    raise ValueError(
        f"{missing:.0%} of the scores of epoch {training.epoch + 1} are missing, and advantages.max_missing is "
        f"{budget:.0%}; the state is saved. {'; '.join(errors) or 'The rewards gave no reason'}"
    )


def _sampling_facts(training: Training) -> dict[str, float]:
    """What changes from epoch to epoch, where the config says that it does."""
    sampling, facts = training.config.sampling, {}
    if sampling.window.kind != "fixed":
        facts["sampling/first_noise_step"] = float(training.sampler.sde_steps[0])
    if sampling.curriculum:
        facts["sampling/height"] = float(training.config.sampling.size_at(training.epoch).height)
    return facts


# --- updates ---------------------------------------------------------------------------------------------------


def _learn(training: Training, rollouts: Sequence[Sequence[Rollout]], found: Advantages) -> dict[str, float]:
    """The epoch's optimizer steps; returns their metrics."""
    config = training.config
    turns = [(inner, update) for inner in range(config.objective.inner_epochs) for update in rollouts]
    metrics: dict[str, list[float]] = defaultdict(list)
    with training.timed("update"), training.bars.phase("updating", total=len(turns)) as advance:
        for inner, update in turns:
            if config.max_steps and training.step >= config.max_steps:
                break
            for name, value in _update(training, update, found, inner=inner).items():
                metrics[name].append(value)
            advance(1)
    if training.old:
        training.old.follow(training.step)
    own = {
        # The first update replays the rollout's own policy: any deviation there is an error of arithmetic.
        name: values[0] if name.startswith(RATIO_DEVIATION) else sum(values) / len(values)
        for name, values in metrics.items()
    }
    parts = training.runtime.gather(own)  # each rank has seen its own samples
    line = {}
    for name in own:
        several = [part[name] for part in parts]
        line[name] = max(several) if name.startswith(RATIO_DEVIATION) else sum(several) / len(several)
    _warn_of_deviation(training, line)
    return line


def _warn_of_deviation(training: Training, line: Mapping[str, float]) -> None:
    """Says once where the ratio before an update is so far from 1 that clipping would feel it."""
    worst = max((value for name, value in line.items() if name.startswith(RATIO_DEVIATION)), default=0.0)
    tolerance = training.config.objective.ratio_tolerance
    if worst > tolerance and RATIO_DEVIATION not in training.warned:
        training.warned.add(RATIO_DEVIATION)
        if training.runtime.is_main:
            logger.warning(
                "epoch %d: before its first update the ratio deviates from 1 by %.1e, more than %.1e: training does "
                "not replay sampling exactly; set sampling.batch to 1 or model.dtype to float32, or raise "
                "objective.clip_range",
                training.epoch + 1,
                worst,
                tolerance,
            )


def _update(training: Training, rollouts: Sequence[Rollout], found: Advantages, *, inner: int) -> dict[str, float]:
    """One optimizer step; skipped, on all ranks alike, where a gradient is not finite."""
    config = training.config
    metrics = {"lr": _set_learning_rate(training)} | update_policy(
        _learner(training),
        [Batch(rollout, found.value_B[rollout.row_B], found.used_B[rollout.row_B]) for rollout in rollouts],
        runtime=training.runtime,
        draw=(config.seed, training.epoch, inner),
    )
    norm = training.runtime.step(training.optimizer, training.parameters, max_norm=config.optimizer.max_grad_norm)
    metrics["grad_norm"] = norm
    skipped = not math.isfinite(norm)
    if skipped:
        _count_bad_step(training)
    else:
        training.bad_steps = 0
        training.step += 1
        training.average.follow(training.step)
    return metrics | {"skipped": float(skipped)}


def _learner(training: Training) -> PolicyLoss:
    config = training.config
    return PolicyLoss(
        training.policy,
        training.sampler,
        training.cache,
        options=config.objective,
        advantage_clip=config.advantages.clip,
        old=training.old,
    )


def _set_learning_rate(training: Training) -> float:
    wanted = training.config.optimizer
    rate = learning_rate(
        training.step,
        peak=wanted.lr,
        schedule=wanted.schedule,
        warmup=wanted.warmup_steps,
        total=training.total_steps,
    )
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _count_bad_step(training: Training) -> None:
    training.bad_steps += 1
    if training.bad_steps >= training.config.optimizer.max_bad_steps:
        save(training)
        raise ValueError(
            f"{training.bad_steps} optimizer steps in a row had gradients that are not finite; the state is saved. "
            "Lower optimizer.lr or look for a reward that is not finite"
        )


def _note(line: Mapping[str, float]) -> str:
    return "  ".join(f"{name.split('/')[1]} {value:.3f}" for name, value in line.items() if name.endswith("/mean"))
