"""Models that score a run's images: their memory, and the questions that rewards really ask.

Rewards are called with images of noise and a judge that records. Questions of one call share prefixes, so that their
tokens are counted, and batched, by the trees of `judge.sharing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pacorl.core.devices import best_dtype
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.judge.sharing import Node, batches, prefix_forest
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META, MemoryLedger, measured
from pacorl.rewards.consistency import Consistency, Contrast, JudgedReward
from pacorl.types import Character, Grid, Prompt, Question, Size, Verdict

HEAD_TOKENS = 15
"""Tokens of the chat template before the first image."""
TAIL_TOKENS = 6
"""Tokens of the chat template after the text."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""About a token of a question's text: a word or a sign."""
THEME = "A small red fox who runs a lighthouse by the northern sea, painted in soft watercolour on cream paper."
"""Theme of absent prompts."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""
EVALUATED = 8
"""Images of an evaluation's call that are planned: they fill the judge's batches."""

Calls = list[list[Question]]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A judge or reward model: bytes of its weights and buffers, and a judge's work."""

    name: str
    weights: int
    """On the device."""
    streamed: int
    """In main memory."""
    buffers: int
    """Peak of a forward, with the keys and values that it reads."""
    files: int
    image_flops: float = 0.0
    """Of the questions about a training image."""
    evaluated_flops: float = 0.0
    """Of the questions about an image of an evaluation."""


@dataclass
class Recorder:
    """A judge that notes the questions of each call, and answers none."""

    calls: Calls = field(default_factory=list)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        self.calls.append(list(questions))
        return [Verdict(None, "planned")] * len(questions)

    def explain(self, question: Question) -> str:
        return ""


def judges_of(
    config: PolicyConfig, judges: Sequence[sources.Checkpoint], *, prompts: Sequence[Prompt], sizes: Sequence[Size]
) -> list[Scorer | None]:
    """Measure the judge of a run and that of its evaluation; None if there is none.

    Args:
        config: the run.
        judges: the checkpoints of both.
        prompts: of training, the first of which stands for all; without them a set of 2 × 2, or an edit.
        sizes: of the training images and of the evaluation's.
    """
    # A call of training holds whole groups if a reward compares their samples.
    batch = math.lcm(config.sampling.batch, config.group_size) if config.whole_groups else config.sampling.batch
    with TemporaryDirectory() as folder:
        prompt = prompts[0] if prompts else _assumed_prompt(config, Path(folder))

        def asked(key: str, size: Size, images: int, *, trains: bool = False) -> Calls:
            judge = Recorder()
            shown = ([prompt] * images, _noise(size, images))
            for name, reward in sources.rewards_of(config, judge=judge):
                if not name.startswith(key):
                    continue
                if trains and isinstance(reward, Consistency) and reward.contrast:
                    Contrast(reward, range(images))(*shown)
                elif isinstance(reward, JudgedReward):
                    reward(*shown)
            return judge.calls

        train = asked("rewards.", sizes[0], batch, trains=True)
        evaluated = asked("rewards.", sizes[1], EVALUATED)
        held_out = asked("evaluation.", sizes[1], EVALUATED)
    own = config.evaluation.judge_settings
    evaluated += [] if own else held_out
    scorers: list[Scorer | None] = [None, None]
    if config.judge:
        scorers[0] = _judge("judge", config.judge, judges[0].configs, train, evaluated, batch=batch)
    if own:
        scorers[1] = _judge("evaluation's judge", own, judges[1].configs, [], held_out, batch=batch)
    return scorers


def pair_judge(settings: JudgeSettings, configs: Parts, *, size: Size, sets: bool) -> Scorer:
    """Measure the judge of generated candidates: sets of 2 × 2 of this size, or images."""
    grid, size = (Grid(2, 2), size) if sets else (Grid(1, 2), Size(size.height, 2 * size.width))
    judge = Recorder()
    Consistency(judge)([Prompt(0, THEME, THEME, grid)] * EVALUATED, _noise(size, EVALUATED))
    return _judge("judge", settings, configs, judge.calls, [], batch=EVALUATED)


def clip_scorers(config: PolicyConfig, *, panels: int) -> Iterator[Scorer]:
    """Measure the encoders of rewards, for batches of images with so many panels."""
    # Rewards of one checkpoint share an encoder, which is named after the last of them.
    encoders = {id(encoder): (key, encoder) for key, encoder in sources.clip_encoders(config).items()}
    count = min(CLIP_BATCH, config.sampling.batch * panels)
    for key, encoder in encoders.values():
        model: Any = model_on_meta(sources.clip_parts(encoder), dtype=getattr(torch, encoder.dtype))
        side = model.config.vision_config.image_size
        pixels = torch.empty(count, 3, side, side, device=META, dtype=model.dtype)
        peak = measured(lambda: model.vision_model(pixel_values=pixels)).peak  # noqa: B023 - runs at once
        size = weight_bytes(model)
        yield Scorer(f"CLIP of {key.split('.')[-3]}", size, 0, peak, size)


def _judge(name: str, settings: JudgeSettings, configs: Parts, train: Calls, evaluated: Calls, *, batch: int) -> Scorer:
    """Measure a judge's forwards for the calls about a batch and about `EVALUATED` images."""
    # A server's memory is not the run's: its work is that of bf16.
    form = JudgeSettings() if settings.remote else settings
    configs = configs or sources.published_judge(settings.name)[1]
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(form.checkpoint, "cuda")))
    files = parameter_count(model) * model.dtype.itemsize
    # Each patch of the vision tower is a quarter of a token.
    per_visual_token = 2 * parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    quantize_model(model, form.quantize, device=META, stream=form.stream)

    # The forwards of each call. The largest decides the peak, with the keys and values that a forward reads.
    calls = [*train, *evaluated]
    forests = [list(_forwards(prefix_forest([_symbols(question, configs) for question in call]))) for call in calls]
    forwards = [forward for forest in forests for forward in forest]
    peak, per_token = 0.0, 0.0
    if forwards:
        largest = max(forwards, key=attrgetter("padded"))
        ledger = _language_forward(model, largest)
        per_token = ledger.flops / largest.padded
        scale = ledger.peak / largest.padded
        peak = max(forward.padded * scale + forward.kept * _kept_bytes(model) for forward in forwards)

    # Each pair in both orders shares nothing with itself.
    flops = []
    for call, forest in zip(calls, forests, strict=True):
        images = {image.tobytes(): image for question in call for image in question.images}
        visual = per_visual_token * sum(_tokens(image, configs) for image in images.values())
        language = per_token * sum(forward.tokens for forward in forest)
        flops.append((1 + settings.symmetric) * (visual + language))
    return Scorer(
        name,
        weight_bytes(model),
        streamed_bytes(model),
        round(peak),
        files,
        image_flops=sum(flops[: len(train)]) / batch,
        evaluated_flops=sum(flops[len(train) :]) / EVALUATED,
    )


def _noise(size: Size, images: int) -> list[Image.Image]:
    """Draw images of which no two panels are equal."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size.height, size.width, 3), np.uint8)) for _ in range(images)]


def _assumed_prompt(config: PolicyConfig, folder: Path) -> Prompt:
    """Return a prompt in place of absent ones: an edit of an image in `folder`, or a set with a character."""
    path = folder / "source.png"
    Image.new("RGB", config.sampling.size, "white").save(path)
    if sources.planned_images(config):
        return Prompt(0, "Change it.", sources=(path,))
    panels = tuple(f"the hero in scene {number}" for number in range(4))
    return Prompt(0, THEME, THEME, Grid(2, 2), panels, characters=(Character("", "", (path,)),))


# --- tokens ----------------------------------------------------------------------------------------------------


def _tokens(image: Image.Image, configs: Parts) -> int:
    return image_tokens(Size(image.height, image.width), configs["processor"])


def _symbols(question: Question, configs: Parts) -> NDArray[np.int64]:
    """List symbols of a question's tokens, equal where questions share them."""
    runs: list[tuple[str | bytes, int]] = [("", HEAD_TOKENS)]
    runs += [(image.tobytes(), _tokens(image, configs)) for image in question.images]
    runs.append((question.text, len(TOKEN.findall(question.text)) + TAIL_TOKENS))
    return np.concatenate([(hash(content) % 2**40 << 20) + np.arange(length) for content, length in runs])


class Forward(NamedTuple):
    """One forward over nodes of a prefix tree, padded to the longest."""

    rows: int
    longest: int
    tokens: int
    """Without padding."""
    kept: int
    """Tokens of the levels above whose keys and values are in memory."""

    @property
    def padded(self) -> int:
        """Tokens with padding."""
        return self.rows * self.longest


def _forwards(nodes: Sequence[Node], *, above: int = 0, kept: int = 0) -> Iterator[Forward]:
    """List the forwards of a forest as the judge makes them, a level below the other.

    Args:
        nodes: of one level.
        above: tokens before these nodes, padding included.
        kept: tokens in the caches of the levels above.
    """
    for batch in batches(nodes, tokens=BATCH_TOKENS):
        longest = max(map(len, batch))
        yield Forward(len(batch), longest, sum(map(len, batch)), kept)
        children = [child for node in batch for child in node.children]
        if children:
            yield from _forwards(children, above=above + longest, kept=kept + len(batch) * (above + longest))


def _language_forward(model: Any, forward: Forward) -> MemoryLedger:
    """Measure a forward of the language model, the largest part of a judge."""
    language = model.model.language_model
    shape = (forward.rows, forward.longest)
    positions = torch.zeros(3, *shape, device=META, dtype=torch.long)
    embedded = torch.empty(*shape, language.config.hidden_size, device=META, dtype=model.dtype)
    return measured(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))


def _kept_bytes(model: Any) -> int:
    """Compute the bytes of a token's keys and values."""
    config = model.model.language_model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize)
