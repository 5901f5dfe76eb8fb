"""How far does a panel's noise act on other panels, in each recipe of the tiny world, before and after training?

    python benchmarks/locality.py --recipes tiny quickstart --after 0 8 --groups 12

As `advantages.credit: auto` measures it: of the sets of each group the tokens of one panel are drawn again, after the
SDE step, or in `quickstart`, which takes none, in the initial noise. Prints the root mean square change of the parts of
the score that contain the panel, that of the rest, and the share of the rest in the squared change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace

import torch

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.grpo.locality import CHILDREN, Locality, panel_changes
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["tiny", "quickstart"])
    parser.add_argument("--after", type=int, nargs="+", default=[0, 8], help="epochs of training before")
    parser.add_argument("--groups", type=int, default=12)
    options = parser.parse_args()
    quiet_loading()
    torch.set_num_threads(1)

    rows = []
    for name in options.recipes:
        for after in options.after:
            found = locality_of(name, after=after, groups=options.groups)
            rows.append([name, after, found.own, found.rest, found.share])
    print(json.dumps(rows, indent=1))


def locality_of(name: str, *, after: int, groups: int) -> Locality:
    """Train a recipe for some epochs, and measure its panels' locality."""
    with tempfile.TemporaryDirectory() as folder:
        config = configs.load(PolicyConfig, recipe(name), ["trackers=[]", f"out={folder}/run"])
        trainer = PolicyTrainer(config)
        for _ in range(after):
            trainer.run_epoch()

        changes = []
        for number, prompt in enumerate(trainer.train_prompts[:groups]):
            # Another epoch for every group: its noise is its own.
            draw = replace(trainer.draw(trainer.sampler), epoch=config.epochs + number, by_panel=True)
            with trainer.sampling_policy():
                changes += panel_changes(config, draw, trainer.rewards, prompt, children=CHILDREN)
        trainer.close()
    return Locality.of(changes)


if __name__ == "__main__":
    main()
