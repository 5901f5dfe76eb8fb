"""One day with a GPU, in under ten minutes: what FLUX.1-dev and its 7B judge take on the card that is here.

    python benchmarks/gpu_day.py --out gpu-day             # gpu-day.json and gpu-day.md; 1 if memory is missed
    python benchmarks/gpu_day.py --sections policy ratio   # some of it
    python benchmarks/gpu_day.py --tiny                    # the same code on a CPU, on the tiny shapes, in seconds
    python benchmarks/gpu_day.py --needs                   # what a bare machine has to install, a line for pip

All weights are random, and of the published shapes; nothing is downloaded. What is measured are the project's own
functions: `denoise`, `decode`, `collect`, `update_policy` with its optimizer step, `LocalJudge.verdicts` and `Scorer`.
The fastest of the repeats counts. FLOPs are those that torch executes, recomputation included, and the peak is that of
a large product in the model's dtype, measured in the same run: a phase cannot take less than FLOPs / peak. Text
encoders are left out: conditioning is drawn, as if they had left.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from pacorl.config import base as configs
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION
from pacorl.core.questions import same_theme
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, collect, denoise, sigmas_of
from pacorl.grpo.rows import Row
from pacorl.grpo.scoring import torch_context
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.io.processor import image_text_processor
from pacorl.judge.local import LocalJudge
from pacorl.lab.plan import sources
from pacorl.lab.plan.components import Phase, policy_on_meta, training_rows
from pacorl.lab.plan.plan import Plan, size_text
from pacorl.lab.plan.sources import JUDGE_PARTS
from pacorl.lab.plan.work import work_of
from pacorl.models.lora.adapters import MovingAverage, add_lora
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Policy
from pacorl.models.quantize import NONE
from pacorl.models.quantize.linear import quantize_model
from pacorl.models.twins import CHAT_TEMPLATE, model_on_meta, qwen_tokenizer_of
from pacorl.runtime.compiled import compile_blocks
from pacorl.runtime.processes import Runtime
from pacorl.tiny.characters import all_panels, draw
from pacorl.types import Advantages, Conditioning, Prompt, Question, Samples, Size

THEME = "A small red fox who runs a lighthouse by the northern sea, painted in soft watercolour on cream paper."
NEEDS = (
    "torch>=2.11", "accelerate", "diffusers", "einops", "httpx2", "jinja2", "peft", "pillow", "pydantic", "pyyaml",
    "rich", "safetensors", "transformers", "typer",
)  # fmt: skip
"""What it imports; pure wheels but for torch, numpy and the tokenizers of transformers."""
NOISE_STEP = 1
SLACK = 2**30
"""Kernels' scratch space and the allocator's rounding, which no plan sees."""
TINY_SIDES, SIDES = (32, 64), (512, 1024)
Timer = Callable[[Callable[[], Any], torch.device], float]
"""Seconds of some work on a device."""


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
    if options.needs:
        print(f"pip install {' '.join(repr(name) for name in NEEDS)}\nPYTHONPATH=src python benchmarks/gpu_day.py")
        return 0
    if not options.tiny and not torch.cuda.is_available():
        print("gpu_day: no CUDA device is here; --tiny tries the same code on a CPU", file=sys.stderr)
        return 1
    day = measured(options, torch.device("cpu" if options.tiny else "cuda"))
    options.out.with_suffix(".json").write_text(json.dumps(asdict(day), indent=2) + "\n")
    options.out.with_suffix(".md").write_text(page(day))
    print(page(day))
    missed = any(phase.bytes is not None and phase.bytes > phase.planned_bytes + SLACK for phase in day.phases)
    return int(missed)


@dataclass(slots=True)
class Day:
    """All that was measured."""

    device: str
    torch: str
    matmul_peak: float
    """FLOP/s."""
    phases: list[Measured] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """What it is, with its unit → how much."""


def measured(options: argparse.Namespace, device: torch.device) -> Day:
    """Every section that was asked for."""
    runs = {side: run_of(side, options) for side in (TINY_SIDES if options.tiny else SIDES)}
    bench = Bench(next(iter(runs.values())), device)
    peak = matmul_peak(device, bench.dtype, side=512 if options.tiny else 8192)
    day = Day(name_of(device), torch.__version__, peak)
    if "policy" in options.sections:
        day.phases = [phase for side, run in runs.items() for phase in bench.measure(side, run, options, peak=peak)]
    for name, section in SECTIONS.items():
        if name in options.sections:
            day.figures |= section(bench, next(iter(runs)), options)
    return day


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Of `line`, or of the command's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the tiny shapes in fp32 on the CPU; figures mean little")
    parser.add_argument("--needs", action="store_true", help="print what to install, and end")
    parser.add_argument("--sections", nargs="+", choices=["policy", *SECTIONS], default=["policy", *SECTIONS])
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="sampling steps")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(line)


def run_of(side: int, options: argparse.Namespace, *changes: str) -> PolicyConfig:
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
    return configs.load(PolicyConfig, None, [*(f"{key}={value}" for key, value in settings.items()), *changes])


class Drawn:
    """Conditioning of the right shapes from a generator of noise, in place of a cache of encoded prompts."""

    def __init__(self, policy: PipelinePolicy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._batches: dict[tuple[int, Size], Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """The same again for as many prompts at a size: what is trained must be what was sampled."""
        if (key := (len(prompts), size)) not in self._batches:
            shapes = self._policy.conditioning_on_meta(size, batch=len(prompts)).tensors
            self._batches[key] = Conditioning(
                {name: torch.randn(t.shape, dtype=t.dtype, device=self._device) for name, t in shapes.items()}
            )
        return self._batches[key]


class Bench:
    """A generator of random weights on the device, with its adapter, average and optimizer."""

    def __init__(
        self, config: PolicyConfig, device: torch.device, *, quantize: str = NONE, stream: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.device, self.runtime = device, Runtime()
        self.dtype = getattr(torch, config.model.dtype)
        self.generator = policy_on_meta(config, sources.generator(config).configs)
        self.policy = cast(Policy, self.generator)
        # Packed weights are made from drawn ones: codes of noise would be no weights.
        transformer = self.generator.pipeline.transformer
        for part in (transformer, self.generator.pipeline.vae):
            draw_weights(part.to_empty(device=device))
        quantize_model(transformer, quantize, device=device, stream=stream)
        self.base_parameters = sum(one.numel() for one in self.policy.transformer.parameters())
        add_lora(
            self.policy.transformer,
            rank=config.adapter.rank,
            alpha=config.adapter.alpha,
            targets=self.policy.lora_targets,
        )
        self.policy.transformer.to(device)
        if config.model.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        if config.model.compile != "none":
            compile_blocks(transformer)
        self.as_trained = config.model.compile != "none"
        self.policy.transformer.train()
        self.trained = [one for one in self.policy.transformer.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=config.optimizer.lr)
        self.average = MovingAverage(self.policy.transformer, decay=0.9, interval=1)
        self.cache = cast(ConditioningCache, Drawn(self.generator, device))

    def sampler(self, side: int, options: argparse.Namespace) -> Sampler:
        size = self.generator.nearest_size(Size(side, side))
        return Sampler(size=size, steps=options.steps, sde_steps=(NOISE_STEP,), tree=Tree(options.batch, (1,)))

    def collect(self, side: int, options: argparse.Namespace) -> Samples:
        """A batch of training samples."""
        sampler = self.sampler(side, options)
        draw = Draw(self.policy, sampler, self.cache, seed=0, epoch=0, batch=options.batch, as_trained=self.as_trained)
        return collect(draw, [Row(Prompt(id=0, text="drawn"), number) for number in range(options.batch)])

    def measure(self, side: int, config: PolicyConfig, options: argparse.Namespace, *, peak: float) -> list[Measured]:
        """Sampling, decoding and training at one size, and all three as an epoch has them."""
        sampler, prompts = self.sampler(side, options), [Prompt(id=0, text="drawn")] * options.batch
        samples = self.collect(side, options)
        final = samples.rollouts[0].final_BNC.to(self.device)
        works: dict[Phase, Callable[[], Any]] = {
            "sample": lambda: self.sample(prompts, sampler),
            "decode": lambda: self.policy.decode(final, sampler.size),
            "train": lambda: self.train(samples, sampler),
        }
        planned = self.planned(config)
        self.train(samples, sampler)  # the optimizer's moments exist from its first step on
        phases = []
        for phase, work in works.items():
            flops = counted(work)
            seconds, taken = fastest(work, self.device, repeats=options.repeats)
            share = flops / seconds / peak
            phases.append(Measured(side, phase, seconds, flops, share, taken, planned.phase_bytes(phase)))
        return phases

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

    def train(self, samples: Samples, sampler: Sampler, *, steps: bool = True) -> dict[str, float]:
        """One optimizer step on one micro-batch; without `steps` its gradient alone."""
        learner = PolicyLoss(
            self.policy,
            sampler,
            self.cache,
            options=OBJECTIVES["grpo_clip"].options(),
        )
        count = len(samples.rollouts[0])
        advantage_B = torch.linspace(-1, 1, count) if count > 1 else torch.ones(1)
        values = Advantages(advantage_B, torch.ones(count, dtype=torch.bool), {})
        metrics = update_policy(learner, samples, values, runtime=self.runtime, draw=(0,))
        if steps:
            self.runtime.step(self.optimizer, self.trained, max_norm=1.0)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def planned(self, config: PolicyConfig) -> Plan:
        """What `--dry-run` says of the same run."""
        policy = policy_on_meta(config, sources.generator(config).configs)
        work = work_of(config, world=1)
        rows = training_rows(config, work=work, policy=policy, judge={}, held_out_judge={}, prompts=())
        return Plan(rows, (), (), str(self.device), None)


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


def matmul_peak(
    device: torch.device, dtype: torch.dtype, *, side: int, repeats: int = 20, timer: Timer = timed
) -> float:
    """FLOP/s of a large product, the fastest of three trials."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    timer(multiply, device)
    return 2 * side**3 * repeats / min(timer(multiply, device) for _ in range(3))


# --- sections --------------------------------------------------------------------------------------------------

FORMS: Mapping[str, tuple[list[str], Mapping[str, Any]]] = {
    "as it is": ([], {}),
    "without checkpointing": (["model.gradient_checkpointing=false"], {}),
    "compiled": (["model.compile=blocks"], {}),
    "int8": ([], {"quantize": "int8"}),
    "int8, streamed": ([], {"quantize": "int8", "stream": True}),
    "fp8": ([], {"quantize": "fp8"}),
}
"""Forms of a run → their settings, and the form of the base's weights."""


def epoch_section(bench: Bench, side: int, options: argparse.Namespace) -> dict[str, float]:
    """An epoch of one update: samples drawn, decoded and trained on."""

    def epoch() -> None:
        bench.train(bench.collect(side, options), bench.sampler(side, options))

    seconds, _ = fastest(epoch, bench.device, repeats=options.repeats)
    return {f"epoch at {side}, images/s": options.batch / seconds}


def judge_section(bench: Bench, side: int, options: argparse.Namespace) -> dict[str, float]:
    """The judge alone, sampling alone, and both at once, as `Scorer` runs them."""
    judge, asked = drawn_judge(bench.device, tiny=options.tiny), questions(1, side // 2)

    def score() -> None:
        judge.prompting._last_features = None  # each image of a run is a new one
        judge.verdicts(asked)

    def sample() -> None:
        bench.collect(side, options)

    def both() -> None:
        # The judge's questions on the thread and stream that a run gives them.
        with ThreadPoolExecutor(1) as thread, torch.inference_mode(mode=False):
            context = torch_context()

            def beside() -> None:
                with context():
                    score()

            scored = thread.submit(beside)
            sample()
            scored.result()

    alone, sampling, together = (
        fastest(work, bench.device, repeats=options.repeats)[0] for work in (score, sample, both)
    )
    return {
        f"judge, grids/s of {len(asked)} questions": 1 / alone,
        "judge and sampling at once, share of the shorter that is hidden": (alone + sampling - together)
        / min(alone, sampling),
    }


def ratio_section(bench: Bench, side: int, options: argparse.Namespace, *, forms: Sequence[str]) -> dict[str, float]:
    """By how much the ratio deviates from 1 before the first update, in some forms; it should be by 0."""
    figures = {}
    for form in forms:
        settings, weights = FORMS[form]
        here = Bench(run_of(side, options, *settings), bench.device, **weights)
        samples, sampler = here.collect(side, options), here.sampler(side, options)
        metrics = here.train(samples, sampler, steps=False)
        figures[f"ratio's deviation, {form}"] = metrics[f"{RATIO_DEVIATION}/{NOISE_STEP}"]
        seconds, _ = fastest(partial(here.train, samples, sampler, steps=False), here.device, repeats=1)
        figures[f"a batch trained, {form}, s"] = seconds
        del here
        gc.collect()
    return figures


def launcher_section(bench: Bench, side: int, options: argparse.Namespace) -> dict[str, float]:
    """A trained step by itself, and within DDP and FSDP2 on a group of one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    figures = {}
    with one_process(bench.device):
        for form in ("alone", "DDP", "FSDP2"):
            here = Bench(run_of(side, options), bench.device)
            samples, sampler = here.collect(side, options), here.sampler(side, options)
            transformer: Any = here.policy.transformer
            if form == "DDP":
                here.policy.transformer = DistributedDataParallel(transformer)
            if form == "FSDP2":
                for name, blocks in transformer.named_children():
                    for block in blocks if name.endswith("blocks") else ():
                        fully_shard(block)
                fully_shard(transformer)
                here.trained = [one for one in transformer.parameters() if one.requires_grad]
                here.optimizer = torch.optim.AdamW(here.trained)
            work = partial(here.train, samples, sampler)
            figures[f"trained step at {side}, {form}, s"] = fastest(work, here.device, repeats=options.repeats)[0]
            del here, samples, transformer, work
            gc.collect()
    return figures


SECTIONS: Mapping[str, Callable[[Bench, int, argparse.Namespace], dict[str, float]]] = {
    "epoch": epoch_section,
    "judge": judge_section,
    "ratio": partial(ratio_section, forms=[form for form in FORMS if form != "compiled"]),
    "compiled": partial(ratio_section, forms=["compiled"]),
    "launchers": launcher_section,
}


@contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """Within the block there is a process group, of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with TemporaryDirectory() as folder:
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def drawn_judge(device: torch.device, *, tiny: bool) -> LocalJudge:
    """The published 7B judge's shape with random weights, or the committed tiny one."""
    if tiny:
        return LocalJudge.from_pretrained("tiny")
    processor = image_text_processor(
        tokenizer=qwen_tokenizer_of([THEME] * 9), image_options=JUDGE_PARTS["processor"], chat_template=CHAT_TEMPLATE
    )
    ids = processor.tokenizer.convert_tokens_to_ids
    tokens = {"image_token_id": ids("<|image_pad|>"), "vision_start_token_id": ids("<|vision_start|>")}
    model = model_on_meta({**JUDGE_PARTS["model"], **tokens}, dtype=torch.bfloat16).to_empty(device=device)
    draw_weights(model)
    return LocalJudge(model, processor)


def questions(grids: int, side: int) -> list[Question]:
    """About all pairs of some grids' four panels, which are drawn."""
    panels = [draw(panel, 64).resize((side, side)) for panel in all_panels()[:: len(all_panels()) // (4 * grids)]]
    sets = [panels[4 * number : 4 * number + 4] for number in range(grids)]
    return [Question(pair, same_theme(THEME)) for images in sets for pair in combinations(images, 2)]


# --- words -----------------------------------------------------------------------------------------------------


def page(day: Day) -> str:
    """What the docs quote."""
    lines = [
        f"# {day.device}, torch {day.torch}",
        "",
        f"Products in the model's dtype reach {day.matmul_peak / 1e12:.4g} TFLOP/s. All weights are random.",
        "",
        "| Side | Phase | Seconds | TFLOP | Of that peak | Memory | Planned |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in day.phases:
        memory = "–" if line.bytes is None else size_text(line.bytes)
        cells = [str(line.side), line.phase, f"{line.seconds:.3f}", f"{line.flops / 1e12:.3f}"]
        lines.append(f"| {' | '.join([*cells, f'{line.share_of_peak:.1%}', memory, size_text(line.planned_bytes)])} |")
    lines += ["", "| Figure | |", "|---|---|", *(f"| {name} | {value:.4g} |" for name, value in day.figures.items())]
    return "\n".join(lines) + "\n"


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
