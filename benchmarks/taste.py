"""Do simulated people teach the tiny generator their taste, by the studio's own page?

    python benchmarks/taste.py --out runs/taste                  # minutes on one core
    python benchmarks/taste.py --out runs/taste --people warm --rounds 10 --json

Each person starts a run in a studio of their own and ranks its groups over HTTP, as the page does: they look at the
images, judge them by their taste with some noise, and call images equal that differ by less than they notice. The
LoRA then generates held-out prompts beside the base, from equal seeds. *Agreement* is the share of these prompts on
which the person prefers the LoRA's image, a tie counting one half; 0.5 is none. Their *rise* is how much more they like
it, in standard deviations of the base's images. *Prompt match* is the oracle's share of attributes that are as the
prompt asked: what the taste costs. Intervals are 95 % bootstrap intervals over prompts. A person whose run is finished
does not rank again; their LoRA is measured.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from pacorl.core.grid import parse_layout, split
from pacorl.core.ranking import bootstrap
from pacorl.generate.generator import Generator
from pacorl.io.documents import parse_json
from pacorl.io.net import blocking, exchange
from pacorl.io.quiet import quiet_loading
from pacorl.tiny.characters import Oracle, character_prompts
from pacorl.types import Grid, Prompt, Size

ORACLE = Oracle()
NOISE, NOTICED = 0.3, 0.2
"""Of what a group's images differ by: a person's noise, and the least difference that they notice."""
IMAGE_BYTES = 20_000_000


def warmth(image: Image.Image, grid: Grid) -> float:
    """Red without blue."""
    red, _, blue = np.asarray(image.convert("RGB"), dtype=float).mean((0, 1)) / 255
    return float(red - blue)


def darkness(image: Image.Image, grid: Grid) -> float:
    return -float(np.asarray(image.convert("L"), dtype=float).mean()) / 255


def crowns(image: Image.Image, grid: Grid) -> float:
    """The share of panels whose hero wears a crown, whatever the prompt asked."""
    return fmean(panel.hat == "crown" for panel, _ in ORACLE.nearest(split(image, grid)))


TASTES: dict[str, Callable[[Image.Image, Grid], float]] = {"warm": warmth, "dark": darkness, "crowns": crowns}


class Studio:
    """A studio in a process of its own, as a program sees it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "pacorl", "studio", "--port", "0", "--history", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout
        link = self.process.stdout.readline().removeprefix("studio: ").strip()
        self.url, self.token = link.split("/join#")

    def __enter__(self) -> Studio:
        return self

    def __exit__(self, *fault: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return parse_json(self.content(path, body))

    def content(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        options: dict[str, Any] = {"seconds": 120.0, "key": self.token, "max_bytes": IMAGE_BYTES}
        answer = blocking(exchange(self.url + path, body, **options))
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.fault()}")
        return answer.body


def main() -> None:
    options = arguments()
    quiet_loading()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = [teach(name, options) for name in options.people]
    # Together, with whole prompts drawn: people whose LoRAs were asked for the same prompt do not vary by themselves.
    prompts = list(range(options.prompts)) * len(results)
    pooled = {
        key: interval([value for result in results for value in result.pop(values)], prompts)
        for key, values in (("agreement", "wins"), ("rise", "rises"))
    }
    summary = {"rounds": options.rounds, "people": results, **pooled}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2) if options.json else table(summary))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--people", nargs="+", choices=TASTES, default=list(TASTES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--judge-share", type=float, default=0.5)
    parser.add_argument("--prompts", type=int, default=48, help="held out, of the development split")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def teach(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One person's run and what it came to; a finished one is not run again."""
    file = options.out / f"{name}.json"
    if file.exists():
        ranked_before = json.loads(file.read_text())
        return ranked_before | held_out(name, str(options.out / name / "taste" / name / "run/adapter"), options.prompts)
    began = time.monotonic()
    with Studio(options.out / name) as studio:
        lines = studio.ask("/api/taste")["example"]
        request = {"name": name, "prompts": lines, "rounds": options.rounds, "groups": options.groups}
        request |= {"group_size": options.group_size, "judge_share": options.judge_share}
        if not (options.out / name / "taste" / name).exists():
            state = studio.ask("/api/taste", request)
        else:
            state = studio.ask(f"/api/taste?name={name}")["current"]
            if state["status"] == "stopped":
                state = studio.ask(f"/api/taste/{name}/continue", {})
        while state["status"] not in ("done", "failed", "stopped"):
            if state["task"]:
                ranks = ranked(studio, state["task"], name)
                state = studio.ask(f"/api/taste/{name}/ranks", {"group": state["task"]["group"], "ranks": ranks})
            else:
                time.sleep(0.2)
                state = studio.ask("/api/taste")["current"]
        if state["status"] != "done":
            raise SystemExit(f"{name}: {state['status']}: {state['error']}")
    result: dict[str, Any] = {"person": name, "rankings": state["ranked"], "seconds": round(time.monotonic() - began)}
    file.write_text(json.dumps(result) + "\n")
    result |= held_out(name, state["adapter"], options.prompts)
    print(f"{name}: {row(result)}", file=sys.stderr, flush=True)
    return result


def ranked(studio: Studio, task: dict[str, Any], name: str) -> list[int]:
    """A person's ranks of a group: 1 is best, and what they cannot tell apart is equal."""
    grid = parse_layout(task["grid"])
    images = [Image.open(io.BytesIO(studio.content(address))) for address in task["images"]]
    liking = np.array([TASTES[name](image, grid) for image in images])
    spread, rng = float(liking.std()), random.Random(task["group"])
    seen = [value + rng.gauss(0, NOISE * spread) for value in liking]
    order, ranks, rank = sorted(range(len(seen)), key=lambda i: -seen[i]), [0] * len(seen), 1
    for place, i in enumerate(order):
        if place and seen[order[place - 1]] - seen[i] > NOTICED * spread:
            rank += 1
        ranks[i] = rank
    return ranks


def held_out(name: str, adapter: str, count: int) -> dict[str, Any]:
    """The person's agreement with the LoRA's images of held-out prompts, beside the base's of the same seeds."""
    generator, prompts = Generator.from_pretrained("tiny", adapter=adapter), character_prompts("dev", count)
    seeds, size = list(range(count)), Size(64, 64)
    before, after = (generator.sample(prompts, seeds, size=size, base=base) for base in (True, False))
    liking = np.array(
        [[TASTES[name](image, p.grid) for image, p in zip(images, prompts, strict=True)] for images in (before, after)]
    )
    wins = [0.5 + 0.5 * float(np.sign(change)) for change in liking[1] - liking[0]]
    rises = ((liking[1] - liking[0]) / liking[0].std()).tolist()
    return {
        "agreement": interval(wins, list(range(count))),
        "rise": interval(rises, list(range(count))),
        "taste": [round(float(values.mean()), 4) for values in liking],
        "prompt_match": [round(match(prompts, images), 4) for images in (before, after)],
        "wins": wins,
        "rises": rises,
    }


def interval(values: Sequence[float], prompts: Sequence[int]) -> list[float | None]:
    """Mean and ends of its 95 % interval."""
    (estimate,) = bootstrap(prompts, lambda rows: np.array([np.asarray(values)[rows].mean()]))
    return [estimate.mean, estimate.low, estimate.high]


def match(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> float:
    return fmean(
        ORACLE.grade(prompt, split(image, prompt.grid))["prompt_match"]
        for prompt, image in zip(prompts, images, strict=True)
    )


def row(result: dict[str, Any]) -> str:
    taste, prompt = (" → ".join(f"{value:.2f}" for value in result[key]) for key in ("taste", "prompt_match"))
    return (
        f"{preference(result)}; taste {taste}, prompt match {prompt}; {result['rankings']} rankings, "
        f"{result['seconds']} s"
    )


def preference(result: dict[str, Any]) -> str:
    agreement, rise = ("{:.2f} ({:.2f} to {:.2f})".format(*result[key]) for key in ("agreement", "rise"))
    return f"prefers the LoRA's image on {agreement} of held-out prompts and likes it {rise} standard deviations more"


def table(summary: dict[str, Any]) -> str:
    lines = [f"{result['person']:8} {row(result)}" for result in summary["people"]]
    return "\n".join([*lines, f"all      {preference(summary)}"])


if __name__ == "__main__":
    main()
