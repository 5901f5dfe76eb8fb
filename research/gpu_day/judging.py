"""The judge alone, sampling alone, and both at once as a run's `Scorer` has them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import torch
from tests.twins.parts import CHAT_TEMPLATE, qwen_tokenizer_of

from pacorl.core.questions import same_theme
from pacorl.grpo.scoring import torch_context
from pacorl.io.pretrained import model_of
from pacorl.io.processor import image_text_processor
from pacorl.judge.local import LocalJudge
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.sources import JUDGE_PARTS
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Question

from .bench import Bench, device_of, place_random, run_of
from .forms import depth, sides
from .measuring import Work, measured
from .parts import Record

THEME = "A small red fox who runs a lighthouse by the northern sea, painted in soft watercolour on cream paper."


def measure_judge(options: argparse.Namespace) -> Iterator[Record]:
    """Grids per second of the 7B judge, and the share of the shorter work that overlap hides."""
    device, side = device_of(options), sides(options)[0]
    blocks = depth(options)
    judge = random_judge(device, tiny=options.tiny)
    bench = Bench(run_of(side, options), options, device, blocks=blocks)
    asked = questions(1, side // 2)

    def score() -> None:
        judge.prompting._last_features = None  # each image of a run is a new one
        judge.verdicts(asked)

    def sample() -> None:
        bench.collect(side, 1)

    seconds = {}
    for name, work in {"judge": score, "sampling": sample, "both": both(score, sample)}.items():
        record = measured(work, device, repeats=options.repeats)
        yield {"judging": name, "questions": len(asked), **record}
        seconds[name] = record.get("seconds")
    judging, sampling, together = seconds.values()
    if judging and sampling and together:
        hidden = (judging + sampling - together) / min(judging, sampling)
        yield {"figure": "share of the shorter of judging and sampling that overlap hides", "value": hidden}


def both(score: Work, sample: Work) -> Work:
    """Sampling on this thread and the judge on another, with the context and stream that a run gives it."""

    def work() -> None:
        with ThreadPoolExecutor(1) as thread, torch.inference_mode(mode=False):
            context = torch_context()

            def concurrent() -> None:
                with context():
                    score()

            scored = thread.submit(concurrent)
            sample()
            scored.result()

    return work


def random_judge(device: torch.device, *, tiny: bool) -> LocalJudge:
    """The published 7B judge's shape with random weights, or the committed tiny one."""
    if tiny:
        return LocalJudge.from_pretrained("tiny", device=device)
    processor = image_text_processor(
        tokenizer=qwen_tokenizer_of([THEME] * 9), image_options=JUDGE_PARTS["processor"], chat_template=CHAT_TEMPLATE
    )
    ids = processor.tokenizer.convert_tokens_to_ids
    tokens = {"image_token_id": ids("<|image_pad|>"), "vision_start_token_id": ids("<|vision_start|>")}
    config = {**JUDGE_PARTS["model"], **tokens}
    if device == META:
        model = model_on_meta(config, dtype=torch.bfloat16)
        place_random(model, device)
        return LocalJudge(model, processor)
    # Made on the device: position tables that no checkpoint holds are computed there.
    standard = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = model_of(config).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(standard)
    return LocalJudge(model, processor)


def questions(grids: int, side: int) -> list[Question]:
    """Questions about all pairs of some grids' four drawn panels."""
    panels = [draw(panel, 64).resize((side, side)) for panel in all_panels()[:: len(all_panels()) // (4 * grids)]]
    sets = [panels[4 * number : 4 * number + 4] for number in range(grids)]
    return [Question(pair, same_theme(THEME)) for images in sets for pair in combinations(images, 2)]
