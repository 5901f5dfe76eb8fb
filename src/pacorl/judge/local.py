"""The judge that runs in this process: a Qwen-VL-family model, its options, and where it runs.

    judge = LocalJudge.from_pretrained("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16", device="cuda")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

Legend: P prompts, V tokens of the vocabulary, N tokens of a prompt, K feature maps of an image, D width.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn

from pacorl.core.devices import available_device, best_dtype, check_dtype
from pacorl.core.questions import text_fault
from pacorl.io.documents import read_object
from pacorl.io.hub import check_checkpoint, checkpoint_digest, local_file
from pacorl.io.net import is_url, shown_url
from pacorl.judge.domain import Domain
from pacorl.judge.judge import VARIANTS, WORDS, InProcessOptions, JudgeFacts, JudgeSpec
from pacorl.judge.pairwise import both_orders
from pacorl.judge.prompting import ChatPrompt, Prompting
from pacorl.judge.sharing import SharedForward, can_share, packed
from pacorl.models.quantize import NONE
from pacorl.models.quantize.linear import check_quantization, quantize_model
from pacorl.tiny import CHECKPOINTS
from pacorl.types import Question, Verdict

logger = logging.getLogger(__name__)

TINY_JUDGE = CHECKPOINTS / "judge"
HEAD_ROWS = 256
"""Answers that pass the head together: each is a row of the whole vocabulary."""
CPU_TOKENS = 1024
"""Most tokens of a forward on a CPU, per thread: its caches hold the activations of so many, and no weight is read too
often for what is computed with it."""


class LocalOptions(InProcessOptions):
    """A judge in this process."""

    backend: Literal["local"] = "local"
    checkpoint: str = "X-GenGroup/PaCo-Reward-7B"
    """A transformers folder, a hub name, or `tiny` for the committed judge."""

    @model_validator(mode="after")
    def _no_address(self) -> LocalOptions:
        if is_url(self.checkpoint):
            raise ValueError(f"checkpoint {shown_url(self.checkpoint)} is a URL; set backend: http")
        return self

    def identity(self) -> str:
        sources = [TINY_JUDGE if self.checkpoint == "tiny" else self.checkpoint, *filter(None, [self.adapter])]
        if base := base_of(str(sources[0])):
            sources.append(base)
        digests = [checkpoint_digest(str(source)) for source in sources]
        return f"sha256 {hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}" if all(digests) else ""


def base_of(checkpoint: str) -> str:
    """The base of a checkpoint that is an adapter on this machine; empty of any other."""
    path = None if local_file(checkpoint, "config.json") else local_file(checkpoint, "adapter_config.json")
    return str(read_object(path).get("base_model_name_or_path") or "") if path else ""


class LocalJudge:
    """A Qwen-VL-family model in this process; one call at a time.

    In one call every distinct question is asked once, every distinct image passes the vision tower once (equal
    pixels are one image), and what questions begin with in common is computed once.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        batch_tokens: int = 8192,
        temperature: float = 1.0,
        symmetric: bool = False,
        variants: bool = False,
        share: bool | None = None,
        domain: Domain | None = None,
    ) -> None:
        """
        Args:
            batch_tokens: The most tokens of one forward, padding included (one longer prompt still passes alone); on
                a CPU no more than `CPU_TOKENS` per thread.
            temperature: Divides the Yes − No logit.
            symmetric: Asks about every pair in both orders; the verdict is the mean, `order_gap` their distance.
            variants: Adds up the spellings `VARIANTS`, EditReward-Bench's rule.
            share: Computes common beginnings once; by default if that is proven equal.
            domain: Verdicts about images outside of it are missing.
        """
        from pacorl.judge.vision import batch_windows  # the model has imported transformers by now

        self.model = model.eval().requires_grad_(False)
        """The model, frozen and in evaluation mode, its adapter merged."""
        batch_windows(self.model)
        self.processor = processor
        """The checkpoint's own."""
        self.prompting = Prompting(model, processor)
        """Turns questions into tokens and pixels."""
        self.batch_tokens, self.temperature, self.symmetric = batch_tokens, temperature, symmetric
        self.share = can_share(model.config) if share is None else share
        """Whether common beginnings of prompts are computed once."""
        self.yes_ids, self.no_ids = answer_ids(processor.tokenizer, variants=variants)
        self.domain = domain
        """Tells images that the judge knows from others; None declines nothing."""

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path = "tiny",
        *,
        adapter: str = "",
        dtype: str = "float32",
        quantize: str = NONE,
        stream: bool = False,
        device: str | torch.device = "cpu",
        decline: bool = False,
        **options: Any,
    ) -> LocalJudge:
        """Loads a checkpoint folder, a hub name, or the committed tiny judge ("tiny"), with an adapter if named.

        Args:
            checkpoint: If it is itself a PEFT LoRA, it is loaded on the base that its config names.
            quantize: `none`, or the form of `pacorl.models.quantize.QUANTIZERS` that the blocks' weights are packed in;
                an adapter is merged before.
            stream: whether they stay in main memory, and are sent to the device layer by layer.
            decline: Verdicts about images outside of the checkpoint's domain, if it brings one (`judge.domain`), are
                missing and say so. A reward never declines.
            options: Those of `LocalJudge`.

        Raises:
            ValueError: if the adapter belongs to another base, its base is unknown, or weights are damaged.
        """
        check_quantization(quantize)
        for key, name in (("judge.dtype", dtype), ("judge.quantize", quantize)):
            check_dtype(name, device, key=key)
        source, merged = check_local(str(checkpoint), adapter)
        if merged != adapter:
            logger.warning("%s is a LoRA adapter; the judge is its base %s with it merged in", checkpoint, source)
        from transformers import AutoModelForImageTextToText

        from pacorl.io.pretrained import pretrained
        from pacorl.io.processor import load_processor
        from pacorl.judge.adapter import merge_adapter

        model = pretrained(AutoModelForImageTextToText, source, dtype=getattr(torch, dtype))
        if merged:
            model = merge_adapter(model, merged)
        quantize_model(model, quantize, device=device, stream=stream)
        # An adapter may have learned more than its base, so its own domain counts.
        domain = Domain.load(merged or source) if decline else None
        return cls(model.to(device), load_processor(source), domain=domain, **options)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order. Raises ImageError if an image cannot be looked at."""
        if not questions:
            return []
        ask = partial(both_orders, self._verdicts) if self.symmetric else self._verdicts
        return self.domain.verdicts(ask, questions) if self.domain else ask(questions)

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """The answer in words, the likeliest token each time under the checkpoint's repetition penalty.

        The penalty is that of generation_config.json, which servers apply as well. No verdict depends on it: P(Yes) is
        read from the model's own logits.

        Raises RuntimeError if an image is outside of the judge's domain, or the text holds a control token.
        """
        if reason := text_fault(question.text) or (self.domain.reason(question.images) if self.domain else ""):
            raise RuntimeError(f"no reasons: {reason}")
        (prompt,) = self.prompting.chat_prompts([question])
        answer = self.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False).sequences[0]
        return str(self.processor.tokenizer.decode(answer, skip_special_tokens=True)).strip()

    def models(self) -> list[nn.Module]:
        """What computes on the device."""
        return [self.model]

    def facts(self) -> JudgeFacts:
        """The ids of Yes and No, and the size of the weights."""
        weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return JudgeFacts(self.yes_ids, self.no_ids, weight_bytes=weight_bytes)

    def log_probs(self, prompts: Sequence[ChatPrompt]) -> list[Tensor]:
        """Per prompt the (V,) log-probabilities of the first answer token, fp64 on the CPU."""
        return list(log_softmax(self._last_logits(prompts, slice(None)))) if prompts else []

    @torch.inference_mode()
    def generate(self, prompt: ChatPrompt, **options: Any) -> Any:
        """What transformers' `generate` returns as a dict; its `sequences` hold the new tokens alone."""
        inputs = self.prompting.padded(self.prompting.encode([prompt]))
        output = self.model.generate(**inputs, **options, return_dict_in_generate=True)
        output.sequences = output.sequences[:, inputs["input_ids"].shape[1] :]
        return output

    def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        faults = [text_fault(question.text) for question in questions]
        if any(faults):
            askable = [question for question, fault in zip(questions, faults, strict=True) if not fault]
            answers = iter(self._verdicts(askable) if askable else [])
            return [Verdict(None, fault) if fault else next(answers) for fault in faults]
        prompts = self.prompting.chat_prompts(questions)
        distinct = list(dict.fromkeys(prompts))
        logits = self._last_logits(distinct, torch.tensor([*self.yes_ids, *self.no_ids]))
        p_yes = dict(zip(distinct, self._p_yes(logits).tolist(), strict=True))
        return [Verdict(p_yes[prompt]) for prompt in prompts]

    def _p_yes(self, logits: Tensor) -> Tensor:
        """P(Yes | Yes or No) from the logits of `yes_ids` and `no_ids`, in fp32 (fp64 for an fp64 model)."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        yes, no = (columns.logsumexp(-1) for columns in wide.split([len(self.yes_ids), len(self.no_ids)], dim=-1))
        return (torch.stack([yes, no], dim=-1) / self.temperature).softmax(-1)[:, 0]

    @torch.inference_mode()
    def _last_logits(self, prompts: Sequence[ChatPrompt], columns: Tensor | slice) -> Tensor:
        """(P, columns) logits at the last position of each prompt, and nowhere else."""
        encoded = self.prompting.encode(prompts)
        if self.share:
            feature_KND, runs = self.prompting.featured(encoded, batch_tokens=self.batch_tokens)
            on_cpu = self.model.device.type == "cpu"
            most = min(self.batch_tokens, CPU_TOKENS * torch.get_num_threads()) if on_cpu else self.batch_tokens
            hidden_PD = SharedForward(self.model, feature_KND, most).last_hidden(runs)
            # Of a whole vocabulary's rows only `columns` are kept, so that they never lie in memory together.
            return torch.cat([self.model.lm_head(rows_PD)[:, columns] for rows_PD in hidden_PD.split(HEAD_ROWS)])
        rows, most = dict[int, Tensor](), self.batch_tokens
        # Longest first: they pad little, and a batch too large for the memory fails at once.
        longest_first = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
        for batch in packed(longest_first, lambda _, batch: (len(batch) + 1) * len(encoded[batch[0]]) <= most):
            inputs = self.prompting.padded([encoded[i] for i in batch])
            logits = self.model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1, columns]
            rows |= dict(zip(batch, logits, strict=True))
        return torch.stack([rows[number] for number in range(len(encoded))])


def check_local(checkpoint: str, adapter: str = "") -> tuple[str, str]:
    """Check what can be known of a judge of this process before transformers is imported, which takes seconds.

    Returns:
        Its base, a folder or hub name, and the adapter on it.

    Raises:
        ValueError: There is no such checkpoint or adapter, or the adapter has layers that the checkpoint has not.
    """
    from pacorl.judge.adapter import base_and_adapter, today
    from pacorl.models.lora.formats import PEFT_CONFIG, check_layers

    source = str(TINY_JUDGE) if checkpoint == "tiny" else checkpoint
    check_checkpoint(source, "config.json", PEFT_CONFIG)
    base, adapter = base_and_adapter(source, adapter)
    check_checkpoint(base, "config.json")
    if adapter:
        check_layers(adapter, base, name_of=today)
    return base, adapter


def placement(checkpoint: str, dtype: str = "auto") -> dict[str, Any]:
    """The `dtype` and `device` for `LocalJudge.from_pretrained`.

    "auto" is bfloat16 on a GPU and float32 elsewhere, and float32 for the tiny judge everywhere.
    """
    device = available_device()
    return {"dtype": best_dtype(checkpoint, device) if dtype == "auto" else dtype, "device": device}


def open_local(options: LocalOptions, *, device: torch.device, processes: int = 1, waits: bool = True) -> LocalJudge:
    """Loads the judge of a config; each of the processes has its own, and there is nothing to wait for."""
    keys = {"checkpoint", "adapter", "dtype", "quantize", "stream", "batch_tokens", "symmetric", "variants"}
    return LocalJudge.from_pretrained(device=device, **options.model_dump(include=keys))


def from_source(
    source: str, *, adapter: str = "", model: str = "", api_key_env: str = "", **options: Any
) -> tuple[LocalJudge, str]:
    """A judge of this process by its checkpoint, at its best place; `model` and `api_key_env` mean nothing to it."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one would be drawn for the weights, between a command's own lines
    judge = LocalJudge.from_pretrained(source, adapter=adapter, **options, **placement(source))
    return judge, f"{source} + {adapter}" if adapter else source


SPEC = JudgeSpec(
    options=LocalOptions,
    open=open_local,
    from_source=from_source,
    check=check_local,
    base="Qwen2.5-VL-7B",
    architecture=Path(__file__).with_name("qwen2_5_vl_7b.json"),
    tiny=TINY_JUDGE,
)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities in fp64 on the CPU."""
    # One of −20 in fp32 is known to 1e-6 only, and P(Yes) is a difference of two.
    return logits.cpu().double().log_softmax(-1)


def single_token(tokenizer: Any, word: str) -> int:
    """The id of a word that must be one token. Raises ValueError if it is not."""
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens for this judge's tokenizer, and must be one to be a score")
    return int(ids[0])


def answer_ids(tokenizer: Any, *, variants: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of Yes and of No, first; with `variants` also those of their other spellings that are single tokens."""
    all_ids = []
    for first, *others in VARIANTS if variants else WORDS:
        spelled = [tokenizer.encode(word, add_special_tokens=False) for word in others]
        all_ids.append((single_token(tokenizer, first), *(ids[0] for ids in spelled if len(ids) == 1)))
    yes_ids, no_ids = all_ids
    return yes_ids, no_ids
