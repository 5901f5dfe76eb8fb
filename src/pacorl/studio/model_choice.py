"""Models that the studio offers: on this machine or on the hub, with their licence, their memory and their download.

The page names models and LoRAs of the hub, never a path of this machine: paths come from the command alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pacorl.config.options import AUTO, MEMORY, StudioModels
from pacorl.config.user_files import is_in_file
from pacorl.io.children import start_python
from pacorl.io.documents import read_object, read_text
from pacorl.io.files import LONGEST_NAME, open_regular
from pacorl.io.hub import local_file
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY
from pacorl.web.guard import RefusedError

INDEX = "model_index.json"
JUDGE = "X-GenGroup/PaCo-Reward-7B"
"""The published judge."""
WEIGHTS = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""Files of a checkpoint that are read; pickles, and the single files beside a pipeline's folders, are not."""
VARIANTS = ("*.fp16.*", "*.bf16.*")


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that can be chosen or downloaded."""

    name: str
    sets: bool
    """Whether it draws from words."""
    edits: bool
    """Whether it changes pictures."""
    judges: bool
    """Whether it judges pictures."""
    bytes: int
    """Size on this disk; 0 if it is not here."""
    gated: bool = False
    """Whether the hub gives it only to people who accepted its licence there."""
    licence: str = ""
    """Licence of a published checkpoint, to be accepted before the download; empty for the embedded models."""
    kind: str = ""
    """Kind of a generator."""
    download: int = 0
    """Bytes of its weights as published; 0 if unknown."""
    cards: Mapping[str, int | None] = field(default_factory=dict)
    """`memory` → GB of the smallest card beside the published judge, as planned; empty if unknown."""


def offers(names: StudioModels) -> list[Offer]:
    """List the embedded models, the published ones, the ones in the hub's cache, and the command's."""
    here = cached_bytes()
    kinds = {TINY: kind_of(TINY)}
    for kind, spec in POLICIES.items():
        kinds[spec.published] = kind
    # Other checkpoints of the cache, and of the command.
    for name in [*here, names.model, names.editor]:
        index = local_file(name, INDEX) if name and name not in kinds else None
        if index and read_object(index).get("_class_name") in {spec.pipeline for spec in POLICIES.values()}:
            kinds[name] = kind_of(str(index.parent))

    listed = []
    for name, kind in kinds.items():
        spec = POLICIES[kind]
        embedded = name == TINY  # one model draws, others edit and judge
        offer = Offer(name, spec.sets, spec.edits or embedded, embedded, here.get(name, 0), kind=kind)
        if name == spec.published:
            offer = replace(offer, gated=spec.gated, licence=spec.licence[1] or spec.licence[0])
            offer = replace(offer, **_planned_needs().get(name, {}))
        listed.append(offer)
    for judge in dict.fromkeys([JUDGE, names.judge]):
        if judge != TINY:
            needs = _planned_needs().get(judge, {})
            listed.append(Offer(judge, False, False, True, here.get(judge, 0), **needs))
    return listed


@cache
def _planned_needs() -> Mapping[str, Any]:
    """Read the download and cards of the published models, as planned."""
    return read_object(Path(__file__).parent / "memory.json")


def cached_bytes() -> dict[str, int]:
    """Return the size of each model in the hub's cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return {}


def check_name(name: str, known: Collection[str] = ()) -> str:
    """Return a name of the hub, or one of the `known` names.

    Raises:
        ValueError: for any other text, such as a path of this machine or a name in a Python file.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if name in known:
        return name
    repository, _, file = name.partition(":")
    try:
        validate_repo_id(repository)
    except HFValidationError:
        repository = ""
    # The system raises for longer names.
    is_hub_name = "/" in repository and name.isprintable() and len(name.encode()) <= LONGEST_NAME
    is_hub_name = is_hub_name and not is_in_file(name)
    # A folder of this machine wins over the hub's name, and a page must not choose folders.
    if not is_hub_name or Path(name).exists() or Path(repository).exists() or ".." in Path(file).parts:
        raise ValueError(f"{name[:80]!r} is no model of the list, and no name of the hub such as OWNER/NAME")
    return name


def check_cached(name: str) -> None:
    """Raise ValueError if a model of the hub is not in its cache."""
    if name.partition(":")[0] not in cached_bytes():
        raise ValueError(f"{name} is not on this machine; download it under Models")


# --- memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A generator and the judge in the memory of this machine."""

    memory: str
    """The first setting that fits, or else the last."""
    needed: int
    """Bytes at the peak."""
    room: int
    """Bytes of the card, or without one of the main memory."""
    device: str
    disk: int
    """Size of the generator's weights as published."""
    absent: tuple[str, ...] = ()
    """What has to be downloaded first."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory, less a margin for CUDA."""
        return self.needed + MARGIN <= self.room


MARGIN = 2 * 2**30
"""As `plan.CARD_MARGIN`."""

BUILDING = threading.RLock()
"""Held while models are loaded or planned. The libraries import their parts at first use and patch torch while they
build a model, for all threads at once: a plan beside a load ended the load with an ImportError."""


def fit_of(names: StudioModels, model: str, kind: str = "") -> Fit:
    """Plan a generator beside the judge, with the first `memory` that fits.

    Raises:
        ValueError: the model is of no supported kind.
    """
    if model == names.judge == TINY and names.memory == AUTO:
        return Fit("normal", 0, MARGIN, "", 0)
    return _planned(model, kind, names.judge, names.judge_adapter, names.memory)


def _planned(model: str, kind: str, judge: str, judge_adapter: str, memory: str) -> Fit:
    with BUILDING:
        fit = _plan(model, kind, judge, judge_adapter, memory)
    if fit.absent:
        _plan.cache_clear()  # a download may be at its end the next time
    return fit


@cache
def _plan(model: str, kind: str, judge: str, judge_adapter: str, memory: str) -> Fit:
    # Imported here: torch takes seconds, and the page is there before.
    from pacorl.plan.plan import judge_options, plan_generation

    spec = POLICIES.named(kind or kind_of(model))
    dtype = "float32" if model == TINY else "bfloat16"
    fit = None
    for setting, weights in MEMORY.items():
        if memory not in (AUTO, setting):
            continue
        options = spec.options_for(model, dtype=dtype, **weights)
        asked = judge_options(judge, judge_adapter, weights)
        plan = plan_generation(options, low=setting != "normal", judge=asked)
        # Without a card the models are in main memory.
        main = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed = plan.peak_bytes if plan.device_bytes else plan.peak_bytes + plan.held_bytes
        parameters = sum(row.parameters or 0 for row in plan.rows if not row.component.startswith("judge"))
        absent = tuple(absence.source for absence in plan.absences)
        fit = Fit(setting, needed, plan.device_bytes or main, plan.device, 2 * parameters, absent)
        if fit.fits:
            break
    assert fit
    return fit


def with_memory(names: StudioModels, model: str, kind: str) -> StudioModels:
    """Set the memory by the card, before anything is loaded.

    Raises:
        ValueError: the models are not here, or fit with no setting.
    """
    if names.memory != AUTO:
        return names
    fit = fit_of(names, model, kind)
    if fit.absent:
        raise ValueError(f"{fit.absent[0]} is not on this machine; download it under Models")
    if not fit.fits:
        raise ValueError(
            f"{model} needs {fit.needed / 2**30:.1f} GiB even with the least memory, and {fit.device} has "
            f"{fit.room / 2**30:.1f}; choose a smaller model under Models"
        )
    return replace(names, memory=fit.memory)


# --- downloads -------------------------------------------------------------------------------------------------


class Downloads:
    """A download into the hub's cache, in a process of its own; an interrupted one goes on where it stopped."""

    def __init__(self, log: Path) -> None:
        """
        Args:
            log: file of the process' output: the bytes to fetch, or the fault.
        """
        self.log = log
        self.name = ""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name: str, *, token: str = "") -> None:
        """Start the download of a model.

        Args:
            name: on the hub.
            token: of the hub's user, for a licence that is accepted there; it is never written.

        Raises:
            RefusedError: another download runs, or the hub must not be asked.
        """
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise RefusedError("the hub must not be asked: the studio was started with HF_HUB_OFFLINE", status=409)
        # By the environment: all users of the machine can read a process's arguments.
        environment = dict(os.environ)
        if token:
            environment["HF_TOKEN"] = token
        with self._lock:
            if self._runs:
                raise RefusedError(f"{self.name} is being downloaded; stop that first, it can go on later", status=409)
            with open(open_regular(self.log, os.O_WRONLY | os.O_TRUNC), "wb") as log:
                pipes: Any = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "env": environment}
                self._process = start_python("-m", "pacorl.studio.download_process", name, **pipes)
            self.name = name

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the download; what it has fetched stays."""
        with self._lock:
            if self._process and self._runs:
                self._process.terminate()
                self._process.wait()
                self.name = ""

    def state(self) -> dict[str, Any] | None:
        """Describe the download: name, bytes, and the fault that ended it; None without one."""
        if not self.name or self._process is None:
            return None
        lines = read_text(self.log).strip().splitlines() or [""]
        total = int(lines[0]) if lines[0].isdigit() else 0
        code = self._process.poll()
        fault = "" if code in (None, 0) else lines[-1][:400]
        return {"name": self.name, "done": fetched_bytes(self.name), "total": total, "runs": self._runs, "fault": fault}


def fetched_bytes(name: str) -> int:
    """Count the bytes of a model in the hub's cache, unfinished files included."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "blobs")
    fetched = 0
    for path in folder.glob("*"):
        # A finished file changes its name meanwhile.
        if path.exists():
            fetched += path.stat().st_size
    return fetched


def free_bytes() -> int:
    """Return the free space of the disk with the hub's cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    return shutil.disk_usage(cache if cache.exists() else Path.home()).free
