"""What every type of SDE of the table promises; a new entry is tested on the day it is added."""

from __future__ import annotations

import pytest
import torch

from pacorl.config.base import load
from pacorl.core.sde import SDE_TYPES, SdeSpec, Transition, log_prob
from pacorl.core.solvers import euler
from pacorl.grpo.policy_config import PolicyConfig

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
V = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
SPECS = pytest.mark.parametrize("spec", [SDE_TYPES[name] for name in SDE_TYPES], ids=list(SDE_TYPES))


def transition(spec: SdeSpec, *, noise_level: float = 0.7, sigma: float = 0.8) -> Transition:
    return spec.transition(X, V, sigma=sigma, sigma_next=0.6, noise_level=noise_level, sigma_max=0.9)


@SPECS
def test_a_config_names_it(spec: SdeSpec) -> None:
    assert SDE_TYPES[spec.name] is spec
    assert load(PolicyConfig, None, [f"sampling.sde_type={spec.name}"]).sampling.sde_type == spec.name


@SPECS
def test_log_prob_is_the_mean_gaussian_density(spec: SdeSpec) -> None:
    mean, std = drawn_from = transition(spec)
    sampled = mean + 0.3
    reference = torch.distributions.Normal(mean.double(), std).log_prob(sampled.double())
    torch.testing.assert_close(log_prob(sampled, drawn_from).double(), reference.mean((1, 2)), rtol=1e-5, atol=1e-6)


@SPECS
def test_it_keeps_fp32_and_is_finite_from_pure_noise(spec: SdeSpec) -> None:
    mean, std = transition(spec, sigma=1.0)
    assert mean.dtype == torch.float32
    assert mean.isfinite().all()
    assert 0 < std < float("inf")


@SPECS
def test_without_noise_it_is_the_ode(spec: SdeSpec) -> None:
    mean, std = transition(spec, noise_level=1e-9)
    torch.testing.assert_close(mean, euler(X, V, 0.6 - 0.8), rtol=1e-5, atol=1e-6)
    assert std < 1e-6


@SPECS
def test_more_noise_is_a_larger_std(spec: SdeSpec) -> None:
    assert transition(spec, noise_level=0.3).std < transition(spec, noise_level=0.8).std


@SPECS
def test_the_steps_of_the_default_recipe_are_accepted(spec: SdeSpec) -> None:
    spec.check((0, 1), steps=10, noise_level=0.7)
