"""The split of a nested score's variance: exact sums of squares, unbiased estimates, honest intervals."""

from __future__ import annotations

import numpy as np
import pytest

from pacorl.lab.probe.variance import Floats, mean_squares, nested_variances

STEPS = ("step 1",)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], sigmas: tuple[float, ...], *, shift: float = 0.0) -> Floats:
    """Nested scores with a known standard deviation per level; `shift` is added to every second reading."""
    y = np.zeros(shape)
    for level, sigma in enumerate(sigmas):
        effect = sigma * rng.standard_normal(shape[: level + 1])
        y += effect.reshape(*effect.shape, *[1] * (len(shape) - level - 1))
    y[..., 1::2] += shift
    return y


def test_mean_squares_equal_those_of_the_textbook_one_unit_at_a_time() -> None:
    y = drawn(np.random.default_rng(1), (3, 2, 4), (1.0, 2.0, 0.5))
    prompts, starts, children = y.shape
    grand = sum(y.ravel()) / y.size
    prompt_mean = [sum(y[p].ravel()) / y[p].size for p in range(prompts)]
    start_mean = [[sum(y[p, s]) / children for s in range(starts)] for p in range(prompts)]
    expected = [
        starts * children * sum((m - grand) ** 2 for m in prompt_mean) / (prompts - 1),
        children
        * sum((start_mean[p][s] - prompt_mean[p]) ** 2 for p in range(prompts) for s in range(starts))
        / (prompts * (starts - 1)),
        sum(
            (y[p, s, c] - start_mean[p][s]) ** 2 for p in range(prompts) for s in range(starts) for c in range(children)
        )
        / (prompts * starts * (children - 1)),
    ]
    square_L, freedom_L = mean_squares(y)
    assert square_L == pytest.approx(expected, rel=1e-12)
    assert freedom_L.tolist() == [2, 3, 18]


def test_the_lowest_level_is_the_pooled_sample_variance() -> None:
    y = drawn(np.random.default_rng(2), (4, 3, 5, 1), (1.0, 1.0, 1.0, 0.0))
    variances = nested_variances(y, steps=STEPS, rng=np.random.default_rng(0))
    assert variances.unbiased_L[-1] == pytest.approx(np.mean(np.var(y[..., 0], axis=2, ddof=1)), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "sigmas"),
    [((2, 2, 2, 2), (1.0, 0.7, 0.5, 0.3)), ((3, 2, 2, 1), (0.0, 0.4, 1.0, 0.0)), ((2, 3, 2, 2), (2.0, 0.0, 0.1, 0.6))],
)
def test_estimates_are_unbiased_for_the_smallest_designs(shape: tuple[int, ...], sigmas: tuple[float, ...]) -> None:
    """The mean over many draws of two units a level meets the truth, which clamped estimates do not."""
    rng, rounds = np.random.default_rng(3), 2000
    estimates = np.array(
        [nested_variances(drawn(rng, shape, sigmas), steps=STEPS, rng=rng, draws=1).unbiased_L for _ in range(rounds)]
    )
    truth = np.square(sigmas)[: estimates.shape[1]]
    assert np.abs(estimates.mean(0) - truth).max() < 4 * (estimates.std(0) / rounds**0.5).max()
    assert (np.abs(estimates.mean(0) - truth) <= 4 * estimates.std(0) / rounds**0.5).all()
    assert (estimates < 0).any()  # clamping them would have added to the mean


def test_two_stochastic_steps_are_told_apart() -> None:
    y = drawn(np.random.default_rng(4), (2000, 2, 2, 2, 2), (1.0, 0.8, 0.6, 0.4, 0.2))
    variances = nested_variances(y, steps=("step 1", "step 3"), rng=np.random.default_rng(0))
    assert variances.names == ("prompt", "start", "step 1", "step 3", "judge")
    assert variances.unbiased_L[1:] == pytest.approx([0.64, 0.36, 0.16, 0.04], rel=0.1)
    assert variances.share("step 1", "step 3").value == pytest.approx(0.52 / 1.2, abs=0.02)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng, held = np.random.default_rng(5), {"start": 0, "step 1": 0, "share": 0}
    for _ in range(300):
        variances = nested_variances(drawn(rng, (4, 2, 2, 2), (1.0, 0.5, 1.0, 0.2)), steps=STEPS, rng=rng, draws=1000)
        for name, truth in (("start", 0.25), ("step 1", 1.0)):
            interval = variances.variance(name)
            held[name] += interval.low <= truth <= interval.high
        share = variances.share("step 1")
        held["share"] += share.low <= 1.0 / 1.29 <= share.high
    # Generalised intervals are known to be a little wide for levels near 0, and never narrow.
    assert min(held.values()) >= 0.925 * 300
    assert held["step 1"] <= 0.975 * 300


def test_a_reading_that_is_lower_for_all_images_of_a_prompt_is_no_variance() -> None:
    y = drawn(np.random.default_rng(6), (3, 2, 2, 2), (1.0, 0.5, 0.5, 0.1))
    rng = np.random.default_rng
    plain = nested_variances(y, steps=STEPS, rng=rng(0))
    y[1, ..., 1] += 0.3
    assert nested_variances(y, steps=STEPS, rng=rng(0)).unbiased_L[1:] == pytest.approx(plain.unbiased_L[1:], abs=1e-12)


def test_what_falls_below_zero_is_taken_as_zero_and_said() -> None:
    y = np.zeros((1, 2, 2, 1))
    y[0, :, 0, 0], y[0, :, 1, 0] = 1.0, -1.0  # starts alike, children apart
    variances = nested_variances(y, steps=STEPS, rng=np.random.default_rng(0))
    assert variances.unbiased_L[1] == pytest.approx(-1.0)
    assert variances.clamped == ("start",)
    assert variances.variance("start").value == 0.0
    assert variances.share("step 1").value == 1.0


def test_scores_that_are_all_alike_have_no_shares() -> None:
    variances = nested_variances(np.ones((2, 2, 2, 2)), steps=STEPS, rng=np.random.default_rng(0))
    assert [variances.share(name).value for name in variances.within] == [0.0, 0.0, 0.0]


def test_a_level_of_one_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two draws"):
        nested_variances(np.ones((2, 1, 2, 1)), steps=STEPS, rng=np.random.default_rng(0))


def test_the_signal_of_a_group_counts_its_distinct_draws() -> None:
    rng = np.random.default_rng(0)
    y = drawn(rng, (3000, 3, 2, 2), (0.0, 1.0, 0.5, 0.25))
    variances = nested_variances(y, steps=STEPS, rng=rng)
    for starts in (16, 4, 1):
        signal = variances.signal({"start": starts, "step 1": 16, "judge": 16})
        moved = 0.25 * (1 - 1 / 16)
        fixed = 1.0 * (1 - 1 / starts) + 0.0625 * (1 - 1 / 16)
        assert signal.value == pytest.approx(moved / (moved + fixed), rel=0.1)
        assert signal.low < signal.value < signal.high
