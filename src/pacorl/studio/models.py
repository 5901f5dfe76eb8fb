"""Models that the studio offers, and what fits this card and main memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pacorl.config.options import AUTO, MEMORY, StudioModels
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY

JUDGE = "X-GenGroup/PaCo-Reward-7B"
"""The published judge."""
MARGIN = 2 * 2**30
"""Bytes that stay free on a card, for CUDA itself."""
PACE = {"normal": "", "low": ", slower, models take turns", "lowest": ", slow, layer by layer"}
ENDINGS = ("json", "safetensors", "txt", "jinja", "model")


@dataclass(frozen=True, slots=True)
class Offer:
    """A generator or a judge that can be chosen or downloaded."""

    name: str
    kind: str
    """Kind of a generator; empty for the judge."""
    does: str
    is_here: bool
    licence: str = ""
    gated: bool = False
    """Whether the hub gives it only to people who accepted its licence there."""


def offers() -> list[Offer]:
    """List the practice model, the published generators and the judge."""
    here = cached()
    listed = [Offer(TINY, kind_of(TINY), "draws and changes pictures", is_here=True, licence="Apache-2.0")]
    for kind, spec in POLICIES.items():
        does = " and ".join(["draws"] * spec.sets + ["changes pictures"] * spec.edits)
        licence = spec.licence[1] or spec.licence[0]
        listed.append(Offer(spec.published, kind, does, spec.published in here, licence, spec.gated))
    return [*listed, Offer(JUDGE, "", "judges", JUDGE in here, "Apache-2.0")]


def cached() -> set[str]:
    """List the models in the hub's cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return {repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return set()


def fetch_code(name: str) -> str:
    """Return Python code that fetches a model's folders into the hub's cache, without pickles."""
    patterns = [f"{folder}*.{ending}" for folder in ("", "*/") for ending in ENDINGS]
    if name != JUDGE:
        patterns.remove("*.safetensors")  # the single file beside the folders of a pipeline would be fetched twice
    return f"from huggingface_hub import snapshot_download as get; get({name!r}, allow_patterns={patterns!r})"


@cache
def fit_of(model: str, kind: str, judge: str) -> tuple[str, str]:
    """Plan a generator beside the judge on this machine.

    Returns:
        The first setting of memory that fits, empty if none does; and a line for a person.
    """
    from pacorl.plan.plan import judge_options, plan_generation

    spec = POLICIES.named(kind or kind_of(model))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needs = ""
    for setting in MEMORY:
        options = spec.options_for(model, dtype="float32" if model == TINY else "bfloat16", memory=setting)
        plan = plan_generation(options, low=setting != "normal", judge=judge_options(judge, setting))
        if plan.device_bytes:
            fits = plan.peak_bytes + MARGIN <= plan.device_bytes and plan.held_bytes <= total
            needs = f"{gib(plan.peak_bytes)} of the card's {gib(plan.device_bytes)}, and "
            needs += f"{gib(plan.held_bytes)} of {gib(total)} main memory"
        else:  # the models are in main memory
            fits = plan.held_bytes + plan.peak_bytes <= total
            needs = f"{gib(plan.held_bytes + plan.peak_bytes)} of {gib(total)} main memory"
        if fits:
            return setting, f"runs here{PACE[setting]}: {needs}"
    return "", f"not on this machine: needs {needs}"


def memory_for(names: StudioModels) -> str:
    """Choose the memory setting for this machine. Raises ValueError if the models fit with none."""
    if names.memory != AUTO:
        return names.memory
    if names.model == names.judge == TINY:
        return "normal"
    setting, text = fit_of(names.model, names.kind, names.judge)
    if not setting:
        raise ValueError(f"{names.model}: {text}; choose a smaller model in the header")
    return setting


def shown_name(model: str, kind: str = "model") -> str:
    """Name a model for a person."""
    if model == TINY:
        return f"the practice {kind}"
    return Path(model).name if model.endswith(".safetensors") else model


def gib(number: int) -> str:
    return f"{number / 2**30:.1f} GB"
