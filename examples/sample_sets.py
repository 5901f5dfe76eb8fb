"""Sets to distil a set judge from: samples of policies, cut into panels (docs/reward.md).

    python examples/sample_sets.py sets --prompts tiny:train:50 --size 64x64 --steps 6 --adapter "" runs/tiny/adapter
    pacorl train-reward reward/set_tiny 'data.train=[sets/sets.jsonl, tiny:train]'

Size and steps are those of the training samples that the set judge will be asked about.
"""

import argparse
from pathlib import Path

from pacorl import Generator
from pacorl.core.grid import shared_text, split
from pacorl.core.questions import same_theme
from pacorl.io.documents import write_jsonl
from pacorl.records.prompts import prompts_from
from pacorl.types import Size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--adapter", nargs="*", default=[""], help="adapters of policies; '' for none")
    parser.add_argument("--prompts", default="tiny:train:50", help="dealt to the adapters in turn")
    parser.add_argument("--samples", type=int, default=8, help="sets per prompt")
    parser.add_argument("--size", type=Size.parse, default=None)
    parser.add_argument("--steps", type=int, default=None)
    options = parser.parse_args()

    options.out.mkdir(parents=True)
    prompts = prompts_from(options.prompts)
    rows = []
    for turn, adapter in enumerate(options.adapter):
        generator = Generator.from_pretrained(options.model, adapter=adapter)
        for prompt in prompts[turn :: len(options.adapter)]:
            group = [prompt] * options.samples
            seeds = [1000 * turn + number for number in range(options.samples)]
            for image in generator.sample(group, seeds, size=options.size, steps=options.steps):
                names = [f"{len(rows):05d}-{number}.png" for number in range(prompt.grid.count)]
                for name, panel in zip(names, split(image, prompt.grid), strict=True):
                    panel.save(options.out / name)
                rows.append({"images": names, "question": same_theme(shared_text(prompt.text))})
    write_jsonl(options.out / "sets.jsonl", rows)


if __name__ == "__main__":
    main()
