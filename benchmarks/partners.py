"""Does a panel learn more if it is also compared with the panels of other samples of its node? On the tiny world.

    python benchmarks/partners.py --groups 60 --after 0 12           # the signal of a group's gradient
    python benchmarks/partners.py --learn --seeds 0 1 2              # judged samples until it has learned

Panel credit gives a panel the answers about its pairs, whose other panel has noise of its own. The samples of one node
are drawn from one latent, so that the panels of another sample are other draws of that partner. With `--arrangements` 3
each panel is judged in its own set and in two mixed ones: in arrangement k, panel p of mixed set m is that of sample
m + k·p of the group. That costs 6 more questions per sample and arrangement, and no more samples.

The signal is that of `pacorl probe --credit`: what the gradients of two groups share, by their noise. A run is that of
benchmarks/learning.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning import learn
from PIL import Image
from torch import Tensor

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.grid import join, split
from pacorl.core.set_scores import panel_shares
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.lab.probe.credit import CREDITS, group_gradients, signal_by_noise
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import PanelScores
from pacorl.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrangements", type=int, nargs="+", default=[1, 3], help="1: its own set alone")
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--after", type=int, nargs="+", default=[0, 12], help="epochs before the gradients")
    parser.add_argument("--out", type=Path, default=Path("runs/partners"))
    parser.add_argument("--learn", action="store_true", help="train instead, with results in --out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", choices=["dev", "test"], default="dev")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=48)
    parser.set_defaults(until=0.15)
    options = parser.parse_args()
    quiet_loading()
    torch.set_num_threads(1)

    options.out.mkdir(parents=True, exist_ok=True)
    if options.learn:
        for seed in options.seeds:
            for count in options.arrangements:
                with arranged(count):
                    learn(f"arrangements_{count}", (), seed, options)
        return
    print(json.dumps([signal(options, after) for after in options.after], indent=2))


def signal(options: argparse.Namespace, after: int) -> dict[str, Any]:
    """Measure the signal between groups by each number of arrangements, with the same draws, after some epochs."""
    config = configs.load(PolicyConfig, recipe(), ["trackers=[]", "save_every=1000", f"out={options.out / str(after)}"])
    trainer = PolicyTrainer(config)
    for _ in range(after):
        trainer.run_epoch()

    found: dict[str, Any] = {"epochs": after, "groups": options.groups}
    prompts = trainer.train_prompts[: options.groups]
    for count in options.arrangements:
        halves: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in CREDITS}
        for number, prompt in enumerate(prompts):
            # Another epoch for every group: its noise is its own.
            draw = replace(trainer.draw(trainer.sampler), epoch=config.epochs + number, by_panel=True)
            with arranged(count):
                for name, both in group_gradients(config, draw, trainer.rewards, prompt).items():
                    halves[name].append(both)
        for name, of_groups in halves.items():
            between, _ = signal_by_noise(of_groups, np.random.default_rng(0))
            found[f"{name}, {count}"] = [between.value, between.low, between.high]
    trainer.close()
    return found


@contextmanager
def arranged(count: int) -> Iterator[None]:
    """Let consistency judge each panel in `count` arrangements of its group."""
    own = Consistency.panel_scores

    def panel_scores(
        reward: Consistency, prompts: Sequence[Prompt], images: Sequence[Image.Image]
    ) -> list[PanelScores]:
        scores = own(reward, prompts, images)
        assert all(score.score is not None for score in scores), "the judge answers every question"
        parts = torch.tensor([score.part_P for score in scores], dtype=torch.float64)
        for step in range(1, count):
            parts += mixed_parts(reward, prompts, images, step)
        means = (parts / count).tolist()
        return [PanelScores(score.score, tuple(mean)) for score, mean in zip(scores, means, strict=True)]

    Consistency.panel_scores = panel_scores  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Consistency.panel_scores = own  # type: ignore[method-assign]


def mixed_parts(reward: Consistency, prompts: Sequence[Prompt], images: Sequence[Image.Image], step: int) -> Tensor:
    """Judge sets of panels of different samples, and give each panel of a sample its part: (samples, panels)."""
    assert len({prompt.id for prompt in prompts}) == 1, "a batch is one group"
    prompt = prompts[0]
    panels = [split(image, prompt.grid) for image in images]
    count = len(panels)
    numbers = range(prompt.grid.count)
    mixed = []
    for first in range(count):
        members = [panels[(first + step * panel) % count][panel] for panel in numbers]
        mixed.append(join(members, prompt.grid))

    parts = torch.zeros(count, len(numbers), dtype=torch.float64)
    for first, verdicts in enumerate(reward.pairs(prompts, mixed)):
        shares = torch.tensor(panel_shares(reward.tempered(verdicts), len(numbers)), dtype=torch.float64)
        for panel in numbers:
            parts[(first + step * panel) % count, panel] = shares[panel]
    return parts


if __name__ == "__main__":
    main()
