"""One run of the tiny generator by a judge that was made worse, as flat numbers for `claims/judge_quality.yaml`.

    python -m research.benchmarks.judge_quality_atom --out runs/atom --seed 0 --noise 0.3 --epochs 24 --every 24

The judge is the committed one with Gaussian noise on the matrices of its language model, of `--noise` standard
deviations of each matrix. Its accuracy and its AUC are those of P(Yes) on pairs of sets that the untrained generator
samples for test prompts, by the oracle. The run is that of `generator_atom.py`, which explains its numbers.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from research.benchmarks.generator_atom import FORM, flat, parsed, parser
from research.benchmarks.learning import learn
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score

from pacorl.core.grid import shared_text, split
from pacorl.core.questions import same_theme
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.generate.generator import Generator
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.io.quiet import quiet_loading
from pacorl.judge.local import TINY_JUDGE, LocalJudge
from pacorl.records.prompts import prompts_from
from pacorl.tiny.oracle import Oracle
from pacorl.types import Prompt, Question, Size

PROMPTS = 16
"""Groups of 12 sets on which the judge is measured, with six pairs each."""
GROUP = 12
PAIRS = tuple(itertools.combinations(range(4), 2))

Panels = Sequence[Image.Image]


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--noise", type=float, required=True, help="standard deviations of each matrix")
    options = parsed(words)
    quiet_loading()
    torch.set_num_threads(1)
    judge = worse_judge(options.out / "judge", options.noise, options.seed)
    quality = measured(LocalJudge.from_pretrained(str(judge)))

    learn(FORM, [*options.set, f"judge.checkpoint={judge}"], options.seed, options)
    run = json.loads((options.out / f"{FORM}-{options.seed}.json").read_text())
    (options.out / "metrics.json").write_text(json.dumps(flat(run) | quality, indent=1) + "\n")


def worse_judge(folder: Path, noise: float, seed: int) -> Path:
    """Write the committed judge with noise on the matrices of its language model."""
    shutil.copytree(TINY_JUDGE, folder, dirs_exist_ok=True)
    weights = load_file(TINY_JUDGE / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith("model.layers.") and weight.ndim == 2:
            drawn = torch.Generator().manual_seed(seed_of(seed, "judge noise", name))
            spread = noise * weight.float().std()
            weights[name] = (weight + spread * torch.randn(weight.shape, generator=drawn)).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measured(judge: LocalJudge) -> dict[str, float]:
    """Measure the judge on pairs of the untrained generator's sets, by the oracle."""
    oracle, p_yes, equal = Oracle(), [], []
    for prompt, sets in sampled(Generator.from_pretrained("tiny"), prompts_from(f"tiny:test:{PROMPTS}")):
        question = same_theme(shared_text(prompt.text))
        for panels in sets:
            kept = [panel.looks if panel else None for panel in oracle.read(panels)]
            equal += [kept[i] is not None and kept[i] == kept[j] for i, j in PAIRS]
            verdicts = judge.verdicts([Question((panels[i], panels[j]), question) for i, j in PAIRS])
            p_yes += [verdict.p_yes for verdict in verdicts]
    asked, true = torch.tensor(p_yes, dtype=torch.float64), torch.tensor(equal)
    right = ((asked > 0.5) == true).double().mean()
    return {"accuracy": float(right), "auc": float(roc_auc_score(true, asked))}


@torch.no_grad()
def sampled(generator: Generator, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, list[Panels]]]:
    """Sample a group of sets per prompt, at the size and steps of configs/tiny.yaml."""
    sampler, cache = Sampler(size=Size(64, 64), steps=6), ConditioningCache(generator.policy)
    for number, prompt in enumerate(prompts):
        seeds = range(GROUP * number, GROUP * (number + 1))
        images = sample_images(
            generator.policy, [prompt] * GROUP, sampler=sampler, cache=cache, seeds=seeds, batch=GROUP
        )
        yield prompt, [split(image, prompt.grid) for image in images]


if __name__ == "__main__":
    main()
