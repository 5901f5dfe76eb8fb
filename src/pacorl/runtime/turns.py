"""On a small card the generator and the models that score its images take turns (`memory: low`)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class HoldsModels(Protocol):
    """A judge or a reward with models of this process."""

    def models(self) -> list[nn.Module]:
        """Return the modules that run on the device, loaded if necessary."""


class Turns:
    """Alternation on the device between the generator's frozen weights and the scorers.

    Adapter, moving average and moments stay: together they are smaller than any of the models.
    """

    def __init__(self, generator: nn.Module, *, device: torch.device, enabled: bool = True) -> None:
        self.generator = generator
        self.device = device
        self.enabled = enabled
        """Whether models are moved; otherwise all of them stay where they are."""
        self.scorers: list[nn.Module] = []
        """Scorers in host memory, except during `scoring`."""

    def add(self, holders: Iterable[object]) -> None:
        """Add the models of judges and rewards, if they expose any."""
        for holder in holders:
            if self.enabled and isinstance(holder, HoldsModels):
                self.scorers += holder.models()

    def scoring(self) -> AbstractContextManager[None]:
        """Move the scorers to the device during the block, and the generator to host memory."""
        return self.lent_to(self.scorers)

    @contextmanager
    def lent_to(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Move `models` to the device during the block, including models added to the list in it."""
        if not self.enabled:
            yield
            return
        self._move_generator(torch.device("cpu"))
        torch.cuda.empty_cache()  # else fragments of one model's weights are too small for the other's
        for model in models:
            model.to(self.device)
        try:
            yield
        finally:
            for model in models:
                model.to("cpu")
            torch.cuda.empty_cache()
            self._move_generator(self.device)

    def _move_generator(self, device: torch.device) -> None:
        tensors: list[Tensor] = [*self.generator.parameters(), *self.generator.buffers()]
        for tensor in tensors:
            if not tensor.requires_grad:
                tensor.data = tensor.data.to(device)
