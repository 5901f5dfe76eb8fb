"""What the built-in server accepts: the part of the chat-completions API that a judge needs.

A field that is not listed is refused by name, so that nothing a caller asks for is dropped in silence.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageUrl(_Strict):
    """A data URL (or, where the server was told to fetch, an http one)."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: str | None = None
    """vLLM's cache key; not used here."""


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(_Strict):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str | list[Part]

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class ChatRequest(_Strict):
    """One conversation to continue."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    """0 takes the likeliest token; the log-probabilities are the model's own at any temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    logprob_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=128)
    """Tokens whose log-probabilities are listed besides the likeliest."""
    return_tokens_as_token_ids: bool = False
    """Names tokens `token_id:N`, which no two tokens share."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    user: str = ""

    @model_validator(mode="after")
    def _logprobs_are_on(self) -> ChatRequest:
        if (self.top_logprobs or self.logprob_token_ids) and not self.logprobs:
            raise ValueError("top_logprobs and logprob_token_ids need logprobs=true")
        return self

    @property
    def new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 512


class TokenizeRequest(_Strict):
    """A text to cut into tokens, as vLLM's /tokenize."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = False
