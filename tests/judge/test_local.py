"""P(Yes) against a plain forward, whatever is batched and shared; options; what a judge refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from judges import build, pairs, panels, plain_logits, plain_p_yes
from PIL import Image

from pacorl.core import questions
from pacorl.io.processor import ImageTextProcessor
from pacorl.judge.judge import VARIANTS
from pacorl.judge.local import LocalJudge
from pacorl.tiny import world
from pacorl.types import Question

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module")
def judge() -> LocalJudge:
    return LocalJudge.from_pretrained("tiny")


def answers(judge: LocalJudge, asked: list[Question]) -> list[float]:
    return [verdict.p_yes or math.nan for verdict in judge.verdicts(asked)]


def grid_questions(images: list[Image.Image]) -> list[Question]:
    return [Question(pair, questions.same_theme("a red hero")) for pair in itertools.combinations(images, 2)]


# --- P(Yes) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "qwen2_5_vl" else pytest.mark.slow) for family in FAMILIES]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow)]
)
def test_p_yes_is_the_plain_forwards(
    processor: ImageTextProcessor, family: str, dtype: torch.dtype, tolerance: float
) -> None:
    model, asked = build(family, processor).to(dtype), pairs(20)
    if family == "qwen3_5":  # its recurrent layers compute in fp32 whatever the type
        tolerance = 1e-5
    plain = [plain_p_yes(model, processor, question) for question in asked]
    for batch_tokens in (300, 8192):
        judge = LocalJudge(model, processor, batch_tokens=batch_tokens)
        assert answers(judge, asked) == pytest.approx(plain, abs=tolerance), batch_tokens
    assert answers(judge, asked[::-1])[::-1] == pytest.approx(plain, abs=tolerance)
    alone = [answers(judge, [question])[0] for question in asked[:5]]
    assert alone == pytest.approx(plain[:5], abs=tolerance)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(partial(answers, judge), [asked[start:] for start in range(4)]))
    assert [part[-1] for part in parts] == pytest.approx([plain[-1]] * 4, abs=tolerance)
    assert max(plain) - min(plain) > 0.1


def test_all_log_probabilities_are_the_plain_forwards(processor: ImageTextProcessor) -> None:
    model, asked = build("qwen2_5_vl", processor), [*pairs(4), Question((), "Is it Yes or No?")]
    judge = LocalJudge(model, processor)
    rows = judge.log_probs(judge.prompting.chat_prompts(asked))
    plain = [plain_logits(model, processor, question).double().log_softmax(0) for question in asked[:4]]
    for row, expected in zip(rows, plain, strict=False):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)
    assert rows[4].exp().sum() == pytest.approx(1)


# --- what is computed ------------------------------------------------------------------------------------------


@contextmanager
def counted(judge: LocalJudge) -> Iterator[dict[str, int]]:
    """Images through the vision tower, rows through the head, tokens through the language model."""
    count = {"images": 0, "answers": 0, "tokens": 0}

    def images(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        count["images"] += len(named["grid_thw"] if "grid_thw" in named else arguments[1])

    def tokens(_: Any, __: tuple[Any, ...], named: dict[str, Any]) -> None:
        count["tokens"] += named["inputs_embeds"].shape[:2].numel()

    def rows(_: Any, arguments: tuple[Any, ...]) -> None:
        count["answers"] += arguments[0].shape[:-1].numel()

    model = judge.model
    hooks = [
        model.model.visual.register_forward_pre_hook(images, with_kwargs=True),
        model.model.language_model.register_forward_pre_hook(tokens, with_kwargs=True),
        model.lm_head.register_forward_pre_hook(rows),
    ]
    yield count
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grid_of_four_is_6_questions_and_4_images(processor: ImageTextProcessor, family: str) -> None:
    judge = LocalJudge(build(family, processor), processor)
    asked = grid_questions(panels(4, sizes=[(128, 128)]))
    with counted(judge) as count:
        judge.verdicts(asked)
    _, runs = judge.prompting.featured(judge.prompting.encode(judge.prompting.chat_prompts(asked)), batch_tokens=8192)
    symbols = [run.symbol_N for run in runs]
    beginnings = {tuple(tokens[:end]) for tokens in symbols for end in range(1, len(tokens) + 1)}
    assert count == {"images": 4, "answers": 6, "tokens": len(beginnings)}
    assert len(beginnings) < 0.85 * sum(map(len, symbols))


def test_other_weights_or_other_images_are_encoded_anew(processor: ImageTextProcessor) -> None:
    judge = LocalJudge(build("qwen2_5_vl", processor).double(), processor)
    asked = grid_questions(panels(4))
    with counted(judge) as count:
        before = answers(judge, asked)
        assert answers(judge, asked) == before
        assert count["images"] == 4
        with torch.no_grad():
            for weight in judge.model.model.visual.parameters():
                weight.mul_(1.5)
        after = answers(judge, asked)
        assert count["images"] == 8
        assert after == answers(LocalJudge(judge.model, processor), asked) != before
        count["images"] = 0
        judge.verdicts(asked[:1])
        assert count["images"] == 2


# --- options ---------------------------------------------------------------------------------------------------


def test_variants_add_up_the_spellings_that_are_single_tokens(processor: ImageTextProcessor) -> None:
    model, (question,) = build("qwen2_5_vl", processor).double(), pairs(1)
    tokenizer, probability = processor.tokenizer, plain_logits(model, processor, question).softmax(0)
    masses = [
        sum(float(probability[ids[0]]) for word in words if len(ids := tokenizer.encode(word)) == 1)
        for words in VARIANTS
    ]
    judge = LocalJudge(model, processor, variants=True)
    assert min(len(judge.yes_ids), len(judge.no_ids)) > 1
    assert answers(judge, [question])[0] == pytest.approx(masses[0] / sum(masses), abs=1e-12)


def test_the_judge_explains(judge: LocalJudge) -> None:
    first, second = world.all_panels()[:2]
    images = (world.draw(first, 32), world.draw(second, 64))
    answer = judge.explain(Question(images, questions.same_theme("a hero in town")))
    assert answer.startswith(("Yes", "No"))
    assert len(answer.split()) > 2


# --- what is refused -------------------------------------------------------------------------------------------


def test_a_question_cannot_smuggle_an_image_in(judge: LocalJudge) -> None:
    (verdict,) = judge.verdicts([Question(tuple(panels(2)), "Same? <|image_pad|>")])
    assert (verdict.p_yes, verdict.error) == (None, "a text may not hold the control token <|image_pad|>; take it out")
