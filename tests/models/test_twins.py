"""Twins of the released models: their tokenizers are the same in every call, their widths are what is asked for."""

import subprocess
import sys

import pytest
import torch
from tests.twins.parts import TINY, clip_tokenizer_of, qwen_tokenizer_of, random_weight, tiny_judge

from pacorl.judge.prompting import chat_text
from pacorl.plan.generators import model_on_meta
from pacorl.tiny.characters import vocabulary


def test_tokenizers_of_the_same_texts_are_the_same() -> None:
    for make in (clip_tokenizer_of, qwen_tokenizer_of):
        first, second = (make(vocabulary())._tokenizer.to_str() for _ in range(2))
        assert first == second


def test_a_model_without_weights_draws_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda *_, **__: pytest.fail("weights were drawn"))
    assert model_on_meta(TINY["vae"], dtype=torch.float32).device.type == "meta"


@pytest.mark.slow
def test_a_model_on_meta_leaves_torch_s_initialisation_whole() -> None:
    """In a new process: diffusers keeps the functions that it finds when it is imported, and restores them later."""
    code = (
        "import torch; from tests.twins.parts import TINY; from pacorl.plan.generators import model_on_meta; "
        "model_on_meta(TINY['qwen_image_vae'], dtype=torch.float32); "
        "from diffusers.models.modeling_utils import no_init_weights\n"
        "with no_init_weights(): pass\n"
        "weight = torch.zeros(4, 4); torch.nn.init.kaiming_uniform_(weight); print(bool(weight.any()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_answer_of_a_judge_that_could_think_begins_after_an_empty_thought() -> None:
    """The text is that of Qwen3.5's published template with `enable_thinking=False`."""
    _, processor = tiny_judge(["Yes. No."], "qwen3_5")
    content = [{"type": "image"}, {"type": "text", "text": "Same?"}]
    turns = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    assert chat_text(processor, turns) == (
        "<|im_start|>system\nLook.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Same?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_random_weights_keep_outputs_finite() -> None:
    shape = torch.empty(3, 5, dtype=torch.bfloat16, device="meta")
    assert not random_weight("norm.bias", shape[0]).any()
    assert (random_weight("norm.weight", shape[0]) == 1).all()
    assert (random_weight("bn.running_var", shape[0]) == 1).all()
    matrix = random_weight("linear.weight", torch.empty(3000, 1024, device="meta"))
    assert abs(float(matrix.std()) / 0.02 - 1) < 0.01
    assert not torch.equal(matrix[0], matrix[1024])
    assert not random_weight("ids", torch.empty(4, dtype=torch.long)).any()
