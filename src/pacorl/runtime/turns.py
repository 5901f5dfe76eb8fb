"""On a small card the generator and the models that score its images take turns (`memory: low`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class HoldsModels(Protocol):
    """A judge or a reward with models of this process."""

    def models(self) -> list[nn.Module]:
        """What computes on the device; loaded if it is not yet."""


class Turns:
    """Who lies on the device: the generator's frozen weights, but while scores are computed the models that give them.

    Adapter, moving average and moments stay: together they are smaller than any of the models.
    """

    def __init__(self, generator: nn.Module, *, device: torch.device) -> None:
        """
        Args:
            generator: the adapted transformer, which lies on the device.
            device: for which they take turns.
        """
        self.generator, self.device = generator, device
        self.scorers: list[nn.Module] = []
        """In main memory, but within `scoring`."""

    def add(self, holders: Iterable[object]) -> None:
        """Give turns to the models of judges and rewards; others have none, or keep them to themselves."""
        models = chain.from_iterable(holder.models() for holder in holders if isinstance(holder, HoldsModels))
        self.scorers += [model for model in dict.fromkeys(models) if model not in self.scorers]

    def scoring(self) -> AbstractContextManager[None]:
        """Within the block the models that score are on the device, and the generator is in main memory."""
        return self.lent_to(self.scorers)

    @contextmanager
    def lent_to(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Within the block the device is theirs, also of models that join the list there."""
        self._move_generator(torch.device("cpu"))
        for model in models:
            model.to(self.device)
        try:
            yield
        finally:
            for model in models:
                model.to("cpu")
            self._move_generator(self.device)

    def _move_generator(self, device: torch.device) -> None:
        for tensor in chain(self.generator.parameters(), self.generator.buffers()):
            if not tensor.requires_grad:
                tensor.data = tensor.data.to(device)
