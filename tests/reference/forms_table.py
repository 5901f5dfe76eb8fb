"""The forms of the engine that are compared with the reference, and within which tolerances.

To compare a new form, add its config to `CASES`, and extend `paco.py` if the method is new. Six parts are taken from
the engine by both sides, so that a fault of them changes both alike, and have tests of their own:
`core.schedule.seed_of` with `Policy.noise`, `Policy.sigmas` with `training_sigmas`, `NoiseWindow.at`,
`TreeOptions.resolve`, `grpo.rows.epoch_rows`, and `core.set_scores.draw_pairs_across`. Images, text encoders and judges
are no part of it: contracts compare a generator with its diffusers pipeline.
"""

from __future__ import annotations

CONTRAST = [
    "judge={checkpoint: tiny}",
    "rewards=[{name: consistency, args: {contrast: 0.8, partners: 2}}, {name: warmth, weight: 0.7},"
    " {name: contrast, weight: 0.4}]",
    "prompts_per_epoch=4",
]
TREE = ["sampling.sde_steps=[0,1]", "sampling.steps=5", "sampling.tree={seeds: 1, branches: [2,2]}"]

CASES = {
    "independent noise": [],
    "all steps stochastic": ["sampling.sde_steps=[0,1,2]"],
    "coefficients-preserving sampling": ["sampling.sde_type=cps", "sampling.sde_steps=[0,1]"],
    "tree with AB2": [*TREE, "sampling.suffix={solver: ab2, steps: 3}"],
    "few Euler steps": ["sampling.steps=5", "sampling.suffix={steps: 2}"],
    "tree": [*TREE, "advantages={aggregate: log_tamed, clip: 0.6}"],
    "log-tamed by one deviation": ["advantages={aggregate: log_tamed, std: global}"],
    "weighted sum with a floor": ["advantages={aggregate: weighted_sum, floor: add}"],
    "groups of six": ["group_size=6", "sampling.batch=3"],
    "GRPO-Guard with KL": ["objective={name: grpo_guard, kl_weight: 0.5}", "sampling.sde_steps=[0,1]"],
    "DiffusionNFT": ["objective={name: diffusion_nft, kl_weight: 0.1}", "advantages.clip=0.7"],
    "DiffusionNFT with a floor": [
        "objective={name: diffusion_nft, kl_weight: 0.2}",
        "advantages={floor: max}",
        "sampling.steps=6",
        "sampling.sde_steps=[2]",
        "optimizer.updates_per_epoch=1",
        "optimizer.max_grad_norm=0.01",
        "optimizer.weight_decay=0.1",
        "group_size=2",
        "prompts_per_epoch=4",
        "seed=360",
    ],
    "AWM": ["objective={name: awm}", "sampling.sde_steps=[1,2]"],
    "AWM with KL": ["objective={name: awm, kl_weight: 0.1}"],
    "DiffusionNFT in a tree with panel credit": [
        *TREE,
        "sampling.tree={seeds: 2, branches: [2,1]}",
        "advantages.credit=panel",
        "objective={name: diffusion_nft, kl_weight: 0.1}",
    ],
    "AWM in a tree with AB2": [*TREE, "sampling.suffix={solver: ab2, steps: 3}", "objective={name: awm}"],
    "panel credit": ["advantages.credit=panel"],
    "panel credit in a tree": [*TREE, "advantages={aggregate: log_tamed, credit: panel, std: global}"],
    "panel credit with GRPO-Guard": ["advantages.credit=panel", "objective={name: grpo_guard, kl_weight: 0.5}"],
    "panel credit with DiffusionNFT": ["advantages.credit=panel", "objective.name=diffusion_nft"],
    "panel credit with AWM": ["advantages={aggregate: weighted_sum, credit: panel}", "objective={name: awm}"],
    "contrast": CONTRAST,
    "contrast in a tree with panel credit": [
        *CONTRAST,
        *TREE,
        "prompts_per_epoch=3",
        "sampling.batch=3",
        "advantages={aggregate: weighted_sum, credit: panel}",
        "objective.name=diffusion_nft",
        "optimizer.updates_per_epoch=1",
    ],
    "tree of three levels": [
        "sampling.sde_steps=[0,1,2]",
        "sampling.steps=5",
        "sampling.tree={seeds: 1, branches: [2,2,2]}",
        "group_size=8",
    ],
    "random window": ["sampling.sde_steps=[0,1,2]", "sampling.window={kind: random, size: 1}"],
    "large steps": ["optimizer={updates_per_epoch: 2, lr: 0.05}"],
    "small gradient norm": ["optimizer.max_grad_norm=0.001", "optimizer.weight_decay=0.1"],
}
"""Form → what its config has beyond `engine_forms.SETTINGS`."""
RESUMED = ["tree", "DiffusionNFT", "panel credit", "large steps"]
"""Forms that are also compared after a checkpoint and a resume."""
TWO_PROCESSES = {
    "independent noise": 0,
    "tree": 1,
    "GRPO-Guard with KL": 0,
    "AWM in a tree with AB2": 0,
    "panel credit": 1,
    "contrast": 1,
}
"""Forms that are also compared on two processes, and the epochs before a checkpoint and a resume of both; 0 for a run
without a stop."""

DRAWN_FAST, DRAWN, DRAWN_IN_CAMPAIGN = 3, 12, 300
"""Configs that hypothesis draws."""

SAMPLES, WEIGHTS = 1e-10, 1e-9
"""Largest difference, as a share of the largest element of its tensor. Both sides are float64 throughout. AdamW divides
the gradient by its own size, which magnifies rounding where a gradient nearly cancels: so weights, and samples that
trained weights have drawn, may differ by more."""
ABSOLUTE = 1e-12
"""Added to that, for tensors of zeros."""
