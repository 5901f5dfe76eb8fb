"""PaCo-GRPO: paint groups, judge them, and make what was better than its group more likely.

    pacorl train-policy configs/flux_t2is.yaml

One epoch: draw `prompts_per_epoch` groups at the training size with a few stochastic steps, score them, turn scores
into advantages, take `updates_per_epoch` optimizer steps. Evaluation is at full size, without noise, with the
averaged adapter (arXiv 2512.04784, §3.3 and §7).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pacorl import config as configs
from pacorl.config import PolicyRun
from pacorl.core.advantages import advantages
from pacorl.core.objectives import OBJECTIVES
from pacorl.data.records import prompts_from
from pacorl.engine.logbook import Logbook
from pacorl.engine.progress import Bars
from pacorl.engine.rollout import ConditioningCache, Row, assign_groups, collect, epoch_rows
from pacorl.engine.runtime import Interrupted, Runtime, all_finite, checkpoints
from pacorl.models.adapters import MovingAverage, add_lora, load_lora, set_adapter_state
from pacorl.models.judge import JUDGES
from pacorl.models.policies import build_policy
from pacorl.models.policy import Policy
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.reward import score
from pacorl.train.evaluate import evaluate
from pacorl.train.state import restore, save
from pacorl.train.training import Grade, Training
from pacorl.train.update import Batch, accumulate_gradients
from pacorl.types import RewardTable, Rollout, Size


def train_policy(config: PolicyRun, *, resume: bool = False, grade: Grade | None = None) -> Path:
    """Runs a config to its end and returns the run's folder.

    With `resume` the run goes on from its newest checkpoint, if there is one. Raises Interrupted after a SIGTERM or
    SIGINT, when the state is saved.
    """
    training = prepare(config, resume=resume)
    try:
        with training.runtime.signals():
            _run(training, grade)
    finally:
        training.logbook.close()
    return config.out


def prepare(config: PolicyRun, *, resume: bool = False) -> Training:
    """Loads and checks everything that a run needs; cheap checks come first."""
    check_rewards(config.rewards)
    train_prompts = prompts_from(config.prompts.train, limit=None)
    evaluation_prompts = prompts_from(config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    runtime = Runtime()
    existing = checkpoints(config.out / "checkpoints")
    _refuse_a_used_folder(config.out, existing=bool(existing), resume=resume)
    torch.manual_seed(config.seed)  # the adapter's first weights
    policy = _build_policy(config, runtime)
    targets = config.adapter.targets or policy.lora_targets
    add_lora(policy.transformer, rank=config.adapter.rank, alpha=config.adapter.alpha, targets=targets)
    if config.adapter.start:
        set_adapter_state(policy.transformer, load_lora(config.adapter.start))
    cache = ConditioningCache(policy)
    cache.prepare(train_prompts, Size(*config.sampling.size))
    cache.prepare(evaluation_prompts, Size(*config.evaluation.size))
    policy.free_encoders()  # before the judge is loaded, so that both never lie on the device together
    judge = JUDGES[config.judge.backend](
        config.judge.checkpoint,
        adapter=config.judge.adapter,
        dtype=config.judge.dtype,
        device=runtime.device,
        batch_tokens=config.judge.batch_tokens,
    )
    rewards = build_rewards(config.rewards, judge=judge)
    for reward in rewards.values():
        reward.check([*train_prompts, *evaluation_prompts])
    optimizer = torch.optim.AdamW(
        [p for p in policy.transformer.parameters() if p.requires_grad],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        weight_decay=config.optimizer.weight_decay,
    )
    training = Training(
        config=config,
        runtime=runtime,
        policy=policy,
        judge=judge,
        rewards=rewards,
        train_prompts=train_prompts,
        evaluation_prompts=evaluation_prompts,
        logbook=Logbook(config.out if runtime.is_main else None, trackers=config.trackers),
        optimizer=optimizer,
        average=MovingAverage(
            policy.transformer, decay=config.optimizer.ema_decay, interval=config.optimizer.ema_interval
        ),
        cache=cache,
        targets=tuple(targets),
        bars=Bars(total=config.epochs, done=0, shown=runtime.is_main),
    )
    if resume:
        if existing:
            restore(training, existing[-1])
        # What a crash left behind the checkpoint, or before the first one, is written again.
        training.logbook.cut_back(training.epoch if existing else -1)
    _prepare_processes(training)
    if runtime.is_main:
        (config.out / "config.yaml").write_text(configs.dump(config))
    return training


def _refuse_a_used_folder(out: Path, *, existing: bool, resume: bool) -> None:
    if not resume and (existing or (out / "metrics.jsonl").exists()):
        raise ValueError(f"{out} holds a run already; go on with --resume, or name another folder with out=…")


def _build_policy(config: PolicyRun, runtime: Runtime) -> Policy:
    policy = build_policy(config.model, device=runtime.device)
    for size in (config.sampling.size, config.evaluation.size):
        policy.check_size(Size(*size))
    if config.model.gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    return policy


def _prepare_processes(training: Training) -> None:
    policy = training.policy
    # Gradient checkpointing acts in train mode only; there is no dropout, so nothing else changes with it.
    policy.transformer.train()
    policy.transformer, training.optimizer = training.runtime.accelerator.prepare(
        policy.transformer, training.optimizer
    )


def _run(training: Training, grade: Grade | None) -> None:
    config = training.config
    with training.bars as bars:
        bars.epoch(training.epoch, note="")
        if not training.resumed:
            evaluate(training, grade)
        while training.epoch < config.epochs:
            try:
                line = _epoch(training)
            except Interrupted:
                save(training)
                raise Interrupted(f"stopped after epoch {training.epoch}, and saved; go on with --resume") from None
            bars.epoch(training.epoch, note=_note(line))
            last = training.epoch == config.epochs
            every = config.evaluation.every
            if last or (every and training.epoch % every == 0):
                evaluate(training, grade)
            if last or training.epoch % config.save_every == 0:
                save(training)


def _epoch(training: Training) -> dict[str, float]:
    """One epoch; returns its line in the log.

    Told to stop while it paints, it is abandoned: nothing has changed yet, and a resumed run paints the same again.
    Once it updates, it is finished.
    """
    config, runtime = training.config, training.runtime
    started = dict(training.seconds)
    rows = epoch_rows(
        training.train_prompts,
        epoch=training.epoch,
        count=config.prompts_per_epoch,
        group_size=config.group_size,
        seed=config.seed,
    )
    updates = assign_groups(
        rows,
        batch=config.sampling.batch,
        updates=config.optimizer.updates_per_epoch,
        world=runtime.world,
        rank=runtime.rank,
    )
    with training.bars.phase("sampling", total=len(rows) // runtime.world) as advance:
        rollouts = [[_paint(training, part, advance) for part in update] for update in updates]
    with training.timed("reward"), training.bars.phase("judging", total=1):
        scores = _score(training, [rollout for update in rollouts for rollout in update])
    found = advantages(
        _table(training, scores, rows),
        weights=[reward.weight for reward in config.rewards],
        aggregate=config.advantages.aggregate,
        threshold=config.advantages.threshold,
        std=config.advantages.std,
        clip=config.advantages.clip,
        min_valid=config.advantages.min_valid,
    )
    metrics: dict[str, list[float]] = defaultdict(list)
    with training.timed("update"), training.bars.phase("updating", total=len(rollouts)) as advance:
        for update in rollouts:
            for name, value in _update(training, update, found.value_B).items():
                metrics[name].append(value)
            advance(1)
    training.epoch += 1
    line = dict(found.stats) | {
        # The first update replays the rollout's own policy: any deviation there is an error of arithmetic.
        name: values[0] if name.startswith("ratio_deviation") else sum(values) / len(values)
        for name, values in metrics.items()
    }
    line |= {f"seconds/{phase}": spent - started.get(phase, 0.0) for phase, spent in training.seconds.items()}
    training.logbook.write("epoch", epoch=training.epoch, step=training.step, values=line)
    if training.epoch % config.save_every == 0 or training.epoch == 1:
        training.logbook.picture(f"epoch-{training.epoch:06d}", rollouts[0][0].images[0])
    return line


def _paint(training: Training, rows: Sequence[Row], advance: Callable[[int], None]) -> Rollout:
    training.runtime.check_stop()
    with training.timed("rollout"):
        rollout = collect(
            training.policy,
            rows,
            sampler=training.sampler,
            cache=training.cache,
            seed=training.config.seed,
            epoch=training.epoch,
        )
    advance(len(rollout))
    return rollout


def _score(training: Training, rollouts: Sequence[Rollout]) -> dict[int, list[float]]:
    """Global row → one score per reward (NaN where missing), from every rank."""
    own: dict[int, list[float]] = {}
    for rollout in rollouts:
        table = score(training.rewards, rollout.prompts, rollout.images)
        own |= {row: column.tolist() for row, column in zip(rollout.row_B, table.score_RB.T, strict=True)}
    return training.runtime.gather_rows(own)


def _table(training: Training, scores: Mapping[int, list[float]], rows: Sequence[Row]) -> RewardTable:
    score_RB = torch.tensor([scores[row.number] for row in rows], dtype=torch.float64).T
    return RewardTable(
        names=tuple(training.rewards),
        score_RB=score_RB,
        valid_RB=score_RB.isfinite(),
        group_B=torch.tensor([row.prompt.id for row in rows], dtype=torch.int64),
    )


def _update(training: Training, rollouts: Sequence[Rollout], advantage_B: Tensor) -> dict[str, float]:
    """One optimizer step; skipped, on all ranks alike, where a gradient is not finite."""
    config, accelerator = training.config, training.runtime.accelerator
    metrics = accumulate_gradients(
        training.policy,
        [Batch(rollout, advantage_B[rollout.row_B]) for rollout in rollouts],
        sampler=training.sampler,
        cache=training.cache,
        objective=OBJECTIVES[config.objective.name],
        clip_range=config.objective.clip_range,
        kl_weight=config.objective.kl_weight,
        accelerator=accelerator,
    )
    norm = accelerator.clip_grad_norm_(training.parameters, config.optimizer.max_grad_norm)
    metrics["grad_norm"] = float(norm)
    skipped = not all_finite(training.parameters)
    if skipped:
        _count_bad_step(training)
    else:
        training.bad_steps = 0
        training.optimizer.step()
        training.step += 1
        training.average.follow(training.step)
    training.optimizer.zero_grad(set_to_none=True)
    return metrics | {"skipped": float(skipped)}


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
