"""Generators by name: the weights, and the settings, that each kind takes."""

import pytest

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES, kind_of


@pytest.mark.parametrize("kind", POLICIES)
def test_a_kind_has_its_own_weights_unless_told_otherwise(kind: str) -> None:
    """The released recipe for Kontext names FLUX.1-dev."""
    assert configs.load(PolicyConfig, None, [f"model.kind={kind}"]).model.checkpoint == POLICIES[kind].published
    run = configs.load(PolicyConfig, None, [f"model.kind={kind}", "model.checkpoint=lab/own"])
    assert run.model.checkpoint == "lab/own"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("black-forest-labs/FLUX.1-dev", "flux"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "kontext"),
        ("lab/my-kontext", "kontext"),
        ("Qwen/Qwen-Image", "qwen_image"),
        ("Qwen/Qwen-Image-Edit", "qwen_edit"),
        ("Qwen/Qwen-Image-Edit-2509", "qwen_edit_plus"),
        ("lab/Qwen-Image-Edit-Plus-small", "qwen_edit_plus"),
        ("lab/nothing-to-go-by", "flux"),
    ],
)
def test_a_hub_name_says_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind
