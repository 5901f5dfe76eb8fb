"""What the built-in server accepts: the part of the chat-completions API that a judge needs.

A field that is not listed is refused by name, so that nothing a caller asks for is dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, FailFast, Field, model_validator

from pacorl.io.images import MAX_PIXELS
from pacorl.judge.score_set import questions_about
from pacorl.judge.scores import QuestionSpec
from pacorl.web.forms import Form, Text

MOST_MESSAGES = 32
MOST_PARTS = 512
"""Of one message."""
MOST_IMAGES = 256
"""Of one request, whatever a server allows."""
MOST_CRITERIA = 64
MOST_URL = 2**30
"""Letters of an image's URL; the limit of the body is lower."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold."""

    body_bytes: int = 64 * 2**20
    """On the routes that take images; BodyLimit's on all others."""
    images: int = 8
    pixels: int = MAX_PIXELS
    """Of all its images together."""
    held_pixels: int = 2 * MAX_PIXELS
    """Of the images of all requests that are answered at one time; further requests wait."""
    prompt_tokens: int = 8192
    """Of a request, its images included: one thread answers everybody, and a prompt of ten times as many stalls it."""
    new_tokens: int = 2048
    waiting: int = 1024
    """Questions that may queue for one model."""
    together: int = 64
    """Questions that are answered in common; what they share is computed once."""


def _not_tiny(temperature: float) -> float:
    # Log-probabilities divided by less overflow, and 0 says what is meant.
    if 0 < temperature < 1e-3:
        raise ValueError("0, or at least 0.001")
    return temperature


def _ascii(url: str) -> str:
    if not url.isascii():
        raise ValueError("a URL is written in ASCII")
    return url


Name = Annotated[Text, Field(max_length=1000)]
Url = Annotated[str, Field(max_length=MOST_URL), AfterValidator(_ascii)]
"""A data URL (or an http one, if the server was told to fetch)."""


class ImageUrl(Form):
    """An image."""

    url: Url
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(Form):
    type: Literal["text"]
    text: Text


class ImagePart(Form):
    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: Name | None = None
    """vLLM's cache key; not used here."""


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MOST_PARTS)]


class Message(Form):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: Text | Parts

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class TemplateOptions(Form):
    """Options of the chat template."""

    enable_thinking: Literal[False] = False
    """A judge answers at once."""


class ChatRequest(Form):
    """One conversation to continue."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES), FailFast()]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny)] = 1.0
    """0 takes the likeliest token; the log-probabilities are the model's own at any temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    """Of generated text; None is the checkpoint's own. Log-probabilities are from before it."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    logprob_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=128)
    """Tokens whose log-probabilities are listed besides the likeliest."""
    return_tokens_as_token_ids: bool = False
    """Names tokens `token_id:N`, which no two tokens share."""
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    n: Literal[1] = 1
    stream: Literal[False] = False
    user: Name = ""

    @model_validator(mode="after")
    def _logprobs_are_on(self) -> ChatRequest:
        if (self.top_logprobs or self.logprob_token_ids) and not self.logprobs:
            raise ValueError("top_logprobs and logprob_token_ids need logprobs=true")
        return self

    @property
    def image_urls(self) -> list[str]:
        """Of all images, in order."""
        contents = [content for message in self.messages for content in message.parts]
        return [content.image_url.url for content in contents if isinstance(content, ImagePart)]

    @property
    def new_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 512


class ConsistencyRequest(Form):
    """A set of images to score, as `pacorl score` does."""

    model: Name = ""
    """The judge's name; the first that is served if it is left out."""
    images: Annotated[list[Url], Field(max_length=MOST_IMAGES)]
    theme: Text = ""
    criteria: dict[Name, Text] = Field({}, max_length=MOST_CRITERIA)
    """Label → criterion in words."""
    ranking: bool = False
    """Whether the first image is compared with each of the others, instead of all with all."""
    symmetric: bool = False

    @property
    def questions(self) -> tuple[QuestionSpec, ...]:
        """What is asked about each pair."""
        return questions_about(self.theme, self.criteria)


def asking(text: str, *, images: int) -> Message:
    """The turn that shows so many images and asks a question about them."""
    image = ImagePart(type="image_url", image_url=ImageUrl(url=""))
    return Message(role="user", content=[*[image] * images, TextPart(type="text", text=text)])


class TokenizeRequest(Form):
    """A text to cut into tokens, as vLLM's /tokenize."""

    model: Name = ""
    prompt: Text
    add_special_tokens: bool = False
