"""Characters in the studio: pictures, a sheet of which a picture is drawn again, and the training of a LoRA."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from pacorl.config.options import StudioModels
from pacorl.config.recipes import recipe_names
from pacorl.io.documents import read_yaml
from pacorl.io.images import png_bytes
from pacorl.studio.characters import Characters, character_recipes, training_config
from pacorl.studio.trainer_process import TrainerProcess
from pacorl.tiny.characters import Panel, draw

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
    deadline = time.monotonic() + 30
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
    folder = tmp_path / "sets" / "characters" / "hero"
    assert read_yaml(folder / "card.yaml")["description"] == HERO
    assert studio.characters.find("hero").images[0].read_bytes() == client.get("/characters/hero/02.png").content

    # Files of a person stay when the character is deleted.
    (folder / "notes.md").write_text("mine")
    assert client.delete("/api/characters/hero").json() == []
    assert [path.name for path in folder.iterdir()] == ["notes.md"]


def test_what_cannot_be_done_is_one_line(server):
    client, _ = server
    hero(client)
    for method, path, body, status, fault in [
        ("POST", "/api/characters/a b", {"description": "x"}, 422, "cannot name a folder"),
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
            "no picture 'a' of a set",
        ),
        ("GET", "/characters/hero/card.yaml", None, 404, "has no picture"),
        ("GET", "/characters/nobody/01.png", None, 404, "there is no character called 'nobody'"),
        ("DELETE", "/api/characters/nobody", None, 404, "there is no character called 'nobody'"),
        ("POST", "/api/characters/hero/sheet", {"scenes": ["a dragon"]}, 422, "has no instruction 'a dragon'"),
        ("POST", "/api/characters/hero/sheet", {"scenes": SCENES, "again": "000009"}, 404, "of a sheet '000009'"),
        ("POST", "/api/characters/hero/sheet", {"scenes": SCENES * 9}, 422, "at most 8 items"),
        ("POST", "/api/characters/hero/train", {"resume": "x"}, 404, "there is no LoRA called 'x'"),
        ("POST", "/api/characters/hero/train", {"steps": 0}, 422, "greater than or equal to 1"),
        ("GET", "/loras/loras/x/before-0.png", None, 404, "there is no such image"),
    ]:
        answer = client.request(method, path, json=body)
        assert (answer.status_code, fault in answer.text) == (status, True), f"{path}: {answer.text}"


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
    assert len(kept["pictures"]) == 5


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
        ValueError, match=r"cannot be taught to Qwen/Qwen-Image; choose black-forest-labs/FLUX.1-dev or "
    ):
        config_of("Qwen/Qwen-Image", 80)


def test_an_absent_model_is_named_before_a_training_is_written(tmp_path):
    names = StudioModels(model="black-forest-labs/FLUX.1-dev")
    characters = Characters(tmp_path, names, trainer=TrainerProcess())
    characters.save("hero", HERO, added=[png(), png("blue"), png("green")])
    with pytest.raises(ValueError, match=r"FLUX.1-dev is not on this machine; download it under Models"):
        characters.prepare("hero")
    assert not characters.loras.exists()


@pytest.mark.campaign
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
        before, after = (client.get(f"/loras/loras/hero/{when}-0.png").content for when in ("before", "after"))
        assert (len(before) > 500, before != after, training["pictures"]) == (True, True, 8)

        client.post("/api/models", json={"model": "tiny", "loras": {"loras/hero": 0.8}})
        panels = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]
        form = {"theme": HERO, "panels": panels, "candidates": 2, "steps": 2}
        page = job(client.post("/api/sets", json=form))
        assert page["adapter"].endswith("loras/hero/run/best × 0.8")
        assert all(one["base"] for one in page["candidates"])
    studio.close()
