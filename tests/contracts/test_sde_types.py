"""What every type of SDE of the table promises; a new entry is tested on the day it is added."""

from __future__ import annotations

import pytest
import torch

from pacorl.core.sde import SDE_TYPES, Transition, euler, log_prob

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
V = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
TYPES = pytest.mark.parametrize("name", SDE_TYPES)


def transition(name: str, *, noise_level: float = 0.7, sigma: float = 0.8) -> Transition:
    return SDE_TYPES[name](X, V, sigma=sigma, sigma_next=0.6, noise_level=noise_level, sigma_max=0.9)


@TYPES
def test_log_prob_is_the_mean_gaussian_density(name: str) -> None:
    mean, std = drawn_from = transition(name)
    sampled = mean + 0.3
    reference = torch.distributions.Normal(mean.double(), std).log_prob(sampled.double())
    torch.testing.assert_close(log_prob(sampled, drawn_from).double(), reference.mean((1, 2)), rtol=1e-5, atol=1e-6)


@TYPES
def test_it_keeps_fp32_and_is_finite_from_pure_noise(name: str) -> None:
    mean, std = transition(name, sigma=1.0)
    assert mean.dtype == torch.float32
    assert mean.isfinite().all()
    assert 0 < std < float("inf")


@TYPES
def test_without_noise_it_is_the_ode(name: str) -> None:
    mean, std = transition(name, noise_level=1e-9)
    torch.testing.assert_close(mean, euler(X, V, 0.6 - 0.8), rtol=1e-5, atol=1e-6)
    assert std < 1e-6


@TYPES
def test_more_noise_is_a_larger_std(name: str) -> None:
    assert transition(name, noise_level=0.3).std < transition(name, noise_level=0.8).std
