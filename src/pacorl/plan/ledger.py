"""Peak memory and FLOPs of code that runs on meta tensors.

The peak includes saved activations and passing buffers. It excludes kernels' scratch space, the allocator's rounding
and fragments, and the CUDA context (together about 1 GiB on a card).
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")
aten = torch.ops.aten


class MemoryLedger(TorchDispatchMode):
    """Count the bytes of the storages that operations allocate in the block, and their FLOPs.

    Weights and inputs, which exist before the block, are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.flops = 0.0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(args):
            self._note(tensor, 0)
        outputs = func(*args, **kwargs)
        for tensor in tensors_in(outputs):
            self._note(tensor, tensor.untyped_storage().nbytes())
        formula = flop_registry.get(func._overloadpacket)
        if formula:
            self.flops += float(formula(*args, **kwargs, out_val=outputs))
        return outputs

    def _note(self, tensor: Tensor, size: int) -> None:
        # A storage's Python object lives as long as the storage: its id identifies it, its weak reference reports its
        # end.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return

        def freed(_: object) -> None:
            self.live -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def tensors_in(nested: object) -> list[Tensor]:
    """List the tensors among an operation's arguments or results."""
    return [leaf for leaf in tree_iter(nested) if isinstance(leaf, Tensor)]


@contextmanager
def fused_attention() -> Iterator[None]:
    """Route the attention of meta tensors through a fused kernel, as that of real tensors.

    torch's default for meta tensors keeps every attention matrix, and a peak would be forty times too high.
    """
    # The function by its module, where diffusers looks it up at every call.
    real = F.scaled_dot_product_attention
    name = "scaled_dot_product_attention"

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        if query.device != META:
            return real(query, key, value, attn_mask, dropout_p, **options)
        settings = {key: options[key] for key in ("is_causal", "scale") if key in options}
        kernel = aten._scaled_dot_product_efficient_attention
        fused: Tensor = kernel(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, **settings)[0]
        return fused

    setattr(F, name, attention)
    try:
        yield
    finally:
        setattr(F, name, real)


@contextmanager
def measured(*, gradients: bool = False) -> Iterator[MemoryLedger]:
    """Count the memory and FLOPs of the block, which runs on meta tensors."""
    with nullcontext() if gradients else torch.no_grad(), fused_attention(), MemoryLedger() as ledger:
        yield ledger
