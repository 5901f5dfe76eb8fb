"""The studio's work with the practice models: draw, restore, redraw, check and repair, sheet, teach and use."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from pacorl.config.options import StudioModels
from pacorl.core.grid import split
from pacorl.io.images import open_image
from pacorl.judge import default_judge
from pacorl.studio.models import JUDGE, fit_of, offers
from pacorl.studio.teaching import training_config, trainings
from pacorl.studio.work import BusyError, Studio
from pacorl.types import TINY

SENTENCE = (
    "Four pictures of a purple hero in town at night: standing with house; waving with tree; waving with boat; "
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
    assert studio.draft.panels == ["standing with house", "waving with tree", "waving with boat", "waving with ball"]
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
    checked = studio.folder.page(page.number).recipes[0]
    assert checked.verdict
    new = studio.folder.page(studio.draft.page)
    recipe = new.recipes[0]
    assert checked.odd is None or recipe.tries
    if recipe.tries:
        assert len(new.tries) == len(recipe.tries)
        assert new.before
        assert (pixels(new.before) == pixels(page.candidates[0])).all()
        # The redrawn panels are the accepted tries.
        accepted = {
            int(words[6]) - 1: path for words, path in zip(recipe.tries, new.tries, strict=True) if "accepted" in words
        }
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
    studio.cut(single, "2x2")
    cut = studio.folder.page(single.number)
    assert (cut.recipes[0].layout, len(cut.recipes[0].panels)) == ("2x2", 4)
    assert len(studio.folder.pages) == 3


@pytest.mark.slow
def test_panels_without_words_are_redrawn_by_the_words_of_the_form(studio):
    (drawn,) = studio.folder.pages
    panels = split(open_image(drawn.candidates[0]), drawn.recipes[0].grid)
    added = studio.add_pictures([(Image.new("RGB", (64, 64)), "odd"), *((panel, "x") for panel in panels[1:])])
    # The practice judge reads pictures of the practice model alone.
    recipe = added.recipes[0].model_copy(update={"model": TINY})
    studio.folder.keep_recipe(added, 0, recipe, open_image(added.candidates[0]))
    page = studio.folder.page(added.number)
    assert finished(studio, "checking", lambda job: studio.check(job, page, 0)) == ""
    repaired = studio.folder.page(studio.draft.page)
    assert repaired.number != page.number
    assert repaired.recipes[0].tries


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
    name = studio.folder.new_character("Milo", "a purple hero with a cap")
    for panel in split(open_image(page.candidates[0]), page.recipes[0].grid):
        studio.folder.add_picture(name, panel, "waving")
    assert finished(studio, "sheet", lambda job: studio.draw_sheet(job, name, ["Show the scene at sunset."])) == ""
    sheet = studio.folder.pages[0].recipes[0]
    assert (sheet.note, sheet.layout, len(studio.folder.pages[0].candidates)) == ("sheet of Milo", "1x1", 2)
    assert set(sheet.parts) == {"kept", "followed"}

    job = studio.submit("Teaching Milo", partial(studio.teach, name=name, steps=8))
    with pytest.raises(BusyError, match="Milo"):
        studio.submit("drawing", studio.draw)
    while not job.ended:
        time.sleep(0.1)
    (training,) = trainings(studio.loras, name)
    assert (training.step, job.error) == (8, "")
    assert job.shown
    assert training.samples
    for _, before, after in training.samples:
        assert before.is_file() and after.is_file()  # noqa: PT018
    file = training.lora / "pytorch_lora_weights.safetensors"
    assert file.is_file()

    # Chosen LoRAs outlast a restart, and are in the recipe.
    loras = {str(training.lora): 0.5}
    studio.choose(replace(studio.names, loras=loras))
    studio.close()
    again = Studio(studio.folder.path)
    assert dict(again.names.strengths) == loras
    assert again.restore(page.recipes[0]) == ["with no LoRA"]
    assert finished(again, "drawing", again.draw) == ""
    drawn = again.folder.page(again.draft.page)
    assert drawn.recipes[0].loras == loras
    again.close()


class Child:
    """A process that ends at once."""

    started: ClassVar[list[Child]] = []
    returncode = 0

    def __init__(self, *command, env, **pipes):
        self.command, self.environment = command, env
        self.started.append(self)

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = poll = lambda self, *_: 0


@pytest.fixture
def children(monkeypatch):
    monkeypatch.setattr("pacorl.studio.work.start_python", Child)
    Child.started.clear()
    return Child.started


def test_a_training_starts_from_a_config_of_the_studio(tmp_path, children):
    from pacorl.config.user_files import NO_USER_FILES

    studio = Studio(tmp_path / "studio")
    name = studio.folder.new_character("Milo", "a red hero with a crown")
    for number in range(3):
        studio.folder.add_picture(name, Image.new("RGB", (64, 64), (number, 0, 0)))
    for steps in (8, 8, 16):  # the second goes on with the first, and the third is another
        assert finished(studio, "teaching", partial(studio.teach, name=name, steps=steps)) == ""
    studio.close()
    configs = [Path(child.command[child.command.index("--config") + 1]) for child in children]
    assert configs == [tmp_path / f"studio/loras/Milo/{number}/config.yaml" for number in (1, 1, 2)]
    assert all(config.is_file() for config in configs)
    assert {child.environment[NO_USER_FILES] for child in children} == {"1"}


def test_what_fits_names_the_card_and_main_memory_and_licences_are_said(monkeypatch):
    listed = {offer.name: offer for offer in offers()}
    assert listed[TINY].is_here
    flux = listed["black-forest-labs/FLUX.1-dev"]
    assert flux.gated
    assert flux.licence
    setting, text = fit_of(TINY, "", TINY)
    assert setting == "normal"
    assert "main memory" in text
    fit_of.cache_clear()
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    setting, text = fit_of(TINY, "", TINY)
    assert setting == ""
    assert "not on this machine" in text
    fit_of.cache_clear()


def test_the_judge_follows_the_model(tmp_path):
    studio = Studio(tmp_path / "studio")
    studio.choose(replace(studio.names, model="black-forest-labs/FLUX.1-dev"))
    assert studio.names.judge == JUDGE
    studio.use(TINY)
    assert studio.names.judge == TINY
    studio.close()


def test_a_model_without_a_recipe_is_not_taught(tmp_path):
    with pytest.raises(ValueError, match="cannot be taught"):
        training_config(StudioModels(model="Qwen/Qwen-Image"), tmp_path / "a", tmp_path / "b")


def test_a_token_is_in_the_environment_of_the_download_alone(tmp_path, children):
    studio = Studio(tmp_path / "studio")
    studio.download("owner/model", token="hf_secret")
    studio.close()
    (child,) = children
    assert child.environment["HF_TOKEN"] == "hf_secret"
    assert "hf_secret" not in " ".join(child.command)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()] == []
