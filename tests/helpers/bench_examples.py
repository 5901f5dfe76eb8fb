"""A small example of every benchmark in its published format, which a comparison of mean colours answers correctly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
from asked import Asked
from PIL import Image

from pacorl.bench.edit_reward_bench import DIMENSIONS
from pacorl.bench.options import BenchmarkOptions
from pacorl.bench.t2is import ALIGNED, ALIGNMENT, CASES, CONSISTENT, CRITERIA
from pacorl.io.documents import write_json, write_jsonl
from pacorl.types import Question

COLOURS = ("red", "green", "blue")
LIGHTER = "make it a little lighter"
TASKS = ("color_alter", "tone_transfer")
Example = tuple[Path, BenchmarkOptions]
"""DATA of a benchmark's command, and the options to measure it."""


def faded(colour: str, share: float) -> Image.Image:
    """A colour mixed with a share of white."""
    return Image.blend(Image.new("RGB", (32, 32), colour), Image.new("RGB", (32, 32), "white"), share)


def saved(image: Image.Image, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path.name


def drawn_edits(folder: Path) -> list[tuple[str, str, str]]:
    """Write three sources, each with an edit in its colour and one in another; return their names."""
    drawn = []
    for colour in COLOURS:
        shown = (("in", faded(colour, 0.0)), ("good", faded(colour, 0.1)), ("bad", faded("black", 0.5)))
        source, good, bad = (saved(image, folder / f"{colour}_{name}.png") for name, image in shown)
        drawn.append((source, good, bad))
    return drawn


def rank_example(folder: Path) -> Example:
    """Three references in three folders, each with candidates ranked by the similarity of their colours."""
    prompts, ranks = [], []
    for number, colour in enumerate(COLOURS):
        name = f"{number:04d}"
        for file, share in {"0_0": 0.0, "0_1": 0.1, "1_1": 0.4, "2_1": 0.8}.items():
            saved(faded(colour, share), folder / "images" / name / f"{file}.png")
        ordered = ["0_1.png", "1_1.png", "2_1.png"]
        prompts.append({"idx": name, "prompt": f"{colour} tiles", "criteria": {"Style": {"Colour": "One colour."}}})
        ranks.append({"folder": name, "ref_image": "0_0.png", "comp_images": sorted(ordered), "rank_images": ordered})
    write_jsonl(folder / "prompt_data.jsonl", prompts)
    write_jsonl(folder / "consistency_full_rank.jsonl", ranks)
    return folder, BenchmarkOptions(judge="colour")


def edit_reward_example(folder: Path) -> Example:
    rows = []
    for number, (source, good, bad) in enumerate(drawn_edits(folder)):
        row = {"key": [f"{number}_good", f"{number}_bad"], "instruction": LIGHTER, "task_type": TASKS[number % 2]}
        row |= {"input_image": source, "output_images": [good, bad]}
        rows += [{**row, "dimension": dimension} for dimension in DIMENSIONS]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl", BenchmarkOptions(judge="colour")


def vc_reward_example(folder: Path) -> Example:
    rows = []
    for number, (source, good, bad) in enumerate(drawn_edits(folder)):
        winner, edits = [("Image A", [good, bad]), ("Image B", [bad, good])][number % 2]
        row = {"key": f"pair_{number}", "instruction": LIGHTER, "task": TASKS[number % 2], "winner": winner}
        rows.append({**row, "source_image": source, "edited_images": edits})
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl", BenchmarkOptions(judge="colour")


def compass_example(folder: Path) -> Example:
    rows = []
    for (source, good, bad), dimension in product(drawn_edits(folder), ("IA", "VC", "VQ")):
        row = {"source_image": source, "winner": good, "loser": bad, "prompt": LIGHTER}
        rows.append({**row, "dimension": dimension, "label": "preference"})
    write_json(folder / "rows.json", rows)
    return folder / "rows.json", BenchmarkOptions(judge="colour")


def t2is_example(folder: Path) -> Example:
    """Three cases of two images in nearly one colour."""
    cases, criteria, alignment = {}, {}, {}
    for number, colour in enumerate(COLOURS, start=1):
        name = f"{number:04d}_0001"
        captions = [f"{colour} tiles by day", f"{colour} tiles by night"]
        cases[name] = {"instruction": f"{colour} tiles", "sub_caption": captions, "output_image_count": len(captions)}
        criteria[name] = {dimension: [{"Colour": f"All tiles are {colour}."}] for dimension in CONSISTENT}
        alignment[name] = {text: {dimension: [text] for dimension in ALIGNED} for text in captions}
        for panel in range(len(captions)):
            saved(faded(colour, 0.1 * panel), folder / "made" / f"{name}_{panel + 1:04d}.png")
    for file_name, content in {CASES: cases, CRITERIA: criteria, ALIGNMENT: alignment}.items():
        write_json(folder / file_name, content)
    return folder, BenchmarkOptions(images=folder / "made", judge="colour")


def gedit_example(folder: Path) -> Example:
    """Three finished edits in two languages, in the colour of their source."""
    rows = []
    for number, colour in enumerate(COLOURS):
        task, language = TASKS[number // 2], ("en", "cn")[number % 2]
        row = {"category": task, "key": f"k{number}", "instruction": LIGHTER, "task_name": language}
        source = saved(faded(colour, 0.0), folder / f"{number}.png")
        rows.append({**row, "intersection": number < 2, "image": source})
        saved(faded(colour, 0.1), folder / "made" / "fullset" / task / language / f"k{number}.png")
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl", BenchmarkOptions(images=folder / "made", judge="colour")


def by_colour(question: Question) -> float:
    """P(Yes) by the distance of mean colours: close ones are consistent."""
    first, *others = [
        (np.asarray(image.convert("RGB"), dtype=np.float64) / 255).mean((0, 1)) for image in question.images
    ]
    distance = max([0.0, *(float(np.abs(first - other).max()) for other in others)])
    return 0.05 + 0.9 * math.exp(-6 * distance)


class ColourJudge(Asked):
    """A judge of colours, whose reasons have scores."""

    def explain(self, question: Question) -> str:
        score = round(10 * (self.answer(question) or 0.0), 2)
        return json.dumps({"reasoning": "The mean colours were compared.", "score": [score, score]})


EXAMPLES: list[tuple[str, Callable[[Path], Example]]] = [
    ("consistency-rank", rank_example),
    ("edit-reward-bench", edit_reward_example),
    ("vc-reward-bench", vc_reward_example),
    ("edit-reward-compass", compass_example),
    ("t2is", t2is_example),
    ("gedit", gedit_example),
]
