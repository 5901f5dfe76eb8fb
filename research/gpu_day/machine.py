"""The machine: its card, the versions of its packages, and whether they can be imported at all."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from importlib import import_module

from .parts import Record, UnusableMachine

PACKAGES = ("torch", "accelerate", "diffusers", "httpcore2", "peft", "pydantic", "tensorboard", "transformers")
"""Packages that the parts import and a bare machine may lack, or have without a requirement of theirs."""


def describe_machine(options: argparse.Namespace) -> Iterator[Record]:
    """One record with the card, the versions and the day's settings, so that all others can be read by themselves.

    Raises:
        UnusableMachine: a package cannot be imported, or there is no card.
    """
    try:
        for package in PACKAGES:
            import_module(package)
        _ = import_module("diffusers").FluxPipeline  # imported now, with what it needs itself
        from .bench import device_of

        device = device_of(options)
    except (ImportError, RuntimeError) as error:
        raise UnusableMachine(f"{' '.join(str(error).split())}") from None

    import torch

    from pacorl.io.versions import versions

    yield {
        "figure": "device",
        **(card() if device.type == "cuda" else {"device": "CPU"}),
        **versions(PACKAGES),
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "settings": {name: getattr(options, name) for name in ("steps", "repeats", "rank", "batches", "depth", "tiny")},
        "units": "seconds of one forward (sample) or one optimizer step (train) of the batch; bytes of the card",
    }


def card() -> Record:
    """The card's name, memory and driver."""
    import torch

    from pacorl.core.devices import driver_version

    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    about = {"device": properties.name, "bytes": properties.total_memory, "capability": capability}
    return {**about, "driver": driver_version()}
