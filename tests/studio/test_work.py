"""The studio's work with the practice models: draw, restore, redraw, check and repair, sheet, teach and use."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pacorl.config.options import StudioModels
from pacorl.core.grid import split
from pacorl.io.images import open_image
from pacorl.judge import default_judge
from pacorl.studio.folder import Recipe
from pacorl.studio.models import Download, fit_of, offers
from pacorl.studio.page import with_loras
from pacorl.studio.teaching import training_config
from pacorl.studio.work import BusyError, Studio
from pacorl.types import TINY

SENTENCE = (
    "Four pictures of purple pointed hero, cap, night: standing with house; waving with tree; waving with boat; "
    "waving with ball"
)


def finished(studio: Studio, name: str, work: object) -> str:
    """Do a job, and return its fault."""
    job = studio.submit(name, work)  # type: ignore[arg-type]
    while not job.ended:
        time.sleep(0.01)
    return job.error


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """A studio's folder with one page of two candidates."""
    path = tmp_path_factory.mktemp("drawn") / "studio"
    studio = Studio(path)
    studio.keep(sentence=SENTENCE, seed=3, candidates=2)
    studio.unfold()
    assert finished(studio, "drawing", studio.draw) == ""
    studio.close()
    return path


@pytest.fixture
def studio(drawn, tmp_path):
    """A studio after a restart, in a copy of that folder."""
    shutil.copytree(drawn, tmp_path / "studio")
    studio = Studio(tmp_path / "studio")
    yield studio
    studio.close()


def pixels(path: Path) -> np.ndarray:
    return np.array(open_image(path))


@pytest.mark.slow
def test_a_page_is_ranked_and_drawn_again_to_the_bit_after_a_restart(studio):
    (page,) = studio.folder.pages
    assert studio.draft.page == page.number
    assert [recipe.rank for recipe in page.recipes] == [1, 2]
    scores = [recipe.score for recipe in page.recipes]
    assert scores == sorted(scores, reverse=True)
    assert default_judge(list(page.candidates)) == TINY  # the commands read these files too

    studio.keep(sentence="something else", theme="", panels=[], seed=None)
    assert studio.restore(page.recipes[0]) == []
    assert studio.draft.sentence == SENTENCE
    studio.keep(seed=3)
    assert finished(studio, "drawing", studio.draw) == ""
    again = studio.folder.page(studio.draft.page)
    assert again.number != page.number
    for before, after in zip(page.candidates, again.candidates, strict=True):
        assert (pixels(before) == pixels(after)).all()


@pytest.mark.slow
def test_a_recipe_says_what_differs_now(studio):
    recipe = studio.folder.pages[0].recipes[0]
    other = recipe.model_copy(update={"loras": {"a/b": 0.5}, "model": "another/model", "character": "king"})
    assert studio.restore(other) == ["drawn by another/model", "with a/b 0.5", "of king, who is not here"]
    with pytest.raises(ValueError, match="2 of the pictures"):
        studio.restore(recipe.model_copy(update={"sources": ["one", "two"]}))


@pytest.mark.slow
def test_a_redrawn_panel_is_the_only_change_and_never_worse(studio):
    (page,) = studio.folder.pages
    assert finished(studio, "redrawing", lambda job: studio.redraw(job, page, 0, 1)) == ""
    new = studio.folder.page(studio.draft.page)
    assert len(new.candidates) == 3
    assert new.recipes[0].score >= page.recipes[0].score - 1e-6
    assert {recipe.note for recipe in new.recipes} == {"as before", "panel 2 redrawn"}
    old = split(open_image(page.candidates[0]), page.recipes[0].grid)
    for path in new.candidates:
        for index, panel in enumerate(split(open_image(path), page.recipes[0].grid)):
            assert index == 1 or np.array_equal(np.array(panel), np.array(old[index]))


@pytest.mark.slow
def test_a_page_is_checked_repaired_and_every_try_kept(studio):
    (page,) = studio.folder.pages
    assert finished(studio, "checking", lambda job: studio.check(job, page, 0)) == ""
    assert page.verdict
    new = studio.folder.page(studio.draft.page)
    recipe = new.recipes[0]
    assert page.verdict.passed or recipe.tries
    if recipe.tries:
        assert len(new.tries) == len(recipe.tries)
        assert new.before
        assert (pixels(new.before) == pixels(page.candidates[0])).all()
        # The redrawn panels are the accepted tries.
        accepted = {line.panel: path for line, path in zip(recipe.tries, new.tries, strict=True) if line.accepted}
        for index, path in accepted.items():
            panel = split(open_image(new.candidates[0]), recipe.grid)[index]
            assert (np.array(panel) == pixels(path)).all()


@pytest.mark.slow
def test_pictures_of_other_programs_are_pages_that_the_practice_judge_declines(studio):
    page = studio.add_pictures([(Image.new("RGB", (64, 64)), "a.png"), (Image.new("RGB", (32, 32)), "b.png")])
    assert (page.recipes[0].layout, page.recipes[0].prompt) == ("1x2", "")
    assert "practice judge" in finished(studio, "checking", lambda job: studio.check(job, page, 0))
    single = studio.add_pictures([(Image.new("RGB", (64, 64)), "a.png")])
    assert single.recipes[0].grid.count == 1
    cut = studio.describe(single, "2x2", "a fox", ["runs", "sleeps"])
    assert (cut.recipes[0].layout, cut.recipes[0].panels) == ("2x2", ["runs", "sleeps", "", ""])
    assert len(studio.folder.pages) == 4


@pytest.mark.slow
def test_words_that_the_model_does_not_know_are_refused_before_a_job(studio):
    studio.keep(sentence="Four pictures of a fox: runs; sleeps; eats; hides", panels=[])
    studio.unfold()
    with pytest.raises(ValueError, match="'fox'"):
        studio.prompt()
    studio.keep(sources=["0" * 16], sentence=" ")
    with pytest.raises(ValueError, match="what shall change"):
        studio.prompt()


@pytest.mark.slow
def test_one_job_at_a_time_which_can_be_stopped_and_leaves_nothing(studio):
    def work(job):
        while True:
            job.advance(1)
            time.sleep(0.01)

    job = studio.submit("waiting", work)
    with pytest.raises(BusyError, match="waiting"):
        studio.submit("another", work)
    with pytest.raises(BusyError, match="waiting"):
        studio.choose(studio.names)
    job.stopped = True
    while not job.ended:
        time.sleep(0.01)
    assert job.error == ""

    drawing = studio.submit("drawing", studio.draw)
    drawing.stopped = True
    while not drawing.ended:
        time.sleep(0.01)
    assert len(studio.folder.pages) == 1
    assert finished(studio, "failing", lambda job: {}["a"]) == "'a'"


@pytest.mark.slow
def test_a_character_is_drawn_taught_stopped_continued_and_used(studio):
    (page,) = studio.folder.pages
    name = studio.folder.new_character("Milo", "purple pointed hero, cap, night")
    for panel in split(open_image(page.candidates[0]), page.recipes[0].grid):
        studio.folder.add_picture(name, panel, "waving")
    assert finished(studio, "sheet", lambda job: studio.draw_sheet(job, name, ["Change the scene to sunset."])) == ""
    sheet = studio.folder.pages[0].recipes[0]
    assert (sheet.note, sheet.layout, len(studio.folder.pages[0].candidates)) == ("sheet of Milo", "1x1", 2)
    assert set(sheet.parts) == {"kept", "followed"}

    studio.teach(name, steps=8)
    with pytest.raises(BusyError, match="Milo"):
        studio.submit("drawing", studio.draw)
    while studio.teacher.name:
        time.sleep(0.1)
    training = studio.teacher.last(name)
    assert (training.step, training.error) == (8, "")
    assert training.samples
    for _, before, after in training.samples:
        assert before.is_file() and after.is_file()  # noqa: PT018
    file = training.lora / "pytorch_lora_weights.safetensors"
    assert file.is_file()

    # Chosen LoRAs outlast a restart, and are in the recipe.
    loras = {str(training.lora): 0.5}
    studio.choose(with_loras(studio.names, loras))
    studio.close()
    again = Studio(studio.folder.path)
    assert dict(again.names.strengths) == loras
    assert again.restore(page.recipes[0]) == ["with no LoRA"]
    assert finished(again, "drawing", again.draw) == ""
    drawn = again.folder.page(again.draft.page)
    assert drawn.recipes[0].loras == loras
    again.close()


def test_a_training_starts_from_a_config_of_the_studio(tmp_path, monkeypatch):
    from pacorl.config.user_files import NO_USER_FILES
    from pacorl.studio import teaching

    started = []

    class Child:
        stdin = None

        def __init__(self, *command, **options):
            started.append((command, options["env"]))

        def poll(self):
            return 0

    monkeypatch.setattr(teaching, "start_python", Child)
    studio = Studio(tmp_path / "studio")
    name = studio.folder.new_character("Milo", "red round hero, crown, night")
    for number in range(3):
        studio.folder.add_picture(name, Image.new("RGB", (64, 64), (number, 0, 0)))
    studio.teach(name, steps=8)
    studio.close()
    ((command, environment),) = started
    config = Path(command[command.index("--config") + 1])
    assert config == tmp_path / "studio/loras/Milo/config.yaml"
    assert config.is_file()
    assert environment[NO_USER_FILES] == "1"


def test_what_fits_names_the_card_and_main_memory_and_licences_are_said():
    listed = {offer.name: offer for offer in offers(StudioModels())}
    assert listed[TINY].is_here
    flux = listed["black-forest-labs/FLUX.1-dev"]
    assert flux.gated
    assert flux.licence
    fit = fit_of(TINY, "", TINY)
    assert fit.fits
    assert "main memory" in fit.text
    assert not replace(fit, main=2 * fit.has_main).fits
    assert "not on this machine" in replace(fit, main=2 * fit.has_main).text


def test_a_model_without_a_recipe_is_not_taught(tmp_path):
    with pytest.raises(ValueError, match="cannot be taught"):
        training_config(StudioModels(model="Qwen/Qwen-Image"), tmp_path / "a", tmp_path / "b")


def test_a_token_is_in_the_environment_of_the_download_alone(monkeypatch):
    from pacorl.studio import models

    started = []

    class Child:
        def __init__(self, *command, **options):
            started.append((command, options["env"]))

        def poll(self):
            return None

        def terminate(self):
            pass

        def wait(self):
            pass

    monkeypatch.setattr(models, "start_python", Child)
    download = Download()
    download.start("owner/model", token="hf_secret")
    ((command, environment),) = started
    assert environment["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in " ".join(command)
    with pytest.raises(ValueError, match="owner/model"):
        download.start("owner/another")
    download.stop()
    assert not download.runs


def test_a_recipe_of_a_file_is_a_recipe_and_no_code():
    assert Recipe.model_validate_json("{}").layout == "2x2"
