"""Judge behind the built-in server: its queue, its one thread, and answers of one token or many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pacorl.core.questions import text_fault
from pacorl.gate.check import Check, ControlError, check_set
from pacorl.gate.score_set import score_set
from pacorl.gate.scores import Scores
from pacorl.judge.local import LocalJudge, log_softmax
from pacorl.judge.prompting import ChatPrompt, DistinctImage, chat_text
from pacorl.serve.schema import ChatRequest, CheckRequest, ConsistencyRequest, Message, TextPart
from pacorl.types import Size
from pacorl.web import RefusedError

if TYPE_CHECKING:
    from PIL.Image import Image

WINDOW_SECONDS = 0.003
"""Wait of a batch's first question: short against a forward, long enough for the requests of one call."""

LETTERS_OF_A_TOKEN = 16
"""Upper bound of the letters per token of any prose."""

T = TypeVar("T")
Waiting = tuple[ChatPrompt, asyncio.Future[Tensor]]


class UnjudgedError(RefusedError):
    """Refusal of images about which the judge fails its controls."""

    def __init__(self, error: ControlError) -> None:
        super().__init__(str(error), status=422)
        self.fields: dict[str, Any] = {
            "type": "refused",
            "control": asdict(error.control),
            "image": error.control.image,
        }
        """Further fields of the error in the answer."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Generated tokens, and the log-probabilities of the whole vocabulary at each position."""

    ids: tuple[int, ...]
    log_probs: Tensor
    """(tokens, vocabulary), fp64; no rows unless the request has `logprobs`."""
    stopped: bool
    """Whether the model wrote an end token."""


class Batcher:
    """Dynamic batching: all questions that wait when the model is free share a forward, in order of arrival."""

    def __init__(
        self,
        run: Callable[[Sequence[ChatPrompt]], list[Tensor]],
        executor: Executor,
        *,
        largest: int,
        most_waiting: int,
    ) -> None:
        self._run = run
        self._executor = executor
        self._largest = largest
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(most_waiting)
        self.batches = 0
        self.questions = 0
        self._of_sets = 0
        """Questions of sets that wait for the thread."""

    @property
    def waiting(self) -> int:
        """Number of questions in the queue and of waiting sets."""
        return self._queue.qsize() + self._of_sets

    async def run(self, ask: Callable[[], T], *, questions: int) -> T:
        """Ask about a set on the judge's thread, as one batch of so many questions."""
        loop = asyncio.get_running_loop()
        waiting = questions

        def leave() -> None:
            nonlocal waiting
            self._of_sets -= waiting
            waiting = 0

        def count() -> None:
            leave()
            self.batches += 1
            self.questions += questions

        def on_thread() -> T:
            # The loop alone changes the counters.
            loop.call_soon_threadsafe(count)
            return ask()

        self._of_sets += questions
        try:
            return await loop.run_in_executor(self._executor, on_thread)
        finally:
            leave()  # if the caller hung up before its turn

    async def ask(self, prompt: ChatPrompt) -> Tensor:
        """Return the log-probabilities of `run`. Raises RefusedError if the queue is full, or the error of `run`."""
        future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((prompt, future))
        except asyncio.QueueFull:
            raise RefusedError("too many questions are waiting; ask again", status=429) from None
        return await future

    async def work(self) -> None:
        """Answer questions until the task is cancelled."""
        while True:
            # The first question opens a window for the rest of its call.
            batch = [await self._queue.get()]
            await asyncio.sleep(WINDOW_SECONDS)
            while len(batch) < self._largest and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await self._answer(batch)

    async def _answer(self, batch: Sequence[Waiting]) -> None:
        # Callers who have hung up need no answer.
        batch = [(prompt, future) for prompt, future in batch if not future.done()]
        if not batch:
            return
        self.batches += 1
        self.questions += len(batch)

        prompts = [prompt for prompt, _ in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._executor, self._run, prompts)
        except Exception as error:  # of any kind, for the caller
            if len(batch) > 1:
                # One by one: the prompt at fault must not fail the others.
                for waiting in batch:
                    await self._answer([waiting])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
            return

        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


class ServedModel:
    """Judge with its name, its queue and its thread."""

    def __init__(self, name: str, judge: LocalJudge, *, together: int, waiting: int) -> None:
        self.name = name
        self.judge = judge
        self.tokenizer: Any = judge.processor.tokenizer
        self.vocabulary: int = judge.model.get_input_embeddings().num_embeddings
        # A checkpoint has one end token or several.
        ends = judge.model.generation_config.eos_token_id
        self.end_ids = {ends} if isinstance(ends, int) else set(ends or ())
        # One thread: a model answers one call at a time.
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"judge-{name}")
        self.batcher = Batcher(judge.log_probs, self.executor, largest=together, most_waiting=waiting)

    def check_tokens(self, request: ChatRequest, most_new: int) -> None:
        """Raise RefusedError for too many new tokens, or for ids outside of the vocabulary."""
        if request.new_tokens > most_new:
            raise RefusedError(f"max_tokens {request.new_tokens} is above this server's {most_new}")
        if beyond := [i for i in request.logprob_token_ids if i >= self.vocabulary]:
            raise RefusedError(f"logprob_token_ids {beyond} are beyond the {self.vocabulary} tokens")

    def text(self, messages: Sequence[Message], sizes: Sequence[Size], *, most_tokens: int) -> tuple[str, int]:
        """Write a conversation by the model's chat template, and count its tokens, those of images included.

        Args:
            messages: the turns.
            sizes: of their images, in order.
            most_tokens: limit of text and images together.

        Raises:
            ValueError: if a text has a token of the conversation's structure, or if the conversation is too long.
        """
        # The cheap limit first: a text far beyond it is not tokenized.
        texts = [part.text for message in messages for part in message.content if isinstance(part, TextPart)]
        check_length("".join(texts), most_tokens=most_tokens)
        for text in texts:
            if fault := text_fault(text):
                raise ValueError(fault)

        # The template writes a placeholder for each image.
        turns = []
        for message in messages:
            content: list[dict[str, str]] = []
            for piece in message.content:
                content.append(
                    {"type": "text", "text": piece.text} if isinstance(piece, TextPart) else {"type": "image"}
                )
            turns.append({"role": message.role, "content": content})
        text = chat_text(self.judge.processor, turns)
        tokens = self.judge.prompting.count(text, sizes)
        if tokens > most_tokens:
            raise ValueError(f"the request is {tokens:,} tokens long; at most {most_tokens:,} are taken")
        return text, tokens

    @staticmethod
    def prompt(text: str, images: Sequence[Image]) -> ChatPrompt:
        """Join a conversation of `text` with its images."""
        distinct = tuple(DistinctImage.of(image, name=f"image {number}") for number, image in enumerate(images, 1))
        return ChatPrompt(text, distinct)

    async def answer(self, request: ChatRequest, prompt: ChatPrompt) -> Continuation:
        """Continue a conversation. A single token comes from the batcher."""
        if request.new_tokens == 1:
            row = await self.batcher.ask(prompt)
            token = pick_token(row, temperature=request.temperature, top_p=request.top_p, seed=request.seed)
            return Continuation((token,), row[None], stopped=token in self.end_ids)
        return await asyncio.get_running_loop().run_in_executor(self.executor, self._generate, request, prompt)

    async def score(self, request: ConsistencyRequest, images: Sequence[Image]) -> Scores:
        """Score every pair of a set."""
        ask = partial(
            score_set,
            self.judge,
            images,
            questions=request.questions,
            ranking=request.ranking,
            symmetric=request.symmetric,
        )
        return await self.batcher.run(ask, questions=request.asked)

    async def check(self, request: CheckRequest, images: Sequence[Image], *, least: float) -> Check:
        """Check panels after the controls. Raises UnjudgedError if the judge fails them."""
        panels = len(request.panels)
        ask = partial(
            check_set,
            self.judge,
            images[:panels],
            least=least,
            characters=request.characters(images[panels:]),
            questions=request.questions,
            all_pairs=request.all_pairs,
            symmetric=request.symmetric,
        )
        try:
            return await self.batcher.run(ask, questions=request.asked)
        except ControlError as error:
            raise UnjudgedError(error) from None

    def _generate(self, request: ChatRequest, prompt: ChatPrompt) -> Continuation:
        # Greedy unless a temperature is given.
        sampling: dict[str, Any] = {"do_sample": False}
        if request.repetition_penalty is not None:
            sampling["repetition_penalty"] = request.repetition_penalty
        if request.temperature > 0:
            # top_k 0: transformers' default of 50 is no part of the API.
            sampling |= {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
            if request.seed is not None:
                torch.manual_seed(request.seed)
        output = self.judge.generate(
            prompt, max_new_tokens=request.new_tokens, output_logits=request.logprobs, **sampling
        )
        ids = tuple(output.sequences[0].tolist())
        rows = log_softmax(torch.cat(output.logits)) if request.logprobs else torch.empty(0, self.vocabulary)
        return Continuation(ids, rows, stopped=bool(ids) and ids[-1] in self.end_ids)


def check_length(text: str, *, most_tokens: int) -> None:
    """Raise ValueError for a text far beyond the limit. Tokenizing would take 20 s a megabyte."""
    if len(text) > LETTERS_OF_A_TOKEN * most_tokens:
        raise ValueError(f"a text of {len(text):,} letters; at most {most_tokens:,} tokens are taken")


def pick_token(log_probs: Tensor, *, temperature: float, top_p: float = 1.0, seed: int | None = None) -> int:
    """Choose a position's token: the likeliest at temperature 0, else drawn from the nucleus of mass `top_p`."""
    if temperature == 0:
        return int(log_probs.argmax())
    probability, token = (log_probs / temperature).softmax(-1).sort(descending=True)
    probability[probability.cumsum(-1) - probability >= top_p] = 0  # the likeliest always stays
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return int(token[probability.multinomial(1, generator=generator)])
