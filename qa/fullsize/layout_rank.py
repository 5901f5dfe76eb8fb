"""One rank of a launcher's processes, on a pretended card of its own: a recipe's loop at the published width.

    accelerate launch --config_file configs/launch/fsdp2.yaml --num_processes 2 qa/fullsize/layout_rank.py FOLDER

What the ranks tell each other in objects really passes between them. Collectives of tensors on the card take place
without another card's values, of which a trace knows none anyway.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from qa.fullsize.test_recipes import WITHIN, apart, check_steps
from qa.fullsize.traced import trace
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils import swap_tensors

from pacorl.models.twins import META


def move_states(parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor], device: torch.device) -> None:
    """FSDP2 moves a module; a parameter of the meta device takes no data of the host's, as a real card's does."""
    for tensor in (*parameters, *buffers):
        if tensor.device != device:
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)


@contextmanager
def cards_that_meet() -> Iterator[None]:
    """Within the block DDP and FSDP2 take the meta device for a card's."""
    fully_shard = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    fsdp_init = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    wrap = DistributedDataParallel.__init__

    @wraps(wrap)
    def wrapped(self: DistributedDataParallel, module: nn.Module, *args: Any, **options: Any) -> None:
        wrap(self, module, *args, **options, init_sync=False)
        self.register_comm_hook(None, noop_hook)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", wrapped)
        patch.setattr(FSDPParamGroup, "_validate_no_meta_params", lambda self: None)
        patch.setattr(torch, META.type, torch.cpu, raising=False)  # what answers for the device
        patch.setattr(fully_shard, "_get_device_from_mesh", lambda mesh: META)
        patch.setattr(fsdp_init, "_move_states_to_device", move_states)
        world = distributed.get_world_size()
        patch.setattr(
            fully_shard, "_init_default_mesh", lambda **options: init_device_mesh(META.type, (world,), **options)
        )
        yield


def main(folder: Path) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # it registers the backend
    distributed.init_process_group(f"cpu:gloo,{META.type}:fake")
    own = folder / f"rank-{distributed.get_rank()}"
    own.mkdir(parents=True)
    overrides = [f"out={folder / 'run'}", f"prompts_per_epoch={2 * distributed.get_world_size()}"]
    with cards_that_meet():
        traced = trace("flux_t2is", own, depth=(1, 1), overrides=overrides, resumes=True)
    check_steps(traced)
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        differences = apart(traced)
        # The processes share the encoding, so that a batch of texts may be smaller than the plan's.
        assert differences.pop("encode") >= -WITHIN, apart(traced)
        assert all(abs(difference) <= WITHIN for difference in differences.values()), differences
    (own / "peaks.json").write_text(json.dumps(traced.peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
