"""PEFT's adapted layer, W·x + (α/r)·B·A·x, in the type of x."""

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from torch.nn import functional as F

from pacorl.models.lora import ADAPTER


class AdaptedLinear(lora.Linear):  # type: ignore[misc] # PEFT is untyped
    """An adapted layer whose matrices A and B may be of a wider type than the model.

    PEFT casts the input of such a layer to fp32 and the result back. On a bf16 base that buys no accuracy, since the
    base's own products carry the same error, and takes six more kernels a layer, two of them products at 1/15 of the
    rate of bf16. Here the matrices are cast, and their gradients reach the wider weights.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first, second = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        if self.disable_adapters or x.dtype == second.dtype:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        base = self.base_layer(x)
        hidden = F.linear(x, first.to(x.dtype))
        # One product adds scaling·B·hidden to the base's output, and rounds once.
        second = second.to(base.dtype)
        rows = torch.addmm(base.flatten(0, -2), hidden.flatten(0, -2), second.t(), alpha=self.scaling[ADAPTER])
        return rows.view(*base.shape)
