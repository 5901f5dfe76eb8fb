"""One sentence becomes the texts of a set's panels; no model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pacorl import prompt_from
from pacorl.core.grid import panel_texts
from pacorl.records.panels import read_request, write_panels

EXAMPLES = yaml.safe_load((Path(__file__).parents[2] / "examples" / "sentences.yaml").read_text("utf-8"))


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_example_becomes_a_set_of_its_number(kind):
    text, count = EXAMPLES[kind]["text"], EXAMPLES[kind]["panels"]
    draft = write_panels(text)
    assert len(set(draft.panels)) == count
    prompt = prompt_from("some/model", theme=text)
    assert prompt.grid.count == len(panel_texts(prompt.text)) == count
    assert prompt.criteria["Identity"]


@pytest.mark.parametrize(
    ("text", "panels"),
    [
        ("Three images of one fox: it runs, it sleeps, and it hides.", ["it runs", "it sleeps", "it hides"]),
        ("2 photos of one fox, at rest and at play", ["at rest", "at play"]),
        ("a fox in three scenes (running; sleeping; eating)", ["running", "sleeping", "eating"]),
        ("A set of 3 images of one fox running, sleeping and eating", ["running", "sleeping", "eating"]),
        ("Several pictures of one fox, featuring: 'it runs', 'it sleeps'", ["it runs", "it sleeps"]),
        ("Two signs in one font reading 'open' and 'closed'", ["reading 'open'", "reading 'closed'"]),
        ("Two signs in one font: 'Open' and 'Closed'", ["with 'Open'", "with 'Closed'"]),
        ("A 3-step recipe: boil, steep, pour", ["boil", "steep", "pour"]),
        ("Two menus of a café reading ‘Brew', and ‘Dad’s Treats'", ["reading 'Brew'", "reading 'Dad’s Treats'"]),
        ("Three chalkboards of one café: brew, specials, treats", ["brew", "specials", "treats"]),
        ("Two Christmas greeting cards of one café: brew, treats", ["brew", "treats"]),
        ("Two walls of one café, featuring: 'Brew' and \"Treats”", ["featuring 'Brew'", "featuring 'Treats'"]),
        ("A red fox. 1) It runs. 2) It sleeps, and 3) it eats", ["It runs", "It sleeps", "it eats"]),
        ("Two menus of a café. Show: 1. 'Brew', in ink, 2. 'Treats'", ["'Brew', in ink", "'Treats'"]),
        ("Two stills from a film about: a robot, a dog", ["a robot", "a dog"]),
        ("A red fox. Panel 1: it runs. Panel 2: it sleeps.", ["it runs", "it sleeps"]),
        ("Three images of a fox at the beach, at home and in bed", ["at the beach", "at home", "in bed"]),
        ("Three photos of a fox in snow, in a boat and asleep", ["in snow", "in a boat", "asleep"]),
        ("Two pictures of an owl - reading, flying", ["reading", "flying"]),
        ("A comic strip with two panels of one fox: it runs, it sleeps", ["it runs", "it sleeps"]),
        ("A 1x2 grid of images of one fox: it runs, it sleeps", ["it runs", "it sleeps"]),
        ("Two logos for 'Crumb' on a sign, and a cup", ["on a sign", "on a cup"]),
        ("Two images of a knight's training as a page, a lord", ["as a page", "as a lord"]),
        # A counted feature is in every panel, and so is a style behind "each".
        ("Two images of a monster with two horns: asleep, awake", ["asleep", "awake"]),
        ("Two images of an oak in each season, as a woodcut: bare, green", ["bare", "green"]),
    ],
)  # fmt: skip
def test_lists_are_read(text, panels):
    draft = write_panels(text)
    subject = draft.theme
    assert list(draft.panels) == [f"{subject}, {panel}" for panel in panels]
    assert draft.note == ""


@pytest.mark.parametrize(
    ("text", "theme", "is_one"),
    [
        ("Four images of a fox, a bear, a wolf and an owl", "a fox, a bear, a wolf, an owl", False),
        ("Two images in watercolor: a fjord, a village", "image in watercolor", False),
        ("Two watercolor images: a fjord, a village", "watercolor image", False),
        ("Two posters with the same palette: a fjord, a village", "poster with the same palette", False),
        ("Two images in watercolor of a fox: asleep, awake", "image in watercolor of a fox", True),
        ("Two portraits: asleep, awake", "portrait", True),
        ("Two images with one fox mascot: a mug, a bag", "image with one fox mascot", True),
        ("Two stills from a film about a robot: it wakes, it walks", "still from a film about a robot", True),
        ("Step by step, in two images, how ice melts", "how ice melts", True),
        ("Two keyframes of a rose: bud, bloom", "keyframe of a rose", True),
        ("Two charcoal studies of a rose: bud, bloom", "charcoal study of a rose", True),
        ("Two movies of a rose: bud, bloom", "movie of a rose", True),
        ("Two stained-glass windows of a rose: bud, bloom", "stained-glass window of a rose", True),
        ("Two close-ups of a watch: dial, crown", "close-up of a watch", True),
        ("A two-panel comic about a fox: asleep, awake", "comic about a fox", True),
        ("Two photos of a fox, and a bear", "photo", False),
        # Words before the medium belong to the subject.
        ("A clay owl comic with 2 panels: asleep, in snow", "clay owl comic", True),
        ("A girl in a red coat comic strip of 2 panels: asleep, in snow", "girl in a red coat comic", True),
        ("A paper dragon storyboard with two images: asleep, in snow", "paper dragon image", True),
        ("A watercolor series of two images: a fjord, a mill", "watercolor image", False),
        ("A clay owl in a 2-panel comic: asleep, in snow", "clay owl comic", True),
        ("A knight in two watercolor panels: asleep, in snow", "A knight in watercolor panels", True),
    ],
)  # fmt: skip
def test_a_theme_is_a_phrase_and_has_an_identity_if_it_names_a_subject(text, theme, is_one):
    draft = write_panels(text)
    assert draft.theme == theme
    assert ("Identity" in draft.criteria) == is_one


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("two images of a fox", 2),
        ("Please generate sixteen pictures of a fox", 16),
        ("a series of 7 photos of a fox", 7),
        ("a four-panel comic of a fox", 4),
        ("multiple images of a fox", 4),
        ("Images of a fox", 4),
        ("I'd like to have three pictures of a fox, please", 3),
        ("Could you please draw me five sketches of a fox?", 5),
        # One image, or a text with its panels.
        ("two cats on a sofa", 0),
        ("Two cats on a sofa, a cushion reading 'Home'", 0),
        ("four cats playing cards", 0),
        ("Five apples, three red and two green", 0),
        ("Three friends including Ann, Bob and Cid", 0),
        ("Three friends taking photos", 0),
        ("A fox in the snow. Make four images.", 0),
        ("A fox in the snow. Make a 4-panel comic.", 0),
        ("A man holding a 4-panel comic", 0),
        ("A girl reading a comic with 4 panels", 0),
        ("Generate one image of a fox", 0),
        ("1) A fox at 3. It naps", 0),
        ("TWO-PANEL Images with a 1x2 grid layout of a fox. [1]-[1]: It runs. [1]-[2]: It sleeps.", 0),
    ],
)
def test_numbers_in_words_and_digits(text, count):
    assert (read_request(text) is not None) == bool(count)
    if count:
        assert len(set(write_panels(text).panels)) == count
        assert len(write_panels(text, count=5).panels) == 5


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Generate 17 images of a fox", "asks for 17 images; a set has 2 to 16 panels"),
        ("Four images of one fox: it runs, it sleeps, it eats", "4 images are asked for, and 3 are listed, 'it runs'"),
        (" ", "the sentence is empty"),
    ],
)
def test_what_cannot_be_a_set_is_refused(text, fault):
    with pytest.raises(ValueError, match=fault):
        write_panels(text)
