"""What an epoch costs beyond the work that must be done, in CPU time, on a random FLUX of 18 M parameters.

    python benchmarks/epoch.py                 # 128 px, 2 prompts × 8, 10 steps, one of them trained, one thread
    python benchmarks/epoch.py --rounds 5 --json

Three epochs are run in turn, round after round, so that a busy machine slows them alike: a bare loop that does the
counted work and nothing else (10 forwards, a decode and a JPEG per image, one forward and backward of the trained
step, AdamW) with the transformer as diffusers computes it; pacorl's epoch; pacorl's with the adapter merged into the
weights where nothing is trained. Reported is the median over the rounds of each one's CPU seconds by the bare loop's
of the same round. Exits with 1 where pacorl costs more than the bare loop, or merging saves less than 8 %.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacorl.config import base as configs
from pacorl.config.policy_run import PolicyRun
from pacorl.data.characters import vocabulary
from pacorl.io.quiet import quiet_loading
from pacorl.policies.flux import tiny_flux, tiny_flux_transformer
from pacorl.train.trainer import PolicyTrainer
from pacorl.types import Size

PROMPTS, GROUP, STEPS, TRAINED = 2, 8, 10, 1
LIMITS = {"pacorl": 1.00, "pacorl, merged": 0.92}


def main() -> int:
    options = arguments()
    quiet_loading()
    warnings.filterwarnings("ignore", message=".*model.max_sequence_length.*")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = prepared(Path(folder), options)
        ways: dict[str, Callable[[], Any]] = {
            "bare": lambda: bare_epoch(training),
            "pacorl": lambda: with_fuse(training, enabled=False).run_epoch(),
            "pacorl, merged": lambda: with_fuse(training, enabled=True).run_epoch(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            # Each way follows each other one equally often.
            order = list(ways)[number % 3 :] + list(ways)[: number % 3]
            for name in order:
                spent = cpu_seconds(ways[name])
                if number:  # the first round warms up
                    seconds[name].append(spent)
        training.close()
    result = summary(training, seconds)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if all(result["by the bare loop"][name] <= limit for name, limit in LIMITS.items()) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def prepared(folder: Path, options: argparse.Namespace) -> PolicyTrainer:
    """A run on a random FLUX, through the same door as any other."""
    torch.manual_seed(0)
    pipeline = tiny_flux(vocabulary())
    pipeline.transformer = tiny_flux_transformer(width=256, double_blocks=4, single_blocks=8)
    for parameter in pipeline.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    pipeline.save_pretrained(folder / "flux")
    size = f"[{options.pixels},{options.pixels}]"
    settings = {
        "out": folder / "run",
        "prompts_per_epoch": PROMPTS,
        "group_size": GROUP,
        "trackers": "[]",
        "save_every": 1000,
        "model.checkpoint": folder / "flux",
        "model.dtype": "float32",
        "model.max_sequence_length": 48,
        "model.gradient_checkpointing": "false",
        "adapter.rank": options.rank,
        "adapter.alpha": 2 * options.rank,
        "prompts.train": f"tiny:train:{PROMPTS}",
        "prompts.evaluation": "tiny:dev:1",
        "sampling.size": size,
        "sampling.steps": STEPS,
        "sampling.sde_steps": f"[{TRAINED}]",
        "sampling.batch": GROUP,
        "evaluation.size": size,
        "judge.checkpoint": "tiny",
        "judge.dtype": "float32",
        "rewards": "[{name: jpeg_size}]",
        "advantages.aggregate": "weighted_sum",
        "optimizer.updates_per_epoch": 1,
    }
    return PolicyTrainer(configs.load(PolicyRun, None, [f"{key}={value}" for key, value in settings.items()]))


def with_fuse(training: PolicyTrainer, *, enabled: bool) -> PolicyTrainer:
    sampling = training.config.sampling.model_copy(update={"fuse_lora": enabled})
    training.config = training.config.model_copy(update={"sampling": sampling})
    return training


def bare_epoch(training: PolicyTrainer) -> None:
    """The counted work: sampling, decoding, JPEG, one trained step, AdamW."""
    with diffusers_own(training.transformer):
        _bare_epoch(training)


def _bare_epoch(training: PolicyTrainer) -> None:
    policy, config = training.policy, training.config
    size = Size(*config.sampling.size)
    sigmas = policy.sigmas(STEPS, size).tolist()
    parameters = training.parameters
    groups = [sample(training, [prompt] * GROUP, size, sigmas) for prompt in training.train_prompts]
    for conditioning, x, after, old, scores in groups:
        advantage = (scores - scores.mean()) / (scores.std(correction=0) + 1e-4)
        mean, std = step(policy.velocity(x, torch.full((GROUP,), sigmas[TRAINED]), conditioning, size), x, sigmas)
        ratio = torch.exp(log_prob(after, mean, std) - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - 1e-4, 1 + 1e-4) * advantage).mean()
        (loss / len(groups)).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)


@contextmanager
def diffusers_own(transformer: Any) -> Iterator[None]:
    """Within the block the last block computes the text's rows too (`policies.last_block`)."""
    block = transformer.single_transformer_blocks[-1]
    spared = vars(block).pop("forward")
    try:
        yield
    finally:
        block.forward = spared


@torch.no_grad()
def sample(training: PolicyTrainer, prompts: list[Any], size: Size, sigmas: list[float]) -> tuple[Any, ...]:
    """(conditioning, latent before the trained step, after it, its log-probability, scores) of a group."""
    policy = training.policy
    conditioning = training.cache.batch(prompts, size)
    x = policy.noise(range(GROUP), size)
    kept: tuple[Tensor, ...] = ()
    for number in range(STEPS):
        velocity = policy.velocity(x, torch.full((GROUP,), sigmas[number]), conditioning, size)
        if number == TRAINED:
            mean, std = step(velocity, x, sigmas)
            after = mean + std * policy.noise(range(GROUP, 2 * GROUP), size)
            kept = (x, after, log_prob(after, mean, std))
            x = after
        else:
            x = x + velocity * (sigmas[number + 1] - sigmas[number])
    scores = torch.tensor([-float(jpeg_bytes(image)) for image in policy.decode(x, size)])
    return conditioning, *kept, scores


def step(velocity: Tensor, x: Tensor, sigmas: list[float]) -> tuple[Tensor, float]:
    """Flow-SDE's mean and std at the trained step."""
    sigma, dt = sigmas[TRAINED], sigmas[TRAINED + 1] - sigmas[TRAINED]
    diffusion = 0.7 * (sigma / (1 - sigma)) ** 0.5
    drift = diffusion**2 / (2 * sigma)
    return x + (velocity + drift * (x + (1 - sigma) * velocity)) * dt, diffusion * (-dt) ** 0.5


def log_prob(after: Tensor, mean: Tensor, std: float) -> Tensor:
    return -0.5 * (((after - mean) / std) ** 2).flatten(1).mean(1)


def jpeg_bytes(image: Any) -> int:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.tell()


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def summary(training: PolicyTrainer, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds."""
    shares = {
        name: [spent / bare for spent, bare in zip(several, seconds["bare"], strict=True)]
        for name, several in seconds.items()
    }
    return {
        "parameters": sum(p.numel() for n, p in training.transformer.named_parameters() if "lora_" not in n),
        "adapter parameters": sum(p.numel() for p in training.parameters),
        "rounds": len(seconds["bare"]),
        "cpu seconds": {name: round(statistics.median(several), 2) for name, several in seconds.items()},
        "by the bare loop": {name: round(statistics.median(several), 3) for name, several in shares.items()},
        "all": {name: [round(share, 3) for share in several] for name, several in shares.items()},
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['parameters']:,} parameters, adapter {result['adapter parameters']:,}, {result['rounds']} rounds"
    ]
    for name, spent in result["cpu seconds"].items():
        limit = f"  (limit {LIMITS[name]:.2f})" if name in LIMITS else ""
        lines.append(f"{name:16s} {spent:8.2f} CPU s  {result['by the bare loop'][name]:.3f}{limit}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
