"""ViStoryBench and its Lite selection: do the shots of a story keep its characters? (arXiv 2505.24862)

The published folders as they are: `NN/story.json` and `NN/image/CHARACTER/00.jpg` are read, and `shots/NN/XX.png` is
written and read, the released evaluation's layout below `METHOD/MODE/LANGUAGE/TIME`. Figures are means over stories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from pacorl.bench.benchmarks import Advance, BenchmarkSpec, GeneratorBenchmarkOptions
from pacorl.bench.image_sources import described, image_source
from pacorl.bench.items import Dataset, ImageCache, faded, parse_records
from pacorl.bench.suite import Row, Table, Texts
from pacorl.config.options import one_of, option
from pacorl.core import questions as wordings
from pacorl.core.ranking import Interval, bootstrap
from pacorl.generate.image_queue import ImageJob, Shard, generate_missing
from pacorl.io.documents import JsonObject, blamed_on, read_object, write_json
from pacorl.io.files import write_atomic
from pacorl.io.images import images_in, png_bytes
from pacorl.judge.pairwise import ask
from pacorl.records.characters import in_turn
from pacorl.records.prompts import evenly_spread
from pacorl.types import Character, Prompt, Question

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from pacorl.judge.paco_reward import PacoReward

LITE_NUMBERS = (1, 8, 9, 15, 17, 19, 24, 27, 28, 29, 32, 41, 52, 53, 55, 57, 60, 64, 68, 79)
LITE = tuple(f"{number:02d}" for number in LITE_NUMBERS)
"""Stories of ViStoryBench-Lite."""
APPEARING = "Characters Appearing"
DESCRIBED = ("Setting Description", "Static Shot Description", "Shot Perspective Design")
"""Descriptive fields of a shot, in the order of the prompt."""
COPY_TEMPERATURE = 0.01
"""Temperature of the softmax over a reference and its mirror image, as in the released evaluation."""
FIGURES = {"cross": "Character, cross", "self": "Character, self", "alignment": "Alignment", "copied": "Copy-paste"}
NOTE = (
    "Character: P(Yes) that two images show the same character; cross: a shot and the first reference, self: two "
    "shots. Alignment: P(Yes) that a shot shows its static description. Copy-paste: probability of a reference against "
    "its mirror image by features of the shot, 0.5 without copies; lower is better. The released evaluation crops "
    "characters by a detector and has other encoders, so no published row is shown. Intervals are 95 %, bootstrapped "
    "over stories."
)


@dataclass(frozen=True, kw_only=True)
class VistoryOptions(GeneratorBenchmarkOptions):
    """Options of ViStoryBench."""

    panel: ClassVar[str] = "Story"

    full: bool = option(False, "All stories instead of the Lite selection of 20.")
    language: str = option("en", "en or ch.", parse=one_of("en", "ch"))
    previous: bool = option(False, "Give each shot the one before it as a reference.")
    copy_encoder: str = option("", "A CLIP that measures copied references, e.g. openai/clip-vit-large-patch14.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images and not (self.images / "shots").is_dir():
            raise ValueError(f"--images {self.images}: holds no folder shots; name METHOD/MODE/LANGUAGE/TIME")


class ImageEncoder(Protocol):
    """Encoder of images as unit vectors."""

    def images(self, images: Sequence[Image]) -> Tensor:
        """Return (B, C)."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One image of a story."""

    index: int
    text: str
    """Prompt: setting, static description and perspective."""
    shown: str
    """Static description."""
    characters: tuple[Character, ...]
    """Characters that appear."""


@dataclass(frozen=True, slots=True)
class Story:
    """A story and its shots."""

    id: str
    shots: tuple[Shot, ...]


def read_stories(folder: Path, options: VistoryOptions) -> Dataset[Story, Path]:
    """Read the stories of a folder. Raises ValueError listing the faulty ones, unless they are left out."""
    paths = [path.parent for path in sorted(folder.glob("*/story.json"))]
    selected = [path for path in paths if options.full or path.name in LITE]
    if not selected:
        if not paths:
            raise ValueError(f"{folder} has no NN/story.json; name ViStoryBench's folder of stories")
        raise ValueError(f"{folder} has no story of the Lite selection; take --full, or download ViStoryBench-Lite")

    # Read and check every story.
    records = {str(path): (path, options.language) for path in selected}
    stories, refused = parse_records(records, _story, key=lambda story: story.id, skip_bad=options.skip_bad)
    content = []
    for story in stories.values():
        content.append([story.id, *(shot.text for shot in story.shots)])
    return Dataset(dict(evenly_spread(list(stories.items()), options.limit)), refused, content, folder)


def _story(folder: Path, language: str) -> Story:
    document = read_object(folder / "story.json")
    entries = document.get("Characters")
    shots = document.get("Shots")
    # The forms, before the entries are read.
    if not isinstance(entries, dict) or not isinstance(shots, list) or not shots:
        raise ValueError("story.json must hold Shots, a list, and Characters, a mapping")
    # Characters by name, which the shots refer to.
    characters = {}
    for name, entry in entries.items():
        with blamed_on(f"character {name}"):
            description = entry.get(f"prompt_{language}") if isinstance(entry, dict) else None
            # The name joins a path below, so it must not leave the folder.
            if Path(name).name != name or not isinstance(description, str) or not description:
                raise ValueError(f"needs a name of a folder and the text 'prompt_{language}'")
            images = images_in(folder / "image" / name)
            if not images:
                raise ValueError(f"there is no image in {folder / 'image' / name}")
        characters[name] = Character(name, description, images)

    # Shots in the order of the file, each with its characters.
    read = []
    for number, shot in enumerate(shots, 1):
        with blamed_on(f"shot {number}"):
            read.append(_shot(shot, characters, language))
    if len({shot.index for shot in read}) < len(read):
        raise ValueError("two shots have the same index")
    return Story(folder.name, tuple(read))


def _shot(shot: Any, characters: Mapping[str, Character], language: str) -> Shot:
    texts = []
    for field in DESCRIBED:
        by_language = shot.get(field) if isinstance(shot, dict) else None
        text = by_language.get(language) if isinstance(by_language, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{field!r} must map {language} to a text")
        texts.append(text)
    # Names are keys of Characters in English only.
    appearing = shot.get(APPEARING)
    names = appearing.get("en") if isinstance(appearing, dict) else None
    if not isinstance(names, list) or not isinstance(shot.get("index"), int):
        raise ValueError(f"needs a whole number 'index' and {APPEARING!r} with a list 'en'")
    unknown = [name for name in names if name not in characters]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of the Characters")
    return Shot(shot["index"], " ".join(texts), texts[1], tuple(characters[name] for name in names))


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class VistoryBench:
    """The benchmark over the shots of a folder."""

    data: Dataset[Story, Path]
    images: Path
    """Folder with `shots/`."""
    judge: PacoReward
    made_by: JsonObject
    """Description of the images in the settings."""
    encoder: ImageEncoder | None = None
    encoder_name: str = ""

    title = "ViStoryBench"
    columns = tuple(FIGURES.values())
    paper = None
    notes = (NOTE,)

    def settings(self) -> JsonObject:
        settings = {"benchmark": "vistory", "data": self.data.fingerprint, "judge": self.judge.name}
        return settings | {"images": dict(self.made_by), "copy_encoder": self.encoder_name}

    def texts(self) -> Texts:
        return {story.id: [shot.text for shot in story.shots] for story in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        return [self._measure(self.data.items[key]) for key in keys]

    def _measure(self, story: Story) -> Row:
        drawn = ImageCache(self.images / "shots" / story.id)
        shots = [drawn.open_any(f"{shot.index:02d}", f"shot_{shot.index:02d}") for shot in story.shots]

        # Alignment of each shot; each character against its reference, and against itself over shots.
        questions: dict[tuple[str, str, tuple[int, ...]], Question] = {}
        cast: dict[str, Character] = {}
        shown_in: dict[str, list[Image]] = {}
        for number, (shot, image) in enumerate(zip(story.shots, shots, strict=True)):
            questions["alignment", "", (number,)] = Question((image,), wordings.shows_text(shot.shown))
            for character in shot.characters:
                cast[character.name] = character
                shown_in.setdefault(character.name, []).append(image)
        # Shots are compared with the first image of their characters.
        references = ImageCache(self.data.source)
        first_of = {}
        for name, images in shown_in.items():
            first_of[name] = references.open(str(cast[name].images[0].relative_to(self.data.source)))
            text = wordings.same_theme(cast[name].description)
            for number, image in enumerate(images):
                questions["cross", name, (number,)] = Question((first_of[name], image), text)
            for i, j in combinations(range(len(images)), 2):
                questions["self", name, (i, j)] = Question((images[i], images[j]), text)

        # A mean per character first: one with many shots has many more pairs.
        answers: dict[str, dict[str, list[float]]] = {}
        for (figure, name, _), verdict in ask(self.judge.judge, questions).items():
            if verdict.p_yes is None:
                return {"key": story.id, "error": verdict.error}
            answers.setdefault(figure, {}).setdefault(name, []).append(verdict.p_yes)
        means = {}
        for figure, by_name in answers.items():
            means[figure] = fmean(map(fmean, by_name.values()))
        if self.encoder and shown_in:
            rates = [copy_rate(self.encoder, images, first_of[name]) for name, images in shown_in.items()]
            means["copied"] = fmean(rates)
        return {"key": story.id, **means}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        # NaN for a story without the figure, e.g. if no character appears twice.
        figures_NF = np.array([[row.get(figure, np.nan) for figure in FIGURES] for row in rows])

        def statistic(drawn: Any) -> Any:
            present = ~np.isnan(figures_NF[drawn])
            with np.errstate(invalid="ignore"):
                return np.where(present, figures_NF[drawn], 0).sum(0) / present.sum(0)

        return bootstrap([row["key"] for row in rows], statistic)

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        return []


def copy_rate(encoder: ImageEncoder, shots: Sequence[Image], reference: Image) -> float:
    """Compute the copy-paste measure of a character.

    A pasted reference resembles the reference more than its mirror image; a new drawing resembles both alike.
    """
    from PIL import ImageOps

    vectors_BC = encoder.images([reference, ImageOps.mirror(reference), *shots])
    similarity_S2 = vectors_BC[2:] @ vectors_BC[:2].T
    return float((similarity_S2 / COPY_TEMPERATURE).softmax(1)[:, 0].mean())


# --- generating --------------------------------------------------------------------------------------------------


def _generate(data: Dataset[Story, Path], options: VistoryOptions, out: Path, shard: Shard, advance: Advance) -> None:
    """Generate the missing shots into `shots/NN/XX.png`, with references if the generator takes them."""
    from pacorl.models.policies import POLICIES

    source = image_source(options, edits=False, previous=options.previous)
    # One place may be the shot before.
    most = POLICIES[source.generator["kind"]].policy.max_references - options.previous
    jobs: dict[str, list[ImageJob]] = {story: [] for story in data.items}
    count = 0
    for story in data.items.values():
        for shot in story.shots:
            before = [out / job.file for job in jobs[story.id][-1:] if options.previous]
            prompt = Prompt(
                id=count,
                text=shot.text,
                theme=shot.text,
                panels=(shot.shown,),
                characters=shot.characters,
                references=(*in_turn([character.images for character in shot.characters])[:most], *before),
            )
            file = f"shots/{story.id}/{shot.index:02d}.png"
            jobs[story.id].append(ImageJob(f"{story.id}/{shot.index:02d}", prompt, file))
            count += 1
    if not options.previous:
        generate_missing([*chain(*jobs.values())], out, source, shard=shard, progress=advance)
        return

    # Whole stories, shot by shot, so that the shot before exists. The weights load once.
    source = replace(source, load=cache(source.load))
    batches = shard.batches(list(jobs.values()), size=source.batch)
    for number, stories in enumerate(batches, 1):
        for position in range(max(map(len, stories))):
            generate_missing([shots[position] for shots in stories if position < len(shots)], out, source)
        advance(number, len(batches))


def _build(data: Dataset[Story, Path], options: VistoryOptions, reward: PacoReward, out: Path) -> VistoryBench:
    # Without copies to measure, no run waits for the import of torch.
    encoder: ImageEncoder | None = None
    if options.copy_encoder:
        from pacorl.core.devices import available_device
        from pacorl.rewards.clip import clip_encoder

        encoder = clip_encoder(options.copy_encoder, device=available_device())
    return VistoryBench(
        data,
        options.images or out,
        judge=reward,
        made_by=described(options, previous=options.previous),
        encoder=encoder,
        encoder_name=options.copy_encoder,
    )


def _example(folder: Path) -> tuple[Path, VistoryOptions]:
    """Write three stories of one character and two shots in nearly one colour."""
    for story, colour in zip(LITE, ("red", "green", "blue"), strict=False):
        shots = []
        for index in (1, 2):
            write_atomic(folder / "made" / "shots" / story / f"{index:02d}.png", png_bytes(faded(colour, 0.02 * index)))
            texts = {field: {"en": f"{colour} tiles"} for field in DESCRIBED}
            shots.append({"index": index, APPEARING: {"en": ["Tiles"]}, **texts})
        write_atomic(folder / story / "image" / "Tiles" / "00.png", png_bytes(faded(colour, 0.0)))
        characters = {"Tiles": {"name_en": "Tiles", "prompt_en": f"{colour} tiles"}}
        write_json(folder / story / "story.json", {"Shots": shots, "Characters": characters})
    return folder, VistoryOptions(images=folder / "made", judge="colour")


SPEC = BenchmarkSpec(
    summary="Generate the shots of stories, then measure characters, alignment and copies.",
    data="ViStoryBench's folder of stories.",
    options=VistoryOptions,
    benchmark=VistoryBench,
    read=read_stories,
    build=_build,
    generate=_generate,
    example=_example,
)
