"""Generators by name: the weights, and the settings, that each kind takes."""

import pytest
import torch

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.int8 import parameter_count
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.sd3 import SD3
from pacorl.plan.generators import model_on_meta


@pytest.mark.parametrize("kind", POLICIES)
def test_a_kind_has_its_own_weights_unless_told_otherwise(kind: str) -> None:
    """The released recipe for Kontext names FLUX.1-dev."""
    assert configs.load(PolicyConfig, None, [f"model.kind={kind}"]).model.checkpoint == POLICIES[kind].published
    run = configs.load(PolicyConfig, None, [f"model.kind={kind}", "model.checkpoint=lab/own"])
    assert run.model.checkpoint == "lab/own"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lab/my-kontext", "kontext"),
        ("Qwen/Qwen-Image-Edit-2509", "qwen_edit_plus"),
        ("lab/Qwen-Image-Edit-Plus-small", "qwen_edit_plus"),
        ("lab/nothing-to-go-by", "flux"),
    ],
)
def test_a_hub_name_says_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_sd3_s_published_encoders_have_the_published_number_of_parameters() -> None:
    counts = [123_650_304, 694_659_840, 4_762_310_656, 83_819_683]
    for name, count in zip([*SD3.policy.encoders, "vae"], counts, strict=True):
        assert parameter_count(model_on_meta(SD3.parts[name], dtype=torch.float32)) == count, name
