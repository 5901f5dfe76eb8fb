"""Does a cheaper way to the image keep the order of a group? Each way finishes the same latents, and the judge scores.

    python benchmarks/suffix.py                        # 12 prompts × 8, 10 steps of which step 1 is stochastic
    python benchmarks/suffix.py --steps 6 --seeds 3 --json

The committed generator draws each group to its stochastic step once, at the training size of configs/tiny.yaml. From
there every way finishes it, and the recipe's rewards score the images. The correlation is that of the advantages,
which are normalised in each group, with those of all steps by Euler; signs is the share of samples whose advantage
has the same sign. Forwards are the steps that pass all of the transformer's blocks, the mean over groups.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

import torch
from torch import Tensor

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.sampler import Suffix
from pacorl.grpo.epoch import compare
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, Trunk
from pacorl.grpo.rows import Row, epoch_rows
from pacorl.grpo.scoring import Scorer
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.types import Advantages

ALL_STEPS = Suffix()


def main() -> int:
    options = arguments()
    quiet_loading()
    warnings.filterwarnings("ignore", message=".*model.max_sequence_length.*")
    with tempfile.TemporaryDirectory() as folder:
        trainer = prepared(Path(folder), options)
        with torch.no_grad():
            runs = [measured(trainer, seed, options) for seed in range(options.seeds)]
        trainer.close()
    result = [
        {"suffix": name, **{key: round(fmean(run[name][key] for run in runs), 3) for key in runs[0][name]}}
        | {"lowest correlation": round(min(run[name]["correlation"] for run in runs), 3)}
        for name in runs[0]
    ]
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def prepared(folder: Path, options: argparse.Namespace) -> PolicyTrainer:
    """A run of the recipe `tiny` with a noise of its own for each sample."""
    settings = {
        "out": folder / "run",
        "trackers": "[]",
        "prompts.train": f"tiny:dev:{options.prompts}",
        "prompts_per_epoch": options.prompts,
        "group_size": options.group,
        "sampling.steps": options.steps,
        "sampling.suffix": "{}",
        "sampling.tree": "{}",
        "sampling.batch": options.group,
        "prompts.leaks": "off",
    }
    return PolicyTrainer(configs.load(PolicyConfig, recipe(), [f"{key}={value}" for key, value in settings.items()]))


def ways(steps: int) -> Iterator[Suffix]:
    """What is measured, for so many deterministic steps."""
    yield ALL_STEPS
    for solver, count in product(("euler", "ab2"), sorted({steps // 2, steps * 3 // 8, steps // 4}, reverse=True)):
        if count > 1:
            yield Suffix(solver=solver, steps=count)


def measured(trainer: PolicyTrainer, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each way's agreement with all steps, its mean reward and its forwards."""
    rows = epoch_rows(trainer.train_prompts, epoch=0, count=options.prompts, group_size=options.group, seed=seed)
    draw = replace(trainer.draw(trainer.sampler), seed=seed)
    starts = []
    for first in range(0, len(rows), options.group):
        group = rows[first : first + options.group]
        starts.append((group, torch.stack(list(Trunk(draw, group).grow()[1].values()))))
    steps = options.steps - trainer.sampler.stochastic_steps[-1] - 1
    judged = {label(suffix): finished(trainer, draw, suffix, starts) for suffix in ways(steps)}
    full = judged[label(ALL_STEPS)][0].value_B.tolist()
    return {
        name: {
            "forwards": forwards,
            "correlation": correlation(advantages.value_B.tolist(), full),
            "signs": fmean((a > 0) == (b > 0) for a, b in zip(advantages.value_B.tolist(), full, strict=True)),
            "reward": sum(r.weight * advantages.stats[f"reward/{r.key}/mean"] for r in trainer.config.rewards),
        }
        for name, (advantages, forwards) in judged.items()
    }


def label(suffix: Suffix) -> str:
    return suffix.says or "all steps by euler"


def finished(
    trainer: PolicyTrainer, draw: Draw, suffix: Suffix, starts: Sequence[tuple[Sequence[Row], Tensor]]
) -> tuple[Advantages, float]:
    """The advantages that a suffix gives from where groups left their stochastic step, and the forwards of a group."""
    draw = replace(draw, sampler=draw.sampler.model_copy(update={"suffix": suffix}))
    with Scorer(trainer.rewards, overlap=False) as scorer, counted_forwards(trainer) as calls:
        for group, x_BNC in starts:
            scorer.submit(Trunk(draw, group).finish(group, x_BNC))
        rows = [row for group, _ in starts for row in group]
        return compare(trainer, trainer.sampler, rows, scorer.results()), len(calls) / len(starts)


@contextmanager
def counted_forwards(trainer: PolicyTrainer) -> Iterator[list[None]]:
    """One entry for each time that the last block computes."""
    calls: list[None] = []
    last: Any = trainer.transformer.single_transformer_blocks[-1]  # type: ignore[index]
    handle = last.proj_out.register_forward_hook(lambda *_: calls.append(None))
    yield calls
    handle.remove()


def table(result: Sequence[dict[str, Any]]) -> str:
    lines = ["| suffix | forwards | correlation | signs | reward |", "|---|---|---|---|---|"]
    for row in result:
        spread = f"{row['correlation']:.3f} (lowest {row['lowest correlation']:.3f})"
        lines.append(
            f"| {row['suffix']} | {row['forwards']:.1f} | {spread} | {row['signs']:.3f} | {row['reward']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
