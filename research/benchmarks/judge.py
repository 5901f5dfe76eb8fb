"""What sharing gains a judge: grids/s and FLOPs against a forward per pair, in one run.

    python -m research.benchmarks.judge                        # three mid-size random judges, on the CPU
    python -m research.benchmarks.judge --gpu --model-size 7b  # Qwen2.5-VL-7B's shape in bf16, random weights
    python -m research.benchmarks.judge --gpu --model-size 9b  # Qwen3.5-9B's

A 2×2 grid is 6 questions about 4 panels. The plain way asks each by a forward of its own: 12 images through the vision
tower, every token of every prompt. Both ways run alternately; the fastest of the repeats counts. `recurrent` is a small
Qwen3.5, three of whose four layers keep a state. Exits with 1 where the answers disagree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tests.twins.parts import CHAT_TEMPLATE, QWEN_SPECIAL_TOKENS, THINKING_TEMPLATE, qwen_tokenizer_of
from torch.utils.flop_counter import FlopCounterMode

from pacorl.core.questions import same_theme
from pacorl.io.processor import ImageTextProcessor, image_text_processor
from pacorl.judge.local import LocalJudge
from pacorl.plan.sources import published_judge
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import all_panels, draw, vocabulary
from pacorl.types import Question, Verdict

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
    "recurrent": {
        "text_config": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 3},
        "vision_config": {"hidden_size": 256, "intermediate_size": 684, "depth": 6, "num_heads": 4},
    },
}
BASES = {"7b": "Qwen2.5-VL-7B", "9b": "Qwen3.5-9B"}
"""Model size → the published base of this shape."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="run on a GPU, in bf16")
    parser.add_argument("--model-size", choices=["mid", *BASES], default="mid")
    parser.add_argument("--grids", type=int, default=4, help="2×2 grids in one call")
    parser.add_argument("--side", type=int, default=256, help="pixels of a panel's side")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    use_cores()
    names = list(MID_SIZES) if options.model_size == "mid" else [options.model_size]
    results = [measure(name, options) for name in names]
    print(json.dumps(results, indent=2))
    # bf16's sums depend on their order.
    return int(any(result["largest_difference"] > (0.05 if options.gpu else 1e-4) for result in results))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Ask one call both ways."""
    device = torch.device("cuda" if options.gpu else "cpu")
    judge, call = build(name, device), questions(options.grids, options.side)
    one_by_one = LocalJudge(judge.model, judge.processor, share=False)

    def plain() -> list[Verdict]:
        return [one_by_one.verdicts([question])[0] for question in call]

    def shared() -> list[Verdict]:
        # A new judge for each turn: one that has just met the images would not look at them again.
        return LocalJudge(judge.model, judge.processor).verdicts(call)

    answers, flops, seconds = [], [], []
    for way in (plain, shared):
        with FlopCounterMode(display=False) as counter:
            answers.append(way())
        flops.append(counter.get_total_flops())
    for _ in range(options.repeats):
        seconds.append([timed(way, device) for way in (plain, shared)])
    slow, fast = (min(column) for column in zip(*seconds, strict=True))
    parameters = sum(parameter.numel() for parameter in judge.model.parameters())
    tower = sum(parameter.numel() for parameter in judge.model.model.visual.parameters())
    return {
        "judge": name,
        "parameters": parameters,
        "vision_share": round(tower / parameters, 3),
        "plain_grids_per_second": options.grids / slow,
        "grids_per_second": options.grids / fast,
        "speedup": slow / fast,
        "fewer_flops": flops[0] / flops[1],
        "largest_difference": max(abs(a.p_yes - b.p_yes) for a, b in zip(*answers, strict=True)),
    }


def build(name: str, device: torch.device) -> LocalJudge:
    """A judge of random weights: one of MID_SIZES in fp32, or a published shape in bf16."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    base = BASES.get(name, BASES["9b" if name == "recurrent" else "7b"])
    _, published = published_judge(base)
    processor = image_text_processor(
        # The question in about as many tokens as the real tokenizer makes of it.
        tokenizer=qwen_tokenizer_of([*vocabulary(), *[f"user\nYou are a helpful assistant.\n{same_theme(THEME)}"] * 9]),
        image_options=published["processor"],
        chat_template=THINKING_TEMPLATE if base == BASES["9b"] else CHAT_TEMPLATE,
    )
    sizes = published["model"] if name in BASES else mid_size(name, processor)
    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in QWEN_SPECIAL_TOKENS}
    config = AutoConfig.for_model(
        published["model"]["model_type"],
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
    if name == "recurrent":
        shape |= {"num_hidden_layers": 12, "num_key_value_heads": 1}
        # Heads as in the published model; fewer of them.
        shape |= {"head_dim": 256, "linear_num_key_heads": 3, "linear_num_value_heads": 6}
        grid = {"patch_size": 16, "out_hidden_size": text["hidden_size"]}
        return {"text_config": text | shape, "vision_config": vision | grid}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    window = {"window_size": 112, "fullatt_block_indexes": [vision["depth"] - 1], "patch_size": 14}
    return {
        "text_config": text | shape | rope,
        "vision_config": vision | window | {"out_hidden_size": text["hidden_size"]},
    }


def questions(grids: int, side: int) -> list[Question]:
    """The pairs of some sets of drawn panels."""
    panels = [draw(panel, 64).resize((side, side)) for panel in all_panels()[:: len(all_panels()) // (4 * grids)]]
    sets = [panels[4 * number : 4 * number + 4] for number in range(grids)]
    return [Question(pair, same_theme(THEME)) for images in sets for pair in itertools.combinations(images, 2)]


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


if __name__ == "__main__":
    sys.exit(main())
