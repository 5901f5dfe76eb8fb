"""The stochastic steps against float64 closed forms."""

import math

import pytest
import torch

from pacorl.core.sde import Transition, check_sde_steps, cps, flow_sde, kl

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
V = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("sigma", "sigma_next"), [(0.9, 0.7), (0.31, 0.05)])
def test_flow_sde_is_the_papers_equation(sigma: float, sigma_next: float) -> None:
    a, dt = 0.7, sigma_next - sigma
    x, v = X.double(), V.double()
    sigma_t = a * math.sqrt(sigma / (1 - sigma))
    expected = x + (v + sigma_t**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    mean, std = flow_sde(X, V, sigma=sigma, sigma_next=sigma_next, noise_level=a, sigma_max=0.95)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
    assert mean.dtype == torch.float32
    assert std == pytest.approx(sigma_t * math.sqrt(-dt), rel=1e-12)


def test_cps_keeps_the_noise_share() -> None:
    """A latent (1−σ)x0 + σe moves to (1−σ')x0 + √(σ'²−s²)e + sε: the noise's variance is σ'² again."""
    sigma, sigma_next = 0.8, 0.5
    clean, noise = X.double(), V.double()
    mean, std = cps(
        (1 - sigma) * clean + sigma * noise,
        noise - clean,
        sigma=sigma,
        sigma_next=sigma_next,
        noise_level=0.7,
        sigma_max=1.0,
    )
    share = math.sqrt(sigma_next**2 - std**2)
    torch.testing.assert_close(mean, (1 - sigma_next) * clean + share * noise)
    assert std == pytest.approx(sigma_next * math.sin(0.35 * math.pi))


def test_kl_is_torchs() -> None:
    first, second = Transition(X, 0.4), Transition(V, 0.4)
    reference = torch.distributions.kl_divergence(
        torch.distributions.Normal(X.double(), 0.4), torch.distributions.Normal(V.double(), 0.4)
    )
    torch.testing.assert_close(kl(first, second).double(), reference.mean((1, 2)), rtol=1e-5, atol=1e-6)


def test_cps_refuses_a_config_whose_last_step_is_stochastic() -> None:
    check_sde_steps("cps", [3, 8], steps=10, noise_level=0.7)
    with pytest.raises(ValueError, match="no noise at the last step"):
        check_sde_steps("cps", [3, 9], steps=10, noise_level=0.7)
