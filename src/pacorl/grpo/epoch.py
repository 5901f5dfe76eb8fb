"""One epoch of PaCo-GRPO, from top to bottom: draw, sample and score, compare, update, record (arXiv 2512.04784, §3.3).

The samples of one prompt are a *group*; advantages compare samples within it. A sample is a *row*, numbered over all
ranks. Its randomness follows from (seed, epoch, row or node, step), independent of the number of processes. Samples of
a group may share the beginning of their paths: a *node* is a latent with several samples below it. It passes the
transformer once, in sampling as in training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from pacorl.core.advantages import advantages
from pacorl.core.metric_names import ALARM, SHOWN_EVERY
from pacorl.grpo.monitor import PanelStatistics, measure_agreement, panel_statistics, signs_of
from pacorl.grpo.rollout import Draw, draw_samples
from pacorl.grpo.rows import assign_rows, epoch_rows
from pacorl.grpo.scoring import check_scores, collect_scores, columns_of, reward_table
from pacorl.grpo.update import PolicyLoss, gather_metrics, ratio_warning, update_policy
from pacorl.types import Advantages, Samples

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.grpo.trainer import PolicyTrainer


def run_epoch(trainer: PolicyTrainer) -> dict[str, float]:
    """Run the next epoch, and return its line in metrics.jsonl.

    A stop during sampling abandons it, and a resumed run samples the same images again.

    Raises:
        Interrupted: after a signal.
        SharedFault: on all ranks, for an error of a reward on any rank, or too many missing scores.
    """
    config, runtime, division = trainer.config, trainer.runtime, trainer.division
    names = tuple(trainer.rewards)
    draw = trainer.draw_of(trainer.epoch)

    # 1. Draw: prompts × group size. Whole subtrees go to updates and ranks, so that the samples of an update do not
    # depend on the number of ranks.
    rows = epoch_rows(
        trainer.train_prompts,
        epoch=trainer.epoch,
        count=division.prompts,
        group_size=config.group_size,
        seed=config.seed,
    )
    units_of_updates = assign_rows(
        rows,
        tree=draw.sampler.tree,
        batch=division.batch,
        updates=config.optimizer.updates_per_epoch,
        world=runtime.world,
        rank=runtime.rank,
        sharded=runtime.sharded,
        whole_groups=division.whole_groups,
        kind=partial(trainer.policy.forward_key, size=draw.sampler.size),
    )

    # 2. Sample and score: each batch goes to the rewards as soon as it is decoded. They run concurrently with the
    # generator, or alternate with it on a small GPU.
    samples = [Samples() for _ in units_of_updates]
    images: dict[int, Image] = {}
    statistics: list[PanelStatistics] = []
    sampling = trainer.progress.phase("sampling", total=len(rows) // runtime.world)
    with sampling as advance, trainer.sampling_policy():
        for units, update in zip(units_of_updates, samples, strict=True):
            for rollout in draw_samples(draw, units, update):
                trainer.scorer.submit(rollout, draw=(config.seed, trainer.epoch))
                images |= dict(zip(rollout.row_B, rollout.images, strict=True))
                # The images' own signs here, while a GPU computes the next batch.
                statistics += map(panel_statistics, rollout.prompts, rollout.images)
                advance(len(rollout.row_B))
                # A collective: ranks may have different units, but equally many batches.
                runtime.check_stop()
    with trainer.progress.phase("scoring", total=1), trainer.turns.scoring():
        scores, reasons = collect_scores(trainer.scorer, runtime)
        agreement = measure_agreement(trainer, rows, images)

    # 3. Compare: scale, weigh and normalise within groups. A missing score is not trained on.
    table = reward_table(scores, rows, names=names, by_panel=draw.by_panel)
    weights = [reward.weight for reward in config.rewards]
    epoch_advantages = advantages(table, config.advantages, weights=weights)
    checks, warning = check_scores(
        columns_of(scores, rows, names),
        [row.prompt for row in rows],
        when=f"epoch {trainer.epoch + 1}",
        stats=epoch_advantages.stats,
        reasons=reasons,
    )
    trainer.warn_once(str([name for name in checks if name.startswith(ALARM)]), warning)
    metrics = {**epoch_advantages.stats, **checks, **agreement}

    # 4. Update: one optimizer step per share of the groups. The first replays sampling with ratio exactly 1.
    metrics |= learn(trainer, draw, samples, epoch_advantages)

    # 5. Record: signs of reward hacking, seconds, the log and at times an image.
    metrics |= signs_of([*chain.from_iterable(runtime.gather(statistics))]) | trainer.progress.lap()
    trainer.epoch += 1
    if trainer.epoch % SHOWN_EVERY == 0 or trainer.epoch == 1:
        trainer.logbook.image(f"epoch-{trainer.epoch:06d}", samples[0].rollouts[0].images[0])
    return trainer.record("epoch", metrics)


def learn(
    trainer: PolicyTrainer, draw: Draw, samples: Sequence[Samples], epoch_advantages: Advantages
) -> dict[str, float]:
    """Take the epoch's optimizer steps, one per update; a step whose gradient is not finite is skipped on all ranks.

    Returns:
        Mean metrics over updates and ranks, and the largest ratio deviation.
    """
    config, lora, lag = trainer.config, trainer.lora, trainer.objective.lag
    sampled_at = lora.step
    history: dict[str, list[float]] = defaultdict(list)
    with trainer.progress.phase("updating", total=len(samples)) as advance:
        for update in samples:
            # Before the first step the trained policy is the sampling policy: one forward serves as both.
            old = lora.old if lora.step > sampled_at or lag else None
            clip = config.advantages.clip
            loss = PolicyLoss(draw, config.objective, advantage_clip=clip, old=old)
            metrics = update_policy(loss, update, epoch_advantages, runtime=trainer.runtime)
            # Not finite: no step is taken, and `skipped` is logged.
            norm = lora.take_step()
            for name, value in (metrics | {"grad_norm": norm, "skipped": float(not math.isfinite(norm))}).items():
                history[name].append(value)
            advance(1)

    # The sampling policy follows, if it lags: old ← lag·old + (1 − lag)·trained.
    if lora.old and lag:
        lora.old.approach(1 - lag(lora.step))
    means = gather_metrics(history, trainer.runtime)
    if trainer.objective.needs == "path":
        trainer.warn_once("ratio", ratio_warning(means, config.objective.ratio_tolerance, epoch=trainer.epoch + 1))
    return means
