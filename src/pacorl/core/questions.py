"""Every question that a judge is ever asked: one home for training, scoring and benchmarks.

The wording, including its grammar, is from the released judge's training data (arXiv 2512.04784 and its code);
a judge is sensitive to it, so do not change it without retraining.
"""

import re

CONTROL_TOKEN = re.compile(r"<\|\w{1,40}\|>")
"""The tokens with which the Qwen-VL families structure a conversation."""


def text_fault(text: str) -> str:
    """Why a text cannot be asked or answered, because it would end its own turn of the conversation; empty if it can.

    One rule for in-process judges, all servers and training data: some servers treat such a token as it is
    spelled, some as a control, so that one question would have several answers.
    """
    token = CONTROL_TOKEN.search(text)
    if not token:
        return ""
    return f"a text may not hold the control token {token[0]}; take it out"


def same_theme(theme: str) -> str:
    """Two sub-figures of one set: are they consistent? (The reward's default question.)"""
    return (
        f'Given two subfigures generated based on the theme: "{theme}", do the two images maintain consistency '
        'in terms of style, logic and identity? Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def consistent() -> str:
    """Ask about two images without context (ConsistencyRank's default question)."""
    return (
        "Do the two images maintain consistency in terms of style, logic and identity? "
        'Answer "Yes" and "No" first, and then provide detailed reasons.'
    )


def meets_criterion(criterion: str) -> str:
    """Two images against one written criterion of their set."""
    return (
        f"Do images meet the following criteria? {criterion} "
        "Please answer Yes or No first, then provide detailed reasons."
    )


def shows_text(text: str) -> str:
    """Ask about one panel and its description (ours: the released reward uses CLIP here)."""
    return f'Does this image show "{text}"? Please answer Yes or No.'


def same_pose() -> str:
    """Ask whether a panel copies a reference image (ours): the sign of a pasted reference."""
    return meets_criterion("Both images have the same pose and the same framing.")


def _edit(instruction: str) -> str:
    return f"Compare the edited image (second) with the original image (first). Instruction: '{instruction}'. "


def edit_kept(instruction: str) -> str:
    """Original and edited image: is all that should stay as it was?"""
    return _edit(instruction) + (
        "Except for the parts that are intentionally changed according to the instruction, does the edited image "
        "remain consistent with the original in style, logic, and identity? "
        "Answer 'Yes' or 'No' first, then provide detailed reasons."
    )


def edit_followed(instruction: str) -> str:
    """Original and edited image: was the instruction carried out?"""
    return _edit(instruction) + (
        "Does the edited image accurately follow this instruction? "
        "Answer 'Yes' or 'No' first, then provide detailed reasons."
    )


def meets_criterion_in_a_word(criterion: str) -> str:
    """T2IS-Bench's question to every pair of a set, and ConsistencyRank's first wording."""
    return f"Do images meet the following criteria? {criterion} Please answer Yes or No."


def figure_shows(text: str) -> str:
    """VQAScore's question (Lin et al. 2024, arXiv 2404.01291), which T2IS-Bench measures prompt alignment with."""
    return f'Does this figure show "{text}"? Please answer yes or no.'


def _after_edit(instruction: str) -> str:
    return f"Given two images after an edit with instruction '{instruction}', "


def edit_consistent_in_a_word(instruction: str) -> str:
    """EditReward-Bench: consistency."""
    return _after_edit(instruction) + (
        "do they maintain consistency in terms of style, logic and identity? Answer 'Yes' or 'No' only."
    )


def edit_followed_in_a_word(instruction: str) -> str:
    """EditReward-Bench: prompt following."""
    return _after_edit(instruction) + "is the edit following the instruction well? Answer 'Yes' or 'No' only."
