"""Where a judge's chat template comes from: one of a checkpoint's files, in transformers' order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import ProcessorMixin

from pacorl.io.processor import load_processor
from pacorl.judge.local import TINY_JUDGE

TURNS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Same?"}]}]
KEPT = ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "config.json")


def template(name: str) -> str:
    """Shows whose it is, and what is asked."""
    return name + "{% for turn in messages %}{{ turn['content'][-1]['text'] }}{% endfor %}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A judge's processor files without any chat template."""
    for name in KEPT:
        shutil.copy(TINY_JUDGE / name, tmp_path)
    return tmp_path


def give(folder: Path, source: str) -> None:
    """Give a checkpoint the template of a source."""
    text = template(f"{source}: ")
    if source == "jinja":
        (folder / "chat_template.jinja").write_text(text)
        return
    path = folder / {"json": "chat_template.json", "tokenizer": "tokenizer_config.json"}[source]
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"chat_template": text}))


@pytest.mark.parametrize(
    ("files", "winner"),
    [
        (["tokenizer"], "tokenizer"),
        (["json", "tokenizer"], "json"),  # as Qwen2.5-VL-7B-Instruct is released
        (["json", "jinja"], "json"),
        (["jinja", "tokenizer"], "jinja"),
    ],
)
def test_the_template_is_the_one_that_transformers_takes(checkpoint: Path, files: list[str], winner: str) -> None:
    for name in files:
        give(checkpoint, name)
    processor = load_processor(checkpoint)
    assert processor.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False) == f"{winner}: Same?"
    document, _ = ProcessorMixin.get_processor_dict(checkpoint)  # AutoProcessor's own search, files of tokenizers aside
    assert document.get("chat_template", processor.tokenizer.chat_template) == processor.chat_template


def test_a_checkpoint_without_a_template_is_no_judge(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template, so no question can be put to it"):
        load_processor(checkpoint)
