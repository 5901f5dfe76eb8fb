"""How the tiny CLIP is made: its batches, and that a few steps leave a checkpoint that rewards read."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest
from diffusers import AutoencoderKL
from tools.tiny.pretrain_clip import BATCH, GROUP, neighbours, pretrain_clip

from pacorl.io.documents import read_jsonl
from pacorl.models.policies.flux import TINY_FLUX
from pacorl.rewards.clip import PanelClipText
from pacorl.tiny import characters
from pacorl.tiny.characters import VALUES, Panel, split_of


def differences(first: Panel, second: Panel) -> int:
    return sum(getattr(first, name) != getattr(second, name) for name in VALUES)


def test_a_batch_has_different_training_panels_with_neighbours() -> None:
    batch = list(islice(neighbours(Random(0)), BATCH))
    assert len(set(batch)) == BATCH
    assert {split_of(panel) for panel in batch} == {"train"}
    assert batch == list(islice(neighbours(Random(0)), BATCH))
    for start in range(0, BATCH, GROUP):
        first, *others = batch[start : start + GROUP]
        assert [differences(first, other) for other in others] == [1] * (GROUP - 1)


@pytest.mark.slow
def test_a_few_steps_leave_a_checkpoint_that_a_reward_reads(tmp_path: Path) -> None:
    vae = AutoencoderKL.from_pretrained(TINY_FLUX / "vae").float()
    pretrain_clip(tmp_path / "clip", vae=vae, share=0.005)
    steps = [line["step"] for line in read_jsonl(tmp_path / "clip" / "log.jsonl")]
    assert len(steps) == 1
    prompts = characters.character_prompts("test", 2)
    images = [
        characters.draw_grid([Panel.parse(text) for text in prompt.panels], prompt.grid, 32) for prompt in prompts
    ]
    assert all(-1 <= (score or -2) <= 1 for score in PanelClipText(str(tmp_path / "clip"))(prompts, images))
