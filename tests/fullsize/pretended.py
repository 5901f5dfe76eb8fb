"""A pretended card: torch's meta device, whose bytes are counted.

Tensors on "meta" have shapes and no values. `PretendedCard` counts their bytes, and answers where a program reads a
value: with the value itself if it follows from the host's own integers (ids, masks, lengths), else with draws, and with
True for booleans. So the project's own loop runs as it is. Weights of checkpoints are `mapped`, and take no memory.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from pacorl.plan.ledger import META, fused_attention, tensors_in

aten = torch.ops.aten
DRAWS = torch.Generator().manual_seed(0)
SMALL = 2**20
"""Elements up to which integers on the card have a copy here."""


class PretendedCard:
    """A card's bytes by phase. Everything on it is made by one thread."""

    def __init__(self) -> None:
        self.taken = 0
        self.phase = "between"
        self.peaks: dict[str, int] = defaultdict(int)
        """Phase → the most bytes at a time."""
        self.rises: dict[str, int] = defaultdict(int)
        """Phase → the most bytes beyond those that were there when it began."""
        self._began = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the bytes in the block to a phase; its peak begins with those that are there."""
        before = (self.phase, self._began)
        self.phase, self._began = phase, self.taken
        self._mark()
        try:
            yield
        finally:
            self.phase, self._began = before
            self._mark()

    def _mark(self) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], self.taken)
        self.rises[self.phase] = max(self.rises[self.phase], self.taken - self._began)

    def take(self, tensor: Tensor) -> None:
        """Count a storage on the card, from its birth to its death."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if not tensor.is_meta or key in self._storages:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            self.taken -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, gone)
        self.taken += size
        self._mark()


class _Books(TorchDispatchMode):
    """Every operation's results, written into the card's books."""

    def __init__(self, card: PretendedCard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _composite(func):  # as under inference mode
            with self:
                outputs = func.decompose(*args, **kwargs)
            if outputs is not NotImplemented:
                return outputs
        inputs = list(tensors_in([*args, *kwargs.values()]))
        if not (any(tensor.is_meta for tensor in inputs) or _asks_for_card(kwargs)):
            return self._taken(func(*args, **kwargs))
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default):
            return func(_read(args[0]))
        if func is aten.copy_.default and not args[0].is_meta:
            return func(args[0], _read(args[1]), *args[2:], **kwargs)
        if func is aten._to_copy.default and not _asks_for_card({"device": kwargs.get("device") or META}):
            return self._taken(_read(args[0]).to(kwargs.get("dtype") or args[0].dtype))
        known = _known(func, args, kwargs, inputs)
        if known is not None and func._overloadpacket in VALUES_SHAPE_IT:
            outputs = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=META), known)
        else:
            outputs = func(*_masks_as_rows(func, args), **kwargs)
        if known is not None:
            for shadow, tensor in zip(tree_iter(known), tree_iter(outputs), strict=True):
                tensor.shadow = shadow
        return self._taken(outputs)

    def _taken(self, outputs: Any) -> Any:
        for tensor in tensors_in(outputs):
            self.card.take(tensor)
        return outputs


@cache
def _composite(func: Any) -> bool:
    """Whether an operation is made of others, which are what a card computes."""
    name = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name))


def _asks_for_card(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == META.type


def _read(tensor: Tensor) -> Tensor:
    """What the host sees of a tensor on the card."""
    shadow: Tensor | None = getattr(tensor, "shadow", None)
    if shadow is not None:
        return shadow.clone()
    if tensor.is_floating_point():
        # Images that differ, and scores: of equal ones a judge would look at one alone.
        return torch.rand(tensor.shape, generator=DRAWS, dtype=torch.float32).to(tensor.dtype)
    return torch.full((), tensor.dtype == torch.bool, dtype=tensor.dtype).expand(tensor.shape)


def _known(func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
    """The values of a result that follows from integers of the host alone; None of all others."""
    for tensor in inputs:
        if _is_float(tensor.dtype) or (tensor.is_meta and not hasattr(tensor, "shadow")) or tensor.numel() > SMALL:
            return None
    # A factory's.
    shape = args[0] if args and isinstance(args[0], list | tuple) else ()
    if not inputs and (_is_float(kwargs.get("dtype") or torch.float32) or math.prod(shape) > SMALL):
        return None
    here = {**kwargs, **({"device": torch.device("cpu")} if kwargs.get("device") is not None else {})}
    shadows, here = tree_map_only(Tensor, lambda t: getattr(t, "shadow", t), (args, here))
    known = func(*shadows, **here)
    tensors = [tensor for tensor in tree_iter(known) if isinstance(tensor, Tensor)]
    return known if tensors and all(not _is_float(t.dtype) and t.numel() <= SMALL for t in tensors) else None


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


VALUES_SHAPE_IT = (aten.nonzero, aten.unique_consecutive, aten.masked_select, aten.repeat_interleave, aten.index)
"""Operations whose results may have shapes that depend on values."""


def _masks_as_rows(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Indexing by a mask whose values are known, as indexing by the rows that it selects."""
    if func is not aten.index.Tensor:
        return args
    rows: list[Any] = []
    for index in args[1]:
        if index is None or index.dtype != torch.bool:
            rows.append(index)
        else:
            rows += [torch.empty_like(r, device=META) for r in _read(index).nonzero(as_tuple=True)]
    return (args[0], rows, *args[2:])


# --- weights in files ------------------------------------------------------------------------------------------


def mapped(model: nn.Module) -> nn.Module:
    """A model of the meta device as its files would give it: on the host, of full size, and nothing in memory."""

    # Two layers with one weight become one layer: unlike a card's, a weight that moves to meta is a new one.
    layers: dict[nn.Parameter, nn.Module] = {}
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(getattr(layer, "weight", None), nn.Parameter):
                parent._modules[name] = layers.setdefault(layer.weight, layer)

    def in_file(like: Tensor) -> Tensor:
        return torch.zeros((), dtype=like.dtype).expand(like.shape)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(in_file(parameter), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = in_file(buffer)
    return model


@contextmanager
def pretended() -> Iterator[PretendedCard]:
    """Within the block the meta device is a card."""
    card, made_here = PretendedCard(), torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        # On the meta device torch makes it without its values; a card is sent them.
        made = made_here(data, **options)
        return made if device is None else made.to(device)

    # torch remembers its factories from when it is first asked: with ours among them, `with META` would not see torch's
    # for the rest of the process, and transformers would leave the positions of a CLIP without values.
    _device_constructors()
    with fused_attention(), _Books(card), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        yield card
