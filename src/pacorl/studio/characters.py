"""Characters of the studio, and the LoRAs that are trained on their pictures.

FOLDER/characters/NAME/card.yaml, 01.png, 01.txt …    as `records.characters` has them
FOLDER/loras/NAME/request.json, config.yaml           a training of `pacorl train-character`
FOLDER/loras/NAME/run/                                the trainer's own folder; the LoRA is run/best or run/adapter
"""

from __future__ import annotations

import logging
import re
import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel

from pacorl.character_training.character_config import PROGRESS, CharacterConfig
from pacorl.character_training.pictures import LEAST, uncaptioned
from pacorl.config import base as configs
from pacorl.config.options import StudioModels
from pacorl.config.recipes import recipe, recipe_names
from pacorl.io.documents import blamed_on, dump_yaml, read_json, read_jsonl, read_text, read_yaml, typed, write_json
from pacorl.io.files import PRIVATE, check_no_link, free_name, read_bytes, remove_made, safe_name, write_atomic
from pacorl.io.images import images_in, png_bytes
from pacorl.models.policies import POLICIES, kind_of
from pacorl.records.characters import CARD, FOLDER, Card, read_character
from pacorl.studio.model_choice import BUILDING, Offer
from pacorl.studio.models import description_note
from pacorl.studio.trainer_process import TrainerProcess, lora_of
from pacorl.types import TINY, Character
from pacorl.web.guard import RefusedError

logger = logging.getLogger(__name__)

LORAS = "loras"
MOST = 60
"""Most pictures of a character."""
RECIPE = re.compile(r"character/(?P<kind>\w+?)(_(?P<gigabytes>\d+)gb)?")
"""Name of a recipe that trains a character: the kind of its generator, and the memory of its card."""
NUMBERS = range(1, 100)
"""Numbers of pictures."""
SIDE = 1536
"""Longer side of a picture: training and generators read 1,024 pixels."""
MADE = ("[0-9][0-9].png", "[0-9][0-9].txt", CARD)
"""Files of a character that the studio writes, and may delete."""


class Request(BaseModel):
    """request.json of a training."""

    character: str
    steps: int


class Pace(BaseModel):
    """progress.json of a training."""

    step: int = 0
    seconds_per_step: float | None = None


class GallerySample(BaseModel):
    """A line of the records of a gallery."""

    text: str


class Progress(BaseModel):
    """A line of a training's log."""

    step: int
    held_out_loss: float | None = None


class Characters:
    """The characters of a folder, and their LoRAs."""

    def __init__(self, folder: Path, names: StudioModels, *, trainer: TrainerProcess) -> None:
        self.folder = folder / FOLDER
        self.loras = folder / LORAS
        self.names = names
        self.trainer = trainer
        self._lock = threading.Lock()

    # --- pictures and description ------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        description: str,
        *,
        added: Sequence[bytes] = (),
        added_captions: Sequence[str] = (),
        captions: Mapping[str, str] = {},
        removed: Iterable[str] = (),
    ) -> None:
        """Write a character, or change it. Whatever is refused has no effect.

        Args:
            name: of its folder.
            description: its looks.
            added: PNGs of further pictures.
            added_captions: what the first of them show.
            captions: picture → what it shows; empty for the description alone.
            removed: pictures to delete.

        Raises:
            ValueError: for a name that is none of a folder, an empty or long description, or too many pictures.
            OSError: the folder is a link, or cannot be written.
        """
        folder = self.folder / safe_name(name)
        if not description.strip():
            raise ValueError(f"{name} has no description; say what the character looks like")
        check_no_link(self.folder, folder)
        # Locked: two windows must not give one number to two pictures.
        with self._lock:
            # Traits that a person wrote into the card by hand stay.
            kept = _card(folder).model_dump() if (folder / CARD).is_file() else {}
            card = kept | {"description": description.strip()}
            typed(card, Card)
            texts = {}
            for picture, caption in captions.items():
                texts[self._picture(name, picture).with_suffix(".txt")] = caption.strip()
            gone = [self._picture(name, picture) for picture in dict.fromkeys(removed)]
            numbers = _free_numbers(folder, len(added))
            for number, caption in zip(numbers, added_captions, strict=False):
                texts[folder / f"{number:02d}.txt"] = caption

            # Nothing is written before everything is checked.
            write_atomic(folder / CARD, dump_yaml(card), mode=PRIVATE)
            for number, content in zip(numbers, added, strict=True):
                write_atomic(folder / f"{number:02d}.png", content, mode=PRIVATE)
            for path, caption in texts.items():
                if caption:
                    write_atomic(path, caption, mode=PRIVATE)
                else:
                    remove_made(folder, [path.name])
            for path in gone:
                remove_made(folder, [path.name, path.with_suffix(".txt").name])

    def make_first(self, name: str, picture: str) -> None:
        """Make a picture of a character its first one, which a sheet changes; the former first one becomes its last.

        Raises:
            ValueError: there is no such picture, or it is the first one.
        """
        chosen = self._picture(name, picture)
        former = self._picture(name, images_in(chosen.parent)[0].name)
        if chosen == former:
            raise ValueError(f"{picture} of {name} is the first picture already; choose another")
        content, caption = read_bytes(chosen), _caption(chosen)
        # The former one gets a new number before its own is overwritten: an interruption loses no picture.
        description = _card(chosen.parent).description
        self.save(name, description, added=[read_bytes(former)], added_captions=[_caption(former)])
        with self._lock:
            write_atomic(former, content, mode=PRIVATE)
        self.save(name, description, captions={former.name: caption}, removed=[picture])

    def folder_name(self, name: str, *, is_new: bool) -> str:
        """Make the name of a character's folder: "banana king" → "banana_king".

        Raises:
            ValueError: if there is no letter to make it of, or a new character has the name of another.
        """
        plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        words = re.sub(r"^[^\w.-]+|[^\w.-]+$", "", plain)
        folder = safe_name(re.sub(r"[^\w.-]+", "_", words) or name)
        if is_new and (self.folder / folder / CARD).is_file():
            raise ValueError(f"there is a character called {name} already; give another name")
        return folder

    def find(self, name: str) -> Character:
        """Read a character that can be drawn; raises ValueError naming a fault."""
        self._check(name)
        return read_character(self.folder / name, most=MOST)

    def summaries(self) -> list[dict[str, Any]]:
        """Describe all characters; damaged ones are left out, with a warning."""
        described = []
        for card in sorted(self.folder.glob(f"*/{CARD}")):
            try:
                described.append(self.describe(card.parent.name))
            except (ValueError, OSError) as fault:
                _warn(f"{fault}; this character is not shown")
        return described

    def describe(self, name: str) -> dict[str, Any]:
        """Describe a character: its pictures with their captions, and its newest training."""
        folder = self._check(name)
        pictures = []
        for path in images_in(folder):
            # A picture that was made the first one has the file of another.
            version = path.lstat().st_mtime_ns
            pictures.append({"file": path.name, "caption": _caption(path), "version": str(version)})
        trainings = self._trainings(name)
        description = _card(folder).description
        return {
            "name": name,
            "description": description,
            "note": description_note(self.names, description),
            "loras": [f"{LORAS}/{training.name}" for training in trainings],
            "pictures": pictures,
            "least": LEAST,
            "steps": _usual_steps(self.names.model, self.names.kind),
            "training": self._training(trainings[-1]) if trainings else None,
        }

    def uncaptioned(self, name: str) -> list[Path]:
        """List the pictures of a character that have no caption."""
        return uncaptioned(images_in(self._check(name)))

    def image(self, name: str, picture: str) -> bytes:
        """Read a picture of a character."""
        return read_bytes(self._picture(name, picture))

    def remove(self, name: str) -> None:
        """Delete a character's card, pictures and captions; its LoRAs, and foreign files, stay."""
        remove_made(self._check(name), MADE)

    def _check(self, name: str) -> Path:
        folder = self.folder / safe_name(name)
        if not (folder / CARD).is_file():
            raise RefusedError(f"there is no character called {name[:40]!r}", status=404)
        return folder

    def _picture(self, name: str, picture: str) -> Path:
        # By the folder's own listing, so that no name can lead out of it.
        for path in images_in(self._check(name)):
            if path.name == picture and re.fullmatch(r"\d\d\.png", picture) and path.is_file():
                return path
        raise RefusedError(f"{name} has no picture {picture[:20]!r}", status=404)

    # --- training ----------------------------------------------------------------------------------------------

    def prepare(self, name: str, *, steps: int | None = None) -> str:
        """Plan a new training and write its config; `launch` starts it.

        Returns:
            Its name.

        Raises:
            ValueError: if the model cannot be trained or is not here, the pictures do not suffice, or the card.
        """
        folder = free_name(self.loras / safe_name(name))
        overrides = [f"character={self._check(name)}", f"out={folder / 'run'}"]
        if steps:
            # The page shows progress by evaluations.
            overrides += [f"steps={steps}", f"evaluate_every={max(1, steps // 8)}"]
        with BUILDING:
            from pacorl.plan.character_plan import plan_character
            from pacorl.plan.plan import card_shortage, device
            from pacorl.plan.sources import generator_of

            config = training_config(self.names, overrides, card_bytes=device()[1])
            # Files are looked up at once, and a plan takes seconds.
            absences = generator_of(config.model, config.generator).absences
            if absences:
                raise ValueError(f"{absences[0].source} is not on this machine; download it under Models")
            plan = plan_character(config)
        if card_shortage(plan):
            gigabytes = plan.peak_bytes / 2**30
            raise ValueError(f"training on {config.model.checkpoint} needs {gigabytes:.1f} GiB; choose a smaller model")
        write_atomic(folder / "config.yaml", configs.dump(config), mode=PRIVATE)
        write_json(folder / "request.json", {"character": name, "steps": config.steps}, mode=PRIVATE)
        self.trainer.announce(folder)
        return folder.name

    def resume(self, training: str) -> None:
        """Announce that a training goes on."""
        self.trainer.announce(self._run(training))

    def launch(self, training: str) -> None:
        """Start an announced training, or let it go on from its last checkpoint."""
        folder = self._run(training)
        character = self._check(_request(folder).character)
        self.trainer.launch(folder, "train-character", str(character), "--config", str(folder / "config.yaml"))

    def _run(self, training: str) -> Path:
        folder = self.loras / safe_name(training)
        if not (folder / "request.json").is_file():
            raise RefusedError(f"there is no LoRA called {training[:40]!r}", status=404)
        return folder

    def _trainings(self, name: str) -> list[Path]:
        """List the trainings of a character, the newest last; damaged ones are left out, with a warning."""
        mine = []
        for file in self.loras.glob("*/request.json"):
            try:
                if _request(file.parent).character == name:
                    mine.append(file)
            except (ValueError, OSError) as fault:
                _warn(f"{fault}; this LoRA is not shown")
        return [file.parent for file in sorted(mine, key=lambda file: file.stat().st_mtime_ns)]

    def _training(self, folder: Path) -> dict[str, Any]:
        """Describe a training: its progress, its measured pictures, and whether there is a LoRA."""
        steps = _request(folder).steps
        fault = self.trainer.fault(folder)

        # What it has logged; a damaged log is a fault of the training.
        run = folder / "run"
        log = run / "metrics.jsonl"
        gallery = run / "samples" / "evaluation-000000.jsonl"
        lines = []
        drawn = []
        pace = Pace()
        try:
            with blamed_on(log):
                lines = typed(read_jsonl(log) if log.exists() else [], list[Progress])
            with blamed_on(gallery):
                drawn = typed(read_jsonl(gallery) if gallery.exists() else [], list[GallerySample])
            if (run / PROGRESS).exists():
                pace = typed(read_json(run / PROGRESS), Pace)
        except (ValueError, OSError) as damage:
            fault = fault or str(damage)

        # How far it is. A running or waiting training outranks an earlier fault.
        evaluated = max([line.step for line in lines], default=0)
        losses = [[line.step, line.held_out_loss] for line in lines if line.held_out_loss is not None]
        status = "done" if evaluated >= steps else "stopped"
        if fault:
            status = "failed"
        if self.trainer.waits(folder) or self.trainer.runs(folder):
            status = "learning" if lines else "starting"
        return {
            "name": folder.name,
            "steps": steps,
            "done": max(pace.step, evaluated),
            "seconds_per_step": pace.seconds_per_step,
            "status": status,
            "losses": losses,
            "lora": lora_of(run) is not None,
            "pictures": [sample.text for sample in drawn],
            "error": fault,
        }


def picture_bytes(image: Image) -> bytes:
    """Encode a picture of a character as PNG, with at most SIDE pixels on a side."""
    image.thumbnail((SIDE, SIDE))
    return png_bytes(image)


def training_config(names: StudioModels, overrides: list[str], *, card_bytes: int | None = None) -> CharacterConfig:
    """Build the config of a character's training: the largest recipe for the model that fits the card.

    Raises:
        ValueError: there is no recipe for the model.
    """
    kind = names.kind or kind_of(names.model)
    spec = POLICIES.named(kind)
    # A distilled checkpoint is trained by its base, whose LoRA fits both.
    bases = {name.casefold(): base for name, base in spec.distilled.items()}
    model = bases.get(Path(names.model).name.casefold(), names.model)

    recipes = character_recipes()
    sizes = recipes.get(TINY if model == TINY else kind)
    if not sizes:
        known = [POLICIES.named(name).published for name in recipes if name in POLICIES]
        raise ValueError(f"a character cannot be taught to {names.model}; choose {' or '.join(known)} under Models")
    fitting = [size for size in sizes if size * 10**9 <= (card_bytes or 0)]
    # The smallest if none fits: its plan then states how much memory is missing.
    name = sizes[max(fitting, default=min(sizes))]
    return configs.load(CharacterConfig, recipe(name), [*overrides, f"model.checkpoint={model}"])


def character_recipes() -> dict[str, dict[int, str]]:
    """Map a kind of generator to the recipes that train a character on it, by the gigabytes of their cards."""
    found: dict[str, dict[int, str]] = {}
    for name in recipe_names():
        match = RECIPE.fullmatch(name)
        if match:
            gigabytes = int(match["gigabytes"] or 0)
            found.setdefault(match["kind"], {})[gigabytes] = name
    return found


def offers_for_characters(offers: Sequence[Offer]) -> list[dict[str, Any]]:
    """Describe models with the smallest card that a character is taught on, and mark the one to start with.

    It draws pages and changes pictures, can be taught a character, needs nobody's permission, and of such models is
    taught on the smallest card.
    """
    described = []
    suited = []
    for offer in offers:
        sizes = character_recipes().get(offer.kind, {}) if offer.name != TINY else {}
        described.append(asdict(offer) | {"learns": min(sizes, default=0), "start": False})
        if sizes and offer.sets and offer.edits and not offer.gated:
            suited.append(described[-1])
    if suited:
        min(suited, key=itemgetter("learns"))["start"] = True
    return described


def _free_numbers(folder: Path, count: int) -> list[int]:
    """Number further pictures of a character, behind its last one as long as there are numbers."""
    taken = [path.stem for path in images_in(folder)]
    if len(taken) + count > MOST:
        raise ValueError(f"{folder.name} would have {len(taken) + count} pictures; at most {MOST} are kept")
    used = {int(stem) for stem in taken if stem.isdecimal()}
    free = [number for number in NUMBERS if number not in used]
    free.sort(key=lambda number: number < max(used, default=0))
    return free[:count]


def _caption(picture: Path) -> str:
    path = picture.with_suffix(".txt")
    return read_text(path) if path.is_file() else ""


def _request(folder: Path) -> Request:
    document = read_json(folder / "request.json")
    with blamed_on(folder / "request.json"):
        return typed(document, Request)


@cache
def _usual_steps(model: str, kind: str) -> int | None:
    """Steps of the recipe for a model; None without a recipe."""
    try:
        return training_config(StudioModels(model=model, kind=kind), []).steps
    except ValueError:
        return None


@cache
def _warn(fault: str) -> None:
    """Log a fault once: the page asks every second."""
    logger.warning("%s", fault)


def _card(folder: Path) -> Card:
    document = read_yaml(folder / CARD)
    with blamed_on(folder / CARD):
        return typed(document, Card)
