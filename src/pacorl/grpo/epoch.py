"""One epoch of PaCo-GRPO, from top to bottom: draw, sample, score, compare, update (arXiv 2512.04784, §3.3).

The samples of one prompt are a *group*; advantages compare samples within it. A sample is a *row*, numbered over all
ranks. Its randomness follows from (seed, epoch, row or node, step), independent of the number of processes. Samples of
a group may share the beginning of their paths: a *node* is a latent with several samples below it. It passes the
transformer once, in sampling as in training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pacorl.core.advantages import advantages
from pacorl.core.metric_names import PROMPT_SHARE
from pacorl.core.sampler import Sampler
from pacorl.grpo.rollout import draw_samples
from pacorl.grpo.rows import Row, assign_rows, epoch_rows
from pacorl.grpo.run import Run
from pacorl.grpo.score_checks import check_alike, check_missing, not_finite
from pacorl.grpo.scoring import Parts, Scores, reward_table, share_not_finite
from pacorl.grpo.update import PolicyLoss, gather_metrics, update_policy
from pacorl.judge.judge import counts_of
from pacorl.types import Advantages, Rollout, Samples


def run_epoch(run: Run) -> dict[str, float]:
    """Run the next epoch. A stop during sampling abandons it, and a resumed run samples the same images again.

    Args:
        run: the run, in its state after the last epoch.

    Returns:
        The epoch's line in metrics.jsonl.

    Raises:
        Interrupted: after a signal, when the state is saved.
        ValueError: if more scores are missing than `advantages.max_missing`, when the state is saved.
        Exception: raised by a reward on any rank; on all ranks, when the state is saved.
    """
    sampler = run.sampler
    # Clock and judge count over the whole run.
    seconds_before = dict(run.clock.seconds)
    judged_before = counts_of(run.judge)

    with run.guard():
        # 1. Draw: prompts × group size. All prompts are used before they are shuffled again.
        rows = epoch_rows(
            run.train_prompts,
            epoch=run.epoch,
            count=run.config.prompts_per_epoch,
            group_size=run.config.group_size,
            seed=run.config.seed,
        )

        # 2. Sample and score: each batch goes to the rewards as soon as it is decoded. They run concurrently with the
        # generator, or alternate with it on a small GPU.
        samples = [Samples() for _ in range(run.config.optimizer.updates_per_epoch)]
        with run.scorer(samples=len(rows)) as scoring:
            with run.bars.phase("sampling", total=len(rows) // run.runtime.world) as advance, run.sampling_policy():
                for rollout in sample(run, sampler, rows, samples):
                    scoring.submit(rollout)
                    advance(len(rollout))
                    # A collective: ranks may have different units, but equally many batches.
                    run.runtime.check_stop()
            scores, parts = run.gather_scores(scoring)

            # 3. Compare: scale, weigh and normalise within groups. A missing score is not trained on.
            epoch_advantages = compare(run, rows, scores, parts)
            metrics = {**epoch_advantages.stats, "samples/not_finite": share_not_finite(scores)}
            metrics[PROMPT_SHARE] = len({row.prompt.id for row in rows}) / len(run.train_prompts)
            if metrics["samples/not_finite"]:
                metrics |= run.check_finite(not_finite(run, rows, scores), when=f"epoch {run.epoch + 1}")
            check_missing(run, metrics, scoring)
            metrics |= check_alike(run, metrics)
            statistics = scoring.statistics()
        metrics |= run.judge_counts(before=judged_before)

        # 4. Update: one optimizer step per share of the groups. The first replays sampling with ratio exactly 1.
        metrics |= learn(run, sampler, samples, epoch_advantages)

        # 5. Record: monitor, log.
        return run.finish_epoch(samples, statistics, metrics, seconds_before=seconds_before)


def sample(run: Run, sampler: Sampler, rows: Sequence[Row], samples: Sequence[Samples]) -> Iterator[Rollout]:
    """Draw this rank's share of the rows, and yield each batch of images.

    Args:
        run: the run, within `Run.sampling_policy`.
        samples: one per update, filled with its rollouts and nodes.
    """
    config = run.config
    runtime = run.runtime

    # 1. Assign whole subtrees to updates and ranks, so that updates do not depend on the number of ranks.
    units_of_updates = assign_rows(
        rows,
        tree=sampler.tree,
        batch=config.sampling.batch,
        updates=len(samples),
        world=runtime.world,
        rank=runtime.rank,
        sharded=runtime.sharded,
    )

    # 2. Sample.
    draw = run.draw(sampler)
    for update, units in zip(samples, units_of_updates, strict=True):
        for unit in units:
            with run.clock.timed("rollout"):
                yield from draw_samples(draw, unit, update)


def compare(
    run: Run, rows: Sequence[Row], scores: Mapping[int, Scores], parts: Mapping[int, Parts] | None = None
) -> Advantages:
    """Aggregate the rewards and normalise them within groups.

    Args:
        run: the run, for the rewards' weights.
        scores: global row → one score per reward.
        parts: global row → parts of its scores; None without panel credit.

    Returns:
        Advantages by global row.
    """
    config = run.config
    table = reward_table(scores, rows, names=tuple(run.rewards), parts=parts)
    weights = [reward.weight for reward in config.rewards]
    return advantages(table, config.advantages, weights=weights)


def learn(run: Run, sampler: Sampler, samples: Sequence[Samples], epoch_advantages: Advantages) -> dict[str, float]:
    """Take the epoch's optimizer steps, one per update.

    Returns:
        Mean metrics over updates and ranks, and the largest ratio deviation.
    """
    # 1. Optimizer steps.
    config = run.config
    sampled_at = run.step
    history: dict[str, list[float]] = defaultdict(list)

    with run.clock.timed("update"), run.bars.phase("updating", total=len(samples)) as advance:
        for update in samples:
            if config.max_steps and run.step >= config.max_steps:
                break
            metrics = take_step(run, sampler, update, epoch_advantages, moved=run.step > sampled_at)
            for name, value in metrics.items():
                history[name].append(value)
            advance(1)

    # 2. The sampling policy follows the trained policy, if it lags.
    if run.old and run.objective.lag:
        run.old.follow(run.objective.lag(run.step))

    # 3. Metrics and warnings.
    means = gather_metrics(history, run.runtime)
    run.warn_of_deviation(means)
    return means


def take_step(
    run: Run, sampler: Sampler, samples: Samples, epoch_advantages: Advantages, *, moved: bool
) -> dict[str, float]:
    """Take one optimizer step, or skip it on all ranks if a gradient is not finite.

    Args:
        samples: samples of this rank for this step.
        epoch_advantages: advantages of the whole epoch.
        moved: whether the policy has taken a step since they were sampled.

    Returns:
        Metrics of the step.
    """
    rate = run.set_learning_rate()
    policy_loss = PolicyLoss(
        run.policy,
        sampler,
        run.cache,
        options=run.config.objective,
        advantage_clip=run.config.advantages.clip,
        # Before the first step the trained policy is the sampling policy: one forward serves as both.
        old=run.old if moved or run.objective.lag else None,
    )

    metrics = update_policy(
        policy_loss, samples, epoch_advantages, runtime=run.runtime, draw=(run.config.seed, run.epoch, 0)
    )
    norm = run.step_optimizer()
    return {"lr": rate, **metrics, "grad_norm": norm, "skipped": float(not math.isfinite(norm))}
