"""The edit story's verdict, from runs whose numbers are known."""

import json
from pathlib import Path

import pytest
from PIL import Image
from tools.tiny.edit_story import CELL, MARGIN, before_and_after, draw_edits, summarize, verdict

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.tiny.character_edits import character_edits, write_edits
from pacorl.tiny.characters import draw

RECIPE = Path(__file__).parents[2] / "configs" / "tiny_edit.yaml"


def run_of(folder: Path, kept: tuple[float, float], followed: tuple[float, float]) -> Path:
    folder.mkdir()
    lines = [
        {"kind": "evaluation", "kept": kept[0], "followed": followed[0], "edited_well": 0.1, "valid": 1.0},
        {"kind": "epoch", "loss": 0.0},
        {"kind": "evaluation", "kept": kept[1], "followed": followed[1], "edited_well": 0.3, "valid": 1.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("second", "fine"),
    [
        (((0.7, 0.81), (0.8, 0.8)), True),
        (((0.7, 0.79), (0.8, 0.9)), False),  # too little kept
        (((0.7, 0.9), (0.8, 0.79)), False),  # followed fell
    ],
)
def test_the_worst_seed_decides(tmp_path: Path, second: tuple[tuple[float, float], ...], fine: bool) -> None:
    runs = [run_of(tmp_path / "1", (0.7, 0.95), (0.8, 0.9)), run_of(tmp_path / "2", *second)]
    rows = [{"seed": seed, **before_and_after(run)} for seed, run in enumerate(runs)]
    (kept, followed) = second
    summary = summarize(rows)
    assert summary["worst"]["kept"] == pytest.approx(kept[1] - kept[0])
    assert summary["worst"]["followed"] == pytest.approx(min(0.1, followed[1] - followed[0]))
    assert summary["reached"] is fine
    lines = verdict(summary)
    assert (
        lines[0] == "seed 0: kept 0.700 → 0.950, followed 0.800 → 0.900, edited_well 0.100 → 0.300, valid 1.000 → 1.000"
    )
    assert lines[-1].endswith(": reached" if fine else ": not reached")


def test_its_recipe_is_a_run() -> None:
    run = configs.load(PolicyConfig, RECIPE)
    assert run.model.kind == "kontext"
    assert [reward.name for reward in run.rewards] == ["edit_consistency"]


def test_the_image_shows_source_before_and_after(tmp_path: Path) -> None:
    edits = character_edits("dev", 3)
    prompts = write_edits(tmp_path, edits, name="dev", pixels=32)
    greys = {"evaluation-000000": 10, "evaluation-000020": 99, "evaluation-000080": 200}
    for name, grey in greys.items():
        (tmp_path / "samples" / name).mkdir(parents=True)
        lines = []
        for number in range(6):  # two of each prompt, of which the first is shown
            colour = (grey, grey, grey) if number % 2 == 0 else (255, 0, 0)
            Image.new("RGB", (32, 32), colour).save(tmp_path / "samples" / name / f"{number:04d}.png")
            lines.append(json.dumps({"prompt_id": number // 2, "image": f"{name}/{number:04d}.png"}))
        (tmp_path / "samples" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run = configs.load(PolicyConfig, RECIPE, [f"out={tmp_path}", f"prompts.evaluation={prompts}"])
    image = draw_edits(run)
    left, top = 60 + CELL // 2, 44 + CELL // 2
    for col in range(3):
        x = left + (CELL + MARGIN) * col
        source = draw(edits[col].before, 32).resize((CELL, CELL), Image.Resampling.NEAREST)
        assert image.getpixel((x, top)) == source.getpixel((CELL // 2, CELL // 2))
        assert image.getpixel((x, top + CELL + MARGIN)) == (10, 10, 10)
        assert image.getpixel((x, top + 2 * (CELL + MARGIN))) == (200, 200, 200)
