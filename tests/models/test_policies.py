"""Generators by name: the weights, and the settings, that each kind takes."""

import pytest

from pacorl.config import base as configs
from pacorl.config.base import ConfigError
from pacorl.config.policy_run import PUBLISHED, ModelConfig, PolicyRun
from pacorl.policies.table import POLICIES, policy_options


@pytest.mark.parametrize("kind", POLICIES)
def test_a_kind_has_its_own_weights_unless_told_otherwise(kind: str) -> None:
    """The released recipe for Kontext names FLUX.1-dev."""
    assert configs.load(PolicyRun, None, [f"model.kind={kind}"]).model.checkpoint == PUBLISHED[kind]
    named = configs.load(PolicyRun, None, [f"model.kind={kind}", "model.checkpoint=lab/own"])
    assert named.model.checkpoint == "lab/own"


def test_every_kind_is_built_with_what_it_knows() -> None:
    flux = policy_options(ModelConfig(kind="kontext", guidance=2.5, true_cfg_scale=2, negative_prompt="blurred"))
    assert flux == {"guidance": 2.5, "max_sequence_length": 512, "true_cfg_scale": 2.0, "negative_prompt": "blurred"}
    assert policy_options(ModelConfig(kind="qwen_edit")) == {"true_cfg_scale": 1.0, "negative_prompt": " "}
    assert policy_options(ModelConfig(), record_sizes=True)["record_sizes"] is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.guidance=2.5", r"guidance 2\.5 says nothing to kind qwen_edit"),
        ("model.max_sequence_length=64", "max_sequence_length 64 says nothing to kind qwen_edit"),
        ("model.checkpoint=tiny", "checkpoint tiny: there is none of kind qwen_edit"),
        ("model.true_cfg_scale=0.5", "true_cfg_scale"),
    ],
)
def test_what_qwen_cannot_use_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.load(PolicyRun, None, ["model.kind=qwen_edit", override])


def test_a_run_s_own_config_is_read_back() -> None:
    """Every default stands in it, those that Qwen-Image has no use for too."""
    run = configs.load(PolicyRun, None, ["model.kind=qwen_edit_plus"])
    assert PolicyRun.model_validate(configs.yaml.safe_load(configs.dump(run))) == run
