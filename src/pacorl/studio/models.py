"""Models that the studio offers: what fits this card and main memory, their licences and downloads."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pacorl.config.options import AUTO, MEMORY, StudioModels
from pacorl.io.children import start_python
from pacorl.io.documents import read_object
from pacorl.io.hub import local_file
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY

JUDGE = "X-GenGroup/PaCo-Reward-7B"
"""The published judge."""
MARGIN = 2 * 2**30
"""Bytes that stay free on a card, for CUDA itself."""
ENDINGS = ("json", "safetensors", "txt", "jinja", "model")
PATTERNS = tuple(f"{folder}*.{ending}" for folder in ("", "*/") for ending in ENDINGS)
"""Files of a model that are fetched."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A generator or a judge that can be chosen or downloaded."""

    name: str
    kind: str = ""
    """Kind of a generator; empty for a judge."""
    is_here: bool = False
    gated: bool = False
    """Whether the hub gives it only to people who accepted its licence there."""
    licence: str = ""

    @property
    def draws(self) -> bool:
        return bool(self.kind) and POLICIES[self.kind].sets

    @property
    def changes(self) -> bool:
        """Whether it changes pictures."""
        return bool(self.kind) and (POLICIES[self.kind].edits or self.name == TINY)


def offers(names: StudioModels) -> list[Offer]:
    """List the practice model, the published generators, others of the hub's cache and the command, and the judge."""
    here = cached()
    listed = {TINY: Offer(TINY, kind_of(TINY), is_here=True)}
    for kind, spec in POLICIES.items():
        licence = spec.licence[1] or spec.licence[0]
        listed[spec.published] = Offer(spec.published, kind, spec.published in here, spec.gated, licence)
    classes = {spec.pipeline for spec in POLICIES.values()}
    for name in dict.fromkeys([*here, names.model, names.editor]):
        if name and name not in listed:
            index = local_file(name, "model_index.json")
            is_generator = Path(name).suffix == ".safetensors"  # one file, as ComfyUI has it
            if index:
                is_generator = read_object(index).get("_class_name") in classes
            if is_generator:
                listed[name] = Offer(name, kind_of(str(index.parent) if index else name), is_here=True)
    listed[JUDGE] = Offer(JUDGE, is_here=JUDGE in here, licence="apache-2.0")
    return list(listed.values())


def cached() -> dict[str, int]:
    """Return the size of each model in the hub's cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return {}


# --- memory ----------------------------------------------------------------------------------------------------------


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
def fit_of(model: str, kind: str, judge: str) -> Fit:
    """Plan a generator beside the judge on this machine, with the first setting of memory that fits."""
    from pacorl.plan.plan import judge_options, plan_generation

    spec = POLICIES.named(kind or kind_of(model))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = []
    for setting in MEMORY:
        options = spec.options_for(model, dtype="float32" if model == TINY else "bfloat16", memory=setting)
        plan = plan_generation(options, low=setting != "normal", judge=judge_options(judge, setting))
        # Without a card the models are in main memory.
        card = plan.peak_bytes if plan.device_bytes else 0
        main = plan.held_bytes + (0 if plan.device_bytes else plan.peak_bytes)
        fits.append(Fit(setting, card, main, plan.device_bytes or 0, total))
    return next((fit for fit in fits if fit.fits), fits[-1])


def memory_for(names: StudioModels) -> str:
    """Choose the memory setting for this machine. Raises ValueError if the models fit with none."""
    if names.memory != AUTO:
        return names.memory
    if names.model == names.judge == TINY:
        return "normal"
    fit = fit_of(names.model, names.kind, names.judge)
    if not fit.fits:
        raise ValueError(f"{names.model}: {fit.text}; choose a smaller model in the header")
    return fit.memory


# --- downloads -------------------------------------------------------------------------------------------------------


class Download:
    """A download into the hub's cache, in a process of its own; an interrupted one goes on where it stopped."""

    def __init__(self) -> None:
        self.name = ""
        self.fault = ""
        self._process: subprocess.Popen[bytes] | None = None

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
        """Fetch a model's folders, without pickles.

        Args:
            token: of a gated model's user; never written, and never an argument, which all users could read.
        """
        if self.runs:
            raise ValueError(f"{self.name} is being downloaded; stop that first, it can go on later")
        # The single file beside the folders of a pipeline would be fetched twice.
        patterns = [pattern for pattern in PATTERNS if name == JUDGE or pattern != "*.safetensors"]
        code = f"from huggingface_hub import snapshot_download as get; get({name!r}, allow_patterns={patterns!r})"
        environment = os.environ | ({"HF_TOKEN": token} if token else {}) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = start_python("-c", code, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
        self.name, self.fault = name, ""

    def stop(self) -> None:
        """End the download; what it has fetched stays."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
            self._process = None
