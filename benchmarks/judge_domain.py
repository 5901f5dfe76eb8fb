"""The tiny judge's domain: which share of photographs and textures it declines, and of its own world's images.

    PYTHONPATH=. python benchmarks/judge_domain.py                        # photographs that installed packages ship
    PYTHONPATH=. python benchmarks/judge_domain.py --photos FOLDER …      # and all images below these folders

Nothing here was seen when the classifier and its threshold were made (`pacorl tiny domain`): it learned from drawn
textures of other families and from no photograph, and of the world from training characters and other seeds.

photographs  seven crops of each photograph, at random places and sizes, some of them mirrored
textures     ten families, among them documents and fractals
world        grids and their panels about test characters: drawn, by the committed generator in one to ten steps, by an
             untrained one, by one at several steps of its training, under random adapters, and by the editor

It ends with 1 if less than 99 % of the former are declined, or more than 0.5 % of the latter.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tools.tiny.pretrain_domain import early_generators, random_adapter

from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.io.quiet import quiet_loading
from pacorl.judge.domain import Domain
from pacorl.judge.local import TINY_JUDGE
from pacorl.models.policies.flux import FLUX, TINY_FLUX, TRAINED_WITH, FluxPolicy
from pacorl.models.policies.kontext import KONTEXT, TINY_KONTEXT
from pacorl.models.policies.policy import Policy
from pacorl.records.prompts import prompts_from
from pacorl.runtime.cores import use_cores
from pacorl.tiny import characters
from pacorl.tiny.character_edits import character_edits, write_edits
from pacorl.types import Grid, Prompt, Size

SHIPPED = ("sklearn/datasets/images", "matplotlib/mpl-data/sample_data", "skimage/data")
"""Where installed packages keep photographs."""
NO_PHOTOGRAPHS = (
    "checker_bilevel", "chessboard_GRAY", "chessboard_RGB", "color", "horse", "logo", "logo2", "microaneurysms",
    "Minduka_Present_Blue_Pack", "motorcycle_right", "page", "phantom",
)  # fmt: skip
"""Drawings among them, and the second half of a stereo pair."""
MIN_SIDE = 100  # pixels; smaller files are icons
SEED = 12345
WRECKING = 0.3
"""A random adapter's spread that leaves nothing of the generator, far beyond training. Shown, and not counted."""
LEAST_DECLINED, MOST_DECLINED = 0.99, 0.005


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    domain = Domain.load(options.judge)
    if domain is None:
        raise SystemExit(f"{options.judge} brings no domain.json, so it declines nothing")
    shares: dict[str, list[bool]] = {}
    for kind, images in chain(foreign(options.photos, options.crops), world(options.count, options.train_steps)):
        shares[kind] = domain.outside(images)
        print(f"{kind:42} {sum(shares[kind]):6} of {len(images):5} declined", flush=True)
    outside = [one for kind, several in shares.items() if kind.startswith(("photo", "texture")) for one in several]
    inside = [one for kind, several in shares.items() if kind.startswith("world") for one in several]
    print(f"photographs and textures: {np.mean(outside):.2%} of {len(outside)} declined")
    print(f"the world: {np.mean(inside):.2%} of {len(inside)} declined")
    if options.json:
        table = {kind: [sum(several), len(several)] for kind, several in shares.items()}
        options.json.write_text(json.dumps(table, indent=2) + "\n")
    raise SystemExit(int(np.mean(outside) < LEAST_DECLINED or np.mean(inside) > MOST_DECLINED))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--judge", default=str(TINY_JUDGE), help="the checkpoint whose domain is measured")
    parser.add_argument("--photos", nargs="*", type=Path, default=[], help="further folders of photographs")
    parser.add_argument("--crops", type=int, default=7, help="images made of each photograph")
    parser.add_argument("--count", type=int, default=24, help="grids of each kind of the world and size")
    parser.add_argument("--train-steps", type=int, nargs="*", default=[30, 80, 160, 300], help="of the new generator")
    parser.add_argument("--json", type=Path, help="write the table")
    return parser.parse_args()


# --- photographs -----------------------------------------------------------------------------------------------


def foreign(folders: Sequence[Path], crops: int) -> Iterator[tuple[str, list[Image.Image]]]:
    rng = random.Random(SEED)
    paths = photographs(folders)
    print(f"{len(paths)} photographs: {', '.join(path.stem for path in paths)}")
    yield "photographs", [image for path in paths for image in views(path, crops, rng)]
    yield from textures(20, seed=SEED)


def photographs(folders: Sequence[Path]) -> list[Path]:
    """All below the folders, and those that packages ship."""
    for place in SHIPPED:
        package, _, inner = place.partition("/")
        spec = find_spec(package)
        if spec and spec.submodule_search_locations:
            folders = [*folders, Path(spec.submodule_search_locations[0]) / inner]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES]
    return [path for path in files if path.stem not in NO_PHOTOGRAPHS and is_large(path)]


IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}


def is_large(path: Path) -> bool:
    with Image.open(path) as image:
        return min(image.size) >= MIN_SIDE


def views(path: Path, count: int, rng: random.Random) -> Iterator[Image.Image]:
    """The whole photograph, and crops of it."""
    with Image.open(path) as file:
        photograph = file.convert("RGB")
    photograph.thumbnail((1024, 1024))
    yield photograph
    for _ in range(count - 1):
        side = rng.uniform(0.35, 1.0) * min(photograph.size)
        width, height = int(side), int(side * rng.uniform(0.75, 1.0))
        left, top = rng.uniform(0, photograph.width - width), rng.uniform(0, photograph.height - height)
        crop = photograph.crop((int(left), int(top), int(left) + width, int(top) + height))
        yield crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


# --- textures of other families than those that the classifier learned from ------------------------------------


def textures(count: int, *, seed: int) -> Iterator[tuple[str, list[Image.Image]]]:
    """`count` images of each family, at several sizes."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    for family in FAMILIES:
        sizes = (64, 128, 256, 512)
        yield f"texture: {family.__name__}", [family(rng, noise, rng.choice(sizes)) for _ in range(count)]


Family = Callable[[random.Random, np.random.Generator, int], Image.Image]


def stripes(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[:side, :side] / side
    angle, waves = rng.uniform(0, np.pi), rng.uniform(2, 14)
    value = np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)))
    return coloured(value if rng.random() < 0.5 else np.sign(value), noise)


def checkers(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[:side, :side] * rng.choice((2, 3, 4, 5, 8, 16)) // side
    return coloured((x + y) % 2, noise)


def mosaic(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[:side, :side] / side
    points = noise.uniform(0, 1, (rng.choice((6, 12, 25, 60)), 2))
    nearest = np.stack([np.hypot(x - a, y - b) for a, b in points]).argmin(0)
    return Image.fromarray(noise.integers(0, 256, (len(points), 3), dtype=np.uint8)[nearest])


def rings(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[:side, :side] / side
    bent = 0.05 * np.sin(9 * x + rng.uniform(0, 6)) + 0.05 * np.sin(7 * y + rng.uniform(0, 6))
    radius = np.hypot(x - rng.uniform(-0.5, 1.5), (y - rng.uniform(-0.5, 1.5)) * rng.uniform(0.1, 1))
    return coloured(np.sin(2 * np.pi * rng.uniform(6, 20) * (radius + bent)), noise)


def plaid(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    across, down = (np.repeat(noise.uniform(0, 1, 16), -(-side // 16))[:side] for _ in range(2))
    return coloured(across[None, :] + down[:, None], noise, colours=4)


def julia(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[-1.4 : 1.4 : side * 1j, -1.4 : 1.4 : side * 1j]
    z, steps = x + 1j * y, np.zeros((side, side))
    constant = 0.7885 * np.exp(1j * rng.uniform(0, 2 * np.pi))
    for _ in range(40):
        within = np.abs(z) < 4
        z = np.where(within, z * z + constant, z)
        steps += within
    return coloured(np.sqrt(steps), noise, colours=5)


def chart(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(image)
    pen.line((side * 0.1, side * 0.05, side * 0.1, side * 0.9, side * 0.95, side * 0.9), fill="black", width=2)
    for _ in range(rng.randint(1, 3)):
        colour = tuple(int(v) for v in noise.integers(0, 200, 3))
        heights = np.clip(0.5 + np.cumsum(noise.normal(0, 0.08, 12)), 0.05, 1)
        points = [(side * (0.12 + 0.07 * i), side * (0.9 - 0.8 * h)) for i, h in enumerate(heights)]
        if rng.random() < 0.5:
            pen.line(points, fill=colour, width=max(2, side // 80))
            continue
        for x, y in points:
            pen.rectangle((x, y, x + side * 0.05, side * 0.9), fill=colour)
    return image


def letter(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    dark = rng.random() < 0.3
    paper, ink = ((24, 26, 30), (220, 220, 220)) if dark else ((252, 251, 246), (25, 25, 30))
    image = Image.new("RGB", (side, side), paper)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=max(8, side // rng.choice((12, 18, 26))))
    for top in range(side // 12, side - side // 12, max(10, int(font.size * 1.4))):
        text = " ".join("".join(rng.choices("aeinorstlcdm", k=rng.randint(2, 9))) for _ in range(9))
        pen.text((side // 14, top), text, fill=ink, font=font)
    return image


def sketch(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(4, 25)):
        points = [(float(x), float(y)) for x, y in noise.uniform(0, side, (rng.randint(2, 7), 2))]
        pen.line(points, fill="black", width=max(1, side // 100))
    return image


def weave(rng: random.Random, noise: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[:side, :side] / side
    waves = rng.uniform(4, 20)
    over = np.sign(np.sin(2 * np.pi * waves * x) * np.sin(2 * np.pi * waves * y))
    shade = np.where(over > 0, np.cos(2 * np.pi * waves * x), np.cos(2 * np.pi * waves * y))
    return coloured(over + 0.3 * shade + noise.normal(0, 0.1, shade.shape), noise, colours=3)


FAMILIES: tuple[Family, ...] = (stripes, checkers, mosaic, rings, plaid, julia, chart, letter, sketch, weave)


def coloured(values: NDArray[np.float64], noise: np.random.Generator, *, colours: int = 2) -> Image.Image:
    """Values → colours of a random scale."""
    scaled = (values - values.min()) / max(float(np.ptp(values)), 1e-9)
    scale, stops = noise.uniform(0, 255, (colours, 3)), np.linspace(0, 1, colours)
    pixels = np.stack([np.interp(scaled, stops, scale[:, channel]) for channel in range(3)], axis=-1)
    return Image.fromarray(pixels.round().astype(np.uint8))


# --- the world -------------------------------------------------------------------------------------------------


def world(count: int, train_steps: Sequence[int]) -> Iterator[tuple[str, list[Image.Image]]]:
    """Grids with their panels, by kind."""
    yield from drawings(count)
    for steps in (10, 6, 3, 2, 1):
        yield f"world: generator, {steps} steps", grids(generator(), count, steps=steps)
    for spread in (0.05, 0.1, 0.2, WRECKING):
        policy = generator()
        random_adapter(policy.transformer, policy.lora_targets, spread=spread, seed=SEED)
        kind = "world" if spread < WRECKING else "wreck"
        yield f"{kind}: generator, random adapter {spread}", grids(policy, count)
    vae = generator().pipeline.vae
    for step, pipeline in zip([0, *train_steps], early_generators(vae, [0, *train_steps], seed=SEED), strict=True):
        policy = FLUX.over(pipeline, **TRAINED_WITH)
        yield f"world: new generator after {step} steps", grids(policy, count)
    yield from edits(count)


def drawings(count: int) -> Iterator[tuple[str, list[Image.Image]]]:
    rng = random.Random(SEED)
    panels = characters.panels_of("test")
    sizes = (32, 48, 64, 128, 256)
    yield "world: drawn panels", [characters.draw(rng.choice(panels), rng.choice(sizes)) for _ in range(8 * count)]
    for layout in (Grid(2, 2), Grid(1, 2), Grid(3, 3)):
        sets = [[rng.choice(panels) for _ in range(layout.count)] for _ in range(2 * count)]
        yield f"world: drawn {layout} grids", [characters.draw_grid(one, layout, rng.choice((32, 64))) for one in sets]


def generator() -> FluxPolicy:
    return FLUX.from_pretrained(TINY_FLUX, **TRAINED_WITH)


def grids(policy: FluxPolicy, count: int, *, steps: int = 10) -> list[Image.Image]:
    """`count` grids of 64 px and as many of 128 px, and all their panels."""
    prompts = characters.character_prompts("test", count, seed=SEED)
    made = [grid for size in (64, 128) for grid in sampled(policy, prompts, size=size, steps=steps)]
    return [*made, *(panel for grid in made for panel in split(grid, Grid(2, 2)))]


def edits(count: int) -> Iterator[tuple[str, list[Image.Image]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_edits(Path(folder), character_edits("test", 2 * count, seed=SEED), name="edits")
        prompts = prompts_from(str(path), limit=None)
        editor = KONTEXT.from_pretrained(TINY_KONTEXT, **TRAINED_WITH)
        for steps in (10, 3, 1):
            yield f"world: editor, {steps} steps", sampled(editor, prompts, size=32, steps=steps)


def sampled(policy: Policy, prompts: Sequence[Prompt], *, size: int, steps: int) -> list[Image.Image]:
    seeds: Iterable[int] = range(SEED, SEED + len(prompts))
    sampler, cache = Sampler(size=Size(size, size), steps=steps), ConditioningCache(policy)
    with torch.no_grad():
        return sample_images(policy, prompts, sampler=sampler, cache=cache, seeds=list(seeds), batch=12)


if __name__ == "__main__":
    main()
