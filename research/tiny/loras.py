r"""A run's adapter as the tiny checkpoints hold one: fp16, without the name of its base, and of a lower rank if asked.

python -m research.claims run curve --arm both --seed 1 --out runs/both --trial epochs=21 evaluation.every=21 \
    'rewards=[{name: consistency, args: {ask: criteria, contrast: 1}},
              {name: panel_match, args: {temperature: 4}, weight: 1.5}]'
python -m research.tiny.loras runs/both/adapter consistent
python -m research.claims run curve --arm plain --seed 1 --out runs/plain --trial epochs=12
python -m research.tiny.loras runs/plain/adapter collapsed --rank 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pacorl.io.documents import read_object, write_json


def pack(adapter: Path, out: Path, *, rank: int | None = None) -> None:
    """Write an adapter in fp16, with its largest singular values alone if `rank` is lower than its own."""
    weights = load_file(adapter / "adapter_model.safetensors")
    config = read_object(adapter / "adapter_config.json")
    config["base_model_name_or_path"] = None
    if rank:
        weights = truncated(weights, rank)
        config |= {"r": rank, "lora_alpha": config["lora_alpha"] * rank // config["r"]}
    out.mkdir(parents=True)
    save_file({name: weight.half().contiguous() for name, weight in weights.items()}, out / "adapter_model.safetensors")
    write_json(out / "adapter_config.json", config)


def truncated(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Truncate each product B·A to its largest singular values, which both matrices share."""
    lower = {}
    for name, down in weights.items():
        if ".lora_A." in name:
            up_name = name.replace(".lora_A.", ".lora_B.")
            left, values, right = torch.linalg.svd(weights[up_name] @ down, full_matrices=False)
            root = values[:rank].sqrt()
            lower[name] = root[:, None] * right[:rank]
            lower[up_name] = left[:, :rank] * root
    return lower


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    pack(options.adapter, options.out, rank=options.rank)
