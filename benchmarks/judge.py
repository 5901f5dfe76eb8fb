"""How near the judge comes to what sharing allows: grids/s against the plain per-pair forward, in one run.

    python benchmarks/judge.py                              # three mid-size random judges, on the CPU
    python benchmarks/judge.py --gpu --model-size 7b        # Qwen2.5-VL-7B's shape in bf16, random weights
    python benchmarks/judge.py --gpu --model-size 9b        # Qwen3.5-9B's
    python benchmarks/judge.py --quickstart                 # the committed judge and an epoch's questions

A 2×2 grid is 6 questions about 4 panels. The plain way asks each by a forward of its own (12 images through the vision
tower, every token of every prompt). The bound is what exact sharing can gain at most, counted: each image once, each
distinct beginning once, attention over the keys that a token may see, the last layer's queries and MLP and the head at
answer positions only. Both ways run alternately; the fastest of the repeats counts. Exits with 1 where the two disagree
or a goal of the mid-size judges is missed: 85 % of the bound where the tower is 10 % of the parameters, 1.8 times the
plain way where it is 40 %. `recurrent` is a small Qwen3.5, three of whose four layers keep a state (Gated DeltaNet):
85 % of the bound.

`--quickstart` asks the committed judge what an epoch of configs/tiny.yaml asks: for 6 prompts × 12 grids the 6 pairs of
`consistency`, then the 4 panels of `panel_match`, with a call of each per prompt.

`sets` is the form of a set judge (docs/judge.md), with the judge's own weights, which were not trained for it: its
answers mean nothing, and its work is the same. With `--quickstart` a trained one may be given, `--set-judge ADAPTER`,
and its answers about pairs are compared too. A recurrent judge has no such form. `--json` prints one list.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from gpu_day.rates import matmul_peak
from torch.utils.flop_counter import FlopCounterMode

from pacorl.core.grid import join
from pacorl.core.questions import same_theme
from pacorl.io.processor import ImageTextProcessor, image_text_processor
from pacorl.judge.local import LocalJudge
from pacorl.judge.set_judge import set_forest
from pacorl.judge.sharing import RECURRENT, Node, layer_kinds, prefix_forest
from pacorl.lab.plan.sources import published_judge
from pacorl.models.twins import CHAT_TEMPLATE, QWEN_SPECIAL_TOKENS, THINKING_TEMPLATE, qwen_tokenizer_of
from pacorl.records.prompts import prompts_from
from pacorl.rewards.consistency import Consistency, PanelMatch
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import all_panels, draw, set_of, vocabulary, with_another
from pacorl.types import Question, Verdict

THEME = "a red round hero with a crown"
QUICKSTART = "the quickstart's epoch"
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
GOALS = dict.fromkeys(("10 % vision", "recurrent"), ("share_of_bound", 0.85)) | {"40 % vision": ("speedup", 1.8)}
BASES = {"7b": "Qwen2.5-VL-7B", "9b": "Qwen3.5-9B"}
"""Model size → the published base of this shape."""
CHUNK = 64
"""Tokens that a recurrent layer computes at a time."""


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
    """What the judge does: short beginnings are not worth a pass of their own, and of the last layer only the MLP is
    spared."""
    sets: Work | None
    """What a set judge does, and the judge for questions about one image; None for a recurrent judge."""
    bound: float
    plain_grids_per_second: float
    grids_per_second: float
    set_grids_per_second: float | None
    tokens_per_second: float
    """Tokens of plain prompts that are answered for."""
    speedup: float
    share_of_bound: float
    largest_difference: float
    """Of P(Yes), between the two ways."""
    set_correlation: float | None = None
    """Of a given set judge's P(Yes) about pairs with the plain way's."""
    set_mean_difference: float | None = None
    share_of_matmul_peak: float | None = None
    plain_share_of_matmul_peak: float | None = None


def main() -> int:
    options = arguments()
    use_cores()
    device = torch.device("cuda" if options.gpu else "cpu")
    names = list(MID_SIZES) if options.model_size == "mid" else [options.model_size]
    results = []
    for name in [QUICKSTART] if options.quickstart else names:
        results.append(measure(name, device, options))
        if not options.json:
            print(described(results[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    # bf16's sums depend on their order.
    return int(any(missed(result, tolerance=0.05 if options.gpu else 1e-4) for result in results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="run on a GPU, in bf16")
    parser.add_argument("--model-size", choices=["mid", *BASES], default="mid")
    parser.add_argument("--quickstart", action="store_true", help="the committed judge and an epoch's questions")
    parser.add_argument("--set-judge", default="", help="a set judge of the committed judge, for --quickstart")
    parser.add_argument("--grids", type=int, default=4, help="2×2 grids in one call")
    parser.add_argument("--side", type=int, default=256, help="pixels of a panel's side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.set_judge and not options.quickstart:
        parser.error("--set-judge is of the committed judge; add --quickstart")
    return options


def measure(name: str, device: torch.device, options: argparse.Namespace) -> Result:
    if name == QUICKSTART:
        judge = LocalJudge.from_pretrained("tiny", device=device, set_judge=options.set_judge)
        calls, grids, side = epoch_calls(), 72, 32
    else:
        judge, calls, grids, side = (
            build(name, device),
            [questions(options.grids, options.side)],
            options.grids,
            options.side,
        )
    plain, least, done = map(total, zip(*count_calls(judge, calls, side), strict=True))
    reads_sets = RECURRENT not in layer_kinds(judge.model.config)
    sets = total(list(count_sets(judge, calls, side))) if reads_sets else None
    one_by_one = LocalJudge(judge.model, judge.processor, share=False)

    def ask_all() -> list[Verdict]:
        # A new judge for each turn: one that has just met the images would not look at them again.
        fresh = LocalJudge(judge.model, judge.processor)
        return [verdict for call in calls for verdict in fresh.verdicts(call)]

    def ask_sets() -> list[Verdict]:
        fresh = LocalJudge(judge.model, judge.processor, set_model=judge.set_model or judge.model)
        return [verdict for call in calls for verdict in fresh.verdicts(call)]

    (slow, expected), (fast, found), *by_set = alternate(
        [
            lambda: [one_by_one.verdicts([question])[0] for call in calls for question in call],
            ask_all,
            *([ask_sets] if reads_sets else []),
        ],
        device,
        repeats=options.repeats,
    )
    agreement = compared(calls, expected, by_set[0][1]) if by_set and options.set_judge else (None, None)
    parameters = sum(parameter.numel() for parameter in judge.model.parameters())
    tower = sum(parameter.numel() for parameter in judge.model.model.visual.parameters())
    # bf16 on a GPU, and per thread in fp32 on a CPU.
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    measures_peak = options.gpu or options.quickstart
    peak = matmul_peak(device, dtype, side=side, timer=timed) if measures_peak else None
    return Result(
        judge=name,
        parameters=parameters,
        vision_share=tower / parameters,
        plain=plain,
        least=least,
        done=done,
        sets=sets,
        bound=plain.flops / least.flops,
        plain_grids_per_second=grids / slow,
        grids_per_second=grids / fast,
        set_grids_per_second=grids / by_set[0][0] if by_set else None,
        tokens_per_second=plain.tokens / fast,
        speedup=slow / fast,
        share_of_bound=slow / fast / (plain.flops / least.flops),
        largest_difference=max(abs(a.p_yes - b.p_yes) for a, b in zip(expected, found, strict=True)),
        set_correlation=agreement[0],
        set_mean_difference=agreement[1],
        share_of_matmul_peak=peak and done.flops / fast / peak,
        plain_share_of_matmul_peak=peak and plain.flops / slow / peak,
    )


def compared(
    calls: Sequence[Sequence[Question]], expected: Sequence[Verdict], found: Sequence[Verdict]
) -> tuple[float, float]:
    """Correlate a set judge's answers about pairs with the plain way's; also their mean difference."""
    asked = [question for call in calls for question in call]
    answers = [
        (plain.p_yes, by_set.p_yes)
        for question, plain, by_set in zip(asked, expected, found, strict=True)
        if question.panels
    ]
    both = torch.tensor(answers, dtype=torch.float64).T
    return float(torch.corrcoef(both)[0, 1]), float((both[0] - both[1]).abs().mean())


# --- judges and questions --------------------------------------------------------------------------------------


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
    panels = [draw(panel, 64).resize((side, side)) for panel in all_panels()[:: len(all_panels()) // (4 * grids)]]
    sets = [panels[4 * number : 4 * number + 4] for number in range(grids)]
    return [
        Question(pair, same_theme(THEME), panels=tuple(images))
        for images in sets
        for pair in itertools.combinations(images, 2)
    ]


class Collector:
    """Stands for a judge and keeps the questions of each call."""

    def __init__(self) -> None:
        self.calls: list[list[Question]] = []

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        self.calls.append(list(questions))
        return [Verdict(0.5)] * len(questions)

    def explain(self, question: Question) -> str:
        raise NotImplementedError


def epoch_calls() -> list[list[Question]]:
    """What the rewards of `tiny` ask in an epoch, call by call.

    Of three sets one is consistent, in one a panel has another hat, and in one another hat and colour.
    """
    rng = random.Random(0)
    collector = Collector()
    rewards = [Consistency(collector), PanelMatch(collector)]
    for prompt in prompts_from("tiny:train:6"):
        grids = []
        for number in range(12):
            # A hero of its own, so that no image is drawn twice.
            panels = set_of(rng.choice(all_panels()).kept, 4, rng)
            if number % 3:
                panels[0] = with_another(panels[0], "hat", rng)
            if number % 3 == 2:
                panels[0] = with_another(panels[0], "colour", rng)
            grids.append(join([draw(panel, 32) for panel in panels], prompt.grid))
        for reward in rewards:
            reward([prompt] * 12, grids)
    return collector.calls


# --- counting --------------------------------------------------------------------------------------------------


def images_of(call: Sequence[Question]) -> list[bytes]:
    """The distinct images of a call, in order."""
    return list(dict.fromkeys(image.tobytes() for question in call for image in question.images))


def count_calls(judge: LocalJudge, calls: Sequence[Sequence[Question]], side: int) -> Iterator[tuple[Work, ...]]:
    """What each call costs the plain way, at least, and as the judge does it."""
    count, before = counter(judge, side), list[bytes]()
    for call in calls:
        prompts = judge.prompting.encode(judge.prompting.chat_prompts(call))
        _, runs = judge.prompting.featured(prompts, batch_tokens=judge.batch_tokens)
        symbols = [run.symbol_N for run in runs]
        lengths = [len(symbol) for symbol in symbols]
        # A reward that follows another finds the features of its images.
        images = images_of(call)
        distinct, before = 0 if images == before else len(images), images
        alone = [Node(0, length, number) for number, length in enumerate(lengths)]
        yield (
            count(sum(len(question.images) for question in call), alone, lengths),
            count(distinct, prefix_forest(symbols, worth=0), lengths, at_answers=("q_proj", "o_proj", "mlp")),
            count(distinct, prefix_forest(symbols), lengths, at_answers=("mlp",)),
        )


def count_sets(judge: LocalJudge, calls: Sequence[Sequence[Question]], side: int) -> Iterator[Work]:
    """What each call costs by a set judge."""
    count, before = counter(judge, side), list[bytes]()
    for call in calls:
        images = images_of(call)
        distinct, before = 0 if images == before else len(images), images
        if not call[0].panels:
            prompts = judge.prompting.encode(judge.prompting.chat_prompts(call))
            _, runs = judge.prompting.featured(prompts, batch_tokens=judge.batch_tokens)
            forest = prefix_forest([run.symbol_N for run in runs])
            yield count(distinct, forest, [len(run) for run in runs], at_answers=("mlp",))
            continue
        sets = list(dict.fromkeys(judge.prompting.set_prompts(call)))
        _, runs = judge.prompting.featured(judge.prompting.encode(sets), batch_tokens=judge.batch_tokens)
        _, forest = set_forest(runs)
        yield count(distinct, forest, call)


def total(works: Sequence[Work]) -> Work:
    """The work of several calls."""
    return Work(*(sum(column) for column in zip(*map(astuple, works), strict=True)))


def counter(judge: LocalJudge, side: int) -> Callable[..., Work]:
    """A function that counts; the vision tower is counted by torch on one panel."""
    language = judge.model.model.language_model
    linear = sum(module.weight.numel() for module in language.modules() if isinstance(module, torch.nn.Linear))
    config = language.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending = len(kinds) - kinds.count(RECURRENT)
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    state = recurrent_flops(config) * kinds.count(RECURRENT)
    tower, head = vision_flops(judge, side), 2 * judge.model.lm_head.weight.numel()

    def count(images: int, nodes: Sequence[Node], lengths: Sequence[Any], *, at_answers: Sequence[str] = ()) -> Work:
        """The work on these images, token runs and answers; parts of the last layer may see only the answers."""
        (tokens, keys), answers = totals(nodes), len(lengths)
        spared = sum(
            weight.numel()
            for name, weight in language.layers[-1].named_parameters()
            if weight.ndim == 2 and any(part in name for part in at_answers)
        )
        # What has children passes the last layer whole, unless queries are spared too.
        last = answers if "q_proj" in at_answers else answers + sum(len(node) for node in nodes if node.children)
        last_keys = sum(lengths) if "q_proj" in at_answers else keys
        attention = 4 * width * ((attending - 1) * keys + last_keys)
        products = (2 * linear + state) * tokens - 2 * spared * (tokens - last)
        return Work(images, tokens, keys, answers, float(images * tower + products + attention + answers * head))

    return count


def recurrent_flops(config: Any) -> float:
    """The work of a recurrent layer's state on a token, beside its projections: products of the chunked form."""
    if not hasattr(config, "linear_num_value_heads"):
        return 0.0
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    return float(2 * config.linear_num_value_heads * (3 * key * value + CHUNK * (5 * key + 3 * value) / 2))


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


# --- words -----------------------------------------------------------------------------------------------------


def missed(result: Result, *, tolerance: float) -> bool:
    if result.largest_difference > tolerance:
        return True
    measure_, goal = GOALS.get(result.judge, ("speedup", 0.0))
    return float(getattr(result, measure_)) < goal


def described(result: Result) -> str:
    lines = [
        f"{result.judge}: {result.parameters / 1e6:,.0f} M parameters, {result.vision_share:.0%} of them vision",
        f"  plain   {result.plain_grids_per_second:8.3f} grids/s   {_work(result.plain)}",
        f"  shared  {result.grids_per_second:8.3f} grids/s   {_work(result.done)}",
        f"  bound   {result.bound:.3f} times the plain way   {_work(result.least)}; "
        f"the judge computes {result.done.flops / result.least.flops:.2f} times as much",
        f"  reached {result.speedup:.3f} times, {result.share_of_bound:.0%} of the bound; "
        f"{result.tokens_per_second:,.0f} plain tokens/s; P(Yes) differs by {result.largest_difference:.1e} at most",
    ]
    if result.sets is not None:
        lines.insert(3, f"  sets    {result.set_grids_per_second:8.3f} grids/s   {_work(result.sets)}")
    if result.set_correlation is not None:
        lines.append(
            f"  the set judge's P(Yes) about pairs correlates with plain's by {result.set_correlation:.3f}, "
            f"and differs by {result.set_mean_difference:.3f} in the mean"
        )
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
