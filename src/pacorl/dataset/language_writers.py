"""Sets written by a language model behind an OpenAI-compatible URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from pacorl.judge.chat import ChatModel
from pacorl.records.compose import prompt_from

Text = Annotated[str, Field(min_length=3, max_length=2000)]


class SetReply(BaseModel):
    """A language model's answer."""

    theme: Text
    """The request in a person's words, or the shared description."""
    shared: str = ""
    """Shared description of all panels, if the theme is a request."""
    panels: list[Text]
    criteria: dict[str, dict[str, Text]] = {}
    """dimension → name → the requirement over all panels."""


def ask_for_set(
    chat: ChatModel, request: str, *, count: int, check: Callable[[SetReply], None] = lambda reply: None
) -> SetReply:
    """Ask for a set of `count` panels that can be composed to a prompt and passes `check`.

    Raises:
        ChatError: no attempt gives a usable answer.
        ServiceRefusedError: the server refuses all questions.
    """

    def check_reply(reply: SetReply) -> None:
        if len(reply.panels) != count:
            raise ValueError(f"exactly {count} panels are needed, got {len(reply.panels)}")
        prompt_from("", theme=reply.theme, panels=reply.panels)  # refuses empty texts and panel tags
        check(reply)

    messages = [{"role": "user", "content": request}]
    return chat.ask_json(messages, SetReply, check=check_reply)


def answer_form(count: int, dimensions: Sequence[str], *, theme: str, further: str = "") -> str:
    """Describe the JSON of the answer; `further` are further keys."""
    criteria = ", ".join(f'"{name}": {{"<short name>": "<what must hold in all images>"}}' for name in dimensions)
    return (
        "Answer with one JSON object and nothing else:\n"
        f'{{"theme": "<{theme}>", {further}"panels": [<exactly {count} texts, one per image>], '
        f'"criteria": {{{criteria}}}}}'
    )
