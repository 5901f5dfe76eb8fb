"""Memory and absent files of generating one image at a time: `pacorl generate --dry-run`."""

from __future__ import annotations

import os

from pacorl.config.options import JUDGE_KEY
from pacorl.generate.generator import SIZE
from pacorl.judge.judge import JudgeSettings
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.judges import candidates_judge
from pacorl.plan.memory import memory_of
from pacorl.plan.passes import Batch, measure_generator, shallow
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
    spec, key = POLICIES[options.kind], "--judge"
    checkpoint = sources.generator_of(options, spec)
    size = size or (spec.committed.size if options.checkpoint == TINY else SIZE)
    policy = policy_on_meta(spec, options, shallow(checkpoint.configs))
    policy.check_size(size)
    batches = [Batch(policy.nearest_size(size), 1)]
    generator = measure_generator(spec, options, checkpoint.configs, images=images or None, batches=batches)
    absences, scorers = list(checkpoint.absences), []
    if judge:
        api_key = JUDGE_KEY if os.environ.get(JUDGE_KEY) else ""
        settings = JudgeSettings(checkpoint=judge, api_key_env=api_key).in_memory(options.memory)
        judge_files = sources.judge(settings, key=key)
        absences += [*judge_files.absences, *sources.silent_judge(key, settings)]
        if judge_files.configs:
            scorers.append(candidates_judge(settings, judge_files.configs, size=size))
    return Plan(absences, memory=memory_of(options, generator, scorers, in_turns=options.memory != "normal"))
