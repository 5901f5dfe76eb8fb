"""Trainings of characters: runs of `pacorl train-character`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacorl.config.options import StudioModels
from pacorl.config.recipes import recipe
from pacorl.io.documents import read_jsonl, read_log, read_object, read_yaml
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY

RECIPES = {TINY: "character/tiny", "flux": "character/flux_16gb", "klein": "character/klein_12gb"}
"""Kind of a generator → the recipe that teaches it a character."""


@dataclass(frozen=True, slots=True)
class Training:
    """The training of a character."""

    run: Path

    @property
    def step(self) -> int:
        """Step of the newest evaluation, which has pictures; -1 before it has begun."""
        log = self.run / "metrics.jsonl"
        return max(read_log(log, lambda line: int(line["step"]) if line["kind"] == "evaluation" else -1), default=-1)

    @property
    def config(self) -> Any:
        return read_yaml(self.run / "config.yaml")

    @property
    def is_finished(self) -> bool:
        return (self.run / "summary.json").is_file()

    @property
    def verdict(self) -> str:
        """Kept LoRA, and the reason; empty before the end, or without a held-out picture."""
        return " ".join(read_object(self.run / "summary.json").get("verdict", ())) if self.is_finished else ""

    @property
    def lora(self) -> Path:
        """File of a finished training's LoRA: of the lowest held-out loss, or else the last."""
        return self.run / "adapter" / "pytorch_lora_weights.safetensors"

    @property
    def samples(self) -> list[tuple[str, Path]]:
        """Texts and images of the newest evaluation; at the end they are of `lora`."""
        folder = self.run / "samples"
        newest = sorted(folder.glob("evaluation-*.jsonl"))[-1:]
        return [(sample["text"], folder / sample["image"]) for log in newest for sample in read_jsonl(log)]


def training_recipe(names: StudioModels) -> list[str]:
    """Name the recipe for a model as arguments of `pacorl train-character`. Raises ValueError if there is none."""
    kind = kind_of(names.model)
    # A distilled checkpoint is trained by its base, whose LoRA fits both.
    model = POLICIES.named(kind).distilled.get(Path(names.model).name, names.model)
    name = RECIPES.get(TINY if model == TINY else kind)
    if name is None:
        raise ValueError(f"no recipe teaches a character to {model}; `pacorl recipes` lists the models that learn")
    arguments = ["--config", str(recipe(name)), f"model.checkpoint={model}", "gallery.each=true"]
    return arguments + [f"memory={names.memory}"] * (names.memory != "normal")
