"""The engine's forms in the toy world, and the reference beside them: the same config, the same draws, both in float64.

observed = train(out, ["objective.name=awm"])      # the engine
expected = reference(["objective.name=awm"])        # plain loops
compare(observed, expected)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import paco
import torch
from forms_table import ABSOLUTE, SAMPLES, WEIGHTS
from PIL import Image
from torch import Tensor
from toy_world import TOKEN_PIXELS, ToyJudge, ToyPolicy, toy_config, toy_world

from pacorl.core.grid import split
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.schedule import seed_of
from pacorl.core.set_scores import draw_pairs_across
from pacorl.grpo import epoch as epoch_module
from pacorl.grpo import scoring
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import epoch_rows
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.models.adapters import adapter_state, full_tensor
from pacorl.records.prompts import load_prompts
from pacorl.rewards.reward import PanelScores
from pacorl.types import Grid, Prompt, Question, Size

SETTINGS = [
    "epochs=2",
    "group_size=4",
    "sampling.batch=2",
    "model.dtype=float64",
    "judge=none",
    "evaluation.every=0",
    "rewards=[{name: warmth, weight: 0.7}, {name: contrast, weight: 0.4}]",
]
"""Two rewards of different spread, one of which is negative at times and missing at others."""


class Warmth:
    """The mean of red, around 0.5, with each panel's share as its part; missing for one image in seven."""

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float | None]:
        return [found.score for found in self.panel_scores(prompts, images)]

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[PanelScores]:
        return [_warmth(prompt, image) for prompt, image in zip(prompts, images, strict=True)]


def contrast(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float | None]:
    """Red above blue, which may be negative and varies much."""
    return [float((_pixels(image)[..., 0] - _pixels(image)[..., 2]).mean()) * 8 for image in images]


REWARDS = {"warmth": Warmth(), "contrast": contrast}
"""One reward with parts and one without."""


def _warmth(prompt: Prompt, image: Image.Image) -> PanelScores:
    pixels = _pixels(image)
    count = prompt.grid.count
    if round(float(pixels.sum()) * 255) % 7 == 3:
        return PanelScores(None, [None] * count)
    return PanelScores(
        float(pixels[..., 0].mean()),
        [float(_pixels(panel)[..., 0].mean()) / count for panel in split(image, prompt.grid)],
    )


def _pixels(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image.convert("RGB"), dtype=np.float64) / 255


def config_of(overrides: Sequence[str], out: Path) -> PolicyConfig:
    """The config of both sides."""
    return toy_config(out, *SETTINGS, *overrides)


# --- the engine ------------------------------------------------------------------------------------------------


def train(out: Path, overrides: Sequence[str], *, stop_after: int = 0) -> dict[str, Any]:
    """Run the engine; with `stop_after`, save after so many epochs and go on in another trainer.

    Returns:
        adapter, average: name → weights at the end. epochs: by epoch, {row: {endpoint, log_prob, advantage}} of the
        rows of this rank.
    """
    config = config_of(overrides, out)
    epochs: list[dict[int, dict[str, Tensor]]] = []
    # One reward in seven is missing.
    with toy_world(), patch.object(scoring, "MAX_MISSING", 1.0):
        trainer = PolicyTrainer(config, rewards=REWARDS)
        while not trainer.finished:
            if stop_after and trainer.epoch == stop_after:
                trainer.save()
                trainer.close()
                trainer = PolicyTrainer(config, rewards=REWARDS, resume=True)
                stop_after = 0
            epochs.append(_observed_epoch(trainer))
        adapter = {name: full_tensor(value).clone() for name, value in adapter_state(trainer.lora.transformer).items()}
        average = {name: full_tensor(value).clone() for name, value in trainer.lora.average.state.items()}
        trainer.close()
    return {"adapter": adapter, "average": average, "epochs": epochs}


def train_in_process(out: Path, overrides: Sequence[str], result: Path, *, stop_after: int = 0) -> None:
    """`train` in one of two processes; each writes what it observed."""
    observed = train(out, overrides, stop_after=stop_after)
    torch.save(observed, f"{result}-{torch.distributed.get_rank()}")


def merged(result: Path) -> dict[str, Any]:
    """Join the rows that both processes observed to the main one's weights."""
    first, second = (torch.load(f"{result}-{rank}", weights_only=True) for rank in range(2))
    return {**first, "epochs": [ours | theirs for ours, theirs in zip(first["epochs"], second["epochs"], strict=True)]}


def _observed_epoch(trainer: PolicyTrainer) -> dict[int, dict[str, Tensor]]:
    """One epoch, and what each of this rank's samples was on its way to the update."""
    rows: dict[int, dict[str, Tensor]] = {}
    learn = epoch_module.learn

    def observe(run: Any, sampler: Any, samples: Any, advantages: Any) -> dict[str, float]:
        values = advantages.value_B if advantages.value_BP is None else advantages.value_BP
        for share in samples:
            for rollout in share.rollouts:
                for row, endpoint in zip(rollout.row_B, rollout.final_BNC, strict=True):
                    rows[row] = {"endpoint": endpoint, "advantage": values[row]}
            for nodes in share.nodes:
                for row, log_prob in zip(nodes.row_B, nodes.log_prob_B, strict=True):
                    rows[row][f"log_prob/{nodes.level}"] = log_prob
        return learn(run, sampler, samples, advantages)

    epoch_module.learn = observe  # type: ignore[assignment]
    try:
        trainer.run_epoch()
    finally:
        epoch_module.learn = learn
    return rows


# --- the reference ---------------------------------------------------------------------------------------------


def reference(overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """What `train` should return, by plain loops; it only takes the initial weights from the engine's model."""
    config = config_of(overrides, out)
    with toy_world():
        trainer = PolicyTrainer(config, rewards=REWARDS)
        weights = {name: value.detach().clone() for name, value in trainer.lora.transformer.state_dict().items()}
        start = {name: value.clone() for name, value in adapter_state(trainer.lora.transformer).items()}
        trainer.close()
    policy = ToyPolicy(dtype=torch.float64)
    theta = {name: value.clone().requires_grad_() for name, value in start.items()}
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        list(theta.values()), lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    state = paco.State(theta, average=dict(start), old=dict(start), optimizer=optimizer)

    settings, world = settings_of(config, policy), world_of(config, policy, weights)
    epochs = []
    for epoch in range(config.epochs):
        samples = paco.run_epoch(settings, world, state, epoch)
        epochs.append({sample.row: _expected(sample, settings) for sample in samples})
    adapter = {name: value.detach() for name, value in state.theta.items()}
    return {"adapter": adapter, "average": state.average, "epochs": epochs}


def _expected(sample: paco.Sample, settings: paco.Settings) -> dict[str, Tensor]:
    advantage_P = torch.tensor(sample.advantage, dtype=torch.float64)
    by_panel = settings.by_panel
    expected = {"endpoint": sample.endpoint, "advantage": advantage_P if by_panel else advantage_P[0]}
    for level, step in enumerate(sample.steps):
        log_prob = torch.tensor(step.log_prob[0], dtype=torch.float64)
        if by_panel:
            log_prob = torch.empty(len(sample.endpoint), dtype=torch.float64)
            for panel, value in zip(sample.panels, step.log_prob, strict=True):
                log_prob[panel] = value
        expected[f"log_prob/{level}"] = log_prob
    return expected


def settings_of(config: PolicyConfig, policy: ToyPolicy) -> paco.Settings:
    """A config under the reference's names."""
    sampling, options = config.sampling, config.optimizer
    size = Size(*sampling.size)
    tree = sampling.tree.resolve(config.group_size, steps=sampling.stochastic_steps)
    is_path = OBJECTIVES[config.objective.name].needs == "path"
    shares_starts = tree.seeds < config.group_size
    # From the config's own keys: the engine's properties of them are compared too.
    # One of the rewards has no parts, so that the credit is the set's if it is left out.
    by_panel = config.advantages.credit == "panel"
    objective = config.objective
    if getattr(objective, "clip_range", 1.0) is None:
        # Panels' ratios deviate more than images'.
        objective = objective.model_copy(update={"clip_range": 1e-3 if by_panel else 1e-4})
    return paco.Settings(
        sigmas=policy.sigmas(sampling.steps, size).tolist(),
        training_sigmas=policy.training_sigmas(sampling.steps, size).tolist(),
        sde_steps=lambda epoch: list(sampling.window.at(epoch, sampling.sde_steps, seed=config.seed)),
        sde_type=sampling.sde_type,
        noise_level=sampling.noise_level,
        suffix_steps=sampling.suffix.steps,
        solver=sampling.suffix.solver,
        branches=list(tree.branches) if is_path or shares_starts else [],
        batch=sampling.batch,
        weights=[reward.weight for reward in config.rewards],
        advantages=config.advantages,
        by_panel=by_panel,
        group_size=config.group_size,
        contrast=config.rewards[0].args.get("contrast", 0.0),
        objective=objective,
        optimizer=options,
    )


def world_of(config: PolicyConfig, policy: ToyPolicy, weights: dict[str, Tensor]) -> paco.World:
    """The toy generator as a function of its adapter's weights, its noise and its rewards."""
    prompts = load_prompts(config.prompts.train)
    by_id = {prompt.id: prompt for prompt in prompts}
    size = Size(*config.sampling.size)
    texts = {prompt.id: policy.encode([prompt], size)[0].tensors["text"][0].double() for prompt in prompts}
    rows, columns = (
        torch.linspace(-1, 1, size.height // TOKEN_PIXELS),
        torch.linspace(-1, 1, size.width // TOKEN_PIXELS),
    )
    places = torch.tensor([[row, column] for row in rows for column in columns]).double()
    scale = config.adapter.alpha / config.adapter.rank

    def linear(theta: paco.Theta | None, name: str, x: Tensor) -> Tensor:
        out = x @ weights[f"{name}.base_layer.weight"].T + weights[f"{name}.base_layer.bias"]
        if theta is None:
            return out
        return out + scale * (x @ theta[f"{name}.lora_A.weight"].T @ theta[f"{name}.lora_B.weight"].T)

    def velocity(theta: paco.Theta | None, x: Tensor, sigma: float, prompt: int) -> Tensor:
        level = torch.full((len(x), 1), sigma, dtype=torch.float64)
        inputs = torch.cat([x, places, texts[prompt].expand(len(x), -1), level], dim=1)
        hidden = torch.tanh(linear(theta, "hidden", torch.tanh(linear(theta, "into", inputs))))
        return x + linear(theta, "out", hidden)

    def noise(epoch: int, *names: str | int) -> Tensor:
        return policy.noise([seed_of(config.seed, epoch, *names)], size)[0].double()

    def rewards(endpoint: Tensor, prompt: int) -> list[float | None]:
        image = policy.decode(endpoint[None], size)
        return [reward([by_id[prompt]], image)[0] for reward in REWARDS.values()]

    def parts(endpoint: Tensor, prompt: int) -> list[list[float | None]]:
        warm = REWARDS["warmth"].panel_scores([by_id[prompt]], policy.decode(endpoint[None], size))[0]
        count = by_id[prompt].grid.count
        return [list(warm.part_P), [rewards(endpoint, prompt)[1]] * count]

    def panels(prompt: int) -> list[list[int]]:
        return _tokens_of_panels(by_id[prompt].grid, size)

    def drawn(epoch: int) -> list[int]:
        count, group = config.prompts_per_epoch, config.group_size
        rows = epoch_rows(prompts, epoch=epoch, count=count, group_size=group, seed=config.seed)
        return [row.prompt.id for row in rows]

    return paco.World(velocity, noise, rewards, parts, panels, drawn, *_comparison(config, policy, by_id))


def _comparison(config: PolicyConfig, policy: ToyPolicy, by_id: dict[int, Prompt]) -> tuple[Any, Any]:
    """How sets of a group are compared: P(Yes) of two panels, and the pairs across sets."""
    size = Size(*config.sampling.size)

    def alike(first: Tensor, panel: int, second: Tensor, other: int, prompt: int) -> float:
        grid = by_id[prompt].grid
        shown = [split(policy.decode(x[None], size)[0], grid) for x in (first, second)]
        (verdict,) = ToyJudge().verdicts([Question((shown[0][panel], shown[1][other]), "")])
        return float(verdict.p_yes or 0.0)

    def across(epoch: int, rows: list[int], panels: int) -> list[tuple[int, int]]:
        seeds = [seed_of(config.seed, epoch, "contrast", row) for row in rows]
        return draw_pairs_across(seeds, panels, partners=config.rewards[0].args["partners"])

    return alike, across


def _tokens_of_panels(grid: Grid, size: Size) -> list[list[int]]:
    rows, columns = size.height // TOKEN_PIXELS, size.width // TOKEN_PIXELS
    tokens: list[list[int]] = [[] for _ in range(grid.count)]
    for row in range(rows):
        for column in range(columns):
            panel = row * grid.rows // rows * grid.cols + column * grid.cols // columns
            tokens[panel].append(row * columns + column)
    return tokens


# --- both ------------------------------------------------------------------------------------------------------


def differences(observed: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """List what differs by more than rounding, in the order in which it arises."""
    found = []
    for epoch, samples in enumerate(observed["epochs"]):
        if set(samples) != set(expected["epochs"][epoch]):
            found.append(f"epoch {epoch}: rows {sorted(samples)} and {sorted(expected['epochs'][epoch])}")
        tolerance = SAMPLES if epoch == 0 else WEIGHTS
        for row, values in sorted(samples.items()):
            found += _apart(f"epoch {epoch} row {row}", values, expected["epochs"][epoch].get(row, {}), tolerance)
    for kind in ("adapter", "average"):
        found += _apart(kind, observed[kind], expected[kind], WEIGHTS)
    return found


def _apart(where: str, observed: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> list[str]:
    found = []
    if set(observed) != set(expected):
        found.append(f"{where}: {sorted(observed)} and {sorted(expected)}")
    for name in observed.keys() & expected.keys():
        ours, theirs = observed[name].double(), expected[name].double()
        worst, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
        if not worst <= tolerance * size + ABSOLUTE:
            found.append(f"{where} {name}: {worst:.2e} apart at a size of {size:.2e}")
    return found
