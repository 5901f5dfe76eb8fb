"""One run of the tiny generator by a judge that was made worse, as flat numbers for `claims/judge_quality.yaml`.

    python benchmarks/judge_quality_atom.py --out runs/atom --seed 0 --noise 0.3 --epochs 24 --every 24

The judge is the committed one with Gaussian noise on the matrices of its language model, of `--noise` standard
deviations of each matrix. Its accuracy and its AUC are those of P(Yes) on pairs of sets that the untrained generator
samples for test prompts, by the oracle. The run is that of `generator_atom.py`, which explains its numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from generator_atom import FORM, flat, parsed, parser
from learning import learn
from safetensors.torch import load_file, save_file
from set_judge import GROUP, about_pairs, answers, equal_pairs, sampled
from sklearn.metrics import roc_auc_score

from pacorl.core.grid import shared_text
from pacorl.core.schedule import seed_of
from pacorl.generate.generator import Generator
from pacorl.io.quiet import quiet_loading
from pacorl.judge.local import TINY_JUDGE, LocalJudge
from pacorl.records.prompts import prompts_from

PROMPTS = 16
"""Groups of 12 sets on which the judge is measured, with six pairs each."""


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
    generator = Generator.from_pretrained("tiny")
    p_yes, equal = [], []
    for prompt, sets in sampled(generator, prompts_from(f"tiny:test:{PROMPTS}"), epoch=0):
        p_yes.append(answers(judge, about_pairs(shared_text(prompt.text), sets), GROUP))
        equal.append(equal_pairs(sets))
    asked, true = torch.cat(p_yes).flatten(), torch.cat(equal).flatten()

    right = ((asked > 0.5) == true).double().mean()
    return {"accuracy": float(right), "auc": float(roc_auc_score(true, asked))}


if __name__ == "__main__":
    main()
