"""How names and numbers are written on a page."""

from __future__ import annotations

LABELS = {
    "all_equal_pairs": "All-equal pairs",
    "attribute_agreement": "Attribute agreement",
    "clip_fraction": "Clipped share",
    "config_hash": "Config hash",
    "consistency": "Consistency",
    "diversity": "Diversity",
    "grad_norm": "Gradient norm",
    "kl": "KL to the reference",
    "grid_artifact": "Fine regular pattern",
    "blank": "Blank panels",
    "duplicates": "Panels that are copies",
    "hidden_reward": "Reward, hidden behind the rollout",
    "p_yes": "P(Yes) of pairs",
    "pair_accuracy": "Pair accuracy",
    "text_accuracy": "Text accuracy",
    "panel_match": "Panel match",
    "prompt_match": "Prompt match",
    "ratio": "Reward ratio",
    "valid": "Valid panels",
}
"""Name of a quantity → how it reads. A name that is not here reads as its own words."""

MEANINGS = {
    "consistency": "The judge’s mean P(Yes) over the pairs of panels of a set.",
    "attribute_agreement": "Share of identity and style attributes that two panels of a set have in common.",
    "all_equal_pairs": "Share of panel pairs that have every one of those attributes in common.",
    "prompt_match": "Share of the attributes named in a panel’s text that the panel shows.",
    "valid": "Share of panels that show something of the world they were asked from.",
    "diversity": "How much sets differ from prompt to prompt; guards against one answer to everything.",
}
"""Metric → one sentence for the reader of a page; its order is the order of the page."""

MINUS = "\N{MINUS SIGN}"


def label(name: str) -> str:
    """`grad_norm` → `Gradient norm`."""
    if name in LABELS:
        return LABELS[name]
    words = name.replace("_", " ").replace("/", " · ").strip()
    return words[:1].upper() + words[1:]


def amount(value: float | None) -> str:
    """About three significant figures with a real minus sign; – for nothing."""
    if value is None:
        return "–"
    return _plain(value).replace("-", MINUS)


def change(value: float | None) -> str:
    """An amount that says its direction: `+0.120`."""
    sign = "+" if value is not None and value > 0 else ""
    return sign + amount(value)


def duration(seconds: float) -> str:
    """`0.8 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _plain(value: float) -> str:
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if size < 10:
        return f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"
    return f"{value:.1f}" if size < 1000 else f"{value:.0f}"
