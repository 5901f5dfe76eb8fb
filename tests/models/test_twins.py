"""Twins of the released models: their tokenizers are the same in every call, their widths are what is asked for."""

import subprocess
import sys

import pytest
from tests.twins.parts import tiny_judge

from pacorl.judge.prompting import chat_text


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
