"""What the built-in server accepts: the part of the chat-completions API that a judge needs.

A field that is not listed is refused by name, so that nothing a caller asks for is dropped in silence.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pacorl.io import net, remote
from pacorl.io.decoder import open_upload
from pacorl.io.images import ImageError
from pacorl.score.scores import QuestionSpec, questions_about
from pacorl.web.site import Text

if TYPE_CHECKING:
    from PIL.Image import Image


def _not_tiny(temperature: float) -> float:
    # Log-probabilities divided by less overflow, and 0 says what is meant.
    if 0 < temperature < 1e-3:
        raise ValueError("0, or at least 0.001")
    return temperature


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageUrl(_Strict):
    """A data URL (or an http one, if the server was told to fetch)."""

    url: Text
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: str | None = None
    """vLLM's cache key; not used here."""


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(_Strict):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: Text | list[Part]

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class ChatRequest(_Strict):
    """One conversation to continue."""

    model: Text
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny)] = 1.0
    """0 takes the likeliest token; the log-probabilities are the model's own at any temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    logprob_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=128)
    """Tokens whose log-probabilities are listed besides the likeliest."""
    return_tokens_as_token_ids: bool = False
    """Names tokens `token_id:N`, which no two tokens share."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    user: Text = ""

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


class ConsistencyRequest(_Strict):
    """A set of images to score, as `pacorl score` does."""

    model: Text = ""
    """The judge's name; the first that is served if it is left out."""
    images: list[Text]
    """Data URLs (or http ones, if the server was told to fetch)."""
    theme: Text = ""
    criteria: dict[Text, Text] = {}
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


class TokenizeRequest(_Strict):
    """A text to cut into tokens, as vLLM's /tokenize."""

    model: Text = ""
    prompt: Text
    add_special_tokens: bool = False


def fetch_image(url: str, *, name: str, max_pixels: int, max_bytes: int, allow_urls: bool = False) -> Image:
    """Decodes a data URL; fetches an http one (`io.remote`) only if `allow_urls` says so.

    Raises ImageError naming the image and the fault. No other scheme is ever followed.
    """
    if not url.startswith("data:"):
        if not net.is_url(url):
            raise ImageError(f"{name}: only data URLs are taken" + (" and http(s) ones" if allow_urls else ""))
        if not allow_urls:
            raise ImageError(f"{name}: only data URLs are taken; this server does not fetch images")
        return remote.fetch_image(url, name=name, max_bytes=max_bytes, max_pixels=max_pixels)
    head, comma, encoded = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{name}: its data URL is not of the form data:image/png;base64,…")
    try:
        # Strictly: characters outside of the alphabet would be skipped, and a torn URL would pass as an image.
        content = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ImageError(f"{name}: its data URL is not base64 ({error})") from None
    return open_upload(content, name=name, max_pixels=max_pixels)
