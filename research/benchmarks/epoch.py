"""Arithmetic and CPU time of the policy loop's epoch, relative to a plain loop's. Needs no network.

    python -m research.benchmarks.epoch  # the shape of `tiny`, its rewards replaced by the size of a JPEG
    python -m research.benchmarks.epoch --rounds 5 --json
    python -m research.benchmarks.epoch --rounds 0  # counts alone

Four epochs are run in turn, round after round and on one thread, so that a busy machine slows them alike:

    bare      a plain loop of own noises as others write it: 6 forwards, a decode and a JPEG per image, one forward and
              backward of the trained step, AdamW, and the transformer as diffusers computes it
    own       pacorl's epoch, an initial noise for each sample
    node      one initial noise per group, with the stochastic step computed and trained once per group
    node_ab2  node, and half of the steps after the stochastic one by the second-order rule

The FLOPs of one epoch are counted: of products, convolutions and attention, forward and backward. They are the same on
every machine, and the limits are on their ratio to the bare loop's. CPU seconds depend on the machine and its load, so
they are reported and not judged: the median over the rounds of each epoch's seconds by the bare loop's of the same
round. Exits with 1 if a count exceeds its limit.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.plan.ledger import MemoryLedger
from pacorl.types import Size

FORMS = {
    "own": ["sampling.tree={seeds: 12}", "sampling.suffix={}"],
    "node": ["sampling.tree={seeds: 1}", "sampling.suffix={}"],
    "node_ab2": ["sampling.tree={seeds: 1}", "sampling.suffix={solver: ab2, steps: 2}"],
}
LIMITS = {"own": 0.91, "node": 0.53, "node_ab2": 0.35}
"""Most FLOPs of an epoch by the bare loop's."""


def main() -> int:
    options = arguments()
    quiet_loading()
    warnings.filterwarnings("ignore", message=".*model.max_sequence_length.*")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = PolicyTrainer(config_of(Path(folder), "own"))
        epochs = {name: epoch_of(training, Path(folder), name) for name in FORMS}
        epochs = {"bare": lambda: bare_epoch(training), **epochs}
        flops = {name: counted(epoch) for name, epoch in epochs.items()}
        seconds = interleaved(epochs, rounds=options.rounds)
        training.close()
    result = summary(flops, seconds)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 1 if exceeded(result) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed epochs of each form")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def config_of(folder: Path, form: str) -> PolicyConfig:
    """The recipe `tiny` without its judge."""
    settings = ["judge=none", "rewards=[{name: 'examples/jpeg_reward.py:jpeg_size'}]", "trackers=[]", "save_every=1000"]
    settings += ["advantages.credit=set"]  # the size of a JPEG has no parts
    return configs.load(PolicyConfig, recipe(), [f"out={folder}", *settings, *FORMS[form]])


def epoch_of(training: PolicyTrainer, folder: Path, form: str) -> Callable[[], Any]:
    """pacorl's epoch in one of its forms."""
    config = config_of(folder, form)

    def epoch() -> None:
        training.config = config
        training.run_epoch()

    return epoch


def counted(epoch: Callable[[], Any]) -> int:
    """FLOPs of an epoch; it also warms up."""
    with MemoryLedger() as operations:
        epoch()
    return int(operations.flops)


def interleaved(epochs: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of all threads, by epoch and round."""
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for number in range(rounds):
        # Each one follows each other one equally often.
        shift = number % len(epochs)
        for name in [*list(epochs)[shift:], *list(epochs)[:shift]]:
            started = time.process_time()
            epochs[name]()
            seconds[name].append(time.process_time() - started)
    return seconds


# --- the plain loop --------------------------------------------------------------------------------------------


def bare_epoch(training: PolicyTrainer) -> None:
    """The counted work: sampling, decoding, JPEG, the trained step, AdamW."""
    config = training.config
    prompts, updates = training.train_prompts[: config.prompts_per_epoch], config.optimizer.updates_per_epoch
    groups = [sample(training, [prompt] * config.group_size) for prompt in prompts]
    for update in range(updates):
        learn(training, groups[update::updates])


@torch.no_grad()
def sample(training: PolicyTrainer, prompts: list[Any]) -> tuple[Any, ...]:
    """(conditioning, latent before the trained step, after it, its log-probability, scores) of a group."""
    policy, sampling, count = training.policy, training.config.sampling, len(prompts)
    size, (trained,) = Size(*sampling.size), sampling.sde_steps
    sigmas = policy.sigmas(sampling.steps, size).tolist()
    conditioning = training.cache.batch(prompts, size)
    x = policy.noise(range(count), size)
    kept: tuple[Tensor, ...] = ()
    for number in range(sampling.steps):
        velocity = policy.velocity(x, torch.full((count,), sigmas[number]), conditioning, size)
        if number == trained:
            mean, std = step(velocity, x, sigmas[number], sigmas[number + 1])
            after = mean + std * policy.noise(range(count, 2 * count), size)
            kept = (x, after, log_prob(after, mean, std))
            x = after
        else:
            x = x + velocity * (sigmas[number + 1] - sigmas[number])
    scores = torch.tensor([-float(jpeg_bytes(image)) for image in policy.decode(x, size)])
    return conditioning, *kept, scores


def learn(training: PolicyTrainer, groups: list[tuple[Any, ...]]) -> None:
    """GRPO's step on the trained steps of some groups."""
    policy, sampling, size = training.policy, training.config.sampling, Size(*training.config.sampling.size)
    (trained,) = sampling.sde_steps
    sigmas = policy.sigmas(sampling.steps, size).tolist()[trained : trained + 2]
    for conditioning, x, after, old, scores in groups:
        advantage = (scores - scores.mean()) / (scores.std(correction=0) + 1e-4)
        mean, std = step(policy.velocity(x, torch.full((len(x),), sigmas[0]), conditioning, size), x, *sigmas)
        ratio = torch.exp(log_prob(after, mean, std) - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - 1e-4, 1 + 1e-4) * advantage).mean()
        (loss / len(groups)).backward()
    torch.nn.utils.clip_grad_norm_(training.parameters, 1.0)
    training.lora.optimizer.step()
    training.lora.optimizer.zero_grad(set_to_none=True)


def step(velocity: Tensor, x: Tensor, sigma: float, following: float) -> tuple[Tensor, float]:
    """Flow-SDE's mean and std."""
    dt = following - sigma
    diffusion = 0.7 * (sigma / (1 - sigma)) ** 0.5
    drift = diffusion**2 / (2 * sigma)
    return x + (velocity + drift * (x + (1 - sigma) * velocity)) * dt, diffusion * (-dt) ** 0.5


def log_prob(after: Tensor, mean: Tensor, std: float) -> Tensor:
    return -0.5 * (((after - mean) / std) ** 2).flatten(1).mean(1)


def jpeg_bytes(image: Any) -> int:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.tell()


# --- what came out ---------------------------------------------------------------------------------------------


def summary(flops: dict[str, int], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Counts and times by the bare loop's; times are medians over the rounds, None without any."""
    ratios = {
        name: [spent / bare for spent, bare in zip(seconds[name], seconds["bare"], strict=True)] for name in FORMS
    }
    return {
        "rounds": len(seconds["bare"]),
        "gflops": {name: round(count / 1e9, 3) for name, count in flops.items()},
        "flops_ratios": {name: round(flops[name] / flops["bare"], 4) for name in FORMS},
        "limits": LIMITS,
        "cpu_seconds": {name: median(several) for name, several in seconds.items()},
        "seconds_ratios": {name: median(several) for name, several in ratios.items()},
        "seconds_ratios_by_round": {name: [round(ratio, 3) for ratio in several] for name, several in ratios.items()},
    }


def exceeded(result: dict[str, Any]) -> list[str]:
    """Forms whose count is above its limit."""
    return [name for name, limit in LIMITS.items() if result["flops_ratios"][name] > limit]


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def table(result: dict[str, Any]) -> str:
    lines = [f"an epoch by the bare loop's {result['gflops']['bare']} GFLOP; seconds of {result['rounds']} rounds"]
    for name, ratio in result["flops_ratios"].items():
        limit = f"  (limit {LIMITS[name]:.3f})" if name in LIMITS else ""
        timed = f"  {result['seconds_ratios'][name]} of the CPU time" if result["rounds"] else ""
        lines.append(f"{name:10s} {ratio:.4f} of the FLOPs{limit}{timed}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
