"""What it saves to run the language-model head on answer positions only: peak memory and time of a training step.

    python benchmarks/answer_head.py                 # --device cuda where there is one

A Qwen2.5-VL of random weights with the released vocabulary (151,936) takes one training step of LoRA on pairs of
images with reasons, once through `read_answers` and once with full logits, each in a process of its own. The two
losses are compared, and the peak is the process's own (on a GPU the allocator's), less what it held before the step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from pacorl.core.objectives import decision_weighted
from pacorl.judge_training.judge_config import RewardTuningConfig
from pacorl.judge_training.loop import LABEL_KEYS, read_answers
from pacorl.judge_training.tuning import tune

VOCABULARY = 151_936
IMAGE, START, END = 151_655, 151_652, 151_653
SIDE = 256
"""Pixels of a sub-figure; 28 px of it make a token."""


def random_judge(*, width: int, layers: int, seed: int = 0) -> Any:
    """A Qwen2.5-VL of random weights with the released vocabulary and patches."""
    torch.manual_seed(seed)
    head = width // 4
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rope_scaling": {"type": "mrope", "mrope_section": [head // 8, head * 3 // 16, head * 3 // 16]},
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "fullatt_block_indexes": [0, 1],
            "out_hidden_size": width,
        },
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def random_batch(*, pairs: int, question: int, answer: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Pairs of images, a question and an answer of so many tokens each."""
    generator = torch.Generator().manual_seed(seed)
    side = SIDE // 28 * 2
    image = [START, *[IMAGE] * (side * side // 4), END]
    words = torch.randint(1000, 100_000, (pairs, question + answer), generator=generator)
    ids = torch.cat([torch.tensor([image * 2]).expand(pairs, -1), words], 1)
    answered = torch.zeros_like(ids, dtype=torch.bool)
    answered[:, -answer:] = True
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(2 * pairs * side * side, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, side, side]]).repeat(2 * pairs, 1),
        "answer": answered,
        "index": torch.arange(pairs),
    }


def full_log_probs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same log-probabilities by way of every position's logits."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in LABEL_KEYS}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    nll = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
    return F.pad(-nll.view(len(logits), -1), (1, 0))


def measure(options: argparse.Namespace, way: str) -> dict[str, float]:
    """One way: a step to warm up with a short batch, then the measured one."""
    device = torch.device(options.device)
    model = tune(random_judge(width=options.width, layers=options.layers), RewardTuningConfig()).to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(batch: dict[str, torch.Tensor]) -> float:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        if way == "answers":
            log_prob = read_answers(model, batch, yes=0, no=1).log_prob_BL
        else:
            log_prob = full_log_probs(model, batch)
        loss, _ = decision_weighted(log_prob, batch["answer"], alpha=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(random_batch(pairs=1, question=1, answer=2))
    before = held(device)
    started, spent = time.perf_counter(), time.process_time()
    loss = step(random_batch(pairs=options.pairs, question=options.question, answer=options.answer))
    return {
        "loss": loss,
        "peak_mib": (peak(device) - before) / 2**20,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - spent,
    }


def held(device: torch.device) -> float:
    """Bytes in use now; the peak is counted from here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is held now
    return status("VmRSS")


def peak(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(name: str) -> float:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="comparisons in the step")
    parser.add_argument("--question", type=int, default=80, help="tokens of the question and the chat template")
    parser.add_argument("--answer", type=int, default=80, help="tokens of the answer")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # A process each: memory that one way took from the system would not be missing to the other.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        answers, full = pool.starmap(measure, [(options, "answers"), (options, "full")], chunksize=1)
    found = {"answers": answers, "full": full}
    positions = random_batch(pairs=1, question=options.question, answer=options.answer)["input_ids"].shape[1]
    found["compared"] = {
        "loss_difference": abs(found["answers"]["loss"] - found["full"]["loss"]),
        "logits_positions_ratio": positions / options.answer,
        "peak_ratio": found["full"]["peak_mib"] / found["answers"]["peak_mib"],
        "time_ratio": found["full"]["cpu_seconds"] / found["answers"]["cpu_seconds"],
    }
    print(json.dumps(found, indent=2) if options.json else table(found, positions, options.answer))


def table(found: dict[str, dict[str, float]], positions: int, answer: int) -> str:
    rows = [f"{'head on':<12}{'positions':>10}{'loss':>14}{'peak MiB':>12}{'CPU s':>9}"]
    for way, count in (("full", positions), ("answers", answer)):
        one = found[way]
        rows.append(f"{way:<12}{count:>10}{one['loss']:>14.7f}{one['peak_mib']:>12.0f}{one['cpu_seconds']:>9.2f}")
    compared = found["compared"]
    rows.append(
        f"peak of the step ÷ {compared['peak_ratio']:.2f}, CPU time ÷ {compared['time_ratio']:.2f}, "
        f"losses differ by {compared['loss_difference']:.1e}"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
