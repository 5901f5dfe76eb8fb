"""Names in a run's metrics.jsonl: prefixes that packages share, and the meaning of each sign of reward hacking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MONITOR = "monitor/"
HELD_OUT = "held_out/"
ALARM = "alarm/"
SECONDS = "seconds/"
SUFFIX_CORRELATION = "sampling/suffix_correlation"

SHOWN_NAMES: Mapping[str, str] = {"consistency": "consistency_reward", "p_yes": "consistency"}

SIGN_MEANINGS: Mapping[str, str] = {
    "duplicates": "panels of a set are becoming copies of each other",
    "blank": "panels are becoming empty",
    "grid_artifact": "a fine regular pattern covers the images",
    "diversity": "different prompts get the same image",
}
HELD_OUT_MEANING = "a measure that is not rewarded falls while the rewarded ones are trained"


def shown_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a log under a page's names, if the run wrote P(Yes) beside the reward that is made of it.

    A log has the judge's mean P(Yes) as `p_yes`, and what the reward makes of it as `consistency`. A summary calls the
    former `consistency`, and a page must not give two numbers one name, nor one number two names.
    """
    shown = {"/".join(SHOWN_NAMES.get(part, part) for part in key.split("/")): value for key, value in record.items()}
    p_yes, reward = (shown.get(name) for name in ("consistency", "consistency_reward"))
    if p_yes is not None and reward is not None and math.isclose(p_yes, reward, rel_tol=1e-6):
        del shown["consistency_reward"]
    return shown


def sign_meaning(sign: str) -> str:
    """What it means that a sign went beyond its limit; all held-out measures share one meaning."""
    return SIGN_MEANINGS.get(sign, HELD_OUT_MEANING)
