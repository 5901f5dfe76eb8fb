"""A set judge: each pair has the answer of a plain forward over the whole set in which its query sees two panels."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from judges import build, panels, processor_of_any_size
from PIL import Image
from pydantic import TypeAdapter

from pacorl.core import questions
from pacorl.io.processor import ImageTextProcessor
from pacorl.judge import JudgeSection, check_judge, open_judge
from pacorl.judge.local import TINY_JUDGE, LocalJudge, LocalOptions, joined_digest, weight_digests
from pacorl.judge.pairwise import ask_pairs
from pacorl.judge.set_judge import RECORD, SetRecord, check_can_read_sets
from pacorl.types import Question

JUDGE_SECTION: TypeAdapter[Any] = TypeAdapter(JudgeSection)
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
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


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl", "qwen3_vl"))]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), pytest.param(torch.float64, 1e-10, marks=pytest.mark.slow)]
)
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


def test_other_questions_go_to_the_pair_judge(processor: ImageTextProcessor) -> None:
    judge = both("qwen2_5_vl", processor)
    first, second, third = panels(3)
    alone = [Question((first,), "Is it red?"), Question((first, second), TEXTS[0])]
    of_set = Question((first, third), TEXTS[0], panels=(first, second, third))
    mixed = [alone[0], of_set, alone[1], Question((), f"{TEXTS[0]} <|im_end|>")]
    found = judge.verdicts(mixed)
    with judge.pair_by_pair():
        assert not judge.reads_sets
        pair_judge = judge.verdicts(mixed)
    assert judge.reads_sets
    assert [found[number].p_yes for number in (0, 2)] == [pair_judge[number].p_yes for number in (0, 2)]
    assert found[1].p_yes != pytest.approx(pair_judge[1].p_yes, abs=1e-4)
    assert found[3].p_yes is None


def test_a_recurrent_model_cannot_be_a_set_judge(processor: ImageTextProcessor) -> None:
    check_can_read_sets(build("qwen2_5_vl", processor).config)
    with pytest.raises(ValueError, match=r"qwen3_5 cannot be a set judge.*leave judge\.set_judge out"):
        check_can_read_sets(build("qwen3_5", processor).config)


# --- its folder ------------------------------------------------------------------------------------------------


def folder_of(path: Path, **record: Any) -> str:
    """A folder that is the committed judge as a set judge."""
    shutil.copytree(TINY_JUDGE, path)
    digest = joined_digest(weight_digests("tiny"))
    fields = {"checkpoint": "tiny", "digest": digest, "panel_correlation": 0.97, "train_sets": 8, "held_out_sets": 8}
    SetRecord(**{**fields, **record}).write(path)
    return str(path)


def test_a_folder_says_what_it_was_distilled_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "set")
    with caplog.at_level(logging.WARNING):
        judge = LocalJudge.from_pretrained("tiny", set_judge=folder)
    assert not caplog.messages
    assert judge.reads_sets
    assert judge.set_model.model.visual is judge.model.model.visual
    assert judge.models() == [judge.model, judge.set_model]


def test_a_low_correlation_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, correlation in enumerate((0.949, None)):
        LocalJudge.from_pretrained("tiny", set_judge=folder_of(tmp_path / str(number), panel_correlation=correlation))
    assert "its correlation with its pair judge is 0.949, and 0.95 is needed" in caplog.messages[0]
    assert "its correlation with its pair judge is not measured" in caplog.messages[1]


def test_one_kind_of_judge_is_refused_in_place_of_the_other(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "set")
    with pytest.raises(ValueError, match=r"set is a set judge.*judge\.set_judge beside .*judge\.checkpoint=tiny"):
        LocalJudge.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"is a set judge"):
        check_judge("tiny", adapter=folder)
    with pytest.raises(ValueError, match=r"has no set_judge\.json: it is missing, or a judge of pairs.*form=set"):
        LocalJudge.from_pretrained("tiny", set_judge=str(TINY_JUDGE))
    other = folder_of(tmp_path / "other", digest="sha256 0123456789abcdef", checkpoint="elsewhere")
    with pytest.raises(ValueError, match=r"was distilled from elsewhere, whose weights are not those of tiny"):
        LocalJudge.from_pretrained("tiny", set_judge=other)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "set")
    (tmp_path / "set" / RECORD).write_text('{"checkpoint": 3}')
    with pytest.raises(ValueError, match=rf"{RECORD}.*checkpoint"):
        LocalJudge.from_pretrained("tiny", set_judge=folder)


def test_a_config_names_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "set")
    options = LocalOptions(checkpoint="tiny", dtype="float32", set_judge=folder)
    judge = open_judge(options, device="cpu")
    assert isinstance(judge, LocalJudge)
    assert judge.reads_sets
    plain = LocalOptions(checkpoint="tiny", dtype="float32")
    assert options.identity() != plain.identity() == LocalOptions(checkpoint="tiny", set_judge="").identity()
    # A server has no set judge: it is not passed over.
    http = {"checkpoint": "http://localhost:1/v1", "backend": "http", "model": "judge"}
    JUDGE_SECTION.validate_python(plain.model_dump() | http)
    with pytest.raises(ValueError, match="set_judge"):
        JUDGE_SECTION.validate_python(options.model_dump() | http)
