"""What the epochs of a run sampled, scored and compared, for tests that hold one run to another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from typing import Any

import torch

from pacorl.core.sampler import Sampler
from pacorl.grpo import epoch
from pacorl.grpo.scoring import Scorer, Scores
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Samples

Record = dict[str, Any]


@contextmanager
def recorded_epochs() -> Iterator[list[Record]]:
    """A record per epoch of the block: scores, parts and digests of samples by global row, and the advantages' bits.

    They are of all ranks, in the order of rows.
    """
    records: list[Record] = []
    collect, learn = epoch.collect_scores, epoch.learn

    def noted_scores(scorer: Scorer, runtime: Runtime) -> tuple[Scores, list[str]]:
        scores, reasons = collect(scorer, runtime)
        of_row = {row: [result.score for result in results] for row, results in scores.items()}
        parts = {row: [result.part_P for result in results] for row, results in scores.items()}
        records.append({"scores": of_row, "parts": parts})
        return scores, reasons

    def noted_samples(
        run: PolicyTrainer, sampler: Sampler, samples: Sequence[Samples], values: Advantages
    ) -> dict[str, float]:
        records[-1]["samples"] = run.runtime.gather_rows(lambda: sample_digests(samples))
        tensors = [(field.name, getattr(values, field.name)) for field in fields(values)]
        records[-1]["advantages"] = {name: value.tolist() for name, value in tensors if isinstance(value, torch.Tensor)}
        return learn(run, sampler, samples, values)

    epoch.collect_scores, epoch.learn = noted_scores, noted_samples  # type: ignore[assignment]
    try:
        yield records
    finally:
        epoch.collect_scores, epoch.learn = collect, learn


def sample_digests(samples: Sequence[Samples]) -> dict[int, str]:
    """Of each sample by global row: prompt, endpoint, image, and latents and log-probability of every SDE step."""
    digests = {row: hashlib.sha256() for update in samples for rollout in update.rollouts for row in rollout.row_B}
    for nodes in chain(*(sorted(update.nodes, key=lambda nodes: nodes.step) for update in samples)):
        rows = zip(nodes.row_B, nodes.node_B.tolist(), nodes.child_B.tolist(), nodes.log_prob_B, strict=True)
        for row, node, child, log_prob in rows:
            for values in (nodes.latents_VNC[node], nodes.next_latents_ENC[child], log_prob):
                digests[row].update(values.numpy().tobytes())
    for rollout in chain(*(update.rollouts for update in samples)):
        for row, prompt, endpoint, image in zip(
            rollout.row_B, rollout.prompts, rollout.final_BNC, rollout.images, strict=True
        ):
            digests[row].update(f"{prompt.id} {image.size}".encode() + endpoint.numpy().tobytes() + image.tobytes())
    return {row: digest.hexdigest() for row, digest in digests.items()}
