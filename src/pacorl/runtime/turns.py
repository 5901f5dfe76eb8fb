"""On a small card the generator and the models that score its images take turns (`memory: low`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pacorl.models.int8 import Arena


@runtime_checkable
class HoldsModels(Protocol):
    """A judge or a reward with models of this process."""

    def models(self) -> list[nn.Module]:
        """Return the modules that run on the device, loaded if necessary."""


class Turns:
    """Alternation on the device between the generator's frozen weights and the scorers.

    Adapter, moving average and moments stay: together they are smaller than any of the models.
    """

    def __init__(self, generator: nn.Module, *, device: torch.device) -> None:
        self.generator = generator
        self.device = device
        self.scorers: list[nn.Module] = []
        """Scorers in host memory, except during `scoring`."""
        self._arena = Arena(pinned=True) if device.type == "cuda" else None
        """Pinned memory, which a card reads and writes at two to four times the rate of pageable memory."""
        self._places: dict[int, Tensor] = {}
        """Id of a parameter or buffer → its place in the arena."""

    def add(self, holders: Iterable[object]) -> None:
        """Add the models of judges and rewards, if they expose any."""
        # Rewards may share a model, which must be moved once.
        models = chain.from_iterable(holder.models() for holder in holders if isinstance(holder, HoldsModels))
        self.scorers += [model for model in dict.fromkeys(models) if model not in self.scorers]

    def scoring(self) -> AbstractContextManager[None]:
        """Move the scorers to the device during the block, and the generator to host memory."""
        return self.lent_to(self.scorers)

    @contextmanager
    def lent_to(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Move `models` to the device during the block, including models added to the list in it."""
        self._park(self._frozen())
        torch.cuda.empty_cache()  # else fragments of one model's weights are too small for the other's
        for model in models:
            model.to(self.device)
        try:
            yield
        finally:
            for model in models:
                self._park(chain(model.parameters(), model.buffers()))
            torch.cuda.empty_cache()
            for tensor in self._frozen():
                tensor.data = tensor.data.to(self.device)

    def _frozen(self) -> list[Tensor]:
        tensors = chain(self.generator.parameters(), self.generator.buffers())
        return [tensor for tensor in tensors if not tensor.requires_grad]

    def _park(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to host memory, each to its own pinned buffer."""
        for tensor in tensors:
            if self._arena is None:
                tensor.data = tensor.data.to("cpu")
            elif id(tensor) in self._places:
                tensor.data = self._places[id(tensor)].copy_(tensor.data)
            else:
                tensor.data = self._places[id(tensor)] = self._arena.copy_of(tensor.data)
