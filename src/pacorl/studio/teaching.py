"""The training of a character, in a process of its own that can be stopped and goes on from its last checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config import base as configs
from pacorl.config.options import StudioModels
from pacorl.config.recipes import recipe, recipe_names
from pacorl.config.user_files import NO_USER_FILES
from pacorl.io.children import start_python
from pacorl.io.documents import parse_json, read_jsonl, read_text, read_yaml
from pacorl.io.files import PRIVATE, free_name, open_regular, write_atomic
from pacorl.models.policies import POLICIES, kind_of
from pacorl.studio.folder import Folder
from pacorl.studio.models import gib
from pacorl.types import TINY

RECIPE = re.compile(r"character/(?P<kind>\w+?)(_(?P<gigabytes>\d+)gb)?")
"""Name of a recipe that trains a character: the kind of its generator, and the memory of its card."""
PATIENCE = 10.0
"""Seconds for a stopping trainer to save; a kill afterwards loses what came after its last checkpoint."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training of a character, as its folder has it."""

    name: str
    steps: int
    step: int
    finished: bool
    lora: Path | None
    """Folder of the LoRA that is used: of the lowest held-out loss, or else the last."""
    best_step: int | None
    """Step of the lowest loss on held-out pictures; None without such a loss."""
    samples: tuple[tuple[str, Path, Path], ...]
    """(text, image without the LoRA, image with it); while it learns of the newest evaluation, then of `lora`."""
    error: str = ""


class Teacher:
    """At most one trainer. It executes no file that a config names: the folder may be somebody else's."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.loras = folder.path / "loras"
        self._process: subprocess.Popen[bytes] | None = None
        self._running = ""

    @property
    def name(self) -> str:
        """The training that runs; empty without one."""
        return self._running if self._process and self._process.poll() is None else ""

    def start(self, names: StudioModels, character: str, *, steps: int | None = None, resume: str = "") -> None:
        """Write a training's config and start it, or let an earlier one go on. Raises ValueError if it cannot run."""
        source = self.folder.character_folder(character)
        target = self.loras / resume if resume else free_name(self.loras / source.name)
        if not resume:
            config = training_config(names, source, target / "run", steps=steps)
            write_atomic(target / "config.yaml", configs.dump(config), mode=PRIVATE)
        arguments = ["train-character", str(source), "--config", str(target / "config.yaml"), "--resume", "auto"]
        with open(open_regular(target / "log.txt", os.O_WRONLY | os.O_TRUNC), "wb") as log:
            # A killed studio cannot end its trainer, which therefore watches its standard input.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            environment = os.environ | {NO_USER_FILES: "1"}
            self._process = start_python("-m", "pacorl", *arguments, "--stop-with-stdin", **pipes, env=environment)
        self._running = target.name

    def stop(self) -> None:
        """End the trainer, which saves."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:  # it still loads, or learns
                self._process.kill()
                self._process.wait()
        if self._process and self._process.stdin:
            self._process.stdin.close()

    def last(self, character: str) -> Training | None:
        """Describe the newest training of a character; None without one."""
        names = [name for name, whose in self._characters().items() if whose == character]
        return self._read(names[-1]) if names else None

    def _characters(self) -> dict[str, str]:
        """Training → its character, the newest last."""
        paths = sorted(self.loras.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
        return {path.parent.name: Path(str(read_yaml(path).get("character"))).name for path in paths}

    def lora_sources(self, character: str = "") -> dict[str, str]:
        """Map the names of the LoRAs that were taught here, or of one character, to their folders."""
        sources = {}
        for name, whose in self._characters().items():
            adapter = self.loras / name / "run" / "adapter"
            if adapter.is_dir() and character in ("", whose):
                sources[name] = str(adapter)
        return sources

    def _read(self, name: str) -> Training:
        folder = self.loras / name
        run = folder / "run"
        log = run / "metrics.jsonl"
        lines: list[Any] = list(read_jsonl(log)) if log.is_file() else []
        losses = {
            line["held_out_loss"]: line["step"]
            for line in lines
            if line.get("held_out_loss") is not None and line["step"]
        }
        step = max((line["step"] for line in lines), default=0)
        if (run / "progress.json").is_file():
            step = max(step, int(parse_json(read_text(run / "progress.json"))["step"]))

        evaluations = sorted((run / "samples").glob("evaluation-*.jsonl"))
        samples: list[tuple[str, Path, Path]] = []
        for record in read_jsonl(evaluations[-1]) if evaluations else []:
            file = str(record["image"]).rpartition("/")[2]
            sides = [path.with_suffix("") / file for path in (evaluations[0], evaluations[-1])]
            samples.append((str(record["text"]), sides[0], sides[1]))

        error = ""
        if self._running == name and self._process and (self._process.poll() or 0) > 0:
            error = (read_text(folder / "log.txt").strip().splitlines() or ["the trainer ended without a word"])[-1]
        return Training(
            name=name,
            steps=int(read_yaml(folder / "config.yaml")["steps"]),
            step=step,
            finished=(run / "summary.json").is_file(),
            lora=run / "adapter" if (run / "adapter").is_dir() else None,
            best_step=losses[min(losses)] if losses else None,
            samples=tuple(samples),
            error=error,
        )


def training_config(names: StudioModels, character: Path, out: Path, *, steps: int | None = None) -> CharacterConfig:
    """Build the config of a character's training: the largest recipe for the model that fits the card.

    Raises:
        ValueError: there is no recipe for the model, or the pictures or the memory do not suffice.
    """
    from pacorl.plan.character_plan import plan_character
    from pacorl.plan.plan import device
    from pacorl.plan.sources import generator_of

    kind = names.kind or kind_of(names.model)
    # A distilled checkpoint is trained by its base, whose LoRA fits both.
    bases = {name.casefold(): base for name, base in POLICIES.named(kind).distilled.items()}
    model = bases.get(Path(names.model).name.casefold(), names.model)
    recipes: dict[str, dict[int, str]] = {}
    for name in recipe_names():
        if match := RECIPE.fullmatch(name):
            recipes.setdefault(match["kind"], {})[int(match["gigabytes"] or 0)] = name
    sizes = recipes.get(TINY if model == TINY else kind)
    if not sizes:
        known = [POLICIES.named(name).published for name in recipes if name in POLICIES]
        raise ValueError(f"a character cannot be taught to {names.model}; choose {' or '.join(known)} in the header")

    fitting = [size for size in sizes if size * 10**9 <= (device()[1] or 0)]
    # The smallest if none fits: its plan then states how much memory is missing.
    name = sizes[max(fitting, default=min(sizes))]
    overrides = [f"character={character}", f"out={out}", f"model.checkpoint={model}", "gallery.each=true"]
    if steps:
        overrides += [f"steps={steps}", f"evaluate_every={max(1, steps // 8)}"]
    config = configs.load(CharacterConfig, recipe(name), overrides)
    absences = generator_of(config.model, config.generator).absences
    if absences:
        raise ValueError(f"{absences[0].source} is not on this machine; download it in the header")
    plan = plan_character(config)
    if not plan.fits:
        raise ValueError(f"teaching {config.model.checkpoint} needs {gib(plan.peak_bytes)}; choose a smaller model")
    return config
