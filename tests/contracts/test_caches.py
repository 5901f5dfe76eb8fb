"""What every cache of the table promises, on every generator that takes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from edit_twins import drawn, edit, settings_of, source_image
from tiny_runs import metrics, tiny_run
from torch import Tensor

from pacorl.config.base import ConfigError, dump, load
from pacorl.config.policy_run import PolicyConfig
from pacorl.core.caches import CACHES
from pacorl.core.metric_names import SUFFIX_CORRELATION
from pacorl.data.characters import character_prompts, vocabulary
from pacorl.engine.rollout import integrate
from pacorl.engine.rows import check_division
from pacorl.lora.adapters import adapter_state, add_lora
from pacorl.lora.layers import FusedLora
from pacorl.policies import POLICIES
from pacorl.policies.flux import tiny_flux
from pacorl.policies.pipeline import PipelinePolicy
from pacorl.train.trainer import train_policy
from pacorl.types import Conditioning, Size

SIZE = Size(64, 64)
SKIPPING: dict[str, dict[str, Any]] = {"first_block": {"threshold": 1e3}}
"""Settings by which a cache skips some of three steps, if its defaults might not on random weights."""
PAIRS = [*product((kind for kind in POLICIES if POLICIES[kind].caches), CACHES)]
EACH = pytest.mark.parametrize(("kind", "name"), [pair for pair in PAIRS if POLICIES[pair[0]].takes_cache(pair[1])])
REFUSED = [pair for pair in PAIRS if not POLICIES[pair[0]].takes_cache(pair[1])]


@cache
def twin(kind: str) -> PipelinePolicy:
    """With an adapter that does something, and guidance if the kind has it, so that a step is two forwards."""
    torch.manual_seed(0)
    spec = POLICIES[kind]
    policy = spec.over(drawn(spec.twin(vocabulary())), dtype="float32", **settings_of(spec))
    add_lora(policy.transformer, rank=2, alpha=4, targets=policy.lora_targets)
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.normal_(std=0.05)
    return policy


@pytest.fixture
def conditioning(kind: str, tmp_path: Path) -> Conditioning:
    source = source_image(tmp_path / "source.png", height=64, width=64)
    prompt = edit(source) if twin(kind).references else character_prompts("dev", 1)[0]
    return twin(kind).collate(twin(kind).encode([prompt], SIZE))


@contextmanager
def counted_blocks(policy: PipelinePolicy) -> Iterator[list[None]]:
    """One entry for each time that the last block computes."""
    calls: list[None] = []
    blocks = [module for module in policy.transformer.children() if isinstance(module, torch.nn.ModuleList)][-1]
    # A layer of it, because a hook of the cache stands in the block's own place.
    layer = getattr(blocks[-1].attn, "to_v", None) or blocks[-1].attn.to_qkv_mlp_proj
    handle = layer.register_forward_hook(lambda *_: calls.append(None))  # type: ignore[operator,union-attr]
    yield calls
    handle.remove()


@torch.no_grad()
def finished(policy: PipelinePolicy, conditioning: Conditioning, steps: int = 3, **how: Any) -> Tensor:
    """From noise to an image's latents."""
    sigmas = policy.sigmas(steps, SIZE)
    settings = {"size": SIZE, "sigmas": sigmas, "grid": range(steps + 1), **how}
    return integrate(policy, policy.noise([0], SIZE), conditioning, **settings)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_spec_says_whether_diffusers_can_cache_it(kind: str) -> None:
    assert POLICIES[kind].caches == isinstance(twin(kind).transformer, CacheMixin)


@pytest.mark.parametrize("name", CACHES)
def test_its_options_name_it_and_say_what_they_do(name: str) -> None:
    options = CACHES[name].options()
    assert options.name == name
    assert CACHES[name].options.__doc__
    with pytest.raises(ValueError, match=f"suffix.cache {name} computes the first step, and the suffix has 1; give"):
        CACHES[name].check(1)
    CACHES[name].check(2)


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_what_a_kind_does_not_take_would_fail(kind: str, name: str, conditioning: Conditioning) -> None:
    with pytest.raises(TypeError):  # if diffusers learns it, the spec may take it
        finished(twin(kind), conditioning, cache=CACHES[name].options())
    with pytest.raises(ConfigError, match=f"cache {name} and kind {kind}, whose transformer takes taylor alone"):
        load(PolicyConfig, None, [f"model.kind={kind}", f"sampling.suffix.cache={name}"])


@EACH
def test_steps_are_skipped_and_nothing_is_left_behind(kind: str, name: str, conditioning: Conditioning) -> None:
    policy, options = twin(kind), CACHES[name].options(**SKIPPING.get(name, {}))
    with counted_blocks(policy) as calls:
        exact = finished(policy, conditioning)
        full = len(calls)
        cached = finished(policy, conditioning, cache=options)
        assert full < len(calls) < 2 * full
        assert torch.equal(finished(policy, conditioning, cache=options), cached), "a state outlived its batch"
        again = finished(policy, conditioning)
    assert torch.equal(again, exact)
    assert not torch.equal(cached, exact)
    assert not policy.transformer.is_cache_enabled
    assert not any(module._diffusers_hook.hooks for module in policy.transformer.modules() if _was_hooked(module))


def _was_hooked(module: Any) -> bool:
    return hasattr(module, "_diffusers_hook")


@EACH
def test_the_first_step_is_exact_and_guidance_keeps_its_forwards_apart(
    kind: str, name: str, conditioning: Conditioning
) -> None:
    """Of two steps the second is skipped: each of its forwards sees the first step's own features, not the other's."""
    policy, options = twin(kind), CACHES[name].options(**SKIPPING.get(name, {}))
    x_BNC, sigma_B = policy.noise([0], SIZE), torch.full((1,), 0.6)
    with torch.no_grad():
        exact = policy.velocity(x_BNC, sigma_B, conditioning, SIZE)
        with policy.cached(options):
            first, second = (policy.velocity(x_BNC, sigma_B, conditioning, SIZE) for _ in range(2))
    assert torch.equal(first, exact)
    torch.testing.assert_close(second, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CACHES)
def test_a_fused_adapter_is_cached_alike(name: str, tmp_path: Path) -> None:
    policy, options = twin("flux"), CACHES[name].options(**SKIPPING.get(name, {}))
    conditioning = policy.collate(policy.encode(character_prompts("dev", 1), SIZE))
    cached = finished(policy, conditioning, cache=options)
    fused = finished(policy, conditioning, cache=options, fused=FusedLora(policy.transformer))
    torch.testing.assert_close(fused, cached, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CACHES)
def test_a_fault_takes_the_hooks_away(name: str) -> None:
    policy = twin("flux")
    with pytest.raises(RuntimeError, match="in the middle"), policy.cached(CACHES[name].options()):
        raise RuntimeError("in the middle")
    assert not policy.transformer.is_cache_enabled


@pytest.mark.parametrize("name", CACHES)
def test_a_config_names_it_and_keeps_its_settings(name: str, tmp_path: Path) -> None:
    by_name, by_section = (
        load(PolicyConfig, None, [f"sampling.suffix.cache{key}={name}"]).sampling.suffix.cache for key in ("", ".name")
    )
    assert by_name == by_section == CACHES[name].options()
    path = tmp_path / "run.yaml"
    path.write_text(dump(load(PolicyConfig, None, [f"sampling.suffix.cache={name}"])))
    assert load(PolicyConfig, path).sampling.suffix.cache == by_name


def test_what_a_cache_extrapolates_from_is_single_precision() -> None:
    """A bfloat16 model's differences of neighbouring steps would be rounding alone."""
    spec = CACHES["taylor"]
    assert spec.hooks(spec.options(name="taylor"), torch.bfloat16).taylor_factors_dtype == torch.float32


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_a_sharded_transformer_breaks_is_refused_there(name: str) -> None:
    """FSDP2 makes new classes of a transformer's blocks, and some hooks know the blocks by their class."""
    config = load(PolicyConfig, None, [f"sampling.suffix.cache={name}"])
    check_division(config, world=1)
    with nullcontext() if CACHES[name].shardable else pytest.raises(ValueError, match=f"{name} does not know .*; take"):
        check_division(config, world=1, sharded=True)


class ShardedBlock(FluxTransformerBlock):
    """As FSDP2 names a block's class anew."""


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_says_truly_whether_it_knows_other_classes_of_blocks(name: str) -> None:
    policy = POLICIES["flux"].over(tiny_flux(vocabulary()), max_sequence_length=48)
    for block in policy.transformer.transformer_blocks:
        block.__class__ = ShardedBlock
    with nullcontext() if CACHES[name].shardable else pytest.raises(ValueError, match="not registered"):
        finished(policy, policy.collate(policy.encode(character_prompts("dev", 1), SIZE)), cache=CACHES[name].options())


@pytest.mark.parametrize("name", CACHES)
def test_only_the_suffix_of_training_samples_has_hooks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run's forwards: (with gradients, tokens of an image, with hooks)."""
    forwards: set[tuple[bool, int, bool]] = set()
    predict = PipelinePolicy.predict

    def kept(policy: PipelinePolicy, prefix: str, **inputs: Any) -> Tensor:
        hooked = policy.pipeline.transformer.is_cache_enabled
        forwards.add((torch.is_grad_enabled(), inputs["hidden_states"].shape[1], hooked))
        return predict(policy, prefix, **inputs)

    monkeypatch.setattr(PipelinePolicy, "predict", kept)
    settings = [
        *("epochs=1", "prompts_per_epoch=1", "group_size=2", "trackers=[]", f"out={tmp_path / 'run'}"),
        *("prompts.train=tiny:train:1", "prompts.evaluation=tiny:dev:1", "judge=none", "rewards=[{name: jpeg_size}]"),
        *("sampling.size=[32,32]", "sampling.steps=5", "sampling.batch=1", f"sampling.suffix={{cache: {name}}}"),
        *("evaluation.size=[64,64]", "evaluation.steps=3"),
    ]
    folder = train_policy(tiny_run(settings))
    training, evaluation = 16, 64
    assert forwards == {
        (True, training, False),
        (False, training, False),
        (False, training, True),
        (False, evaluation, False),
    }
    (epoch,) = metrics(folder, "epoch")
    assert epoch["ratio_deviation/1"] == 0.0
    assert abs(epoch[SUFFIX_CORRELATION]) <= 1 + 1e-9
