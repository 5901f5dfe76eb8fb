"""Characters in the studio: pictures, a sheet of which a picture is drawn again, and the training of a LoRA."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from pacorl.config.options import StudioModels
from pacorl.config.recipes import recipe_names
from pacorl.generate import sets
from pacorl.io.documents import read_yaml
from pacorl.io.images import png_bytes
from pacorl.studio import models
from pacorl.studio.characters import Characters, character_recipes, training_config
from pacorl.studio.jobs import Job
from pacorl.studio.trainer_process import TrainerProcess
from pacorl.tiny.characters import Oracle, Panel, draw
from pacorl.types import Prompt

HERO = "red round hero, crown, night"
SCENES = ["Change the scene to sunset.", "Put a boat beside the hero."]


def png(colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The application on a test client; its models are never loaded."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    from starlette.testclient import TestClient

    from pacorl.studio import server as module
    from pacorl.studio.models import ModelHost

    monkeypatch.setattr(ModelHost, "load", lambda self, job: {})

    def make_sheet(self, job, prompts, sampling, *, sources, earlier=()):
        """What a real host returns, of red candidates."""
        one = {"base": None, "recipe": {}, "layout": "1x1", "panels": ["a"], "rank": 1}
        one |= {"width": 32, "height": 32, "score": 0.5, "matrix": [], "error": ""}
        drawn = list(earlier)
        for seed, position in enumerate(prompts, sampling.seed):
            job.images[f"base-{seed}"] = png()
            drawn.append({**one, "image": f"base-{seed}", "picture": position, "seed": seed})
        return {"kind": "sheet", "sources": [], "candidates": drawn, "read": [path.name for path in sources]}

    monkeypatch.setattr(ModelHost, "make_sheet", make_sheet)
    studio = module.AppState("secret", folder=tmp_path / "sets")
    headers = {"Authorization": "Bearer secret"}
    with TestClient(module.make_app(studio), base_url="http://localhost", headers=headers) as client:
        yield client, studio
    studio.close()


def upload(client, colour: str = "red") -> str:
    return client.post("/api/uploads", params={"name": "me.png"}, content=png(colour)).json()["id"]


def hero(client, pictures: int = 3) -> dict[str, Any]:
    form = {"description": HERO, "uploads": [upload(client) for _ in range(pictures)]}
    return client.post("/api/characters/hero", json=form).json()


def finished(client, answer) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 120
    while (job := client.get(f"/api/jobs/{answer.json()['id']}").json())["status"] in ("queued", "running"):
        assert time.monotonic() < deadline, job
        time.sleep(0.01)
    assert job["status"] == "done", job["error"]
    return job["result"]


def test_the_judge_describes_pictures_without_a_caption(server, monkeypatch):
    client, studio = server
    hero(client)
    refused = client.post("/api/characters/hero/captions")
    assert "choose a real one under Models" in refused.text
    assert refused.status_code == 422

    def describe(self, job, pictures):
        # A person writes one meanwhile.
        studio.characters.save("hero", HERO, added=[], captions={"02.png": "by hand"}, removed=[])
        return {path.name: f"of {path.stem}" for path in pictures}

    monkeypatch.setattr(type(studio.host), "describe", describe)
    studio.names = replace(studio.names, judge="a/vlm")
    assert finished(client, client.post("/api/characters/hero/captions")) == {"captions": 2}
    (one,) = client.get("/api/characters").json()
    assert [picture["caption"] for picture in one["pictures"]] == ["of 01", "by hand", "of 03"]


def test_dropped_pictures_become_a_folder_that_the_commands_read(server, tmp_path):
    client, studio = server
    made = hero(client)
    assert [picture["file"] for picture in made["pictures"]] == ["01.png", "02.png", "03.png"]
    assert client.get("/api/state").json()["uploads"] == []
    form = {
        "description": HERO,
        "captions": {"02.png": "waving, flag"},
        "removed": ["01.png"],
        "uploads": [upload(client)],
    }
    changed = client.post("/api/characters/hero", json=form).json()
    assert [(one["file"], one["caption"]) for one in changed["pictures"]] == [
        ("02.png", "waving, flag"),
        ("03.png", ""),
        ("04.png", ""),
    ]
    # A number of a removed picture is not given again, and none is overwritten.
    form = {"description": HERO, "uploads": [upload(client)]}
    again = client.post("/api/characters/hero", json=form).json()
    assert [one["file"] for one in again["pictures"]] == ["02.png", "03.png", "04.png", "05.png"]
    folder = tmp_path / "sets" / "characters" / "hero"
    assert read_yaml(folder / "card.yaml")["description"] == HERO
    assert studio.characters.find("hero").images[0].read_bytes() == client.get("/characters/hero/02.png").content

    # Files of a person stay when the character is deleted.
    (folder / "notes.md").write_text("mine")
    assert client.delete("/api/characters/hero").json() == []
    assert [path.name for path in folder.iterdir()] == ["notes.md"]


def test_each_candidate_of_a_sheet_belongs_to_its_picture(monkeypatch, tmp_path):
    def generate_sets(generator, prompts, *, best_of, **options):
        """What a real one returns: the candidates of the first prompt, then those of the second."""
        return [prompt for prompt in prompts for _ in range(best_of)]

    generator = SimpleNamespace(policy=SimpleNamespace(max_sources=1), default_steps=1, adapter="", model="toy")
    generator.set_options = lambda: None
    reward = SimpleNamespace(judge=None, name="a judge")
    monkeypatch.setattr(models.ModelHost, "_models", lambda self, job, *, edits: (generator, reward))
    monkeypatch.setattr(
        models, "_candidate_dict", lambda job, prompt, judge: {"text": prompt.text, "score": next(scores)}
    )
    monkeypatch.setattr(sets, "generate_sets", generate_sets)

    # Ties of the judge too are ordered by score.
    scores = iter([0.1, 0.11, None, 0.9, 0.2, 0.3])
    source = tmp_path / "01.png"
    source.write_bytes(png())
    host = models.ModelHost(StudioModels())
    prompts = {2: Prompt(0, SCENES[0]), 5: Prompt(1, SCENES[1])}
    drawn = host.make_sheet(Job("1", "sheet"), prompts, models.Sampling(candidates=3), sources=[source] * 2)
    host.close()
    pictures = [(one["picture"], one["text"]) for one in drawn["candidates"]]
    assert pictures == [(2, SCENES[0])] * 3 + [(5, SCENES[1])] * 3
    assert [one["score"] for one in drawn["candidates"]] == [0.11, 0.1, None, 0.9, 0.3, 0.2]


def test_the_practice_models_draw_a_sheet_of_the_hero_and_say_so(tmp_path):
    """By editor and judge as they are: most best pictures are of the hero, and the judge marks them to be kept."""
    hero_panel = Panel("red", "pointed", "top-hat", "night", "jumping", "flag")
    source = tmp_path / "hero.png"
    draw(hero_panel, 256).save(source)
    lines = [*SCENES, "Put a tree beside the hero.", "Change the scene to day."]
    prompts = {number: Prompt(number, line) for number, line in enumerate(lines)}
    job, host = Job("1", "sheet"), models.ModelHost(StudioModels())
    drawn = host.make_sheet(job, prompts, models.Sampling(candidates=3), sources=[source])
    host.close()

    best = {}
    for candidate in drawn["candidates"]:
        best.setdefault(candidate["picture"], candidate)
    images = [Image.open(io.BytesIO(job.images[one["image"]])).convert("RGB") for one in best.values()]
    seen = Oracle().read(images)
    kept = [panel is not None and panel.kept[:3] == hero_panel.kept[:3] for panel in seen]
    marked = [one["score"] >= 0.5 for one in best.values()]
    assert sum(kept) >= 3, seen
    assert sum(marked) >= 3, best


def test_what_cannot_be_done_is_one_line(server):
    client, _ = server
    hero(client)
    for method, path, body, status, fault in [
        ("POST", "/api/characters/hero", {"description": "x", "is_new": True}, 422, "give another name"),
        ("POST", "/api/characters/hero", {"description": "x", "of": "7", "panels": [0]}, 404, "no candidate 0"),
        ("POST", "/api/characters/香蕉", {"description": "x"}, 422, "cannot name a folder"),
        ("POST", "/api/characters/...", {"description": "x"}, 422, "cannot name a folder"),
        ("POST", "/api/characters/new", {"description": " "}, 422, "say what the character looks like"),
        ("POST", "/api/characters/hero", {"description": "x", "uploads": ["none"]}, 404, "hand it in again"),
        ("POST", "/api/characters/hero", {"description": "x", "removed": ["card.yaml"]}, 404, "has no picture"),
        ("POST", "/api/characters/hero", {"description": "x", "captions": {"../x.png": "y"}}, 404, "has no picture"),
        (
            "POST",
            "/api/characters/hero",
            {"description": "x", "sheet": ["a"], "of": "1"},
            404,
            "there is no sheet '1'",
        ),
        ("GET", "/characters/hero/card.yaml", None, 404, "has no picture"),
        ("GET", "/characters/nobody/01.png", None, 404, "there is no character called 'nobody'"),
        ("DELETE", "/api/characters/nobody", None, 404, "there is no character called 'nobody'"),
        ("POST", "/api/characters/hero/sheet", {"scenes": ["a dragon"]}, 422, "has no instruction 'a dragon'"),
        (
            "POST",
            "/api/characters/hero/sheet",
            {"scenes": SCENES, "again": "000009"},
            404,
            "there is no sheet '000009'",
        ),
        ("POST", "/api/characters/hero/sheet", {"scenes": SCENES * 9}, 422, "at most 8 items"),
        ("POST", "/api/characters/hero/train", {"resume": "x"}, 404, "there is no LoRA called 'x'"),
        ("POST", "/api/characters/hero/train", {"steps": 0}, 422, "greater than or equal to 1"),
        ("GET", "/loras/x/before-0.png", None, 404, "there is no such image"),
    ]:
        answer = client.request(method, path, json=body)
        assert (answer.status_code, fault in answer.text) == (status, True), f"{path}: {answer.text}"


def test_a_name_with_spaces_makes_a_folder(server, tmp_path):
    client, _ = server
    made = client.post("/api/characters/Zoë the king!", json={"description": HERO, "uploads": [upload(client)]}).json()
    assert made["name"] == "Zoe_the_king"
    assert (tmp_path / "sets" / "characters" / "Zoe_the_king" / "card.yaml").is_file()
    again = client.post("/api/characters/Zoe the king", json={"description": "x", "is_new": True})
    assert (again.status_code, "give another name" in again.text) == (422, True)
    text = "Two images of Zoe the king: waving by a boat, jumping by a flag"
    assert client.post("/api/panels", json={"text": text}).json()["theme"].lower() == HERO


def test_panels_of_a_page_become_pictures_with_their_lines(server):
    client, studio = server
    one = {"image": "i", "layout": "1x2", "score": None, "rank": 1, "matrix": [], "recipe": {}, "error": ""}
    page = Image.new("RGB", (64, 32), "red")
    page.paste("blue", (32, 0, 64, 32))
    document = {"kind": "set", "theme": HERO, "sources": [], "asked": {}}
    candidates = [one | {"base": None, "panels": ["waving, flag", "jumping, boat"]}]
    kept = studio.history.add(document | {"candidates": candidates}, {"i": png_bytes(page)})
    form = {"description": HERO, "of": kept, "candidate": 0, "panels": [1]}
    made = client.post("/api/characters/banana king", json=form | {"is_new": True}).json()
    assert (made["name"], [one["caption"] for one in made["pictures"]]) == ("banana_king", ["jumping, boat"])
    with Image.open(io.BytesIO(client.get("/characters/banana_king/01.png").content)) as picture:
        assert (picture.size, picture.getpixel((0, 0))) == ((32, 32), (0, 0, 255))
    for panels in ([2], [-1]):
        answer = client.post("/api/characters/banana_king", json=form | {"panels": panels})
        assert (answer.status_code, "has 2 panels" in answer.text) == (404, True)


def test_another_picture_becomes_the_first_and_none_is_lost(server):
    client, studio = server
    uploads = [upload(client, colour) for colour in ("red", "green", "blue")]
    client.post("/api/characters/hero", json={"description": HERO, "uploads": uploads})
    captions = {"01.png": "a", "03.png": "c"}
    client.post("/api/characters/hero", json={"description": HERO, "captions": captions})
    made = client.post("/api/characters/hero/first", json={"picture": "03.png"}).json()["pictures"]
    assert [(one["file"], one["caption"]) for one in made] == [("01.png", "c"), ("02.png", ""), ("04.png", "a")]
    shown = []
    for one in made:
        with Image.open(io.BytesIO(client.get(f"/characters/hero/{one['file']}").content)) as image:
            shown.append(image.getpixel((0, 0)))
    assert shown == [(0, 0, 255), (0, 128, 0), (255, 0, 0)]
    assert studio.characters.find("hero").images[0].name == "01.png"
    before = contents(studio.characters.folder / "hero")
    for first, fault in [("01.png", "is the first picture already"), ("09.png", "has no picture")]:
        answer = client.post("/api/characters/hero/first", json={"picture": first})
        assert (answer.status_code in (404, 422), fault in answer.text) == (True, True)
    assert contents(studio.characters.folder / "hero") == before

    # A sheet of them, the first one first.
    sheet = client.get("/sheets/of/hero.png")
    with Image.open(io.BytesIO(sheet.content)) as image:
        assert (image.size, image.getpixel((0, 0))) == ((96, 32), (0, 0, 255))
    assert sheet.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("scores", "thumbnail"), [((0.1, 0.9), "b"), ((0.1, 0.2), "source-1"), ((None, 0.1), "source-1")]
)
def test_a_sheet_is_shown_in_the_history_by_a_kept_picture(server, scores, thumbnail):
    client, studio = server
    one = {"layout": "1x1", "rank": 1, "matrix": [], "recipe": {}, "error": "", "base": None, "picture": 0}
    candidates = [one | {"image": image, "score": score} for image, score in zip("ab", scores, strict=True)]
    document = {"kind": "sheet", "theme": "hero", "sources": ["source-1"], "asked": {}, "candidates": candidates}
    studio.history.add(document, {name: png() for name in ("a", "b", "source-1")})
    (listed,) = client.get("/api/history").json()
    assert listed["image"] == thumbnail
    assert client.get(f"/sets/{listed['id']}/{thumbnail}.png").status_code == 200


def test_the_practice_model_is_named_alike_and_refuses_in_the_terms_of_the_page(server):
    client, _ = server
    sentence = {"text": "Four images of a fox: it runs, it sleeps, it eats, it waves"}
    fault = client.post("/api/panels", json=sentence).json()["fault"]
    assert fault.startswith("“What all panels share” has unknown words, 'fox'; the practice model has colour: red")
    scenes = "waving by a flag, jumping by a boat, standing by a tree, waving by a lamp"
    known = f"Four images of a red round hero with a crown at night: {scenes}"
    assert client.post("/api/panels", json={"text": known}).json()["fault"] == ""
    made = client.post("/api/characters/fox", json={"description": "a fox", "uploads": [upload(client)]}).json()
    assert "“What it looks like” has unknown words, 'fox'; the practice model has" in made["note"]
    assert "load a model under Models" in made["note"]
    refused = client.post("/api/characters/fox/sheet", json={"scenes": ["it runs"]}).json()["error"]
    assert refused.startswith("the practice model has no instruction 'it runs'")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_is_refused_changes_nothing(server, tmp_path):
    client, _ = server
    hero(client)
    before = contents(tmp_path / "sets" / "characters" / "hero")
    for change in (
        {"removed": ["01.png", "09.png"]},
        {"captions": {"01.png": "waving", "09.png": "x"}},
        {"uploads": ["none"]},
        {"description": "x" * 2001},
    ):
        form = {"description": "another", "uploads": [upload(client)], **change}
        assert client.post("/api/characters/hero", json=form).status_code in (404, 422)
        assert contents(tmp_path / "sets" / "characters" / "hero") == before
    assert client.get("/api/characters").json()[0]["description"] == HERO
    assert client.post("/api/characters/new", json={"description": "x", "removed": ["01.png"]}).status_code == 404
    assert not (tmp_path / "sets" / "characters" / "new").exists()


def test_files_of_a_character_and_its_training_are_the_owners_alone(server, tmp_path):
    client, studio = server
    hero(client)
    client.post("/api/characters/hero", json={"description": HERO, "captions": {"01.png": "waving, flag"}})
    studio.characters.prepare("hero", steps=8)
    files = {path for path in (tmp_path / "sets").rglob("*") if path.is_file()}
    assert {"card.yaml", "01.png", "01.txt", "request.json", "config.yaml"} <= {path.name for path in files}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_a_new_picture_never_takes_the_file_of_another(tmp_path):
    characters = Characters(tmp_path, StudioModels(), trainer=TrainerProcess())
    folder = tmp_path / "characters" / "hero"
    characters.save("hero", HERO, added=[png("red")] * 59)
    characters.save("hero", HERO, removed=[f"{number:02d}.png" for number in range(1, 59)])
    (folder / "60.jpg").write_bytes(b"of a person")
    characters.save("hero", HERO, added=[png("blue")] * 58)
    files = [picture["file"] for picture in characters.describe("hero")["pictures"]]
    assert len(files) == 60
    assert {len(file) for file in files} == {6}
    assert (folder / "59.png").read_bytes() == png("red")
    assert characters.image("hero", "99.png") == characters.image("hero", "01.png") == png("blue")
    with pytest.raises(ValueError, match="hero would have 61 pictures; at most 60 are kept"):
        characters.save("hero", HERO, added=[png()])
    characters.remove("hero")
    assert [path.name for path in folder.iterdir()] == ["60.jpg"]


def test_a_picture_is_never_kept_by_the_browser_and_is_of_a_bounded_size(server):
    client, _ = server
    large = io.BytesIO()
    Image.new("RGB", (3072, 1024)).save(large, "PNG")
    sent = client.post("/api/uploads", params={"name": "me.png"}, content=large.getvalue()).json()["id"]
    client.post("/api/characters/hero", json={"description": HERO, "uploads": [sent, sent]})
    answer = client.get("/characters/hero/01.png")
    assert Image.open(io.BytesIO(answer.content)).size == (1536, 512)
    assert answer.headers["cache-control"] == "no-store"
    assert client.get("/characters/hero/02.png").status_code == 404


def test_nothing_is_written_or_deleted_through_a_linked_folder(tmp_path):
    characters = Characters(tmp_path / "sets", StudioModels(), trainer=TrainerProcess())
    other = Characters(tmp_path / "mine", StudioModels(), trainer=TrainerProcess())
    other.save("hero", HERO, added=[png()])
    (tmp_path / "sets" / "characters").mkdir(parents=True)
    (tmp_path / "sets" / "characters" / "hero").symlink_to(tmp_path / "mine" / "characters" / "hero")
    before = contents(other.folder / "hero")
    with pytest.raises(OSError, match="a link, through which nothing is written; remove it"):
        characters.save("hero", "another", removed=["01.png"])
    characters.remove("hero")
    assert contents(other.folder / "hero") == before


def test_damaged_files_are_left_out_and_others_shown(server, tmp_path, caplog):
    client, studio = server
    hero(client)
    folder = tmp_path / "sets"
    studio.characters.save("odd", "x")
    (folder / "characters" / "odd" / "card.yaml").write_bytes(b"description: [")
    for name, content in [("a", "[]"), ("b", "{}"), ("c", '{"character": "hero", "steps": "x"}'), ("d", "nonsense")]:
        (folder / "loras" / name).mkdir(parents=True)
        (folder / "loras" / name / "request.json").write_text(content)
    for _ in range(2):
        assert [one["name"] for one in client.get("/api/characters").json()] == ["hero"]
    assert client.get("/api/characters").json()[0]["training"] is None
    warned = [record.getMessage() for record in caplog.records if "not shown" in record.getMessage()]
    assert len(warned) == 5  # once each
    fault = client.post("/api/characters/odd", json={"description": "x"})
    assert (fault.status_code, "card.yaml" in fault.json()["error"]) == (422, True)

    # A damaged log is the fault of its training.
    (folder / "loras" / "a" / "request.json").write_text('{"character": "hero", "steps": 3}')
    (folder / "loras" / "a" / "run").mkdir()
    for line in ("{}", '{"step": "x"}', "nonsense"):
        (folder / "loras" / "a" / "run" / "metrics.jsonl").write_text(line)
        training = client.get("/api/characters").json()[0]["training"]
        assert (training["status"], "metrics.jsonl" in training["error"]) == ("failed", True)


def test_odd_names_and_files_are_refused_in_one_line(server, tmp_path):
    client, _ = server
    hero(client)
    (tmp_path / "sets" / "loras" / "x" / "run" / "samples" / "evaluation-000000").mkdir(parents=True)
    long = client.get(f"/loras/x/before-{'9' * 300}.png")
    assert (long.status_code, "File name too long" in long.json()["error"]) == (422, True)
    folder = tmp_path / "sets" / "characters" / "hero"
    (folder / "01.png").unlink()
    (folder / "01.png").mkdir()
    os.mkfifo(folder / "09.png")
    for picture in ("01.png", "09.png"):
        assert client.get(f"/characters/hero/{picture}").status_code == 404
        form = {"description": HERO, "removed": [picture]}
        assert client.post("/api/characters/hero", json=form).status_code == 404


def test_a_training_that_cannot_be_launched_leaves_the_machine_free(server, tmp_path):
    client, studio = server
    hero(client)
    name = studio.characters.prepare("hero", steps=8)
    studio.trainer.stop()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sets" / "loras" / name).rename(tmp_path / "elsewhere" / name)
    (tmp_path / "sets" / "loras" / name).symlink_to(tmp_path / "elsewhere" / name)
    client.post("/api/characters/hero/train", json={"resume": name})
    deadline = time.monotonic() + 60
    while (training := client.get("/api/characters").json()[0]["training"])["status"] == "starting":
        assert time.monotonic() < deadline, training
        time.sleep(0.01)
    assert (training["status"], "a link, through which nothing is written" in training["error"]) == ("failed", True)
    assert not (tmp_path / "elsewhere" / name / "log.txt").exists()
    studio.trainer.check_idle()


def test_a_continued_training_executes_no_file_that_its_config_names(server, tmp_path):
    client, studio = server
    hero(client)
    name = studio.characters.prepare("hero", steps=8)
    studio.trainer.stop()
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nK = 1\n")
    config = tmp_path / "sets" / "loras" / name / "config.yaml"
    config.write_text(re.sub(r"(?m)^  kind: \w+$", f"  kind: {evil}:K", config.read_text()))
    assert str(evil) in config.read_text()

    client.post("/api/characters/hero/train", json={"resume": name})
    deadline = time.monotonic() + 120
    while (training := client.get("/api/characters").json()[0]["training"])["status"] in {"starting", "learning"}:
        assert time.monotonic() < deadline, training
        time.sleep(0.05)
    assert (training["status"], f"{evil}:K" in training["error"]) == ("failed", True)
    assert "is code, which the studio does not execute" in training["error"]
    assert not (tmp_path / "executed").exists()


def test_a_picture_of_a_sheet_is_drawn_again_and_kept(server):
    client, _ = server
    hero(client)
    first = finished(
        client, client.post("/api/characters/hero/sheet", json={"scenes": SCENES, "candidates": 1, "seed": 7})
    )
    assert (first["theme"], first["read"]) == ("hero", ["01.png", "02.png", "03.png"])
    assert [(one["picture"], one["seed"]) for one in first["candidates"]] == [(0, 7), (1, 8)]
    form = {"scenes": SCENES, "candidates": 1, "again": first["id"], "picture": 1}
    second = finished(client, client.post("/api/characters/hero/sheet", json=form))
    assert [(one["picture"], one["seed"]) for one in second["candidates"]] == [(0, 7), (1, 8), (1, 9)]
    assert client.get(f"{second['images']}/base-7.png").content == png()
    kept = client.post(
        "/api/characters/hero", json={"description": HERO, "sheet": ["base-7", "base-9"], "of": second["id"]}
    ).json()
    lines = [SCENES[0], SCENES[1]]
    assert [one["caption"] for one in kept["pictures"]] == ["", "", "", *lines]


def test_a_picture_that_is_drawn_again_makes_no_second_card_and_a_sheet_is_one_image(server):
    client, studio = server
    hero(client)
    form = {"scenes": SCENES, "candidates": 1}
    first = finished(client, client.post("/api/characters/hero/sheet", json=form))
    client.post(f"/api/history/{first['id']}", json={"favourite": True})
    again = form | {"again": first["id"], "picture": 0}
    second = finished(client, client.post("/api/characters/hero/sheet", json=again))
    (card,) = client.get("/api/history").json()
    assert (card["id"], card["favourite"], card["count"]) == (second["id"], True, 3)

    names = [one["image"] for one in second["candidates"][1:]]
    saved = client.get(f"/sheets/{second['id']}.png", params={"image": names})
    with Image.open(io.BytesIO(saved.content)) as image:
        assert (image.size, saved.headers["content-type"]) == ((64, 32), "image/png")
    assert client.get(f"/sheets/{second['id']}.png", params={"image": ["../x"]}).status_code == 404
    assert client.get(f"/sheets/{second['id']}.png").status_code == 422

    # With its original, which is larger, in front.
    drawn = studio.history.read(second["id"])
    large = png_bytes(Image.new("RGB", (96, 96), "blue"))
    kept = studio.history.add(drawn, {"source-1": large} | {name: png() for name in names})
    sheet = client.get(f"/sheets/{kept}.png", params={"image": names[:1]})
    with Image.open(io.BytesIO(sheet.content)) as image:
        assert (image.size, image.getpixel((0, 0)), image.getpixel((191, 95))) == ((192, 96), (0, 0, 255), (255, 0, 0))
    studio.history.remove(kept)
    assert client.post("/api/characters/hero/sheet", json=again).status_code == 404


def test_what_the_practice_model_cannot_draw_is_noted_when_a_character_is_saved(server):
    client, studio = server
    assert hero(client)["note"] == ""
    goblin = {"description": "a little blue goblin with a teal cap", "uploads": [upload(client)]}
    note = client.post("/api/characters/Pip", json=goblin).json()["note"]
    assert "unknown words, 'little', 'goblin', 'teal'; the practice model has colour: red" in note
    studio.characters.names = replace(studio.names, model="black-forest-labs/FLUX.1-dev")
    assert [one["note"] for one in client.get("/api/characters").json()] == ["", ""]


def test_a_name_in_a_sentence_is_the_character(server):
    client, _ = server
    for name, looks in [("Pip", HERO), ("Pip-2", "blue tall hero, cap, day")]:
        client.post(f"/api/characters/{name}", json={"description": looks, "uploads": [upload(client)]})
    text = "Four images of Pip: waving by a boat, jumping by a flag, standing by a tree, waving by a lamp"
    draft = client.post("/api/panels", json={"text": text}).json()
    assert draft["theme"] == "Red round hero, crown, night"
    assert draft["panels"][0] == "Red round hero, crown, night, waving by a boat"
    form = {"theme": draft["theme"], "panels": draft["panels"], "candidates": 1}
    assert client.post("/api/sets", json=form).status_code == 200

    both = client.post("/api/panels", json={"text": "Two images: {Pip-2} waves, Pippa and Pip jump"}).json()
    assert both["panels"] == ["Blue tall hero, cap, day waves", "Pippa and red round hero, crown, night jump"]
    fox = client.post("/api/panels", json={"text": "two images of a fox: it runs, it sleeps"}).json()
    assert fox["theme"] == "a fox"


def test_all_loras_of_a_character_are_listed_and_the_state_names_who_is_taught(server):
    client, studio = server
    hero(client)
    assert client.get("/api/state").json()["teaching"] == ""
    for _ in range(2):
        studio.characters.prepare("hero", steps=8)
        studio.trainer.stop()
    (one,) = client.get("/api/characters").json()
    assert sorted(one["loras"]) == ["loras/hero", "loras/hero-2"]
    studio.characters.resume("hero")
    assert client.get("/api/state").json()["teaching"] == "hero"
    studio.trainer.stop()


def test_a_training_has_the_machine_and_is_described_by_its_files(server, tmp_path):
    client, studio = server
    hero(client, pictures=2)
    few = client.post("/api/characters/hero/train", json={})
    assert (few.status_code, "has 2 images; a character has in training 3" in few.text) == (422, True)
    client.post("/api/characters/hero", json={"description": HERO, "uploads": [upload(client)]})

    # As if it was about to start.
    name = studio.characters.prepare("hero", steps=16)
    assert client.get("/api/characters").json()[0]["training"]["status"] == "starting"
    for path, body in [("/api/characters/hero/train", {}), ("/api/models", {"model": "tiny"})]:
        assert client.post(path, json=body).status_code == 409
    assert client.post("/api/characters/hero/stop").json()["training"]["status"] == "stopped"

    # As the trainer leaves it.
    run = tmp_path / "sets" / "loras" / name / "run"
    (run / "best").mkdir(parents=True)
    lines = [f'{{"kind": "evaluation", "epoch": 0, "step": {step}, "held_out_loss": 0.5}}' for step in (0, 16)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    training = client.get("/api/characters").json()[0]["training"]
    assert (training["status"], training["done"], training["lora"]) == ("done", 16, True)
    assert (training["seconds_per_step"], training["pictures"]) == (None, [])

    # Between two evaluations, every step is counted.
    (run / "metrics.jsonl").write_text(lines[0])
    (run / "progress.json").write_text('{"step": 7, "seconds_per_step": 1.5}')
    (run / "samples").mkdir()
    (run / "samples" / "evaluation-000000.jsonl").write_text('{"text": "waving, flag"}\n')
    one = client.get("/api/characters").json()[0]
    training = one["training"]
    assert (training["status"], training["done"], training["seconds_per_step"]) == ("stopped", 7, 1.5)
    assert (training["pictures"], one["steps"]) == (["waving, flag"], 200)
    (run / "metrics.jsonl").write_text("\n".join(lines))
    training = client.get("/api/characters").json()[0]["training"]
    assert training["losses"] == [[0, 0.5], [16, 0.5]]
    assert "loras/hero" in client.get("/api/models").json()["loras"]


def test_the_recipe_is_the_largest_for_the_model_that_fits_the_card(tmp_path):
    def config_of(model: str, gigabytes: int | None) -> tuple[str, tuple[int, int], bool]:
        card_bytes = gigabytes and gigabytes * 10**9
        config = training_config(StudioModels(model=model), [], card_bytes=card_bytes)
        return config.model.checkpoint, config.size, config.model.stream

    flux = "black-forest-labs/FLUX.1-dev"
    assert config_of(flux, 8) == (flux, (512, 512), True)
    assert config_of(flux, 16) == (flux, (512, 512), False)
    assert config_of(flux, 80) == (flux, (1024, 1024), False)
    base = "black-forest-labs/FLUX.2-klein-base-4B"
    assert config_of("black-forest-labs/FLUX.2-klein-4B", None)[0] == base
    assert config_of("tiny", None)[1] == (64, 64)
    assert list(character_recipes()["flux"]) == [12, 16, 24]
    named = {name for recipes in character_recipes().values() for name in recipes.values()}
    assert named == {name for name in recipe_names() if name.startswith("character/")}
    with pytest.raises(
        ValueError, match=r"cannot be taught to Qwen/Qwen-Image; choose black-forest-labs/FLUX\.1-dev or "
    ):
        config_of("Qwen/Qwen-Image", 80)


def test_an_absent_model_is_named_before_a_training_is_written(tmp_path):
    names = StudioModels(model="black-forest-labs/FLUX.1-dev")
    characters = Characters(tmp_path, names, trainer=TrainerProcess())
    characters.save("hero", HERO, added=[png(), png("blue"), png("green")])
    with pytest.raises(ValueError, match=r"FLUX.1-dev is not on this machine; download it under Models"):
        characters.prepare("hero")
    assert not characters.loras.exists()


@pytest.mark.nightly
def test_a_character_is_drawn_taught_stopped_and_used(tmp_path):
    """By the embedded models: sheet, training in its own process, resume, gallery, LoRA."""
    from starlette.testclient import TestClient

    from pacorl.studio import server as module

    studio = module.AppState("secret", folder=tmp_path / "sets")
    headers = {"Authorization": "Bearer secret"}
    with TestClient(module.make_app(studio), base_url="http://localhost", headers=headers) as client:
        scenes = [
            ("waving", "flag"),
            ("jumping", "boat"),
            ("standing", "tree"),
            ("waving", "lamp"),
            ("jumping", "house"),
        ]
        shown = [draw(Panel("red", "round", "crown", "night", pose, prop), 64) for pose, prop in scenes]
        ids = [client.post("/api/uploads?name=x.png", content=png_bytes(image)).json()["id"] for image in shown]
        client.post("/api/characters/hero", json={"description": HERO, "uploads": ids})

        def job(answer):
            deadline = time.monotonic() + 600
            while (now := client.get(f"/api/jobs/{answer.json()['id']}").json())["status"] in ("queued", "running"):
                assert time.monotonic() < deadline, now
                time.sleep(0.1)
            assert now["status"] == "done", now["error"]
            return now["result"]

        drawn = job(client.post("/api/characters/hero/sheet", json={"scenes": SCENES, "candidates": 2, "steps": 2}))
        assert [one["picture"] for one in drawn["candidates"]] == [0, 0, 1, 1]

        def until(*wanted: str) -> dict[str, Any]:
            deadline = time.monotonic() + 900
            while (now := client.get("/api/characters").json()[0]["training"])["status"] not in wanted:
                assert time.monotonic() < deadline, now
                assert not now["error"], now
                time.sleep(0.2)
            return now

        client.post("/api/characters/hero/train", json={"steps": 4})
        until("learning")
        assert client.post("/api/characters/hero/stop").json()["training"]["status"] in ("stopped", "done")
        client.post("/api/characters/hero/train", json={"resume": "hero"})
        training = until("done")
        before, after = (client.get(f"/loras/hero/{when}-0.png").content for when in ("before", "after"))
        assert (len(before) > 500, before != after, len(training["pictures"])) == (True, True, 8)

        client.post("/api/models", json={"model": "tiny", "loras": {"loras/hero": 0.8}})
        panels = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]
        form = {"theme": HERO, "panels": panels, "candidates": 2, "steps": 2}
        page = job(client.post("/api/sets", json=form))
        assert page["adapter"].endswith("loras/hero/run/best × 0.8")
        assert all(one["base"] for one in page["candidates"])
    studio.close()
