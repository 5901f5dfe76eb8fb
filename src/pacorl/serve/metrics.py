"""Counters of the built-in server in Prometheus' text format."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pacorl.serve.batcher import Batcher

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Requests by model and outcome, their time, and the batches that answered them."""

    def __init__(self) -> None:
        self.images = 0
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (len(BUCKETS) + 2))
        """(model, outcome) → counts up to each bucket, count of all, sum."""

    @contextmanager
    def request(self, model: str) -> Iterator[None]:
        """Times one request; one that raises counts as failed."""
        start, outcome = time.perf_counter(), "failed"
        try:
            yield
            outcome = "answered"
        finally:
            self._add(self._seconds[model, outcome], time.perf_counter() - start)

    def _add(self, row: list[float], seconds: float) -> None:
        for index, bound in enumerate(BUCKETS):
            row[index] += seconds <= bound
        row[-2] += 1
        row[-1] += seconds

    def text(self, batchers: Mapping[str, Batcher[Any, Any]]) -> str:
        """The page that Prometheus reads."""
        lines = ["# TYPE pacorl_request_seconds histogram"]
        for (model, outcome), row in sorted(self._seconds.items()):
            labels = f'model="{_escaped(model)}",outcome="{outcome}"'
            for bound, count in zip((*BUCKETS, "+Inf"), row, strict=False):
                lines.append(f'pacorl_request_seconds_bucket{{{labels},le="{bound}"}} {count:g}')
            lines.append(f"pacorl_request_seconds_count{{{labels}}} {row[-2]:g}")
            lines.append(f"pacorl_request_seconds_sum{{{labels}}} {row[-1]:.6f}")
        lines += ["# TYPE pacorl_images_total counter", f"pacorl_images_total {self.images}"]
        kinds = {"batches_total": "counter", "batched_questions_total": "counter", "waiting_questions": "gauge"}
        for name, kind in kinds.items():
            lines.append(f"# TYPE pacorl_{name} {kind}")
            for model, batcher in batchers.items():
                value = {
                    "batches_total": batcher.batches,
                    "batched_questions_total": batcher.items,
                    "waiting_questions": batcher.waiting,
                }[name]
                lines.append(f'pacorl_{name}{{model="{_escaped(model)}"}} {value}')
        return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
