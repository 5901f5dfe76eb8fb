"""Memory and absent files of generating one image at a time: `pacorl generate --dry-run`."""

from __future__ import annotations

import os

from pacorl.config.options import JUDGE_KEY
from pacorl.generate.generator import SIZE
from pacorl.judge.judge import JudgeSettings
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import sources
from pacorl.plan.judges import judge_scorer
from pacorl.plan.peaks import Batch, Job, measure
from pacorl.plan.plan import Plan
from pacorl.types import TINY, Size


def plan_generation(options: PolicyOptions, *, size: Size | None = None, judge: str = "", images: int = 0) -> Plan:
    """Measure the memory of generating one image at a time.

    Args:
        options: the generator's. The published architecture replaces absent weights.
        size: size of the image; 1024 × 1024, or the tiny checkpoint's own, by default.
        judge: the judge of candidates; behind HTTP it takes no memory here, and is asked whether it answers.
        images: number of sources and references.
    """
    spec = POLICIES[options.kind]
    if size is None:
        size = spec.committed.size if options.checkpoint == TINY else SIZE
    generator = sources.generator_of(options, spec)
    absences = list(generator.absences)
    scorers = []
    if judge:
        api_key = JUDGE_KEY if os.environ.get(JUDGE_KEY) else ""
        settings = JudgeSettings(checkpoint=judge, api_key_env=api_key).in_memory(options.memory)
        judge_files = sources.judge("--judge", settings, ask=True)
        absences += judge_files.absences
        if judge_files.configs:
            scorers.append(judge_scorer(settings, judge_files.configs))
    job = Job(
        spec=spec,
        options=options,
        configs=generator.configs,
        batches=[Batch(size, "size")],
        images=images or None,
        scorers=scorers,
        in_turns=options.memory != "normal",
    )
    return Plan(absences, memory=measure(job))
