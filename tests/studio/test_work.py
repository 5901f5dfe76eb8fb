"""The studio's work with the practice models: draw, restore, redraw, check and repair, teach and use."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from pacorl.config.options import StudioModels
from pacorl.config.user_files import NO_USER_FILES
from pacorl.core.grid import split
from pacorl.core.set_scores import tied_groups
from pacorl.generate.generated_images import Judged
from pacorl.io.children import start_python
from pacorl.io.documents import write_json
from pacorl.io.images import open_image
from pacorl.studio.folder import Drawing, page_of
from pacorl.studio.models import JUDGE, fit_of
from pacorl.studio.teaching import training_recipe
from pacorl.studio.work import DRAWINGS, NO_BETTER, TRIES, Studio
from pacorl.tiny.world import Panel, draw
from pacorl.types import TINY

PANELS = ["standing with house", "waving with tree", "waving with boat", "waving with ball"]
SENTENCE = f"Four pictures of a purple hero in town at night: {'; '.join(PANELS)}"


def finished(studio: Studio, work: Callable[..., object], *arguments: object) -> str:
    """Do a job, and return its fault."""
    studio.submit(work, *arguments)
    while studio.phase:
        time.sleep(0.01)
    return studio.fault


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """A studio's folder with one page."""
    path = tmp_path_factory.mktemp("drawn") / "studio"
    studio = Studio(path)
    studio.keep(words=SENTENCE, seed=3)
    studio.unfold()
    assert finished(studio, studio.draw) == ""
    studio.close()
    return path


@pytest.fixture
def studio(drawn, tmp_path):
    """A studio after a restart, in a copy of that folder."""
    shutil.copytree(drawn, tmp_path / "studio")
    studio = Studio(tmp_path / "studio")
    yield studio
    studio.close()


def opened(studio: Studio) -> list[Drawing]:
    """The drawings of the open page."""
    return studio.folder.page(studio.draft.page)


def are_ranked(drawings: list[Drawing]) -> bool:
    """Whether they are best first; ties keep the order of their seeds."""
    groups = tied_groups([drawing.recipe.score for drawing in drawings])
    return [index for group in groups for index in group] == [*range(len(drawings))]


def pixels(path: Path) -> np.ndarray:
    return np.array(open_image(path))


def panels_of(drawing: Drawing) -> list[np.ndarray]:
    return [np.array(panel) for panel in split(open_image(drawing.path), drawing.recipe.grid)]


@pytest.mark.slow
def test_a_page_is_ranked_and_drawn_again_to_the_bit_after_a_restart(studio):
    drawings = opened(studio)
    assert are_ranked(drawings)
    best = drawings[0]
    studio.keep(words="something else", seed=None)
    studio.restore(best.recipe)
    assert studio.fault == ""
    assert studio.panels[1] == PANELS, "as a person wrote them"
    assert finished(studio, studio.draw) == ""
    (again,) = [each for each in opened(studio) if each.recipe.seed == best.recipe.seed]
    assert again.path.parent != best.path.parent
    assert (pixels(again.path) == pixels(best.path)).all()
    assert studio.draft.seed is None, "the next drawing is another"
    studio.names = StudioModels(adapter="none")
    studio.restore(best.recipe.updated(model="org/other", characters=["Milo"], references=["1.png"]))
    for other in ("model org/other", "LoRA consistent", "character Milo", "pictures 1.png"):
        assert other in studio.fault


@pytest.mark.slow
def test_a_redrawn_panel_is_the_only_change_and_drawings_that_are_not_told_apart_are_a_tie(studio, monkeypatch):
    judged = [Judged(score) for score in (0.96, 0.93, 0.96, 0.93)]
    monkeypatch.setattr("pacorl.generate.sets.judge_sets", lambda *_: judged)
    page = opened(studio)[0]
    studio.keep(words=SENTENCE)
    studio.unfold()
    assert finished(studio, studio.draw) == ""
    assert [drawing.recipe.tied for drawing in opened(studio)] == [2, 2, 2, 2]
    assert finished(studio, studio.redraw, page, 1) == ""
    drawings = opened(studio)
    assert [drawing.recipe.tied for drawing in drawings] == [2, 2, 2, 2]
    assert [drawing.recipe.note for drawing in drawings] == ["Panel 2 drawn again"] * DRAWINGS
    for drawing in drawings:
        for index, (old, new) in enumerate(zip(panels_of(page), panels_of(drawing), strict=True)):
            assert index == 1 or np.array_equal(old, new)
        studio.restore(drawing.recipe)
        assert studio.fault == ""


EDITS = ["Put a boat beside the hero.", "Show the scene at night."]
"""As the practice editor was asked."""
WORDS = "put a boat beside the hero\nShow the Scene at night."


@pytest.mark.slow
def test_a_sheet_is_drawn_from_pictures_and_restored_to_the_bit(studio):
    name = studio.folder.new_character("Milo", "a purple hero")
    studio.folder.add_picture(name, split(open_image(opened(studio)[0].path), opened(studio)[0].recipe.grid)[0])
    studio.keep(character=name, sheet=WORDS)
    assert finished(studio, studio.sheet) == ""
    drawings = opened(studio)
    assert [drawing.recipe.prompt for drawing in drawings] == [line for line in EDITS for _ in range(DRAWINGS)]
    assert are_ranked(drawings[:DRAWINGS])
    assert are_ranked(drawings[DRAWINGS:])
    last = drawings[-1]
    studio.restore(last.recipe)
    assert finished(studio, studio.sheet) == ""
    (again,) = [each for each in opened(studio) if each.recipe.seed == last.recipe.seed]
    assert (pixels(again.path) == pixels(last.path)).all()
    assert studio.fault == ""
    studio.folder.remove("all", *(path for path, _ in studio.folder.pictures(name)))
    studio.restore(last.recipe)
    assert "pictures 2" in studio.fault


def test_a_model_is_chosen_with_the_form_that_fits_and_its_judge_and_stays_after_a_restart(tmp_path, monkeypatch):
    model = tmp_path / "FLUX.1-dev"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    fit_of = Mock(return_value=("low", "fits"))
    monkeypatch.setattr("pacorl.studio.work.fit_of", fit_of)
    is_here = {"somebody/else": False, "black-forest-labs/FLUX.1-dev": False}
    monkeypatch.setattr("pacorl.studio.work.is_here", lambda name: is_here.get(name, True))
    studio = Studio(tmp_path / "studio")
    assert "not on this machine" in finished(studio, studio.use, "somebody/else")
    assert finished(studio, studio.use, str(model)) == ""
    studio.close()

    again = Studio(tmp_path / "studio")
    assert (again.names.model, again.names.memory, again.names.judge) == (str(model), "low", JUDGE)
    assert finished(again, again.use, TINY) == ""
    assert again.names.judge == TINY
    fit_of.return_value = (None, "does not fit")
    monkeypatch.setattr("pacorl.studio.work.start_python", Mock(side_effect=AssertionError))
    for name in (TINY, "black-forest-labs/FLUX.1-dev"):
        assert finished(again, again.use, name).endswith(" does not fit")
    assert finished(again, again.plan_models) == ""
    assert set(again.fits.values()) == {"does not fit"}
    again.close()


FITS = [(1, 64, "GB of RTX, and 1 are"), (12, 0.1, "GB of main memory, and 0 are"), (12, 8, "")]


@pytest.mark.parametrize(("card", "main", "said"), FITS)
def test_a_model_that_does_not_fit_is_refused_with_the_limit_and_what_is_here(monkeypatch, card, main, said):
    here = {"device": "RTX", "device_bytes": card * 2**30, "main_bytes": int(main * 2**30)}
    monkeypatch.setattr("pacorl.plan.plan.machine", lambda card: here)
    memory, words = fit_of.__wrapped__(TINY)
    assert (memory is None) == bool(said)
    assert said in words


def test_a_token_is_no_argument_of_a_download(tmp_path, monkeypatch):
    started = []

    def start(*command, env, **pipes):
        started.append((command, env["HF_TOKEN"]))
        return start_python("-c", "import sys; sys.exit('no such model')", env=env, **pipes)

    monkeypatch.setattr("pacorl.studio.work.start_python", start)
    monkeypatch.setattr("pacorl.studio.work.fit_of", Mock(return_value=("low", "fits")))
    studio = Studio(tmp_path / "studio")
    name = "black-forest-labs/FLUX.1-dev"
    assert finished(studio, studio.use, name, "hf_secret") == "no such model"
    assert studio.names.model == TINY
    ((command, token),) = started
    assert (token, name in command) == ("hf_secret", True)
    assert "hf_secret" not in str(command)
    studio.close()


@pytest.mark.slow
def test_a_page_is_checked_repaired_and_every_try_kept(studio, monkeypatch):
    recipe = opened(studio)[0].recipe.updated(theme="a purple round hero with a cap in town at night")
    scenes = [text.split(", ") for text in recipe.panels]
    *good, last = [draw(Panel("purple", "round", "cap", "night", "town", pose, prop), 96) for pose, prop in scenes]
    odd = draw(Panel("red", "square", "crown", "sunset", "beach", "jumping", "ball"), 96)
    studio.add_pictures([(page_of([*good, odd], recipe.grid), "odd")], recipe.texts)
    (page,) = opened(studio)
    assert finished(studio, studio.check, page) == ""
    (before,) = studio.folder.page(page.path.parent.name)
    assert before.recipe.odd == 3
    assert "panel 4" in before.recipe.checked[0]
    repaired, *tries = opened(studio)
    assert repaired.recipe.score >= before.recipe.score
    assert (repaired.recipe.note, before.recipe.redrawn) == ("Drawn again: panel 4", {})
    assert list(repaired.recipe.redrawn) == ["4"]
    assert any("accepted" in each.recipe.note for each in tries)
    # No try is taken.
    monkeypatch.setattr("pacorl.generate.repair._is_better", lambda check, than: False)
    assert finished(studio, studio.check, page) == ""
    same, *tries = opened(studio)
    assert (same.recipe.note, len(tries)) == (NO_BETTER, TRIES)
    assert (pixels(same.path) == pixels(page.path)).all()
    # Panels that belong together must also look like the page's character, which is not the form's.
    studio.keep(character=studio.folder.new_character("Milo", "a purple hero"))
    studio.folder.add_picture("Milo", odd)
    for characters in ([], ["Milo"]):
        texts = recipe.updated(characters=characters).texts
        studio.add_pictures([(page_of([*good, last], recipe.grid), "alike")], texts)
        (page,) = opened(studio)
        assert finished(studio, studio.check, page) == ""
        (checked,) = studio.folder.page(page.path.parent.name)
        assert ("(compared with Milo)" in checked.recipe.checked[0]) == bool(characters)


@pytest.mark.slow
def test_pictures_of_other_programs_are_declined_by_the_practice_judge_and_redrawn_by_the_words_of_the_form(studio):
    first = opened(studio)[0]
    panels = split(open_image(first.path), first.recipe.grid)
    pictures = [(Image.new("RGB", (64, 64)), "odd"), *((panel, "x") for panel in panels[1:])]
    studio.add_pictures(pictures, {})
    (page,) = opened(studio)
    assert (page.recipe.layout, page.recipe.prompt) == ("2x2", "")
    assert "practice judge" in finished(studio, studio.check, page)
    page.rewrite(model=TINY)
    (page,) = opened(studio)
    assert finished(studio, studio.check, page) == ""
    assert opened(studio)[0].recipe.note == "Drawn again: panel 1"


@pytest.mark.slow
def test_one_job_at_a_time_which_can_be_stopped_and_leaves_nothing(studio):
    def work():
        while True:
            studio.enter("waiting")
            time.sleep(0.01)

    def stop():
        studio.stop()
        while studio.phase:
            time.sleep(0.01)
        assert studio.fault == ""

    studio.submit(work)
    with pytest.raises(ValueError, match="under way"):
        studio.submit(work)
    stop()
    studio.keep(words=SENTENCE)
    studio.submit(studio.draw)
    stop()
    assert len(studio.folder.pages) == 1
    assert finished(studio, lambda: {}["a"]) == "'a'"


@pytest.mark.slow
def test_a_character_is_taught_in_a_process_without_user_files_and_its_lora_draws_it(studio, monkeypatch):
    name = studio.folder.new_character("Milo", "a purple hero with a cap")
    for panel in split(open_image(opened(studio)[0].path), opened(studio)[0].recipe.grid):
        studio.folder.add_picture(name, panel, "waving")
    arguments = [*training_recipe(studio.names), "steps=8", "evaluate_every=4"]
    monkeypatch.setattr("pacorl.studio.work.training_recipe", lambda names: arguments)
    environments = []

    def started(*command, env, **pipes):
        environments.append(env)
        return start_python(*command, env=env, **pipes)

    monkeypatch.setattr("pacorl.studio.work.start_python", started)
    studio.submit(studio.teach, name)
    phases = {studio.phase}
    while studio.phase:
        phases.add(studio.phase)
        time.sleep(0.1)
    assert any("of at most 8" in phase for phase in phases)
    assert studio.fault == ""
    assert [environment[NO_USER_FILES] for environment in environments] == ["1"]
    training = studio.training(name)
    assert training.is_finished
    assert training.lora.is_file()
    assert next(text for text, _ in training.samples) == "Milo, a purple hero with a cap"

    studio.close()
    again = Studio(studio.folder.path)
    recipe = opened(again)[0].recipe
    again.restore(recipe)
    again.keep(character=name)
    assert finished(again, again.draw) == ""
    drawn = opened(again)[0].recipe
    assert drawn.theme.startswith("a purple hero with a cap")
    assert str(training.lora) in drawn.adapter
    assert drawn.character == name
    assert 0 <= drawn.likeness <= 1
    again.folder.describe(name, "a purple hero")
    again.restore(drawn)
    assert "description a purple hero with a cap" in again.fault
    assert again.adapters("") == {}
    again.close()


def test_the_name_of_a_character_is_its_description_and_words_are_checked_before_a_job(tmp_path):
    studio = Studio(tmp_path / "studio")
    character = studio.folder.new_character("Milo the hat", "a purple hero with a cap")
    studio.folder.add_picture(character, Image.new("RGB", (8, 8)))
    studio.keep(character=character, words=SENTENCE.replace("a purple hero", "Milo the hat"))
    studio.unfold()
    assert studio.panels[0] == "a purple hero with a cap in town at night"
    studio.keep(words=studio.draft.words.replace("a purple hero with a cap", "Milo the hat"))
    assert studio.panels[0] == "a purple hero with a cap in town at night", "in the lines too"
    studio.keep(character=character, words="in town at night\nMilo the hat waves\nstands")
    looks = "a purple hero with a cap"
    assert studio.panels == (f"{looks}, in town at night", [f"{looks} waves", "stands"])
    studio.keep(character="", words=SENTENCE.replace("a purple hero", "Milo the hat"))
    with pytest.raises(ValueError, match="milo"):
        studio.prompt()
    studio.keep(character=character)
    assert studio.prompt().characters[0].name == character
    training = studio.training(character)
    training.run.mkdir(parents=True)
    assert studio.adapters(character) == {}, "a stopped training draws nothing"
    write_json(training.run / "summary.json", {})
    assert list(studio.adapters(character)) == [str(training.lora)]
    studio.keep(character=studio.folder.new_character("Zoë", "a red hero"), words="Zoe\u0308 waves\nstands")
    assert studio.panels[0] == "a red hero waves", "as a Mac's file name has it"
    studio.keep(character="", words="\n".join(["a purple hero in town at night", "runs", *PANELS[1:]]))
    with pytest.raises(ValueError, match="runs"):
        studio.prompt()
    studio.close()


def test_a_page_by_an_editor_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(Studio, "_models", Mock(side_effect=AssertionError))
    studio = Studio(tmp_path / "studio", StudioModels(model="black-forest-labs/FLUX.1-Kontext-dev"))
    assert "Kontext-dev edits images" in finished(studio, studio.draw)
    studio.close()
