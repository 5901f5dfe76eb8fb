"""P(Yes) against a plain forward, whatever the batch."""

import random

import pytest
import torch

from pacorl.core import questions
from pacorl.data import characters
from pacorl.models.judge import LocalJudge, single_token
from pacorl.types import Question


@pytest.fixture(scope="module")
def judge() -> LocalJudge:
    return LocalJudge.from_pretrained("tiny", batch=4)


def ask(count: int) -> list[Question]:
    """Questions of all kinds about panels of both sizes."""
    rng = random.Random(0)
    asked = []
    for number in range(count):
        first, second = rng.sample(characters.all_panels(), 2)
        images = (characters.draw(first, 32), characters.draw(second, 64))
        asked += [
            Question(images, questions.same_theme(first.subject)),
            Question(images[:1], questions.shows_text((first if number % 2 else second).text)),
            Question(images, questions.consistent()),
        ]
    return asked


def plain_p_yes(judge: LocalJudge, question: Question) -> float:
    """One question through the processor and one ordinary forward, fp32 softmax over the two tokens."""
    content = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
    text = judge.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = judge.processor(text=[text], images=list(question.images), return_tensors="pt")
    with torch.no_grad():
        logits = judge.model(**inputs).logits[0, -1]
    tokenizer = judge.processor.tokenizer
    yes, no = tokenizer.convert_tokens_to_ids("Yes"), tokenizer.convert_tokens_to_ids("No")
    return float(torch.stack([logits[yes], logits[no]]).float().softmax(0)[0])


def test_p_yes_is_the_plain_forwards(judge: LocalJudge) -> None:
    asked = ask(8)
    found = [verdict.p_yes for verdict in judge.verdicts(asked)]
    assert found == pytest.approx([plain_p_yes(judge, question) for question in asked], abs=1e-5)
    assert max(found) - min(found) > 0.5


def test_order_and_batch_do_not_matter(judge: LocalJudge) -> None:
    asked = ask(4)
    found = [verdict.p_yes for verdict in judge.verdicts(asked)]
    backwards = [verdict.p_yes for verdict in judge.verdicts(asked[::-1])][::-1]
    alone = [judge.verdicts([question])[0].p_yes for question in asked]
    assert found == pytest.approx(backwards, abs=1e-5)
    assert found == pytest.approx(alone, abs=1e-5)


def test_equal_questions_are_asked_once(judge: LocalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ask(1)
    sizes: list[int] = []
    p_yes = judge._p_yes
    monkeypatch.setattr(judge, "_p_yes", lambda part, *rest: sizes.append(len(part)) or p_yes(part, *rest))
    found = judge.verdicts(asked * 5)
    assert sum(sizes) == len(asked)
    assert found[: len(asked)] == found[-len(asked) :]


def test_the_judge_explains(judge: LocalJudge) -> None:
    answer = judge.explain(ask(1)[0])
    assert answer.startswith(("Yes", "No"))
    assert len(answer.split()) > 2


def test_a_word_of_several_tokens_is_no_score(judge: LocalJudge) -> None:
    with pytest.raises(ValueError, match="must be one"):
        single_token(judge.processor.tokenizer, "Certainly not")
