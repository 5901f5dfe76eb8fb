"""Kernels, products and bytes of FLUX's trained step, by Inductor's fusions, without a card and without compiling.

    python -m research.benchmarks.kernels                 # a block of each kind, times the published depth
    python -m research.benchmarks.kernels --batch 8

Dynamo traces the blocks at published widths as empty tensors, and Inductor lowers and fuses their graphs. The kernels
that it would call are counted, and the bytes that they read and write; none is compiled or run. What is kept for the
backward is counted between the two graphs. Fusions are those for CPUs: a card's differ by a few.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from research.gpu_day.bench import run_of
from research.twin import generator_parts
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pacorl.grpo.builders import add_adapter
from pacorl.plan.generators import policy_on_meta

PUBLISHED = {"transformer_blocks": 19, "single_transformer_blocks": 38}
BUDGETS = (1.0, 0.5, 0.0)
"""Shares of the activations that a compiled block keeps; 0 keeps its inputs alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Your compiler for AOTAutograd")
    print("kept  kernels  products  TFLOP  GB moved  GiB kept   of a trained step")
    for budget in BUDGETS:
        total = Counter[str]()
        for kind, depth in PUBLISHED.items():
            with functorch.patch(activation_memory_budget=budget):
                counts = counted_block(kind, batch=options.batch)
            total.update({name: depth * value for name, value in counts.items()})
        print(
            f"{budget:4.1f} {total['kernels']:8} {total['products']:9} "
            f"{total['flops'] / 1e12:6.0f} {total['bytes'] / 1e9:9.0f} {total['kept'] / 2**30:9.1f}",
            flush=True,
        )


def counted_block(kind: str, *, batch: int) -> Counter[str]:
    """Count forward and backward of one compiled block, at 512² and 512 tokens of text."""
    config = run_of(argparse.Namespace(tiny=False, recipe="flux_t2is_1gpu"), "model.gradient_checkpointing=false")
    counts = Counter[str]()
    torch._dynamo.reset()
    policy = policy_on_meta(config.generator, config.model, generator_parts(config.generator, tiny=False, depth=1))
    add_adapter(config, policy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        transformer: Any = policy.transformer.to_empty(device="cpu").train()
        block = getattr(transformer, kind)[0]
        block.compile(dynamic=False, backend=counting(counts))
        width, head = transformer.inner_dim, transformer.config.attention_head_dim
        empty = partial(torch.empty, dtype=torch.bfloat16)
        output = block(
            hidden_states=empty(batch, 1024, width).requires_grad_(),
            encoder_hidden_states=empty(batch, 512, width).requires_grad_(),
            temb=empty(batch, width),
            image_rotary_emb=tuple(torch.empty(1536, head) for _ in range(2)),
        )
        sum(part.sum() for part in output).backward()
    return counts


def counting(counts: Counter[str]) -> Any:
    """Make a backend that lowers graphs, counts their kernels, and runs them as they are."""

    def lower(kind: str, module: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        graph = GraphLowering(module, example_inputs=inputs, is_backward=kind == "backward")
        with ExitStack() as handlers:
            handlers.enter_context(V.set_fake_mode(detect_fake_mode(inputs)))
            handlers.enter_context(V.set_debug_handler(DebugContext()))
            handlers.enter_context(V.set_graph_handler(graph))
            handlers.enter_context(V.set_extern_kernel_nodes([]))
            graph.run(*inputs)
            code = graph.codegen()[0]
            counts["bytes"] += graph.count_bytes()[0]
        text = str(getattr(code, "value", code))
        products = len(re.findall(r"extern_kernels\.\w+\(|= torch\.ops\.aten\.\w+\.\w+\(", text))
        counts["products"] += products
        counts["kernels"] += products + len(re.findall(r"^\s+cpp_fused\w*\(", text, re.MULTILINE))

        def run(*values: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = module(*values)
            counts["flops"] += counter.get_total_flops()
            return result

        return run

    def keeping(joint: torch.fx.GraphModule, inputs: Any, **rest: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **rest)
        (outputs,) = [node.args[0] for node in forward.graph.nodes if node.op == "output"]
        for node in outputs[rest["num_fwd_outputs"] :]:
            if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                counts["kept"] += node.meta["val"].nbytes
        return forward, backward

    return aot_autograd(
        fw_compiler=partial(lower, "forward"),
        bw_compiler=partial(lower, "backward"),
        partition_fn=keeping,
        decompositions=select_decomp_table(),
    )


if __name__ == "__main__":
    main()
