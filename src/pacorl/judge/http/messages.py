"""Requests and answers of the chat-completions API: images and a question out, the probability of Yes in.

An answer without the probabilities of Yes and No raises; it never becomes a number.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from pacorl.io.images import as_rgb
from pacorl.io.net import TransientError
from pacorl.judge.judge import WORDS

if TYPE_CHECKING:
    from PIL.Image import Image

Json = Mapping[str, Any]
ImageFormat = Literal["png", "jpeg"]
TokenIds = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of Yes and of No."""

TOP_LOGPROBS = 20  # the most that the API allows
CUT_TOLERANCE = 1e-3
"""Tolerance for a list of the likeliest tokens without one of Yes and No, which is at most as likely as the list's
least. If that leaves P(Yes) open by more, the verdict is missing."""
MASS_TOLERANCE = 1e-2  # probabilities of one list may exceed 1 by so much (bf16 servers), and no more
ROUNDING = 1e-2  # two log-probabilities of one token may differ by so much, if a server rounds one of them
FLOOR_LOGPROB = -9999.0  # vLLM's encoding of −inf
OPTIONAL_FIELDS = ("chat_template_kwargs", "repetition_penalty")
"""Fields beyond OpenAI's API, left out of requests to servers that refuse them by name."""


class UnansweredError(Exception):
    """Permanent lack of an answer to a question."""


# --- requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image encoded for the request."""

    url: str
    """A data URL."""
    digest: str
    """SHA-256 of the size and the pixels, which identifies equal images."""


def encode(
    image: Image,
    name: str = "the image",
    image_format: ImageFormat = "png",
    known: Mapping[str, EncodedImage] = MappingProxyType({}),
) -> EncodedImage:
    """Encode the RGB pixels that a judge in this process would see.

    Args:
        name: the image's name in messages.
        known: digest → image encoded before, which is returned instead.

    Raises:
        ImageError: for an invalid image.
    """
    rgb = as_rgb(image, name)
    digest = hashlib.sha256(repr(rgb.size).encode() + rgb.tobytes()).hexdigest()
    if digest in known:
        return known[digest]
    buffer = io.BytesIO()
    # Fast compression: for a nearby server, better compression takes longer than sending.
    options: dict[str, Any] = {"compress_level": 1} if image_format == "png" else {"quality": 95, "subsampling": 0}
    rgb.save(buffer, format=image_format, **options)
    url = f"data:image/{image_format};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return EncodedImage(url, digest)


def turn_body(model: str, content: Sequence[EncodedImage | str], *, max_tokens: int) -> dict[str, Any]:
    """Build a request of one user turn of images and texts, without thinking."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.url}})
    messages = [{"role": "user", "content": parts}]
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"model": model, "messages": messages, "max_tokens": max_tokens} | thinking


def verdict_body(
    model: str, images: Sequence[EncodedImage], text: str, *, ids: TokenIds | None = None
) -> dict[str, Any]:
    """Build a request for the first token's log-probabilities.

    With `ids` the words are requested by id, so that the server lists them even if they are unlikely.
    """
    # The sampled token is unused. At temperature 1 a server that reports log-probabilities after the sampler's changes
    # reports the model's own. A checkpoint's penalty is meant for reasons: it would lower a Yes or No in the question.
    sampling = {"temperature": 1, "top_p": 1, "repetition_penalty": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
    by_id: dict[str, Any] = {}
    if ids:
        by_id = {"logprob_token_ids": [*ids[0], *ids[1]], "return_tokens_as_token_ids": True}
    return turn_body(model, [*images, text], max_tokens=1) | sampling | by_id


# --- answers ---------------------------------------------------------------------------------------------------


def read_p_yes(
    answer: Json,
    words: Sequence[Sequence[str]] = WORDS,
    *,
    ids: TokenIds | None = None,
    temperature: float = 1.0,
) -> float:
    """Read P(Yes | Yes or No) from the first token's log-probabilities of a chat completion.

    Args:
        words: The spellings of Yes and of No; tokens with equal spelling are added up.
        ids: Their token ids; entries named `token_id:N` are read by id, further entries by their text.
        temperature: Divisor of the Yes − No logit.

    Raises:
        TransientError: if the answer contradicts itself, or is to another question.
        LookupError, TypeError: if it has another form.
        UnansweredError: if it does not determine the probability.
    """
    # The entries of Yes and No, by id or by text.
    entries, least = _first_token(answer)
    by_id = ids is not None and any(name.startswith("token_id:") for name, _ in entries)
    if by_id and len(dict(entries)) < len(entries):
        raise TransientError("a token listed twice")
    names = words
    if by_id and ids:
        names = [[f"token_id:{i}" for i in row] for row in ids]
    yes = _log_sum([value for name, value in entries if name in names[0]])
    no = _log_sum([value for name, value in entries if name in names[1]])

    # Their probabilities, if the list determines them.
    if max(yes, no) <= FLOOR_LOGPROB:
        raise UnansweredError(f"neither Yes nor No is among the {len(entries)} tokens that the server listed")
    if min(yes, no) <= FLOOR_LOGPROB and _sigmoid((least - max(yes, no)) / temperature) > CUT_TOLERANCE:
        listed, absent = ("Yes", "No") if yes > no else ("No", "Yes")
        raise UnansweredError(f"the server listed {listed} and not {absent}, which may be as likely as its least entry")
    return _sigmoid((yes - no) / temperature)


def read_text(answer: Json, model: str) -> str:
    """Read the text of a chat completion of this model."""
    check_model(answer, model)
    text = only_choice(answer)["message"]["content"]
    if not isinstance(text, str):
        raise TransientError("an answer without text")
    return text.strip()


def check_model(answer: Json, model: str) -> None:
    """Raise TransientError if another model answered; dated and qualified names are accepted."""
    name = str(answer.get("model") or model)
    if name != model and not re.fullmatch(rf"(.*/)?{re.escape(model)}(-20\d\d[-\d]*)?", name):
        raise TransientError(f"{name[:80]!r} answered instead of {model!r}")


def only_choice(answer: Json) -> Json:
    """Return the only choice of a chat completion. Raises TransientError for several, or another index than 0."""
    choices = answer["choices"]
    # Another number of choices means an answer to another question.
    indices = [choice.get("index", 0) for choice in choices]
    if indices != [0]:
        raise TransientError(f"an answer of {len(indices)} choices, their indices {str(indices)[:60]}")
    return cast(Json, choices[0])


def _first_token(answer: Json) -> tuple[set[tuple[str, float]], float]:
    """Read the listed (token, log-probability) of the first position, and the least of the likeliest.

    Repeated entries, such as the sampled token, occur once.
    """
    choice = only_choice(answer)
    try:
        first = choice["logprobs"]["content"][0]
    except (LookupError, TypeError):
        raise TransientError("an answer without log-probabilities") from None
    sampled = _entry(first)
    listed = [_entry(entry) for entry in first["top_logprobs"]]
    for index, (name, log_prob) in enumerate(listed):
        if any(name == other and 0 < abs(log_prob - value) <= ROUNDING for other, value in listed[:index]):
            raise TransientError(f"the token {name!r:.40} twice, with two log-probabilities that are nearly the same")

    entries = set(listed)
    if not _is_repeated(sampled, listed):
        entries.add(sampled)
    mass = sum(math.exp(log_prob) for _, log_prob in entries)
    if mass > 1 + MASS_TOLERANCE:
        raise TransientError(f"log-probabilities whose probabilities add up to {mass:.3f}")
    # The sampled token may be far less likely than the listed tokens, and is no bound.
    likeliest = [log_prob for name, log_prob in listed if (name, log_prob) != sampled]
    return entries, min(likeliest, default=0.0)


def _entry(entry: Json) -> tuple[str, float]:
    name = entry["token"]
    log_prob = entry["logprob"]
    if not isinstance(name, str) or isinstance(log_prob, bool) or not isinstance(log_prob, int | float):
        raise TransientError("a token or log-probability of another type")
    if not log_prob <= MASS_TOLERANCE:  # nor NaN
        raise TransientError("log-probabilities that are none (NaN, or above 0)")
    return name, float(log_prob)


def _is_repeated(sampled: tuple[str, float], listed: Sequence[tuple[str, float]]) -> bool:
    """Return whether the sampled token is listed, possibly with a rounded log-probability."""
    same = [log_prob for name, log_prob in listed if name == sampled[0]]
    if any(abs(log_prob - sampled[1]) <= ROUNDING for log_prob in same):
        return True
    # A token of the same spelling may be sampled, but only a less likely one.
    if same and sampled[1] > min(log_prob for _, log_prob in listed):
        raise TransientError(f"two log-probabilities of the sampled token {sampled[0]!r:.40}")
    return False


def _log_sum(log_probs: Sequence[float]) -> float:
    top = max(log_probs, default=-math.inf)
    if top <= FLOOR_LOGPROB:
        return -math.inf
    # Relative to the largest: exp of very negative values would be 0, which has no logarithm.
    return top + math.log(sum(math.exp(log_prob - top) for log_prob in log_probs))


def _sigmoid(logit: float) -> float:
    # By cases, since exp of a large number overflows.
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
