"""VCReward-Bench and EditReward-Compass on tiny tables in the published forms, and the judges' published wordings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_data import cell, write_parquet
from PIL import Image
from typer.testing import CliRunner

from pacorl.bench.edit_judges import Comparison, PairChoice, PairWording, Rated, YesNo, read_winner, read_wording
from pacorl.bench.edit_pairs import EditPairOptions, EditRewardCompass, VcRewardBench, read_compass_pairs, read_vc_pairs
from pacorl.bench.rating import EDITSCORE_TEXTS, UNIFIED_POINTS, Rubric
from pacorl.cli.benchmark import app
from pacorl.io.images import open_image
from pacorl.judge.local import LocalJudge
from pacorl.judge.paco_reward import PacoReward
from pacorl.types import Chat, Question, Verdict

COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (120, 120, 20))
PVC = """\
prompt_id: vlm/pairwise
version: v1
system_prompt: You compare edits.
user_prompt:
  - text: |
      Which keeps more?

      **Instruction:** {{ instruction }}
      Original:
  - image: {source: input_image}
  - text: |
      A:
  - image: {source: edited_images, index: 0}
  - text: |
      B:
  - image: {source: edited_images, index: 1}
"""
UNIFIED = """\
from vllm_request import evaluate_batch

instruction = ''
problem = f"Two edits, WHICH\\n\\nText instruction - {instruction}\\n"
input_data = [{'problem': problem, 'images': []}]
output = evaluate_batch(input_data, "http://localhost:8080")
"""
UNIFIED_POINT = """\
problem = "{text}"
output = evaluate_batch([problem], "http://localhost:8080")
"""
VIE_PROMPTS = '''
_context_no_delimit_reasoning_first = """Answer so:
{"reasoning": "...", "score": [...]}
"""
_prompts_0shot_two_image_edit_rule = """Two images.
"""
_prompts_0shot_tie_rule_SC = """
From 0 to 10. 10 is best.
Editing instruction: <instruction>
"""
_prompts_0shot_rule_PQ = """One image, from 0 to 10."""
'''


def image(colour: tuple[int, int, int], size: int = 32) -> Image.Image:
    return Image.new("RGB", (size, size), colour)


def vc_rows() -> list[dict[str, Any]]:
    rows = []
    for number, colour in enumerate(COLOURS):
        task = ("color_alteration", "tone_transfer")[number % 2]
        rows.append(
            {
                "key": f"{task}_pair_{number}",
                "instruction": f"instruction {number}",
                "source_image": cell(image(colour), "in.png"),
                "edited_images": [cell(image(COLOURS[number - 1], 40), "a.png"), cell(image(colour, 40), "b.png")],
                "winner": ("Image A", "Image B")[number == 2],
                "task": task,
            }
        )
    return rows


def p_yes(judge: LocalJudge, before: Image.Image, after: Image.Image, instruction: str, about: str) -> float:
    asked = {
        "VC": "do they maintain consistency in terms of style, logic and identity? Answer 'Yes' or 'No' only.",
        "IA": "is the edit following the instruction well? Answer 'Yes' or 'No' only.",
    }[about]
    text = f"Given two images after an edit with instruction '{instruction}', {asked}"
    return judge.verdicts([Question((before, after.resize(before.size)), text)])[0].p_yes or 0.0


def values_of(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    values: dict[str, Any] = json.loads(done.stdout)["tables"][0]["rows"][0]["values"]
    return values


@pytest.mark.slow
def test_vc_reward_is_what_naive_loops_give(tmp_path: Path) -> None:
    rows = vc_rows()
    write_parquet(tmp_path / "bench" / "data" / "train-00000-of-00002.parquet", rows[:3])
    write_parquet(tmp_path / "bench" / "data" / "train-00001-of-00002.parquet", rows[3:])
    values = values_of("vc-reward-bench", str(tmp_path / "bench"), "--out", str(tmp_path / "run"))

    judge = LocalJudge.from_pretrained("tiny", variants=True)
    right: dict[str, list[bool]] = {}
    for row in rows:
        before = open_image(row["source_image"]["bytes"])
        a, b = (
            p_yes(judge, before, open_image(edit["bytes"]), row["instruction"], "VC") for edit in row["edited_images"]
        )
        right.setdefault(row["task"], []).append(a > b if row["winner"] == "Image A" else b > a)
    every = [answer for answers in right.values() for answer in answers]
    assert values["Accuracy"]["mean"] == pytest.approx(sum(every) / 4)
    assert values["Mean over tasks"]["mean"] == pytest.approx(sum(sum(task) / len(task) for task in right.values()) / 2)


def compass_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, colour in enumerate(COLOURS):
        for name, shown in (("in", colour), ("a", COLOURS[number - 1]), ("b", colour)):
            image(shown).save(folder / f"{number}_{name}.png")
        for dimension in ("IA", "VC", "VQ"):
            row = {"source_image": f"{number}_in.png", "winner": f"{number}_a.png", "loser": f"{number}_b.png"}
            label = "tie" if number == 3 else "preference"
            rows.append(row | {"prompt": f"instruction {number}", "dimension": dimension, "label": label})
    (folder / "reward_eval.json").write_text(json.dumps(rows))
    return rows


@pytest.mark.slow
def test_compass_is_what_naive_loops_give(tmp_path: Path) -> None:
    rows = compass_rows(tmp_path)
    values = values_of("edit-reward-compass", str(tmp_path / "reward_eval.json"), "--out", str(tmp_path / "run"))

    judge = LocalJudge.from_pretrained("tiny", variants=True)
    for dimension, column in (("IA", "Instruction awareness"), ("VC", "Visual consistency")):
        right = []
        for row in rows:
            if row["dimension"] == dimension:
                before = open_image(tmp_path / row["source_image"])
                a, b = (
                    p_yes(judge, before, open_image(tmp_path / row[name]), row["prompt"], dimension)
                    for name in ("winner", "loser")
                )
                right.append(abs(a - b) < 1e-5 if row["label"] == "tie" else a > b)
        assert values[column]["mean"] == pytest.approx(sum(right) / len(right))
    # P(Yes) has no wording for image quality.
    assert values["Visual quality"] is None
    assert values["All pairs"] is None


class Words:
    """Answers by a function of what it was sent."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Question] = []
        self.chats: list[Chat] = []

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        raise AssertionError("asked for P(Yes)")

    def explain(self, question: Question) -> str:
        self.asked.append(question)
        return str(self.answer(question))

    def reply(self, chat: Chat, *, max_new_tokens: int = 512) -> str:
        self.chats.append(chat)
        return str(self.answer(chat))


def test_a_rubric_scores_every_dimension(tmp_path: Path) -> None:
    compass_rows(tmp_path)
    wording = tmp_path / "vie_prompts.py"
    wording.write_text(VIE_PROMPTS)
    data = read_compass_pairs(tmp_path / "reward_eval.json", EditPairOptions(judge_wording=wording))
    assert len(data.items) == 12

    def answer(question: Question) -> str:
        red = question.images[-1].getpixel((0, 0))[0] // 10  # type: ignore[index]
        return f'{{"reasoning": "-", "score": [{red}, 25]}}'

    rubric = read_wording(wording)
    assert isinstance(rubric, Rubric)
    bench = EditRewardCompass(data, Rated(PacoReward(Words(answer), name="words"), rubric))
    rows = bench.measure(list(data.items))
    assert rows[0]["scores"] == [pytest.approx(12 / 2.5), pytest.approx(20 / 2.5)]  # IA: [success, …] of both edits
    assert rows[1]["scores"] == [10, 10]  # VC: […, restraint]
    assert rows[2]["scores"] == [pytest.approx(4.8), pytest.approx(8)]  # VQ: the lower of its two
    right = (0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0)  # the last row ties; restraint is always equal
    assert bench.figures(rows)[3].mean == pytest.approx(sum(right) / 12)


def test_editscores_words_are_joined_as_its_package_joins_them(tmp_path: Path) -> None:
    path = tmp_path / "vie_prompts.py"
    path.write_text(VIE_PROMPTS)
    texts: dict[str, str] = {}
    exec(VIE_PROMPTS, texts)
    context, rule, semantics, quality = (texts[name] for name in EDITSCORE_TEXTS)

    rubric = read_wording(path)
    assert isinstance(rubric, Rubric)
    # As `EditScore.__init__` of the package editscore, with its score_range of 25.
    sc = "\n".join([context, rule, semantics.replace("10", "25")]).replace("<instruction>", "make it red")
    assert rubric.semantics.replace("{instruction}", "make it red") == sc
    assert rubric.quality == "\n".join([context, quality.replace("10", "25")])
    assert rubric.scale == 25


def pair_wording(folder: Path, text: str = PVC) -> Any:
    path = folder / "v1.yaml"
    path.write_text(text)
    return read_wording(path)


def test_pvc_judges_message_has_its_texts_and_images_in_order(tmp_path: Path) -> None:
    images = (image(COLOURS[0]), image(COLOURS[1]), image(COLOURS[2]))
    chat = pair_wording(tmp_path).chat(Comparison(images, "make it red", "consistent"))
    assert chat.system == "You compare edits."
    # Jinja drops the last line break of a block, and a line break follows each image that a text follows.
    assert chat.content == (
        "Which keeps more?\n\n**Instruction:** make it red\nOriginal:",
        images[0],
        "\n",
        "A:",
        images[1],
        "\n",
        "B:",
        images[2],
    )


def unified(folder: Path, asks: str) -> Any:
    path = folder / "edit_pairwise.py"
    path.write_text(UNIFIED.replace("WHICH", asks))
    return read_wording(path)


@pytest.mark.parametrize(
    ("asks", "answer", "scores"),
    [
        ("determine which edited image is better.", "Edited image 2 is better", (0, 1)),
        ("determine which edited image is better.", "Edited Image 1 is better.", (1, 0)),
        ("determine which edited image is better.", "Edited image 1 and 2 are equally good", (0, 0)),
        ("Please provide the scores for each image.", "Image 1: 2.25, Image 2: -1.5", (2.25, -1.5)),
    ],
)
def test_unifiedreward_compares_two_edits_in_every_dimension(
    asks: str, answer: str, scores: tuple[float, float], tmp_path: Path
) -> None:
    """The images, then the text, as its authors' request has them; its script is read and not run."""
    words = Words(lambda _: answer)
    judge = PairChoice(PacoReward(words, name="words"), unified(tmp_path, asks))
    images = (image(COLOURS[0]), image(COLOURS[1]), image(COLOURS[2]))
    (result,) = judge.compare([Comparison(images, "make it red", "quality")])
    assert result == {"scores": list(scores)}
    assert words.chats == [Chat((*images, f"Two edits, {asks}\n\nText instruction - make it red\n"))]
    assert judge.abouts == ("followed", "consistent", "quality")


@pytest.mark.parametrize(
    ("asks", "answer"),
    [
        ("determine which edited image is better.", "Edited image 1 is better or Edited image 2 is better"),
        ("determine which edited image is better.", ""),
        ("Please provide the scores for each image.", "Image 1: 2, Image 2: 1"),
        ("Please provide the scores for each image.", "2.5"),
    ],
)
def test_an_answer_of_unifiedreward_without_two_scores_is_missing(asks: str, answer: str, tmp_path: Path) -> None:
    judge = PairChoice(PacoReward(Words(lambda _: answer), name="words"), unified(tmp_path, asks))
    images = (image(COLOURS[0]), image(COLOURS[1]), image(COLOURS[2]))
    (result,) = judge.compare([Comparison(images, "make it red", "quality")])
    assert set(result) == {"error"}


def test_unifiedrewards_point_scores_are_those_of_its_folder(tmp_path: Path) -> None:
    semantics, quality = (tmp_path / name for name in UNIFIED_POINTS)
    semantics.write_text(UNIFIED_POINT.format(text='Two images.\\n"+ f"{instruction}\\n'))
    quality.write_text(UNIFIED_POINT.format(text="One image."))
    rubric = read_wording(tmp_path)
    assert isinstance(rubric, Rubric)
    assert (rubric.semantics, rubric.quality, rubric.scale) == ("Two images.\n{instruction}\n", "One image.", 25)
    with pytest.raises(ValueError, match="asks about one edit; give its folder for point scores"):
        read_wording(semantics)
    quality.write_text("problem = run('rm')")
    with pytest.raises(ValueError, match=r"edit_pointwise_quality\.py: line 1: 'problem' must be a text"):
        read_wording(tmp_path)


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ('{"winner": "Image A"}', (1, 0)),
        ('```json\n{"winner": "image b"}\n```', (0, 1)),
        ('{"winner": "Tie", "reasoning": "alike"}', (0, 0)),
    ],
)
def test_a_winner_is_read(answer: str, scores: tuple[float, float]) -> None:
    assert read_winner(answer) == scores


@pytest.mark.parametrize("answer", ["Image A", '{"winner": "Image C"}', '{"winner": 1}', "{}", ""])
def test_an_answer_without_a_winner_is_missing(answer: str, tmp_path: Path) -> None:
    judge = PairChoice(PacoReward(Words(lambda _: answer), name="words"), pair_wording(tmp_path))
    images = (image(COLOURS[0]), image(COLOURS[1]), image(COLOURS[2]))
    (result,) = judge.compare([Comparison(images, "make it red", "consistent")])
    assert set(result) == {"error"}
    assert "\n" not in result["error"]


def test_pvc_judge_is_measured(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", vc_rows())
    data = read_vc_pairs(tmp_path / "rows.parquet", EditPairOptions())
    words = Words(lambda chat: '{"winner": "Image A"}')
    bench = VcRewardBench(data, PairChoice(PacoReward(words, name="words"), pair_wording(tmp_path)))
    rows = bench.measure(list(data.items))
    assert bench.figures(rows)[0].mean == pytest.approx(3 / 4)
    assert len(words.chats) == 4
    assert bench.settings()["wording"] != bench.data.fingerprint


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (PVC.replace("user_prompt", "prompt"), "no wording of a judge; give PVC-Judge's YAML"),
        (PVC.replace("{{ instruction }}", "that"), "'user_prompt' must hold {{ instruction }}"),
        (PVC.replace("index: 1", "index: 0"), "must show input_image and both edited_images, each once"),
        (PVC.replace("source: input_image", "source: mask"), "neither a text nor an image of a pair of edits"),
    ],
)
def test_a_wording_of_another_form_is_refused_in_one_line(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"v1\.yaml") as caught:
        pair_wording(tmp_path, text)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("_context = 'x'", "no text _context_no_delimit_reasoning_first"), ("def (", "not a Python module")],
)
def test_another_module_is_refused_and_not_run(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "vie_prompts.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=fault):
        read_wording(path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"winner": "Tie"}, "winner 'Tie' is none of Image A, Image B"),
        ({"task": None}, "no task; a row of VCReward-Bench has"),
        ({"key": "tone_transfer_pair_1"}, "key 'tone_transfer_pair_1' is that of an earlier record"),
    ],
)
def test_rows_of_vc_reward_of_another_schema_are_named(change: dict[str, Any], fault: str, tmp_path: Path) -> None:
    rows = vc_rows()
    write_parquet(tmp_path / "data.parquet", [*rows[:3], rows[3] | change])
    with pytest.raises(ValueError, match="row 4: ") as caught:
        read_vc_pairs(tmp_path / "data.parquet", EditPairOptions())
    assert fault in str(caught.value)
    assert len(read_vc_pairs(tmp_path / "data.parquet", EditPairOptions(skip_bad=True)).items) == 3


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({}, "must be a list of objects; a row of EditReward-Compass has"),
        ([], "holds no rows"),
        ([{"prompt": "x"}], "no source_image, winner, loser, dimension, label"),
    ],
)
def test_a_compass_of_another_schema_is_refused(rows: Any, fault: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"rows\.json") as caught:
        read_compass_pairs(tmp_path / "rows.json", EditPairOptions())
    assert fault in str(caught.value)


def test_yes_and_no_miss_quality_and_pvc_judge_has_consistency_only(tmp_path: Path) -> None:
    assert YesNo.abouts == ("followed", "consistent")
    assert pair_wording(tmp_path).abouts == ("consistent",)
    assert PairWording("", (), "").system == ""
