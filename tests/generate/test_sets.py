"""Generating with the committed tiny generator: seeds, candidates, adapters, recipes, storyboards, edits."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from asked import Asked
from PIL import Image

from pacorl.core.grid import split
from pacorl.core.set_scores import TIE
from pacorl.gate.paco_reward import PacoReward
from pacorl.generate.generated_images import save, to_dict
from pacorl.generate.generator import Generator
from pacorl.generate.sets import generate_sets, judge_edits, judge_sets
from pacorl.io.images import png_texts
from pacorl.rewards.consistency import EditConsistency
from pacorl.tiny.world import set_prompts
from pacorl.types import Character, Grid, Prompt, Size

SIZE, STEPS = Size(64, 64), 3


def brightness() -> Asked:
    """A judge by how alike two images are in brightness."""
    return Asked(lambda question: alike(*question.images))


def alike(first: Image.Image, second: Image.Image) -> float:
    return 1 - abs(float(np.asarray(first).mean()) - float(np.asarray(second).mean())) / 255


def score_of(sheet: Image.Image, prompt: Prompt) -> float:
    return fmean(alike(a, b) for a, b in combinations(split(sheet, prompt.grid), 2))


@pytest.fixture(scope="module")
def painter() -> Generator:
    return Generator.from_pretrained("tiny")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return set_prompts("test", 2)


def test_no_two_candidates_of_a_call_share_a_seed(painter: Generator, prompts: list[Prompt]) -> None:
    options = {"best_of": 2, "judge": brightness(), "keep_all": True, "size": SIZE, "steps": 1}
    made = generate_sets(painter, prompts, seed=5, **options)
    assert sorted(image.recipe["seed"] for image in made) == list(range(5, 9))


@pytest.mark.slow
def test_the_best_of_several_is_the_judges(painter, prompts):
    judge = brightness()
    ranked = generate_sets(painter, prompts, seed=3, best_of=3, judge=judge, size=SIZE, steps=STEPS, keep_all=True)
    assert sorted(one.recipe["seed"] for one in ranked) == list(range(3, 9))
    for prompt, part in zip(prompts, (ranked[:3], ranked[3:]), strict=True):
        own = [score_of(one.image, prompt) for one in part]
        assert max(own) - own[0] < TIE
        assert own[-1] - min(own) < TIE
        assert [one.judged.score for one in part] == pytest.approx(own)
    best = generate_sets(painter, prompts, seed=3, best_of=3, judge=PacoReward(judge), size=SIZE, steps=STEPS)
    (first,) = generate_sets(painter, prompts[0], seed=3, best_of=3, judge=judge, size=SIZE, steps=STEPS)
    assert first.recipe == best[0].recipe
    assert [one.image.tobytes() for one in best] == [ranked[0].image.tobytes(), ranked[3].image.tobytes()]


def test_a_character_s_image_is_asked_about_too(tmp_path):
    """Two sets are as consistent, and one shows the character; without images the character asks nothing."""
    Image.new("L", (8, 8), 200).save(tmp_path / "hero.png")
    hero = Character("hero", "a hero", (tmp_path / "hero.png",))

    def alike(question):
        greys = {image.convert("L").getpixel((0, 0)) for image in question.images}
        return float(len(greys) == 1 and "pose" not in question.text)

    judge = Asked(alike)
    images = [Image.new("L", (16, 8), grey) for grey in (50, 200)]
    prompt = Prompt(0, "two of a hero", grid=Grid(1, 2), panels=("it waves", "it jumps"), characters=(hero,))
    judged = judge_sets(judge, prompt, images)
    assert [each.parts["together"] for each in judged] == [1, 1]
    assert judged[1].score > judged[0].score
    assert [each.score for each in judge_sets(judge, replace(prompt, characters=()), images)] == [1, 1]


def test_the_first_of_tied_candidates_is_kept_and_the_tie_is_named(painter, prompts, tmp_path):
    def ranked_by(*scores):
        # The six pairs of every candidate.
        answers = iter([score for score in scores for _ in range(6)])
        judge = Asked(lambda question: next(answers))
        return generate_sets(painter, prompts[:1], best_of=3, judge=judge, size=SIZE, steps=1, keep_all=True)

    near = ranked_by(0.9971, 0.333, 0.9995)
    assert [(one.recipe["seed"], one.tied) for one in near] == [(0, 2), (2, 2), (1, 1)]
    assert [to_dict(one, tmp_path)["tied"] for one in near] == [2, 2, 1]
    assert [(one.recipe["seed"], one.tied) for one in ranked_by(0.9, 0.333, 0.95)] == [(2, 1), (0, 1), (1, 1)]


def test_an_edit_is_ranked_by_all_its_sources(tmp_path):
    """The first candidate is the first source again, which says nothing of the second."""
    paths = [tmp_path / "black.png", tmp_path / "white.png"]
    for path in paths:
        Image.new("RGB", (16, 16), path.stem).save(path)
    prompt = Prompt(id=0, text="Put both in one picture.", sources=tuple(paths))
    copy, both = Image.new("RGB", (16, 16), "black"), Image.new("RGB", (16, 16), (127, 127, 127))
    judged = judge_edits(brightness(), prompt, [copy, both])
    assert [one.score for one in judged] == pytest.approx([0.5, 0.5], abs=1e-9)
    assert judged[0].parts["kept of source 1"] == 1
    assert judged[0].parts["kept of source 2"] == 0
    one_source = Prompt(id=1, text="Make it grey.", sources=(paths[0],))
    (alone,) = judge_edits(brightness(), one_source, [both])
    assert alone.score == pytest.approx(EditConsistency(brightness())([one_source], [both])[0])


@pytest.mark.slow
def test_a_recipe_makes_its_image_again(prompts, tmp_path):
    """With every option that the model reads another than its default."""
    guided = Generator.from_pretrained(
        "tiny", guidance_scale=2, true_cfg_scale=3, negative_prompt="night", max_sequence_length=44
    )
    (made,) = generate_sets(guided, prompts[:1], seed=4, size=SIZE, steps=STEPS)
    path = tmp_path / "set-1.png"
    save(made, path)
    recipe = png_texts(path)
    assert {"negative_prompt": "night", "max_sequence_length": "44"}.items() <= recipe.items()
    document = to_dict(made, path)
    options = {"guidance_scale": document["guidance_scale"], "true_cfg_scale": float(recipe["true_cfg_scale"])}
    options |= {name: document[name] for name in ("negative_prompt", "max_sequence_length")}
    prompt = Prompt(id=0, text=recipe["prompt"], grid=made.prompt.grid)
    settings = {"seed": document["seed"], "size": Size.parse(recipe["size"]), "steps": document["steps"]}
    (again,) = generate_sets(Generator.from_pretrained(recipe["model"], **options), [prompt], **settings)
    assert again.image.tobytes() == made.image.tobytes()
    for left_out in options:
        rest = {name: value for name, value in options.items() if name != left_out}
        (other,) = generate_sets(Generator.from_pretrained(recipe["model"], **rest), [prompt], **settings)
        assert other.image.tobytes() != made.image.tobytes(), left_out
