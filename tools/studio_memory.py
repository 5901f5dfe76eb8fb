"""Write src/pacorl/studio/memory.json: the download and the smallest cards of the published models, as planned.

python -m tools.studio_memory
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pacorl.config.options import MEMORY
from pacorl.io.documents import write_json
from pacorl.lab.plan.plan import CARD_MARGIN, judge_options, plan_generation
from pacorl.models.policies import POLICIES
from pacorl.studio.model_choice import JUDGE
from tools.hardware import CARDS

OUT = Path(__file__).parent.parent / "src" / "pacorl" / "studio" / "memory.json"


def planned(model: str) -> dict[str, Any]:
    """Plan a published model beside the published judge: its weights' bytes, and `memory` → GB of the smallest card."""
    spec = next(spec for spec in POLICIES.values() if spec.published == model)
    cards = {}
    weights = 0
    for setting, weights_of in MEMORY.items():
        options = spec.options_for(model, dtype="bfloat16", **weights_of)
        judge = judge_options(JUDGE, "", weights_of)
        plan = plan_generation(options, low=setting != "normal", judge=judge)
        weights = 2 * sum(row.parameters or 0 for row in plan.rows if not row.component.startswith("judge"))
        fitting = [card for card in CARDS if plan.peak_bytes + CARD_MARGIN <= card * 10**9]
        cards[setting] = min(fitting, default=None)
    return {"download": weights, "cards": cards}


def judge_bytes() -> int:
    """Return the bytes of the published judge's weights."""
    options = POLICIES["klein"].options_for(POLICIES["klein"].published, dtype="bfloat16")
    plan = plan_generation(options, judge=judge_options(JUDGE, "", MEMORY["normal"]))
    return next(2 * (row.parameters or 0) for row in plan.rows if row.component == "judge")


if __name__ == "__main__":
    needs = {spec.published: planned(spec.published) for spec in POLICIES.values()}
    write_json(OUT, needs | {JUDGE: {"download": judge_bytes(), "cards": {}}})
