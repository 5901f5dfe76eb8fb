"""A day's records as a Markdown page. The standard library alone is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FULL_DEPTH = 19
"""Double blocks of FLUX.1-dev."""
GIB = 2**30
Measurement = tuple[str, int, str]
EXTRAPOLATED = ("seconds", "allocated", "reserved")


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """All tables that have rows."""
    tables = [
        ("Parts", ("Part", "Outcome", "Seconds", "Reason"), outcomes(records)),
        ("Machine", ("What", "Value"), machine(records)),
        ("Rates", ("Operation", "Rate", "Unit"), rates(records)),
        (
            "Forms",
            ("Form", "Double blocks", "Batch", "Phase", "Seconds", "Allocated", "Reserved", "Retries", "Ratio off by"),
            forms(records),
        ),
        (
            f"Forms at {FULL_DEPTH} + {2 * FULL_DEPTH} blocks, extrapolated",
            ("Form", "Batch", "Phase", "Seconds a block", "Seconds", "Allocated", "Reserved"),
            extrapolated(records),
        ),
        (
            "Full depth",
            (
                "Form",
                "Batch",
                "Phase",
                "Side",
                "Seconds",
                "TFLOP",
                "Of the products' peak",
                "Allocated",
                "Planned",
                "Reserved",
            ),
            full(records),
        ),
        ("Kernels", ("Phase", "Double blocks", "Class", "Seconds", "Share"), kernels(records)),
        ("Judge and launchers", ("What", "Seconds", "Allocated", "Reserved"), others(records)),
        ("Figures", ("Figure", "Value"), figures(records)),
    ]
    texts = [f"# A day of {device(records)}", *(table(*parts) for parts in tables if parts[2])]
    return "\n\n".join(texts) + "\n"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def device(records: Sequence[Mapping[str, Any]]) -> str:
    """The card and its torch."""
    named = _devices(records)
    return f"{named[-1]['device']}, torch {named[-1]['torch']}" if named else "a card"


def device_name(records: Sequence[Mapping[str, Any]]) -> str:
    """The card's name by torch; empty if no record has it."""
    named = _devices(records)
    return str(named[-1]["device"]) if named else ""


def _devices(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in records if record.get("figure") == "device" and "device" in record]


def machine(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The last description of the machine."""
    named = _devices(records)
    return [[name, str(value)] for name, value in named[-1].items() if name not in ("part", "figure")] if named else []


def outcomes(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    last = {record["part"]: record for record in records if "outcome" in record}
    return [[name, r["outcome"], f"{r['seconds']:.0f}", r["reason"].replace("|", "/")] for name, r in last.items()]


def rates(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [[r["rate"], number(r, "value"), r["unit"]] for r in records if "rate" in r]


def forms(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for r in (record for record in records if "form" in record):
        deviation = f"{r['ratio_deviation']:.2g}" if "ratio_deviation" in r else "–"
        cells = [r["form"], str(r["blocks"]), str(r["batch"]), phase(r), number(r, "seconds"), *memory(r)]
        rows.append([*cells, str(r.get("retries", "–")), deviation])
    return rows


def phase(record: Mapping[str, Any]) -> str:
    """A form's phase, with the state of gradient checkpointing in training."""
    if record["phase"] == "sample":
        return "a forward"
    return "trained step" if record["checkpointing"] else "trained step without checkpointing"


def extrapolated(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Each measurement at full depth, by the line through its shallowest and its deepest."""
    rows = []
    for (form, batch, name), depths in two_depths(records).items():
        slope = line_through(depths, "seconds")[0]
        whole = {key: at_full_depth(depths, key) for key in EXTRAPOLATED if all(key in r for r in depths.values())}
        rows.append([form, str(batch), name, f"{slope:.3g}", number(whole, "seconds"), *memory(whole)])
    return rows


def two_depths(records: Sequence[Mapping[str, Any]]) -> dict[Measurement, dict[int, Mapping[str, Any]]]:
    """(form, batch, phase) → double blocks → record, of the measurements that succeeded at two depths or more."""
    pairs: dict[Measurement, dict[int, Mapping[str, Any]]] = {}
    for r in records:
        if "form" in r and "seconds" in r:
            pairs.setdefault((r["form"], r["batch"], phase(r)), {})[r["blocks"]] = r
    return {key: depths for key, depths in pairs.items() if len(depths) > 1}


def line_through(depths: Mapping[int, Mapping[str, Any]], key: str) -> tuple[float, float]:
    """(increase per double block, value at depth 0) of a value, by its shallowest and its deepest measurement."""
    (low, first), *_, (high, second) = sorted(depths.items())
    slope = (second[key] - first[key]) / (high - low)
    return slope, first[key] - slope * low


def at_full_depth(depths: Mapping[int, Mapping[str, Any]], key: str) -> float:
    slope, start = line_through(depths, key)
    return start + slope * FULL_DEPTH


def full(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for r in (record for record in records if "full" in record):
        flops = f"{r['flops'] / 1e12:.3f}" if "flops" in r else "–"
        share = f"{r['share']:.1%}" if "share" in r else "–"
        allocated, reserved = memory(r)
        planned = size(r.get("planned"))
        about = [r["full_form"], str(r["batch"]), r["full"], str(r["side"])]
        rows.append([*about, number(r, "seconds"), flops, share, allocated, planned, reserved])
    return rows


def kernels(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for r in (record for record in records if "profile" in record):
        classes = {name: value for name, value in r.items() if name not in ("part", "profile", "blocks")}
        total = sum(classes.values())
        for name, value in classes.items():
            rows.append([r["profile"], str(r["blocks"]), name, f"{value:.4g}", f"{value / total:.0%}"])
    return rows


def others(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for r in records:
        if "judging" in r:
            rows.append([f"judge: {r['judging']}, {r['questions']} questions", number(r, "seconds"), *memory(r)])
        if "wrapper" in r:
            rows.append([f"trained step, wrapper {r['wrapper']}", number(r, "seconds"), *memory(r)])
    return rows


def figures(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [[r["figure"], number(r, "value")] for r in records if "figure" in r and "value" in r]
    for r in records:
        rows += [[f"run, {r['run']['kind']}: {name}", f"{value:.4g}"] for name, value in seconds_of(r.get("run", {}))]
    return rows


def seconds_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The seconds and memory that a run logged."""
    for name, value in line.items():
        if isinstance(value, int | float) and ("seconds" in name or "memory" in name or "bytes" in name):
            yield name, value


def number(record: Mapping[str, Any], key: str) -> str:
    return f"{record[key]:.4g}" if key in record else str(record.get("error", "–"))


def memory(record: Mapping[str, Any]) -> list[str]:
    """Allocated and reserved memory; none on a CPU."""
    return [size(record.get("allocated")), size(record.get("reserved"))]


def size(count: float | None) -> str:
    return "–" if count is None else f"{count / GIB:.2f} GiB"
