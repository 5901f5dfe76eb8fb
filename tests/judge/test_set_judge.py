"""A set judge: each pair has the answer of a plain forward over the whole set in which its query sees two panels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from judges import build, panels, processor_of_any_size
from PIL import Image

from pacorl.core import questions
from pacorl.io.processor import ImageTextProcessor
from pacorl.judge.local import LocalJudge
from pacorl.judge.pairwise import ask_pairs

TEXTS = (questions.same_theme("a red round hero"), questions.consistent())


@pytest.fixture(scope="module")
def processor() -> ImageTextProcessor:
    return processor_of_any_size()


def both(
    family: str, processor: ImageTextProcessor, *, dtype: torch.dtype = torch.float64, **options: Any
) -> LocalJudge:
    """A judge whose set judge has other weights, and its vision tower."""
    model = build(family, processor).to(dtype)
    set_model = build(family, processor, seed=1).to(dtype)
    set_model.model.visual = model.model.visual
    return LocalJudge(model, processor, set_model=set_model, **options)


@torch.no_grad()
def pair_by_pair(model: Any, processor: ImageTextProcessor, images: list[Image.Image], text: str) -> list[float]:
    """P(Yes) of each pair: transformers' own forward over the question and all panels, once for each pair, under a mask
    that hides the panels of no concern from the end of the turn."""
    content = [{"type": "text", "text": text}, *({"type": "image"} for _ in images)]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=[chat], images=images, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    start, end = (processor.tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>") for name in ("start", "end"))
    spans = list(
        zip(
            [place for place, token in enumerate(ids) if token == start],
            [place + 1 for place, token in enumerate(ids) if token == end],
            strict=True,
        )
    )
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    answers = []
    for pair in itertools.combinations(range(len(images)), 2):
        sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        for panel, span in enumerate(spans):
            if panel not in pair:
                sees[spans[-1][1] :, slice(*span)] = False
        mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, -torch.inf)
        logits = model(**{**inputs, "attention_mask": mask[None, None]}, position_ids=positions(model, inputs)).logits
        answers.append(float(logits[0, -1, [yes, no]].softmax(0)[0]))
    return answers


def positions(model: Any, inputs: Any) -> torch.Tensor:
    position_3BN, _ = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
    )
    return position_3BN


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen3_vl"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_each_pair_has_the_answer_of_its_own_forward(
    processor: ImageTextProcessor, family: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Sets of several sizes, shapes and questions in one call, in one batch and in many."""
    sets = [panels(4), panels(4, seed=1), panels(2, seed=2), panels(3, seed=3)]
    texts = [{"a": TEXTS[0]}, {"a": TEXTS[0], "b": TEXTS[1]}, {"b": TEXTS[1]}, {"a": TEXTS[0]}]
    found = {}
    for tokens in (8192, 60):
        judge = both(family, processor, dtype=dtype, batch_tokens=tokens)
        found[tokens] = ask_pairs(judge, sets, texts)
    for number, (images, text_of) in enumerate(zip(sets, texts, strict=True)):
        for name, text in text_of.items():
            expected = pair_by_pair(judge.set_model, processor, images, text)
            for answers in found.values():
                p_yes = [verdicts[name].p_yes for verdicts in answers[number].values()]
                assert p_yes == pytest.approx(expected, abs=tolerance), (number, name)
            if len(expected) > 1:
                assert max(expected) - min(expected) > 1e-3
