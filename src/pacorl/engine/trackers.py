"""Where a run's curves can be watched beside its own page: TensorBoard, Weights & Biases, SwanLab, by name.

To add one: a class behind `Tracker`, a line in TRACKERS, and its name in the config's `trackers`. A service goes on
with the same curves when a run is resumed: its id of the run stays in the run's folder.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pacorl.io.files import write_atomic

PROJECT = "pacorl"
"""The services' project, unless WANDB_PROJECT or SWANLAB_PROJECT name another."""
ID_FILE = "tracker_id"
ID_LETTERS = 21
"""SwanLab has taken ids of no other length; W&B takes any."""


class Tracker(Protocol):
    """Takes a run's numbers."""

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Finite values at a place of the run's axis, which never goes back but for a resumed run."""

    def close(self) -> None:
        """After the last value."""


class TensorBoard:
    """Event files in the run's folder; nothing leaves the machine."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """A run at a service, as the packages of W&B and SwanLab both have it."""

    _run: Any

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Wandb(Service):
    """Weights & Biases, as WANDB_MODE and the other variables of its own say. Its files lie in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._run = _begun(
            "wandb",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            id=id_of(folder),
            resume="allow",
            config=dict(settings),
        )


class SwanLab(Service):
    """SwanLab, as SWANLAB_MODE and the other variables of its own say. Its files lie in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._run = _begun(
            "swanlab",
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            experiment_name=folder.name,
            logdir=str(folder / "swanlog"),
            id=id_of(folder),
            resume="allow",
            config=dict(settings),
        )


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "swanlab": SwanLab,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError where the package of one is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(
                f"trackers: the package {name} is not installed; `pip install 'pacorl[trackers]'`, or leave {name} out"
            )


def start_trackers(names: Sequence[str], folder: Path, *, settings: Mapping[str, Any]) -> list[Tracker]:
    """Those of a run's folder; `settings` is its config, which services show.

    Raises ValueError where a service does not take the run: no account, no network.
    """
    return [TRACKERS[name](folder, settings) for name in names]


def _begun(name: str, /, **options: Any) -> Any:
    """A service's run, by its package's `init`."""
    try:
        return import_module(name).init(**options)
    except Exception as error:  # the services raise kinds of their own
        raise ValueError(
            f"trackers: {name} did not start ({error}); log in with `{name} login`, "
            f"or set {name.upper()}_MODE=offline, or leave {name} out"
        ) from error


def id_of(folder: Path) -> str:
    """The services' id of a run: drawn once, and kept in its folder."""
    path = folder / ID_FILE
    if not path.exists():
        write_atomic(path, uuid.uuid4().hex[:ID_LETTERS] + "\n")
    return path.read_text().strip()
