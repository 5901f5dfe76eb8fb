"""The case studies' twins before and after the quickstart's training: the table and the pictures of docs/cases.md.

    python benchmarks/cases.py runs/quickstart/adapter --pictures docs/cases

Each storyboard `configs/cases/tiny_*.yaml` is generated with and without the adapter from the same seeds. The judge
answers the storyboard's criteria; the oracle reads which attributes two panels share, and whether each panel shows
the thing that its text names. A picture is seed 0, before on the left.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import fmean

from PIL import Image

from pacorl.generate.generated_images import GeneratedImage
from pacorl.generate.generator import Generator
from pacorl.generate.storyboard import generate_storyboard, read_storyboard
from pacorl.io.quiet import quiet_loading
from pacorl.judge.local import LocalJudge
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import Oracle, Panel

CASES = sorted((Path(__file__).parents[1] / "configs" / "cases").glob("tiny_*.yaml"))
SIDE, GAP = 256, 12  # pixels


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    judge, oracle = LocalJudge.from_pretrained("tiny"), Oracle()
    generators = [Generator.from_pretrained("tiny", adapter=adapter) for adapter in ("", options.adapter)]
    print("| | judge, by criteria | attribute agreement | all four at their place |\n|---|---|---|---|")
    for path in CASES:
        board = read_storyboard(path)
        generated = partial(generate_storyboard, board=board, judge=judge, ask="criteria")
        before, after = ([generated(each, seed=seed)[0] for seed in range(options.seeds)] for each in generators)
        means = zip(measured(before, oracle), measured(after, oracle), strict=True)
        print(f"| `{path.stem}` |", " | ".join(f"{was:.2f} → {now:.2f}" for was, now in means), "|")
        if options.pictures:
            side_by_side(before[0].image, after[0].image).save(options.pictures / f"{path.stem}.png")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="a run's adapter")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--pictures", type=Path, help="a folder for the pictures")
    return parser.parse_args()


def measured(images: list[GeneratedImage], oracle: Oracle) -> tuple[float, float, float]:
    """Means of the judge's score and of the attributes that two panels share, and the share of sets in their places."""
    agreements, in_place = [], []
    for image in images:
        described, shown = [Panel.parse(text) for text in image.prompt.panels], oracle.read(image.panels)
        agreements.append(oracle.grade(image.prompt, image.panels)["attribute_agreement"])
        in_place.append(all(read and read.prop == text.prop for read, text in zip(shown, described, strict=True)))
    scores = [image.judged.score or 0.0 for image in images if image.judged]
    return fmean(scores), fmean(agreements), fmean(in_place)


def side_by_side(before: Image.Image, after: Image.Image) -> Image.Image:
    """Both enlarged without a blur, which would hide what the tiny generator gets wrong."""
    canvas = Image.new("RGB", (2 * SIDE + GAP, SIDE), "white")
    for column, image in enumerate((before, after)):
        canvas.paste(image.resize((SIDE, SIDE), Image.Resampling.NEAREST), (column * (SIDE + GAP), 0))
    return canvas


if __name__ == "__main__":
    main()
