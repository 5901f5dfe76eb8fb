"""The judge that runs in this process: a Qwen-VL-family model, and where it runs.

    judge = LocalJudge.from_pretrained("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16", device="cuda")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

Legend: P prompts, V tokens of the vocabulary, N tokens of a prompt, K feature maps of an image, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from pacorl.core.devices import NONE
from pacorl.core.questions import text_fault
from pacorl.io.hub import HUB_NAME, check_checkpoint
from pacorl.judge.adapter import lora_config, merge_adapter
from pacorl.judge.calibration import Calibration
from pacorl.judge.judge import BATCH_TOKENS, MOST_WORDS, VARIANTS, WORDS
from pacorl.judge.prompting import ChatPrompt, Prompting
from pacorl.judge.sharing import FAMILIES, SharedForward, can_share, prefix_forest
from pacorl.models.int8 import quantize_model
from pacorl.models.lora import PEFT_CONFIG, adapter_file
from pacorl.types import TINY, TINY_EDITS, Question, Verdict

logger = logging.getLogger(__name__)

COMMITTED = Path(__file__).parents[1] / "tiny" / "checkpoints"
TINY_JUDGE = COMMITTED / "judge"
TINY_NOTE = (
    "Judged by the embedded tiny judge, which knows the tiny world of drawn characters only and can say nothing of "
    "other images."
)
EMBEDDED = {TINY: TINY_JUDGE, TINY_EDITS: COMMITTED / "edit-judge"}
"""Name of a committed judge → its folder."""
BASES = {
    "Qwen2.5-VL-7B": Path(__file__).with_name("qwen2_5_vl_7b.json"),
    "Qwen3.5-9B": Path(__file__).with_name("qwen3_5_9b.json"),
}
"""Published base → JSON file with its `config.json` as `model` and its image options as `processor`, for plans and
twins. The first one's sizes approximate other checkpoints outside this machine."""
HEAD_ROWS = 256
"""Rows of the language-model head per call: each row of logits spans the whole vocabulary."""
CPU_TOKENS = 1024
"""Most tokens of a forward on a CPU, per thread: their activations fit its caches, and weights are reread rarely."""


class LocalJudge:
    """A Qwen-VL-family model in this process. Calls of several threads pass one at a time.

    A call computes every distinct question, every distinct image (by its pixels) and every common prefix of prompts
    once.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        batch_tokens: int = BATCH_TOKENS,
        variants: bool = False,
        calibration: Calibration | None = None,
    ) -> None:
        """
        Args:
            batch_tokens: The most tokens of one forward, padding included (a longer prompt passes alone); on a CPU at
                most `CPU_TOKENS` per thread.
            variants: Add up the spellings `VARIANTS`, EditReward-Bench's rule.
            calibration: Curves that map the verdicts' P(Yes).

        Raises:
            ValueError: The model is of another family than `FAMILIES`, or attends otherwise.
        """
        from pacorl.judge.vision import batch_windows  # the model has imported transformers by now

        if not can_share(model.config):
            raise ValueError(
                f"a judge is a {', '.join(FAMILIES)} with full attention (sdpa or eager), and this is another "
                f"{model.config.model_type}"
            )
        # The model and its conversion of questions.
        self.model = model.eval().requires_grad_(False)
        """The model, frozen and in evaluation mode, its adapter merged."""
        batch_windows(self.model)
        self.processor = processor
        """The checkpoint's processor."""
        self.prompting = Prompting(model, processor)
        """Conversion of questions to tokens and pixels."""
        # Settings of verdicts.
        self.batch_tokens = batch_tokens
        self.yes_ids, self.no_ids = answer_ids(processor.tokenizer, variants=variants)
        self.calibration = calibration
        """Curves of the verdicts; None leaves P(Yes) as the model gives it."""
        self.note = ""
        """Caveat for readers of the verdicts; empty for most judges."""
        self._turn = Lock()
        """Held by a call: a forward keeps its state in the model's layers."""

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        *,
        dtype: str = "float32",
        quantize: str = NONE,
        stream: bool = False,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> LocalJudge:
        """Load a checkpoint folder, a hub name, or the committed tiny judge ("tiny").

        Args:
            checkpoint: A PEFT LoRA is merged into the base named in its config.
            quantize: `none`, or `int8` for the blocks' weights.
            stream: Keep these weights in main memory, and send them to the device layer by layer.

        Raises:
            ValueError: if a LoRA belongs to another base, its base is unknown, or weights are damaged.
        """
        # Cheap checks, before transformers is imported.
        source, adapter = check_local(str(checkpoint))
        if adapter:
            logger.warning("%s is a LoRA adapter; the judge is its base %s with it merged in", checkpoint, source)

        from transformers import AutoModelForImageTextToText

        from pacorl.io.pretrained import pretrained
        from pacorl.io.processor import load_processor

        model = pretrained(AutoModelForImageTextToText, source, dtype=getattr(torch, dtype))
        if adapter:
            model = merge_adapter(model, adapter)
        # After the merge: the quantised form is that of the merged weights.
        quantize_model(model, quantize, device=device, stream=stream)
        judge = cls(model.to(device), load_processor(source), **options)
        if checkpoint in (TINY, TINY_EDITS):
            judge.note = TINY_NOTE
        return judge

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return one verdict per question, in order. Raises ImageError for an unreadable image."""
        if not questions:
            return []
        with self._turn:
            verdicts = self._verdicts(questions)
        if self.calibration:
            return self.calibration.calibrated(verdicts)
        return verdicts

    def explain(self, question: Question) -> str:
        """Answer in words, by greedy decoding under the checkpoint's repetition penalty.

        Servers apply the same penalty, from generation_config.json. No verdict depends on it: P(Yes) comes from the
        model's own logits.

        Raises RuntimeError if the text holds a control token.
        """
        if reason := text_fault(question.text):
            raise RuntimeError(f"no reasons: {reason}")
        with self._turn:
            (prompt,) = self.prompting.chat_prompts([question])
            answer = self.generate(prompt, max_tokens=MOST_WORDS)
        return str(self.processor.tokenizer.decode(answer, skip_special_tokens=True)).strip()

    def models(self) -> list[nn.Module]:
        """Return the modules that run on the device."""
        return [self.model]

    def log_probs(self, prompts: Sequence[ChatPrompt]) -> list[Tensor]:
        """Return the (V,) log-probabilities of each prompt's first answer token, in fp64 on the CPU."""
        if not prompts:
            return []
        with self._turn:
            logits = self._last_logits(prompts, slice(None))
        return list(log_softmax(logits))

    @torch.inference_mode()
    def generate(self, prompt: ChatPrompt, *, max_tokens: int) -> list[int]:
        """Return the tokens of a greedy answer."""
        (encoded,) = self.prompting.encode([prompt])
        inputs = self.prompting.inputs(encoded)
        (tokens,) = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False).tolist()
        return tokens[len(encoded.ids) :]  # type: ignore[no-any-return]

    def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        # An unusable question costs its own verdict alone.
        faults = [text_fault(question.text) for question in questions]
        if any(faults):
            askable = [question for question, fault in zip(questions, faults, strict=True) if not fault]
            answers = iter(self._verdicts(askable) if askable else [])
            return [Verdict(None, fault) if fault else next(answers) for fault in faults]
        prompts = self.prompting.chat_prompts(questions)
        distinct = list(dict.fromkeys(prompts))
        logits = self._last_logits(distinct, torch.tensor([*self.yes_ids, *self.no_ids]))

        # P(Yes | Yes or No), in fp32, or fp64 for an fp64 model.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        yes, no = wide.split([len(self.yes_ids), len(self.no_ids)], dim=-1)
        logit_P2 = torch.stack([yes.logsumexp(-1), no.logsumexp(-1)], dim=-1)
        p_yes = dict(zip(distinct, logit_P2.softmax(-1)[:, 0].tolist(), strict=True))
        return [Verdict(p_yes[prompt]) for prompt in prompts]

    @torch.inference_mode()
    def _last_logits(self, prompts: Sequence[ChatPrompt], columns: Tensor | slice) -> Tensor:
        """Compute the (P, columns) logits at the last position of each prompt only."""
        # A forward over the tree of common prefixes.
        encoded = self.prompting.encode(prompts)
        feature_KND, runs = self.prompting.featured(encoded, batch_tokens=self.batch_tokens)
        forest = prefix_forest([run.symbol_N for run in runs])
        batch_tokens = self.batch_tokens
        if self.model.device.type == "cpu":
            batch_tokens = min(batch_tokens, CPU_TOKENS * torch.get_num_threads())
        hidden_PD = SharedForward(self.model, feature_KND, batch_tokens).answers(runs, forest)
        # Only `columns` are kept, so that memory never holds all rows of the vocabulary.
        return torch.cat([self.model.lm_head(rows_PD)[:, columns] for rows_PD in hidden_PD.split(HEAD_ROWS)])


def check_local(checkpoint: str) -> tuple[str, str]:
    """Check a checkpoint before transformers is imported, which takes seconds.

    Returns:
        Folder or hub name of a model, and the LoRA on it, which is the checkpoint itself; empty for a model.

    Raises:
        ValueError: There is no such checkpoint, or it is a LoRA whose base is unknown or missing.
    """
    source = str(EMBEDDED.get(checkpoint, checkpoint))
    config = lora_config(source, fetch=True)
    if not config:
        return source, ""
    base = str(config.get("base_model_name_or_path") or "")
    if not HUB_NAME.fullmatch(base) and not (base and Path(base).exists()):
        raise ValueError(
            f"{checkpoint} is a LoRA adapter of {base or 'no named base'}, which is not here; write the base's folder "
            f"or hub name into base_model_name_or_path of its {PEFT_CONFIG}"
        )
    check_checkpoint(base, "config.json")
    adapter_file(source)
    return base, source


def log_softmax(logits: Tensor) -> Tensor:
    """Compute log-probabilities in fp64 on the CPU."""
    # In fp32 a value of −20 is exact to 1e-6 only, and P(Yes) is a difference of two.
    return logits.cpu().double().log_softmax(-1)


def single_token(tokenizer: Any, word: str) -> int:
    """Return the id of a single-token word. Raises ValueError for a word of several tokens."""
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens for this judge's tokenizer, and must be one to be a score")
    return int(ids[0])


def answer_ids(tokenizer: Any, *, variants: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of Yes and of No; with `variants` also of their single-token spellings."""
    # The first spelling must be a single token; further ones count if they are.
    all_ids = []
    for first, *spellings in VARIANTS if variants else WORDS:
        word_ids = [single_token(tokenizer, first)]
        for word in spellings:
            ids = tokenizer.encode(word, add_special_tokens=False)
            if len(ids) == 1:
                word_ids.append(ids[0])
        all_ids.append(tuple(word_ids))
    return all_ids[0], all_ids[1]
