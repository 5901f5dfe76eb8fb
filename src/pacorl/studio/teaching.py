"""Trainings of characters: `loras/NAME/NUMBER` with `config.yaml` and the run of `pacorl train-character`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config import base as configs
from pacorl.config.options import StudioModels
from pacorl.config.recipes import recipe, recipe_names
from pacorl.io.documents import read_jsonl, read_object, read_text
from pacorl.models.policies import POLICIES, kind_of
from pacorl.studio.models import gib
from pacorl.types import TINY

RECIPE = re.compile(r"character/(?P<kind>\w+?)(_(?P<gigabytes>\d+)gb)?")
"""Name of a recipe that trains a character: the kind of its generator, and the memory of its card."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training of a character."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def config(self) -> str:
        path = self.folder / "config.yaml"
        return read_text(path) if path.is_file() else ""

    @property
    def step(self) -> int:
        log = self.run / "metrics.jsonl"
        return max((int(line["step"]) for line in read_jsonl(log)), default=0) if log.is_file() else 0

    @property
    def is_finished(self) -> bool:
        return (self.run / "summary.json").is_file()

    @property
    def lora(self) -> Path | None:
        """Folder of the LoRA that is used: of the lowest held-out loss, or else the last."""
        path = self.run / "adapter"
        return path if path.is_dir() else None

    @property
    def best_step(self) -> int | None:
        """Step of the lowest loss on held-out pictures; None before the end, and without such a loss."""
        return read_object(self.run / "summary.json").get("best_step") if self.is_finished else None

    @property
    def samples(self) -> list[tuple[str, Path, Path]]:
        """(text, image without the LoRA, image with it) of the newest evaluation; at the end it is of `lora`."""
        evaluations = sorted((self.run / "samples").glob("evaluation-*.jsonl"))
        samples = []
        for record in read_jsonl(evaluations[-1]) if evaluations else []:
            file = Path(str(record["image"])).name
            before, after = (path.with_suffix("") / file for path in (evaluations[0], evaluations[-1]))
            samples.append((str(record["text"]), before, after))
        return samples


def trainings(loras: Path, character: str) -> list[Training]:
    """List the trainings of a character, the oldest first."""
    folders = sorted((loras / character).glob("[0-9]*"), key=lambda folder: int(folder.name))
    return [Training(folder) for folder in folders if (folder / "config.yaml").is_file()]


def lora_name(source: str) -> str:
    """Name a LoRA; one that was taught here by its character and, if it was taught again, by its number."""
    parts = Path(source).parts
    if parts[-2:] != ("run", "adapter"):
        return source
    number = "" if parts[-3] == "1" else f" ({parts[-3]})"
    return parts[-4].replace("_", " ") + number


def training_config(names: StudioModels, character: Path, out: Path, *, steps: int | None = None) -> CharacterConfig:
    """Build the config of a character's training: the largest recipe for the model that fits the card.

    Raises:
        ValueError: there is no recipe for the model, or the pictures or the memory do not suffice.
    """
    from pacorl.plan.character_plan import plan_character
    from pacorl.plan.plan import device

    kind = names.kind or kind_of(names.model)
    # A distilled checkpoint is trained by its base, whose LoRA fits both.
    bases = {name.casefold(): base for name, base in POLICIES.named(kind).distilled.items()}
    model = bases.get(Path(names.model).name.casefold(), names.model)
    recipes: dict[str, dict[int, str]] = {}
    for match in filter(None, map(RECIPE.fullmatch, recipe_names())):
        recipes.setdefault(match["kind"], {})[int(match["gigabytes"] or 0)] = match[0]
    sizes = recipes.get(TINY if model == TINY else kind)
    if not sizes:
        known = [POLICIES.named(name).published for name in recipes if name in POLICIES]
        raise ValueError(f"a character cannot be taught to {names.model}; choose {' or '.join(known)} in the header")

    # The smallest if none fits: its plan then states how much memory is missing.
    size = max((size for size in sizes if size * 10**9 <= (device()[1] or 0)), default=min(sizes))
    overrides = [f"character={character}", f"out={out}", f"model.checkpoint={model}", "gallery.each=true"]
    if steps:
        overrides += [f"steps={steps}", f"evaluate_every={max(1, steps // 8)}"]
    config = configs.load(CharacterConfig, recipe(sizes[size]), overrides)
    plan = plan_character(config)
    if plan.absences:
        raise ValueError(f"{plan.absences[0].source} is not on this machine; download it in the header")
    if not plan.fits:
        raise ValueError(f"teaching {model} needs {gib(plan.peak_bytes)}; choose a smaller model")
    return config
