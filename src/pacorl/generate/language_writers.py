"""Panel writers that ask a language model: behind an OpenAI-compatible URL, or a checkpoint in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pacorl.generate.compose import prompt_from
from pacorl.generate.panels import WRITERS, PanelDraft, PanelWriter, SetRequest
from pacorl.io.hub import check_checkpoint
from pacorl.io.net import is_url, service_url
from pacorl.judge.http.chat import ChatModel, Message, ask_json

Text = Annotated[str, Field(min_length=3, max_length=2000)]
MAX_NEW_TOKENS = 4096


class PanelReply(BaseModel):
    """A language model's answer."""

    model_config = ConfigDict(extra="forbid")

    theme: Text
    panels: list[Text]
    criteria: dict[str, dict[str, Text]] = {}


def write_by_server(request: SetRequest, count: int, source: str, model: str) -> PanelDraft:
    """Write panels by a language model behind the URL `source`."""
    if not model:
        raise ValueError(f"{service_url(source, name='writer')} needs a model's name; give one with --writer-model")
    return _draft(ChatModel(model, base_url=source).ask_json, request, count)


def write_by_checkpoint(request: SetRequest, count: int, source: str, model: str) -> PanelDraft:
    """Write panels by a causal or Qwen-VL language model in this process, a folder or hub name."""
    return _draft(partial(ask_json, load_writer(source)), request, count)


def open_writer(source: str, chat: ChatModel) -> str | PanelWriter:
    """Load a writer once, for many requests.

    Args:
        source: `llm` or a URL for `chat`, a language model's folder or hub name, or a name in `WRITERS`, which stays.
        chat: the language model behind an API, whose address a URL replaces.
    """
    ask: Callable[..., PanelReply]
    if source == "llm" or is_url(source):
        if not chat.model:
            raise ValueError(
                "no language model is named; give --model, and --endpoint unless it is the client's default"
            )
        # A copy shares the counts of its original.
        if is_url(source):
            chat = replace(chat, base_url=source)
        ask = chat.ask_json
    elif source in WRITERS:
        return source
    else:
        ask = partial(ask_json, load_writer(source))
    return lambda request, count, *_: _draft(ask, request, count)


def load_writer(source: str) -> Callable[[Sequence[Message]], str]:
    """Load a language model: messages → its likeliest answer."""
    # Before the imports, which take seconds.
    check_checkpoint(source, "config.json")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from pacorl.core.devices import available_device, best_dtype
    from pacorl.io.pretrained import pretrained
    from pacorl.io.quiet import quiet_loading

    quiet_loading()
    device = available_device()
    sees_images = type(pretrained(AutoConfig, source)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    model = pretrained(kind, source, dtype=getattr(torch, best_dtype(source, device))).to(device).eval()
    tokenizer = pretrained(AutoTokenizer, source)

    def ask(messages: Sequence[Message]) -> str:
        # Models that think by default would spend the tokens of the answer on it; other templates ignore the option.
        options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False}
        inputs = tokenizer.apply_chat_template(list(messages), return_dict=True, return_tensors="pt", **options)
        tokens = model.generate(**inputs.to(device), do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return ask


def _draft(ask: Callable[..., PanelReply], request: SetRequest, count: int) -> PanelDraft:
    """Ask by `ChatModel.ask_json`, or the function of that name with its model."""

    def check(reply: PanelReply) -> None:
        if len(reply.panels) != count:
            raise ValueError(f"exactly {count} panels are needed, got {len(reply.panels)}")
        prompt_from("", theme=reply.theme, panels=reply.panels)  # refuses empty texts and panel tags

    messages = [{"role": "user", "content": request_text(request, count)}]
    reply = ask(messages, PanelReply, check=check)
    return PanelDraft(reply.theme, tuple(reply.panels), reply.criteria)


def request_text(request: SetRequest, count: int) -> str:
    """The question to the language model."""
    return (
        f"A person asks an image generator for a set of {count} images that belong together:\n{request.text}\n"
        f"Describe the set. Each panel's text is read alone, so describe the subject in the same words in every one; "
        "panels differ in what they show and agree in what the set keeps. Be concrete and visual.\n"
        "Answer with one JSON object and nothing else:\n"
        f'{{"theme": "<what all images share>", "panels": [<exactly {count} texts, one per image>], '
        '"criteria": {"Style": {"<name>": "<what must hold in all images>"}, "Identity": {…}, "Logic": {…}}}'
    )
