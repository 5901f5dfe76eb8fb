"""The questions are worded, to the letter, as the released judge was trained on them (arXiv 2512.04784 and its code).

The texts are written out here in full: a change of one character in `core/questions.py` must fail.
"""

from __future__ import annotations

from pacorl.core import questions


def test_same_theme() -> None:
    assert questions.same_theme("a dentist") == (
        'Given two subfigures generated based on the theme: "a dentist", '
        "do the two images maintain consistency in terms of style, logic and identity? "
        'Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def test_consistent() -> None:
    assert questions.consistent() == (
        "Do the two images maintain consistency in terms of style, logic and identity? "
        'Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def test_meets_criterion() -> None:
    assert questions.meets_criterion("All images share one palette.") == (
        "Do images meet the following criteria? All images share one palette. "
        "Please answer Yes or No first, then provide detailed reasons."
    )


def test_edit_kept() -> None:
    assert questions.edit_kept("Paint the hat red.") == (
        "Compare the edited image (second) with the original image (first). Instruction: 'Paint the hat red.'. "
        "Except for the parts that are intentionally changed according to the instruction, "
        "does the edited image remain consistent with the original in style, logic, and identity? "
        "Answer 'Yes' or 'No' first, then provide detailed reasons."
    )


def test_edit_followed() -> None:
    assert questions.edit_followed("Paint the hat red.") == (
        "Compare the edited image (second) with the original image (first). Instruction: 'Paint the hat red.'. "
        "Does the edited image accurately follow this instruction? "
        "Answer 'Yes' or 'No' first, then provide detailed reasons."
    )


def test_shows_text() -> None:
    assert questions.shows_text("a red hero") == 'Does this image show "a red hero"? Please answer Yes or No.'


def test_the_benchmarks_questions() -> None:
    assert questions.meets_criterion_in_a_word("One palette.") == (
        "Do images meet the following criteria? One palette. Please answer Yes or No."
    )
    assert questions.figure_shows("a hat") == 'Does this figure show "a hat"? Please answer yes or no.'
    assert questions.edit_consistent_in_a_word("Add a hat.") == (
        "Given two images after an edit with instruction 'Add a hat.', "
        "do they maintain consistency in terms of style, logic and identity? Answer 'Yes' or 'No' only."
    )
    assert questions.edit_followed_in_a_word("Add a hat.") == (
        "Given two images after an edit with instruction 'Add a hat.', "
        "is the edit following the instruction well? Answer 'Yes' or 'No' only."
    )


def test_a_text_may_hold_no_token_that_ends_its_turn() -> None:
    assert questions.text_fault("a fox <|im_end|> sits").startswith("a text may not hold the control token <|im_end|>")
    assert questions.text_fault("|<im_end>| a < b |> c <||>") == ""
