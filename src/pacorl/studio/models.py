"""Models that the studio offers: what fits this card and main memory, their licences and downloads."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config import base as configs
from pacorl.config.options import AUTO, MEMORY, StudioModels
from pacorl.config.recipes import recipe, recipe_names
from pacorl.io.children import start_python
from pacorl.io.documents import read_object
from pacorl.io.hub import local_file
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY

INDEX = "model_index.json"
JUDGE = "X-GenGroup/PaCo-Reward-7B"
"""The published judge."""
RECIPE = re.compile(r"character/(?P<kind>\w+?)(_(?P<gigabytes>\d+)gb)?")
"""Name of a recipe that trains a character: the kind of its generator, and the memory of its card."""
MARGIN = 2 * 2**30
"""Bytes that stay free on a card, for CUDA itself."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A generator that can be chosen or downloaded."""

    name: str
    kind: str
    sets: bool
    """Whether it draws from words."""
    edits: bool
    """Whether it changes pictures."""
    is_here: bool
    gated: bool
    """Whether the hub gives it only to people who accepted its licence there."""
    licence: str


def offers(names: StudioModels) -> list[Offer]:
    """List the practice model, the published ones, and others of the hub's cache and the command."""
    here = cached()
    kinds = {TINY: kind_of(TINY)} | {spec.published: kind for kind, spec in POLICIES.items()}
    classes = {spec.pipeline for spec in POLICIES.values()}
    for name in [*here, names.model, names.editor]:
        index = local_file(name, INDEX) if name and name not in kinds else None
        if index and read_object(index).get("_class_name") in classes:
            kinds[name] = kind_of(str(index.parent))
    listed = []
    for name, kind in kinds.items():
        spec = POLICIES[kind]
        is_here = name == TINY or name in here or Path(name).is_dir()
        licence = spec.licence[1] or spec.licence[0] if name == spec.published else ""
        gated = spec.gated and name == spec.published
        listed.append(Offer(name, kind, spec.sets, spec.edits or name == TINY, is_here, gated, licence))
    return listed


def judges(names: StudioModels) -> list[str]:
    """List the judges that are here: the practice judge, the published one, and the command's."""
    known = [TINY, *([JUDGE] if JUDGE in cached() else []), names.judge]
    return list(dict.fromkeys(known))


def cached() -> dict[str, int]:
    """Return the size of each model in the hub's cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return {}


# --- memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A generator and the judge in the memory of this machine."""

    memory: str
    """The first setting that fits, or else the last."""
    card: int
    """Bytes at the peak on the card; 0 without one."""
    main: int
    """Bytes of main memory at the peak."""
    has_card: int
    has_main: int

    @property
    def fits(self) -> bool:
        return self.card + MARGIN * bool(self.card) <= self.has_card and self.main <= self.has_main

    @property
    def text(self) -> str:
        """One line for a person."""
        needs = f"{gib(self.main)} of {gib(self.has_main)} main memory"
        if self.card:
            needs = f"{gib(self.card)} of the card's {gib(self.has_card)}, and {needs}"
        if not self.fits:
            return f"not on this machine: needs {needs}"
        slow = {"normal": "", "low": ", slower, models take turns", "lowest": ", slow, layer by layer"}
        return f"runs here{slow[self.memory]}: {needs}"


def gib(number: int) -> str:
    return f"{number / 2**30:.1f} GB"


@cache
def fit_of(model: str, kind: str, judge: str, memory: str = AUTO) -> Fit:
    """Plan a generator beside the judge on this machine, with the first `memory` that fits."""
    from pacorl.plan.plan import judge_options, plan_generation

    spec = POLICIES.named(kind or kind_of(model))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = None
    for setting, weights in MEMORY.items():
        if memory not in (AUTO, setting):
            continue
        options = spec.options_for(model, dtype="float32" if model == TINY else "bfloat16", **weights)
        plan = plan_generation(options, low=setting != "normal", judge=judge_options(judge, weights))
        # Without a card the models are in main memory.
        card = plan.peak_bytes if plan.device_bytes else 0
        main = plan.held_bytes + (0 if plan.device_bytes else plan.peak_bytes)
        fit = Fit(setting, card, main, plan.device_bytes or 0, total)
        if fit.fits:
            break
    assert fit
    return fit


def fitted(names: StudioModels, model: str, kind: str) -> str:
    """Choose the memory setting for this machine. Raises ValueError if the models fit with none."""
    if model == names.judge == TINY:
        return "normal"
    fit = fit_of(model, kind, names.judge)
    if not fit.fits:
        raise ValueError(f"{model}: {fit.text}; choose a smaller model in the header")
    return fit.memory


# --- downloads ---------------------------------------------------------------------------------------------------


class Download:
    """A download into the hub's cache, in a process of its own; an interrupted one goes on where it stopped."""

    def __init__(self) -> None:
        self.name = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.fault = ""

    @property
    def runs(self) -> bool:
        """Whether it runs; collects the fault of one that ended."""
        if self._process is None or self._process.poll() is None:
            return self._process is not None
        lines = (self._process.stderr.read() if self._process.stderr else b"").decode(errors="replace").split("\n")
        if self._process.returncode > 0:
            self.fault = next((line for line in reversed(lines) if line.strip()), "it ended without a word")[:400]
        self._process = None
        return False

    def start(self, name: str, *, token: str = "") -> None:
        """Fetch a pipeline's folders, without the single files and variants beside them.

        Args:
            token: of a gated model's user; never written, and never an argument, which all users could read.
        """
        if self.runs:
            raise ValueError(f"{self.name} is being downloaded; stop that first, it can go on later")
        files = ["model_index.json", "*/*.json", "*/*.safetensors", "*/*.txt", "*/*.jinja", "*/*.model"]
        if name == JUDGE:
            files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        code = f"from huggingface_hub import snapshot_download as get; get({name!r}, allow_patterns={files!r})"
        environment = os.environ | ({"HF_TOKEN": token} if token else {}) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = start_python("-c", code, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
        self.name, self.fault = name, ""

    def stop(self) -> None:
        """End the download; what it has fetched stays."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
            self._process = None


# --- teaching ----------------------------------------------------------------------------------------------------


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
    sizes = character_recipes().get(TINY if model == TINY else kind)
    if not sizes:
        known = [POLICIES.named(name).published for name in character_recipes() if name in POLICIES]
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


def character_recipes() -> dict[str, dict[int, str]]:
    """Map a kind of generator to the recipes that train a character on it, by the gigabytes of their cards."""
    found: dict[str, dict[int, str]] = {}
    for name in recipe_names():
        match = RECIPE.fullmatch(name)
        if match:
            found.setdefault(match["kind"], {})[int(match["gigabytes"] or 0)] = name
    return found


def with_loras(names: StudioModels, loras: Mapping[str, float]) -> StudioModels:
    """Draw with these LoRAs in place of the former ones."""
    return replace(names, adapter="", loras=dict(loras))
