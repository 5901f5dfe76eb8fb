"""What a budget pays for, and what is refused before weights load."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from pacorl.core.sampler import Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.probe.options import ProbeOptions
from pacorl.lab.probe.probing import Design, configured_sampler, plan_design
from pacorl.types import Size

Config = Callable[..., PolicyConfig]


def designed(config: PolicyConfig, *, prompts: int = 42, **options: object) -> Design:
    return plan_design(config, configured_sampler(config), ProbeOptions(**options), prompts=prompts)  # type: ignore[arg-type]


def names(design: Design) -> list[str]:
    return [candidate.name for candidate in design.candidates]


LARGE = ("prompts_per_epoch=10", "group_size=16", "sampling.steps=6")


def test_every_step_two_noise_levels_and_half_the_size_are_compared_with_the_config(toy: Config) -> None:
    design = designed(toy(*LARGE))
    steps = ["step 0", "step 2", "step 3", "step 4", "step 5"]
    assert names(design) == ["as configured", *steps, "noise 0.49", "noise 0.98", "size 8x8"]
    assert design.budget == 160
    assert [candidate.weight for candidate in design.candidates][-1] == 0.25


def test_the_draws_cost_no_more_than_the_budget(toy: Config) -> None:
    for epochs in (0.5, 1, 2, 7):
        design = designed(toy(*LARGE), epochs=epochs)
        cost = sum(candidate.weight * candidate.leaves for candidate in design.candidates)
        assert design.prompts * design.seeds * cost <= design.budget == 160 * epochs
        assert (design.prompts + 1) * 2 * cost > design.budget or design.prompts == 10
        assert design.prompts * (design.seeds + 1) * cost > design.budget


def test_a_second_reading_of_the_judge_is_paid_for(toy: Config) -> None:
    config = toy(*LARGE)
    own = configured_sampler(config)
    once, twice = (
        plan_design(config, own, ProbeOptions(sizes=(own.size,)), prompts=42, readings=count) for count in (1, 2)
    )
    assert 1.5 * twice.samples <= once.budget == twice.budget
    assert twice.samples < once.samples


def test_starts_grow_once_all_prompts_of_an_epoch_are_drawn(toy: Config) -> None:
    design = designed(toy(*LARGE), epochs=10)
    assert (design.prompts, design.seeds > 2) == (10, True)


def test_what_nobody_asked_for_is_left_out_first_and_said(toy: Config) -> None:
    design = designed(toy(*LARGE), epochs=0.2)  # 32 samples: four candidates of two prompts with four samples
    assert names(design)[0] == "as configured"
    unpaid = [reason.removesuffix(": the budget does not reach so far") for reason in design.left_out]
    assert len(unpaid) + len(design.candidates) == 9
    assert not {*unpaid} & {*names(design)}
    assert design.prompts == 2


def test_the_candidates_that_were_asked_for_stay(toy: Config) -> None:
    design = designed(toy(*LARGE), steps=(0, 1, 3), noise_levels=(0.9,), sizes=(Size(16, 16), Size(24, 24)))
    assert names(design) == ["as configured", "step 0", "step 3", "noise 0.9", "size 24x24"]


def test_a_config_with_two_steps_is_drawn_as_a_tree_of_both(toy: Config) -> None:
    config = toy(*LARGE, "sampling.sde_steps=[1,3]")
    own = configured_sampler(config)
    first = designed(config).candidates[0]
    assert first.sde_steps == (1, 3)
    assert first.sampler(own, seeds=3).tree == Tree(3, (2, 2))


def test_a_step_that_the_sde_or_the_suffix_refuses_is_left_out_with_its_reason(toy: Config) -> None:
    design = designed(toy(*LARGE, "sampling.sde_type=cps", "sampling.suffix={solver: ab2, steps: 2}"))
    reasons = dict(reason.split(": ", 1) for reason in design.left_out)
    assert "cps adds no noise at the last step" in reasons["step 5"]
    assert "only 1 deterministic steps follow" in reasons["step 4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "budget of 0 samples; give --epochs .each has 160. for 1 to 1,000,000"),
        ({"epochs": math.inf}, "budget of inf samples"),
        ({"epochs": math.nan}, "budget of nan samples"),
        ({"epochs": 1e30}, r"budget of 1.6e\+32 samples"),
        ({"epochs": -3}, "budget of -480 samples"),
        ({"epochs": 3 / 160}, "3 samples is too small for 1 candidates .* give --epochs 0.025 or more"),
        ({"epochs": 10 / 160, "steps": (0, 2)}, "give --epochs 0.075 or more, or fewer candidates"),
        ({"steps": (6,)}, "--steps 6: sampling.steps 6 has the steps 0 to 5"),
        ({"noise_levels": (0.0,)}, "--noise-levels 0 adds no noise"),
    ],
)
def test_a_probe_that_cannot_be_is_refused_with_the_fix(toy: Config, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        designed(toy(*LARGE), **options)


def test_the_budget_that_a_refusal_names_is_enough(toy: Config) -> None:
    assert designed(toy(*LARGE), epochs=0.075, steps=(0, 2), noise_levels=(0.7,), sizes=(Size(16, 16),)).prompts == 1


def test_an_objective_without_stochastic_steps_is_refused(toy: Config) -> None:
    with pytest.raises(
        ValueError, match=r"diffusion_nft trains on finished samples.* probe with objective.name=grpo_clip"
    ):
        configured_sampler(toy("objective.name=diffusion_nft"))


def test_a_config_that_cannot_run_is_none_to_probe(toy: Config) -> None:
    with pytest.raises((ValueError, ValidationError), match="sde_steps"):
        toy("sampling.sde_steps=[]")
