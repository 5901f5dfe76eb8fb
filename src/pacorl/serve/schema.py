"""Requests of the built-in server: the part of the chat-completions API that a judge needs.

An unknown field is refused by name, so that no setting of a caller is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import comb
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from pacorl.gate.check import CONTROLS
from pacorl.gate.score_set import check_count, questions_about
from pacorl.gate.scores import QuestionSpec
from pacorl.io.images import MAX_PIXELS
from pacorl.judge.calibration import Calibration, threshold
from pacorl.records.characters import MAX_IMAGES
from pacorl.serve.forms import Form, Text

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_MESSAGES = 32
MOST_PARTS = 512
"""Limit of one message's parts."""
MOST_IMAGES = 256
"""Limit of one request's images on every server."""
MOST_CRITERIA = 64
MOST_URL = 2**30
"""Limit of an image URL's letters; the limit of the body is lower."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request and of all requests together."""

    body_bytes: int = 64 * 2**20
    """Limit of a route with images."""
    images: int = 16
    """Limit of one request; its pixels have a limit of their own."""
    pixels: int = MAX_PIXELS
    """Limit for all images of one request."""
    prompt_tokens: int = 8192
    """Limit of a request, images included. One thread answers all callers, and a tenfold prompt stalls it."""
    new_tokens: int = 2048
    waiting: int = 1024
    """Questions in the queue of one model."""
    together: int = 64
    """Questions of one batch; their common beginning is computed once."""


def _not_tiny(temperature: float) -> float:
    # Log-probabilities divided by a smaller number overflow; 0 selects the likeliest token.
    if 0 < temperature < 1e-3:
        raise ValueError("0, or at least 0.001")
    return temperature


def _whole(stream: bool) -> bool:
    if stream:
        raise ValueError("streaming is not supported")
    return stream


def _ascii(url: str) -> str:
    # A pattern of pydantic takes a second for 60 MB, on the event loop.
    if not url.isascii():
        raise ValueError("a URL is written in ASCII")
    return url


Name = Annotated[Text, Field(max_length=1000)]
Url = Annotated[str, Field(max_length=MOST_URL), AfterValidator(_ascii)]
"""Data URL in ASCII."""


class ImageUrl(Form):
    """Image by its URL."""

    url: Url
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(Form):
    """Text of a turn."""

    type: Literal["text"]
    text: Text


class ImagePart(Form):
    """Image of a turn."""

    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: Name | None = None
    """Key of vLLM's cache; not used here."""


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Form):
    """Turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Part], Field(max_length=MOST_PARTS), BeforeValidator(_as_parts)]
    """Texts and images in order; a bare text becomes a list of one part."""


class TemplateOptions(Form):
    """Options of the chat template."""

    enable_thinking: Literal[False] = False
    """False, since a judge answers at once."""


class ChatRequest(Form):
    """Conversation to continue."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES), FailFast()]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny)] = 1.0
    """0 selects the likeliest token. Log-probabilities are the model's at temperature 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    """Penalty in generated text; None for the checkpoint's. Log-probabilities are from before the penalty."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    logprob_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=128)
    """Tokens whose log-probabilities are listed besides the likeliest."""
    return_tokens_as_token_ids: bool = False
    """Whether tokens are named `token_id:N`, since two tokens may share a text."""
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    n: Literal[1] = 1
    stream: Annotated[bool, AfterValidator(_whole)] = False
    user: Name = ""

    @model_validator(mode="after")
    def _logprobs_are_on(self) -> ChatRequest:
        if (self.top_logprobs or self.logprob_token_ids) and not self.logprobs:
            raise ValueError("top_logprobs and logprob_token_ids need logprobs=true")
        return self

    @property
    def image_urls(self) -> list[str]:
        """URLs of all images, in order."""
        urls = []
        for message in self.messages:
            for part in message.content:
                if isinstance(part, ImagePart):
                    urls.append(part.image_url.url)
        return urls

    @property
    def new_tokens(self) -> int:
        """Limit of generated tokens."""
        return self.max_completion_tokens or self.max_tokens or 512


class SetRequest(Form):
    """Judge of a set of images, and its questions about each pair."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: Name = ""
    """Name of the judge; empty for the first."""
    theme: Text = ""
    """What all images are to share."""
    criteria: dict[Name, Text] = Field({}, max_length=MOST_CRITERIA)
    """Label → criterion in words."""
    symmetric: bool = False
    """Whether each pair is asked about in both orders."""

    @property
    def questions(self) -> tuple[QuestionSpec, ...]:
        """Questions about each pair."""
        return questions_about(self.theme, self.criteria)

    def _asked(self, pairs: int) -> int:
        return pairs * len(self.questions) * (1 + self.symmetric)


class ConsistencyRequest(SetRequest):
    """Set of images to score, as `pacorl score` does."""

    images: Annotated[list[Url], Field(max_length=MOST_IMAGES, json_schema_extra={"minItems": 2})]
    """Data URLs of the images."""
    ranking: bool = False
    """Whether the first image is compared with each further image, instead of all pairs."""

    @property
    def asked(self) -> int:
        """Number of questions to the judge."""
        count = len(self.images)
        return self._asked(count - 1 if self.ranking else comb(count, 2))

    @model_validator(mode="after")
    def _enough_images(self) -> ConsistencyRequest:
        check_count(len(self.images), ranking=self.ranking)
        return self


class CheckRequest(SetRequest):
    """Panels to check, as `pacorl check` does."""

    panels: Annotated[list[Url], Field(min_length=1, max_length=MOST_IMAGES)]
    """Data URLs of the panels."""
    references: dict[Name, Annotated[list[Url], Field(min_length=1, max_length=MAX_IMAGES)]] = Field(
        {}, max_length=MOST_IMAGES
    )
    """Character → data URLs of its reference images; every panel must show every character."""
    least: float | None = Field(None, ge=0, le=1)
    """Threshold of a panel's score; None for the calibration's."""
    all_pairs: bool = False
    """Whether the panels are compared with each other even if there are references."""

    @property
    def asked(self) -> int:
        """Number of questions to the judge, the controls' included."""
        panels = len(self.panels)
        pairs = panels * (len(self.images) - panels)
        if self.all_pairs or not self.references:
            pairs += comb(panels, 2)
        return self._asked(pairs + len(CONTROLS))

    @model_validator(mode="after")
    def _enough_panels(self) -> CheckRequest:
        if not self.references:
            check_count(len(self.panels))
        return self

    @property
    def images(self) -> list[Url]:
        """URLs of the panels, then of the references."""
        return [*self.panels, *chain.from_iterable(self.references.values())]

    def characters(self, images: Sequence[Image]) -> list[tuple[str, Sequence[Image]]]:
        """Name each character's share of `images`, which are in the order of the references."""
        remaining = iter(images)
        return [(name, list(islice(remaining, len(urls)))) for name, urls in self.references.items()]

    def threshold(self, calibration: Calibration | None) -> float:
        """Return the threshold of a panel. Raises ValueError if neither request nor calibration has one."""
        references = list(map(len, self.references.values()))
        plain = not (self.theme or self.criteria)
        return threshold(calibration, self.least, panels=len(self.panels), references=references, plain=plain)


def asking(text: str, *, images: int) -> Message:
    """Write the turn of a question about images."""
    image = ImagePart(type="image_url", image_url=ImageUrl(url=""))
    return Message(role="user", content=[*[image] * images, TextPart(type="text", text=text)])


class TokenizeRequest(Form):
    """Text to cut into tokens, as vLLM's /tokenize does."""

    model: Name = ""
    prompt: Text
    add_special_tokens: bool = False


# --- answers ---------------------------------------------------------------------------------------------------
# For the schema: endpoints answer with the documents of `Scores` and `Check`.


class SetImage(BaseModel):
    """An image of a set, by its name, and its score."""

    image: str
    median: float | None = None
    with_others: float | None = None
    among_others: float | None = None


class PairAnswer(BaseModel):
    """Score of a pair."""

    images: list[str]
    p_yes: float | None
    by_question: dict[str, float | None]
    order_gap: float | None = None
    error: str = ""


class ScoresAnswer(BaseModel):
    """Scores of a set."""

    model: str
    images: list[str]
    questions: dict[str, str]
    calibrated: bool
    mean: float | None
    lowest_panel: SetImage | None
    missing: int
    odd_one_out: SetImage | None
    pairs: list[PairAnswer]
    matrix: list[list[float | None]]


class PanelAnswer(BaseModel):
    """Verdict about a panel."""

    image: str
    passed: bool
    score: float | None
    with_others: float | None
    lowest_question: str
    lowest_character: str | None
    characters: list[str] = []
    """Characters that the panel has to show; absent without references."""


class ControlAnswer(BaseModel):
    """Answer about a pair whose answer is known."""

    image: str
    """Name of the first image."""
    name: str
    """Description of the second image."""
    same: bool
    p_yes: float


class CheckAnswer(BaseModel):
    """Verdict about a set."""

    judge: str
    note: str
    passed: bool
    least: float
    calibrated: bool
    odd_one_out: str | None
    panels: list[PanelAnswer]
    controls: list[ControlAnswer]
    questions: dict[str, str]
    asked: int


class Fault(BaseModel):
    """Error of a request."""

    message: str
    type: Literal["invalid_request_error", "server_error", "refused"]
    param: None
    code: int
    """HTTP status."""
    control: ControlAnswer | None = None
    """Control that failed, of type refused."""
    image: str | None = None
    """Name of the image beside which it failed."""


class ErrorAnswer(BaseModel):
    """Body of every error."""

    error: Fault
