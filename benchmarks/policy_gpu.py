"""What a FLUX.1-dev of random weights costs on a GPU: seconds, share of the matmul peak, memory against the plan.

    python benchmarks/policy_gpu.py                       # full width and depth in bf16, LoRA of rank 64, 512 and 1024
    python benchmarks/policy_gpu.py --batch 4 --json
    python benchmarks/policy_gpu.py --tiny                # the same code on a CPU with the tiny shape

Measured are the engine's own functions: `denoise` (the adapter in place, the average worn as in an evaluation), the
VAE's `decode`, and `update_policy` with its optimizer step on one micro-batch with gradient checkpointing. The fastest
of the repeats counts. FLOPs are counted by torch as they are executed, recomputation included; the peak is that of a
large product in the model's dtype, measured in the same run. Text encoders and judge are left out: conditioning is
drawn, as if the encoders had left. Exits with 1 where a phase takes more memory than `--dry-run` says, and 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from pacorl.config import base as configs
from pacorl.config.policy_run import PolicyConfig
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampling import Sampler, Tree
from pacorl.engine.conditioning import ConditioningCache
from pacorl.engine.rollout import Draw, collect, denoise, sigmas_of
from pacorl.engine.rows import Row
from pacorl.engine.runtime import Runtime
from pacorl.lora.adapters import MovingAverage, add_lora
from pacorl.plan import sources
from pacorl.plan.components import Phase, policy_on_meta, rows
from pacorl.plan.plan import Plan, size_text
from pacorl.plan.work import work_of
from pacorl.policies.pipeline import PipelinePolicy
from pacorl.policies.policy import Policy
from pacorl.train.update import PolicyLoss, update_policy
from pacorl.types import Advantages, Conditioning, Prompt, Samples, Size

NOISE_STEP = 1
SLACK = 2**30
"""Kernels' scratch space and the allocator's rounding, which no plan sees."""
TINY_SIDES, SIDES = (32, 64), (512, 1024)


@dataclass(frozen=True, slots=True)
class Measured:
    """One phase at one size."""

    side: int
    phase: Phase
    seconds: float
    """For a whole batch: all sampling steps, one decode, or one optimizer step."""
    flops: float
    share_of_peak: float
    bytes: int | None
    """The device's peak; None on a CPU."""
    planned_bytes: int


def main() -> int:
    options = arguments()
    if not options.tiny and not torch.cuda.is_available():
        print("policy_gpu: no CUDA device is here; --tiny tries the same code on a CPU", file=sys.stderr)
        return 1
    phases, text = measured(options, torch.device("cpu" if options.tiny else "cuda"))
    print(text)
    return int(any(phase.bytes is not None and phase.bytes > phase.planned_bytes + SLACK for phase in phases))


def measured(options: argparse.Namespace, device: torch.device) -> tuple[list[Measured], str]:
    """Every phase at every size, and the text or JSON that says so."""
    runs = {side: run_of(side, options) for side in (TINY_SIDES if options.tiny else SIDES)}
    bench = Bench(next(iter(runs.values())), device)
    peak = matmul_peak(device, bench.dtype, side=512 if options.tiny else 8192)
    phases = [phase for side, config in runs.items() for phase in bench.measure(side, config, options, peak=peak)]
    return phases, as_json(phases, peak, bench) if options.json else described(phases, peak, bench)


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Of `line`, or of the command's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tiny", action="store_true", help="the tiny shape in fp32 on the CPU; its figures mean little"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="sampling steps")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(line)


def run_of(side: int, options: argparse.Namespace) -> PolicyConfig:
    """The recipe at one size, with the judge elsewhere."""
    small = (
        {"model.checkpoint": "tiny", "model.dtype": "float32", "model.max_sequence_length": 48} if options.tiny else {}
    )
    settings = {
        **small,
        "adapter.rank": options.rank,
        "adapter.alpha": 2 * options.rank,
        "sampling.size": f"[{side},{side}]",
        "sampling.batch": options.batch,
        "sampling.steps": options.steps,
        "sampling.sde_steps": f"[{NOISE_STEP}]",
        "sampling.fuse_lora": "false",
        "evaluation.size": f"[{side},{side}]",
        "evaluation.batch": options.batch,
        "judge": "{backend: http, checkpoint: 'http://127.0.0.1:1/v1', model: none}",
        "rewards": "[{name: jpeg_size}]",
    }
    return configs.load(PolicyConfig, None, [f"{key}={value}" for key, value in settings.items()])


class Drawn:
    """Conditioning of the right shapes from a generator of noise, in place of a cache of encoded prompts."""

    def __init__(self, policy: PipelinePolicy, device: torch.device) -> None:
        self._policy, self._device = policy, device

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        wanted = self._policy.conditioning_on_meta(size, batch=len(prompts))
        return Conditioning(
            {name: torch.randn(one.shape, dtype=one.dtype, device=self._device) for name, one in wanted.tensors.items()}
        )


class Bench:
    """A generator of random weights on the device, with its adapter, average and optimizer."""

    def __init__(self, config: PolicyConfig, device: torch.device) -> None:
        self.device, self.runtime = device, Runtime()
        self.dtype = getattr(torch, config.model.dtype)
        self.generator = policy_on_meta(config, sources.generator(config).configs)
        self.policy = cast(Policy, self.generator)
        for part in (self.generator.pipeline.transformer, self.generator.pipeline.vae):
            draw_weights(part.to_empty(device=device))
        self.base_parameters = sum(one.numel() for one in self.policy.transformer.parameters())
        add_lora(
            self.policy.transformer,
            rank=config.adapter.rank,
            alpha=config.adapter.alpha,
            targets=self.policy.lora_targets,
        )
        self.policy.transformer.to(device)
        self.generator.pipeline.transformer.enable_gradient_checkpointing()
        self.policy.transformer.train()
        self.trained = [one for one in self.policy.transformer.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=config.optimizer.lr)
        self.average = MovingAverage(self.policy.transformer, decay=0.9, interval=1)
        self.cache = cast(ConditioningCache, Drawn(self.generator, device))

    def measure(self, side: int, config: PolicyConfig, options: argparse.Namespace, *, peak: float) -> list[Measured]:
        """Sampling, decoding and training at one size."""
        size = self.generator.nearest_size(Size(side, side))
        sampler = Sampler(size=size, steps=options.steps, sde_steps=(NOISE_STEP,), tree=Tree(options.batch, (1,)))
        prompts = [Prompt(id=0, text="drawn")] * options.batch
        draw = Draw(self.policy, sampler, self.cache, seed=0, epoch=0, batch=options.batch)
        samples = collect(draw, [Row(prompt, number) for number, prompt in enumerate(prompts)])
        final = samples.rollouts[0].final_BNC.to(self.device)
        works: dict[Phase, Callable[[], Any]] = {
            "sample": lambda: self.sample(prompts, sampler),
            "decode": lambda: self.policy.decode(final, size),
            "train": lambda: self.train(samples, sampler),
        }
        planned = self.planned(config)
        self.train(samples, sampler)  # the optimizer's moments exist from its first step on
        found = []
        for phase, work in works.items():
            flops = counted(work)
            seconds, taken = fastest(work, self.device, repeats=options.repeats)
            found.append(
                Measured(side, phase, seconds, flops, flops / seconds / peak, taken, planned.phase_bytes(phase))
            )
        return found

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], sampler: Sampler) -> None:
        """Noise to endpoints with the average worn."""
        with self.average.swapped_in():
            denoise(
                self.policy,
                range(len(prompts)),
                size=sampler.size,
                conditioning=self.cache.batch(prompts, sampler.size),
                sigmas=sigmas_of(self.policy, sampler, prompts[0]),
            )

    def train(self, samples: Samples, sampler: Sampler) -> None:
        """One optimizer step on one micro-batch."""
        learner = PolicyLoss(
            self.policy,
            sampler,
            self.cache,
            options=OBJECTIVES["grpo_clip"].options(),
        )
        count = len(samples.rollouts[0])
        advantage_B = torch.linspace(-1, 1, count) if count > 1 else torch.ones(1)
        values = Advantages(advantage_B, torch.ones(count, dtype=torch.bool), {})
        update_policy(learner, samples, values, runtime=self.runtime, draw=(0,))
        self.runtime.step(self.optimizer, self.trained, max_norm=1.0)

    def planned(self, config: PolicyConfig) -> Plan:
        """What `--dry-run` says of the same run."""
        policy = policy_on_meta(config, sources.generator(config).configs)
        components = rows(config, work=work_of(config, world=1), policy=policy, judge={}, held_out_judge={}, prompts=())
        return Plan(components, (), (), str(self.device), None)


@torch.no_grad()
def draw_weights(module: torch.nn.Module) -> None:
    """Small weights, no biases, norms of one: figures stay finite through the depth."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02)


# --- measuring -------------------------------------------------------------------------------------------------


def counted(work: Callable[[], Any]) -> float:
    """FLOPs that torch executes."""
    with FlopCounterMode(display=False) as flops:
        work()
    return float(flops.get_total_flops())


def fastest(work: Callable[[], Any], device: torch.device, *, repeats: int) -> tuple[float, int | None]:
    """(seconds of the fastest turn, the device's peak of memory); a turn before them warms up."""
    work()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = min(timed(work, device) for _ in range(repeats))
    return seconds, torch.cuda.max_memory_allocated() if on_gpu else None


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds, until the device is done."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def matmul_peak(device: torch.device, dtype: torch.dtype, *, side: int, repeats: int = 20) -> float:
    """FLOP/s of a large product, the fastest of three trials."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    timed(multiply, device)
    return 2 * side**3 * repeats / min(timed(multiply, device) for _ in range(3))


# --- words -----------------------------------------------------------------------------------------------------


def as_json(found: Sequence[Measured], peak: float, bench: Bench) -> str:
    document = {
        "device": name_of(bench.device),
        "torch": torch.__version__,
        "parameters": bench.base_parameters,
        "adapter_parameters": sum(one.numel() for one in bench.trained),
        "matmul_peak": peak,
        "phases": [asdict(line) for line in found],
    }
    return json.dumps(document, indent=2)


def described(found: Sequence[Measured], peak: float, bench: Bench) -> str:
    lines = [
        f"{name_of(bench.device)}, torch {torch.__version__}: FLUX of {bench.base_parameters / 1e9:.3f} B parameters, "
        f"{bench.dtype}; matmul peak {peak / 1e12:.2f} TFLOP/s",
        "side  phase   seconds    TFLOP  of peak  memory      planned",
    ]
    for line in found:
        memory = "-" if line.bytes is None else size_text(line.bytes)
        lines.append(
            f"{line.side:4d}  {line.phase:6s} {line.seconds:8.3f} {line.flops / 1e12:8.3f}  {line.share_of_peak:6.1%}  "
            f"{memory:10s}  {size_text(line.planned_bytes)}"
        )
    return "\n".join(lines)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
