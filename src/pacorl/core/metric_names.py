"""Names in a run's metrics.jsonl: prefixes that packages share, and the meaning of each sign of reward hacking."""

from collections.abc import Mapping

MONITOR = "monitor/"
HELD_OUT = "held_out/"
ALARM = "alarm/"
SECONDS = "seconds/"
SHOWN_EVERY = 5
"""Epochs between training images in a run's folder."""

ALIKE = "alike"
"""Sign of an epoch in which no reward tells the images of a prompt apart."""
SIGN_MEANINGS: Mapping[str, str] = {
    "duplicates": "panels of a set are becoming copies of each other",
    "diversity": "different prompts get the same image",
    "across": "sets of one prompt are becoming alike: agreement is bought by collapse, not learned",
    ALIKE: "every reward gives all images of a prompt the same score, so there is nothing to learn",
}
NOT_FINITE = "not_finite/"
"""Sign of a reward's scores that are not finite, followed by the reward's name; the alarm's value is their number."""


def sign_meaning(sign: str) -> str:
    """Explain a sign beyond its limit; all held-out rewards share one text."""
    if sign.startswith(NOT_FINITE):
        return "the reward returned NaN or an infinity; such a score counts as missing"
    return SIGN_MEANINGS.get(sign, "a measure that is not rewarded falls while the rewarded ones are trained")
