"""On the server process's PYTHONPATH only: lets torchvision be imported beside a torch without CUDA.

torchvision's wheel brings a compiled extension that a CPU torch cannot load; its Python part then looks for two
operators that the extension would have defined. A judge uses neither, so their signatures are enough.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

OPERATORS = ("torchvision::nms", "torchvision::qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in OPERATORS:
                torch.library.define(operator, SIGNATURE)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
