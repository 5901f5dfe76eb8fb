"""How near the judge comes to what sharing allows: grids/s against the plain per-pair forward, in one run.

    python benchmarks/judge.py                              # two mid-size random judges, on the CPU
    python benchmarks/judge.py --gpu --model-size 7b        # Qwen2.5-VL-7B's shape in bf16, random weights

A 2×2 grid is 6 questions about 4 panels. The plain way asks each by a forward of its own (12 images through the vision
tower, every token of every prompt). The bound is what exact sharing can gain at most, counted: each image once, each
distinct beginning once, attention over the keys that a token may see, the head at answer positions only. Both ways run
alternately; the fastest of the repeats counts. Exits with 1 where the two disagree or a goal of the mid-size judges is
missed: 85 % of the bound where the tower is 10 % of the parameters, 1.8 times the plain way where it is 40 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from pacorl.core.questions import same_theme
from pacorl.data.characters import all_panels, draw, vocabulary
from pacorl.engine.runtime import use_cores
from pacorl.io.processor import ImageTextProcessor, image_text_processor
from pacorl.judges.local import LocalJudge
from pacorl.judges.sharing import Node, prefix_forest
from pacorl.plan.sources import JUDGE_PARTS
from pacorl.twins import CHAT_TEMPLATE, QWEN_SPECIAL_TOKENS, qwen_tokenizer_of
from pacorl.types import Question

THEME = "a red round hero with a crown"
MID_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "10 % vision": {
        "text_config": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12},
        "vision_config": {"hidden_size": 256, "intermediate_size": 684, "depth": 6, "num_heads": 4},
    },
    "40 % vision": {
        "text_config": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
        "vision_config": {"hidden_size": 384, "intermediate_size": 1024, "depth": 12, "num_heads": 6},
    },
}
GOALS = {"10 % vision": ("share_of_bound", 0.85), "40 % vision": ("speedup", 1.8)}


@dataclass(frozen=True, slots=True)
class Work:
    """What a way of asking computes, in multiply-adds times two."""

    images: int
    tokens: int
    keys: int
    """Sum over the tokens of the keys that each may see."""
    answers: int
    flops: float


@dataclass(frozen=True, slots=True)
class Result:
    judge: str
    parameters: int
    vision_share: float
    plain: Work
    least: Work
    """All that exact sharing leaves to do."""
    done: Work
    """What the judge does: short beginnings are not worth a pass of their own."""
    bound: float
    plain_grids_per_second: float
    grids_per_second: float
    tokens_per_second: float
    """Tokens of plain prompts that are answered for."""
    speedup: float
    share_of_bound: float
    largest_difference: float
    """Of P(Yes), between the two ways."""
    share_of_matmul_peak: float | None = None
    plain_share_of_matmul_peak: float | None = None


def main() -> int:
    options = arguments()
    use_cores()
    device = torch.device("cuda" if options.gpu else "cpu")
    names = ["7b"] if options.model_size == "7b" else list(MID_SIZES)
    failed = False
    for name in names:
        result = measure(name, device, options)
        print(json.dumps(asdict(result), indent=2) if options.json else described(result), flush=True)
        failed |= missed(result)
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="run on a GPU, in bf16")
    parser.add_argument("--model-size", choices=["mid", "7b"], default="mid")
    parser.add_argument("--grids", type=int, default=4, help="2×2 grids in one call")
    parser.add_argument("--side", type=int, default=256, help="pixels of a panel's side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(name: str, device: torch.device, options: argparse.Namespace) -> Result:
    judge = build(name, device)
    asked = questions(options.grids, options.side)
    prompts = judge.prompting.encode(judge.prompting.chat_prompts(asked))
    _, runs = judge.prompting.featured(prompts, batch_tokens=judge.batch_tokens)
    symbols = [run.symbol_N for run in runs]
    count = counter(judge, options.side)
    plain = count(2 * len(asked), [Node(0, len(symbol), i) for i, symbol in enumerate(symbols)], len(asked))
    least = count(4 * options.grids, prefix_forest(symbols, worth=0), len(asked))
    done = count(4 * options.grids, prefix_forest(symbols), len(asked))
    one_by_one = LocalJudge(judge.model, judge.processor, share=False)
    (slow, expected), (fast, found) = alternate(
        [lambda: [one_by_one.verdicts([question])[0] for question in asked], lambda: judge.verdicts(asked)],
        device,
        repeats=options.repeats,
    )
    parameters = sum(parameter.numel() for parameter in judge.model.parameters())
    tower = sum(parameter.numel() for parameter in judge.model.model.visual.parameters())
    peak = matmul_peak(device) if options.gpu else None
    return Result(
        judge=name,
        parameters=parameters,
        vision_share=tower / parameters,
        plain=plain,
        least=least,
        done=done,
        bound=plain.flops / least.flops,
        plain_grids_per_second=options.grids / slow,
        grids_per_second=options.grids / fast,
        tokens_per_second=plain.tokens / fast,
        speedup=slow / fast,
        share_of_bound=slow / fast / (plain.flops / least.flops),
        largest_difference=max(abs(a.p_yes - b.p_yes) for a, b in zip(expected, found, strict=True)),
        share_of_matmul_peak=peak and done.flops / fast / peak,
        plain_share_of_matmul_peak=peak and plain.flops / slow / peak,
    )


# --- judges and questions --------------------------------------------------------------------------------------


def build(name: str, device: torch.device) -> LocalJudge:
    """A judge of random weights: one of MID_SIZES in fp32, or the 7B's shape in bf16."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    processor = image_text_processor(
        # The question in about as many tokens as the real tokenizer makes of it.
        tokenizer=qwen_tokenizer_of([*vocabulary(), *[f"user\nYou are a helpful assistant.\n{same_theme(THEME)}"] * 9]),
        image_options=JUDGE_PARTS["processor"],
        chat_template=CHAT_TEMPLATE,
    )
    sizes = JUDGE_PARTS["model"] if name == "7b" else mid_size(name, processor)
    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        **{key: value for key, value in sizes.items() if key != "model_type"},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    return LocalJudge(model, processor)


def mid_size(name: str, processor: ImageTextProcessor) -> dict[str, Any]:
    text, vision = MID_SIZES[name]["text_config"], MID_SIZES[name]["vision_config"]
    shape = {
        "vocab_size": len(processor.tokenizer),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "num_hidden_layers": 10,
        "num_key_value_heads": text["num_attention_heads"] // 3,
    }
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    window = {"window_size": 112, "fullatt_block_indexes": [vision["depth"] - 1], "patch_size": 14}
    return {
        "text_config": text | shape | rope,
        "vision_config": vision | window | {"out_hidden_size": text["hidden_size"]},
    }


def questions(grids: int, side: int) -> list[Question]:
    panels = [draw(panel, 64).resize((side, side)) for panel in all_panels()[:: len(all_panels()) // (4 * grids)]]
    sets = [panels[4 * number : 4 * number + 4] for number in range(grids)]
    return [Question(pair, same_theme(THEME)) for images in sets for pair in itertools.combinations(images, 2)]


# --- counting --------------------------------------------------------------------------------------------------


def counter(judge: LocalJudge, side: int) -> Callable[[int, Sequence[Node], int], Work]:
    """A function of (images, token runs, answers) that counts; the vision tower is counted by torch on one panel."""
    language = judge.model.model.language_model
    linear = sum(module.weight.numel() for module in language.modules() if isinstance(module, torch.nn.Linear))
    config = language.config
    attention = 4 * config.hidden_size * config.num_hidden_layers
    tower, head = vision_flops(judge, side), 2 * judge.model.lm_head.weight.numel()

    def count(images: int, nodes: Sequence[Node], answers: int) -> Work:
        tokens, keys = totals(nodes)
        flops = images * tower + 2 * linear * tokens + attention * keys + answers * head
        return Work(images, tokens, keys, answers, float(flops))

    return count


def totals(nodes: Sequence[Node]) -> tuple[int, int]:
    """Tokens of a forest, and keys that they may see: all before them, and themselves."""
    tokens = keys = 0
    for node in nodes:
        below = totals(node.children)
        tokens += len(node) + below[0]
        keys += (node.end * (node.end + 1) - node.start * (node.start + 1)) // 2 + below[1]
    return tokens, keys


@torch.inference_mode()
def vision_flops(judge: LocalJudge, side: int) -> int:
    image = questions(1, side)[0].images[0]
    inputs = judge.processor.image_processor(images=[image], return_tensors="pt").to(judge.model.device)
    with FlopCounterMode(display=False) as flops:
        judge.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return int(flops.get_total_flops())


# --- measuring -------------------------------------------------------------------------------------------------


def alternate(ways: Sequence[Callable[[], Any]], device: torch.device, *, repeats: int) -> list[tuple[float, Any]]:
    """Seconds of each way (the fastest of its turns, which alternate) and what it gave; the first turn warms up."""
    seconds: list[list[float]] = [[] for _ in ways]
    gave: list[Any] = [way() for way in ways]
    for _ in range(repeats):
        for number, way in enumerate(ways):
            seconds[number].append(timed(way, device))
    return [(min(several), given) for several, given in zip(seconds, gave, strict=True)]


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds on a GPU; on a CPU, which others may use too, the seconds of this process's own threads per thread."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    work()
    return (time.process_time() - start) / torch.get_num_threads()


def matmul_peak(device: torch.device, *, side: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a large bf16 product, the fastest of three trials."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    timed(multiply, device)
    return 2 * side**3 * repeats / min(timed(multiply, device) for _ in range(3))


# --- words -----------------------------------------------------------------------------------------------------


def missed(result: Result) -> bool:
    tolerance = 1e-4 if result.share_of_matmul_peak is None else 0.05  # bf16's sums depend on their order
    if result.largest_difference > tolerance:
        return True
    measure_, goal = GOALS.get(result.judge, ("speedup", 0.0))
    return float(getattr(result, measure_)) < goal


def described(result: Result) -> str:
    lines = [
        f"{result.judge}: {result.parameters / 1e6:,.0f} M parameters, {result.vision_share:.0%} of them vision",
        f"  plain   {result.plain_grids_per_second:8.3f} grids/s   {_work(result.plain)}",
        f"  shared  {result.grids_per_second:8.3f} grids/s   {_work(result.done)}",
        f"  bound   {result.bound:.3f} times the plain way   {_work(result.least)}",
        f"  reached {result.speedup:.3f} times, {result.share_of_bound:.0%} of the bound; "
        f"{result.tokens_per_second:,.0f} plain tokens/s; P(Yes) differs by {result.largest_difference:.1e} at most",
    ]
    if result.share_of_matmul_peak is not None:
        lines.append(
            f"  matmul  {result.share_of_matmul_peak:.0%} of the measured peak, "
            f"plain {result.plain_share_of_matmul_peak:.0%}"
        )
    return "\n".join(lines)


def _work(work: Work) -> str:
    return f"{work.images} images, {work.tokens:,} tokens, {work.flops / 1e12:.3f} TFLOP"


if __name__ == "__main__":
    sys.exit(main())
