"""Memory and absent files of generating one image at a time: `pacorl generate --dry-run`."""

from __future__ import annotations

from pacorl.generate.generator import SIZE
from pacorl.judge import settings_of
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
    generator = sources.generator_of(options, spec)
    settings = settings_of(judge, memory=options.memory) if judge else None
    of_judge = sources.judge("--judge", settings, ask=True)
    job = Job(
        spec=spec,
        options=options,
        configs=generator.configs,
        batches=[Batch(size or (spec.committed.size if options.checkpoint == TINY else SIZE), "size")],
        images=images or None,
        scorers=[judge_scorer(settings, of_judge.configs)] if settings and of_judge.configs else [],
        in_turns=options.memory != "normal",
    )
    return Plan(measure(job), [*generator.absences, *of_judge.absences])
