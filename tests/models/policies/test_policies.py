"""Generators by name: the weights, and the settings, that each kind takes."""

import pytest

from pacorl.config import base as configs
from pacorl.config.base import ConfigError
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES, kind_of


@pytest.mark.parametrize("kind", POLICIES)
def test_a_kind_has_its_own_weights_unless_told_otherwise(kind: str) -> None:
    """The released recipe for Kontext names FLUX.1-dev."""
    assert configs.load(PolicyConfig, None, [f"model.kind={kind}"]).model.checkpoint == POLICIES[kind].published
    run = configs.load(PolicyConfig, None, [f"model.kind={kind}", "model.checkpoint=lab/own"])
    assert run.model.checkpoint == "lab/own"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.guidance_scale=2.5",
            r"model\.guidance_scale: unknown key of kind qwen_edit; there .*true_cfg_scale",
        ),
        ("model.max_sequence_length=64", r"model\.max_sequence_length: unknown key of kind qwen_edit"),
        ("model.negativ_prompt=x", r"unknown key, did you mean 'model\.negative_prompt'"),
        ("model.checkpoint=tiny", "checkpoint tiny: there is none of kind qwen_edit"),
        ("model.true_cfg_scale=0.5", "true_cfg_scale"),
        ("model.kind=qwen", "unknown kind of generator 'qwen'"),
    ],
)
def test_what_qwen_cannot_use_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.load(PolicyConfig, None, ["model.kind=qwen_edit", override])


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
