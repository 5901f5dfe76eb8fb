"""The studio without a browser: its queue, its uploads, and its HTTP API with what it must refuse."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import platform
import random
import threading
import time
import zipfile
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import pytest
from judges import Grey, grey
from PIL import Image, ImageStat

from pacorl.config.options import StudioModels
from pacorl.core.calibration import Curve
from pacorl.core.grid import split
from pacorl.gate.check import CONTROL_FIGURE, check_set
from pacorl.io.images import ImageError, open_image, png_bytes
from pacorl.judge.calibration import Calibration
from pacorl.runtime.turns import Turns
from pacorl.studio import models as limits
from pacorl.studio.history import History
from pacorl.studio.jobs import MAX_ENDED, MAX_WAITING, BusyError, CancelledError, Job, JobQueue
from pacorl.studio.models import (
    EXAMPLES,
    ModelHost,
    Sampling,
    Uploads,
    board_for,
    edit_prompt,
    example,
    panel_prompts,
    prompt_for,
    words,
)
from pacorl.tiny.characters import all_panels, draw, set_of, with_another
from pacorl.types import Grid, Size


def png(width: int = 64, height: int = 64, colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def ended(job: Job) -> Job:
    deadline = time.monotonic() + 120
    while job.status in ("queued", "running"):
        assert time.monotonic() < deadline, job
        time.sleep(0.005)
    return job


@pytest.fixture
def jobs():
    opened = JobQueue()
    yield opened
    opened.close()


# --- the queue -------------------------------------------------------------------------------------------------


def test_jobs_run_one_at_a_time_and_in_order(jobs):
    seen, inside = [], threading.Lock()

    def work(job: Job) -> dict[str, str]:
        assert inside.acquire(blocking=False), "two jobs at once"
        time.sleep(0.02)
        seen.append(job.id)
        inside.release()
        return {"is": job.id}

    made = [jobs.submit("set", work) for _ in range(4)]
    assert [ended(job).result for job in made] == [{"is": job.id} for job in made]
    assert seen == [job.id for job in made]
    assert jobs.latest("set") is made[-1]


def test_a_failure_is_told_and_the_next_job_runs(jobs, caplog):
    def fault(error: Exception) -> Job:
        def work(job: Job) -> dict[str, str]:
            raise error

        return ended(jobs.submit("set", work))

    assert (fault(ValueError("no such hat")).status, fault(ValueError("no such hat")).error) == (
        "failed",
        "no such hat",
    )
    assert fault(KeyError("what nobody thought of")).status == "failed"
    assert "a job of the studio failed" in caplog.text
    assert ended(jobs.submit("set", lambda job: {})).status == "done"


def test_cancelling_a_running_and_a_waiting_job(jobs):
    started = threading.Event()

    def work(job: Job) -> dict[str, str]:
        job.enter("Painting", total=10**6)
        started.set()
        while True:
            job.advance(1)
            time.sleep(0.001)

    first, second = jobs.submit("set", work), jobs.submit("set", work)
    assert started.wait(10)
    jobs.cancel(second)
    assert second.status == "cancelled"
    assert first.status == "running"
    jobs.cancel(first)
    assert ended(first).status == "cancelled"
    assert first.done > 0
    assert jobs.latest("set") is None
    done = ended(jobs.submit("set", lambda job: {}))
    assert done.status == "done"
    jobs.cancel(jobs.submit("set", work))
    assert jobs.latest("set") is done
    assert second.seconds == 0
    jobs.cancel(first)
    assert first.status == "cancelled"


def test_the_queue_is_bounded_and_forgets(jobs):
    gate = threading.Event()
    running = jobs.submit("set", lambda job: {"waited": gate.wait(10)})
    while running.status == "queued":
        time.sleep(0.001)
    waiting = [jobs.submit("set", lambda job: {}) for _ in range(MAX_WAITING)]
    with pytest.raises(BusyError, match="cancel one, or wait"):
        jobs.submit("set", lambda job: {})
    gate.set()
    for job in waiting:
        ended(job)
    jobs.submit("set", lambda job: {})
    assert jobs.find(running.id) is None
    assert sum(jobs.find(str(number)) is not None for number in range(1, 12)) <= MAX_ENDED + 1


# --- uploads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "x.png: empty"),
        (b"Dear Sir", "x.png: not a PNG, JPEG or WebP image"),
        (png()[:60], "x.png: damaged or cut off"),
        (png(5001, 5000), "x.png: 5001x5000 is too large"),
        (png(3, 64), "x.png: 3x64 is too small"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(data, fault):
    with pytest.raises(ImageError, match=fault):
        asyncio.run(Uploads().add(data, "x.png"))


def test_uploads_are_few_and_can_be_taken_back(monkeypatch):
    monkeypatch.setattr(limits, "MAX_IMAGES", 2)
    uploads = Uploads()
    first = asyncio.run(uploads.add(png(600, 300), "a\n  b.png"))
    asyncio.run(uploads.add(png(), ""))
    with pytest.raises(ValueError, match="2 images are here already"):
        asyncio.run(uploads.add(png(), "c.png"))
    assert (first.name, first.size, uploads.of("")[1].name) == ("a b.png", (600, 300), "image")
    assert Image.open(io.BytesIO(first.preview)).size == (512, 256)
    assert first.open().size == (600, 300)
    uploads.remove(first.id)
    uploads.remove("nobody")
    assert uploads.find(first.id) is None
    asyncio.run(uploads.add(png(), "c.png"))


def test_uploads_that_wait_for_a_decoder_hold_no_thread(monkeypatch):
    decoding, uploads = [], Uploads()

    def submit(data, *, name, max_pixels):
        assert max_pixels == limits.MAX_PIXELS
        decoding.append(Future())
        return decoding[-1]

    async def hand_in():
        waiting = [asyncio.create_task(uploads.add(png(), "a.png", owner="browser")) for _ in range(50)]
        assert await asyncio.wait_for(asyncio.to_thread(len, "another"), 30) == 7
        assert len(decoding) == 50
        for future in decoding:
            future.set_result(Image.new("RGB", (32, 32)))
        return await asyncio.gather(*waiting, return_exceptions=True)

    monkeypatch.setattr(limits, "submit_upload", submit)
    ended = asyncio.run(hand_in())
    assert sum(isinstance(upload, limits.Upload) for upload in ended) == limits.MAX_IMAGES


def test_the_page_has_a_way_out(server):
    client, _ = server
    enter(client)
    assert 'id="leave"' in client.get("/").text
    assert '"/leave"' in client.get("/page/page.js").text
    assert client.get("/api/state").status_code == 200
    client.post("/leave")
    assert client.get("/api/state").status_code == 401


# --- what can be asked for -------------------------------------------------------------------------------------


OWN = {"Software": "pacorl 0.1.0", "model": "tiny"}
"""Texts of a PNG that the practice model drew."""


def test_the_practice_judge_judges_pictures_of_the_practice_model_alone():
    drawn = [draw(panel, 64) for panel in all_panels()[:4000:3000]]
    uploads = Uploads()
    own = [asyncio.run(uploads.add(png_bytes(image, OWN), "a.png")) for image in drawn]
    foreign = asyncio.run(uploads.add(png_bytes(drawn[0]), "photo.png"))
    host = ModelHost(StudioModels())
    for refused in (host.judge, partial(host.check, least=0.5)):
        with pytest.raises(ValueError, match=r"practice judge knows .* alone; choose another judge under Models"):
            refused(Job("1", "judgement"), [*own, foreign])
    assert host.judge(Job("2", "judgement"), own)["mean"] > 0
    host.close()


@pytest.fixture
def broken_set():
    """Uploads of a set whose last panel wears another hat, and what its panels should show."""
    panels = set_of(("red", "round", "crown", "night"), 4, random.Random(1))
    shown = [*panels[:3], with_another(panels[3], "hat", random.Random(0))]
    uploads = Uploads()
    added = [
        asyncio.run(uploads.add(png_bytes(draw(panel, 64), OWN), f"{number}.png"))
        for number, panel in enumerate(shown, 1)
    ]
    return added, [panel.text for panel in panels]


@pytest.mark.slow
def test_a_check_is_the_command_lines_and_a_repair_shows_every_try(broken_set):
    uploads, texts = broken_set
    host = ModelHost(StudioModels())
    checked = host.check(Job("1", "judgement"), uploads, least=0.5)
    by_command = check_set(host._rewards["tiny"].judge, [one.open() for one in uploads], least=0.5, names=list("1234"))
    assert [panel["score"] for panel in checked["panels"]] == [panel.score for panel in by_command.panels]
    assert (checked["odd"], checked["calibrated"], checked["tries"]) == (3, False, [])
    assert checked["panels"][3]["lowest_question"] == "consistent"
    score = checked["panels"][3]["score"]
    assert checked["verdict"] == [f"4.png fits the others least ({score:.2f} of 1).", "1 of 4 is below 0.5."]

    job = Job("2", "judgement")
    repaired = host.check(job, uploads, least=0.5, prompts=panel_prompts(host.names, texts), tries=3)
    tries = repaired["tries"]
    assert [one["try"] for one in tries] == list(range(1, len(tries) + 1))
    accepted = [one["image"] for one in tries if one["accepted"]]
    page = {"page"} if accepted else set()
    assert set(job.images) == {*"0123", *(one["image"] for one in tries)} | page
    assert {one["verdict"].partition(", ")[2] for one in tries} <= {"better, kept", "not better, left out"}
    for name in page:  # the whole page, at the size of the images
        assert Image.open(io.BytesIO(job.images[name])).size == (128, 128)
    assert repaired["images"] == [*"012", (accepted or ["3"])[-1]]
    lowest = min(panel["score"] for panel in repaired["panels"])
    assert (lowest > checked["panels"][3]["score"]) == bool(accepted)
    host.close()


def check_of(images: list[Image.Image]) -> dict:
    """Check images by a judge that compares their greys."""
    host = ModelHost(StudioModels())
    _, reward = host._models(Job("0", "load"))
    reward.judge = Grey()
    uploads = Uploads()
    handed_in = [asyncio.run(uploads.add(png_bytes(one, OWN), f"{number}.png")) for number, one in enumerate(images, 1)]
    try:
        return host.check(Job("1", "judgement"), handed_in, least=0.5)
    finally:
        host.close()


def test_a_panel_that_the_judge_cannot_read_fails_and_the_rest_is_judged():
    unreadable = round(ImageStat.Stat(open_image(CONTROL_FIGURE).convert("L")).mean[0])
    result = check_of(grey(unreadable, 20, 20, 25))
    assert result["verdict"][0] == "1.png fits the others least (0.00 of 1)."
    assert (result["odd"], result["passed"]) == (0, False)
    assert [panel["passed"] for panel in result["panels"]] == [False, True, True, True]
    with pytest.raises(ValueError, match="practice judge cannot read these images"):
        check_of(grey(*[unreadable] * 4))


def test_pairs_against_the_verdict_are_named():
    # Neighbours are alike, and the two ends are not.
    passes = check_of(grey(20, 50, 60, 90))
    assert passes["verdict"] == [
        "All 4 belong together.",
        "Each has a median of 0.5 or more with the others.",
        "But 1.png and 4.png have 0.30 together.",
    ]
    fails = check_of(grey(0, 0, 80, 80))
    assert fails["verdict"][:2] == [
        "No image fits most of the others: 1.png fits the others least (0.20 of 1).",
        "4 of 4 are below 0.5.",
    ]
    assert sorted(fails["verdict"][2:]) == [
        "But 1.png and 2.png have 1.00 together.",
        "But 3.png and 4.png have 1.00 together.",
    ]


@pytest.mark.slow
def test_one_panel_is_drawn_again_and_the_page_is_scored_anew():
    host = ModelHost(StudioModels())
    asked = example(host.names, 0)
    prompt = prompt_for(host.names, asked["theme"], asked["panels"], None)
    job = Job("1", "set")
    result = host.make_set(job, prompt, Sampling(candidates=3, steps=2))
    scores = [one["score"] for one in result["candidates"]]
    assert scores == sorted(scores, reverse=True)
    assert [one["rank"] for one in result["candidates"]] == [1, 2, 3]

    one = result["candidates"][0]
    page = open_image(job.images[one["image"]], name="page")
    (redrawn,) = panel_prompts(host.names, [prompt.panels[2]], theme=asked["theme"])
    again = Job("2", "set")
    made = host.redraw_panel(
        again, one, page, panel=2, prompt=redrawn, sampling=Sampling(candidates=1, seed=9, steps=2)
    )
    (new,) = made["candidates"]
    before, after = split(page, Grid(2, 2)), split(open_image(again.images["page"], name="page"), Grid(2, 2))
    assert [a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True)] == [True, True, False, True]
    assert (made["sources"], new["recipe"]["redrawn"], new["shared"]) == (
        ["source-1"],
        "panel 3, seed 9",
        one["shared"],
    )
    # Pairs of the kept panels have the scores that they had.
    assert new["matrix"][0][1] == pytest.approx(one["matrix"][0][1], abs=1e-4)
    host.close()


@pytest.mark.slow
def test_a_stopped_repair_keeps_what_it_drew(broken_set):
    class StoppedAtTheSecondTry(Job):
        def enter(self, phase, *, total=0):
            super().enter(phase, total=total)
            if "try 2" in phase:
                self.is_cancelled = True

    uploads, _ = broken_set
    host = ModelHost(StudioModels())
    prompts = panel_prompts(host.names, ["blue tall hero, cap, day, waving, flag"] * 4)
    job = StoppedAtTheSecondTry("1", "judgement")
    with pytest.raises(CancelledError):
        host.check(job, uploads, least=0.5, prompts=prompts, tries=3)
    assert [one["image"] for one in job.result["tries"]] == ["try-1"]
    assert "try-1" in job.images
    host.close()


def test_the_tiny_editor_starts_from_a_picture_and_says_what_it_cannot_do():
    host = ModelHost(StudioModels(kind="kontext"))
    hero = draw(all_panels()[0], 32)
    upload = asyncio.run(Uploads().add(png_bytes(hero), "me.png"))
    prompt = edit_prompt(host.names, "Paint the hero green.")
    job = Job("1", "set")
    result = host.make_set(job, prompt, Sampling(candidates=2, steps=1), sources=[upload])
    assert [one["layout"] for one in result["candidates"]] == ["1x1", "1x1"]
    assert set(job.images) == {"source-1", *(one["image"] for one in result["candidates"])}
    assert result["sources"] == ["source-1"]
    assert Image.open(io.BytesIO(job.images["source-1"])).size == hero.size
    assert set(host.modes) == {"set", "storyboard"}
    assert "choose a model that draws under Models" in host.modes["set"]
    host.close()


@dataclass
class WatchedTurns:
    """Says whose turn it is."""

    turns: Turns
    scoring_now: bool = False

    def __getattr__(self, name: str):
        return getattr(self.turns, name)

    @contextmanager
    def scoring(self):
        with self.turns.scoring():
            self.scoring_now = True
            yield
            self.scoring_now = False


def test_on_a_small_card_generator_and_judge_take_turns():
    host = ModelHost(StudioModels(memory="low"))
    generator, reward = host._models(Job("0", "load"))
    generator.turns = watched = WatchedTurns(generator.turns)
    assert watched.scorers == reward.judge.models()
    verdicts, answered = reward.judge.verdicts, []
    reward.judge.verdicts = lambda questions: answered.append(watched.scoring_now) or verdicts(questions)
    wish = example(host.names, 0)
    prompt = prompt_for(host.names, wish["theme"], wish["panels"], None)
    result = host.make_set(Job("1", "set"), prompt, Sampling(candidates=2, steps=1, size=Size(64, 64)))
    assert all(candidate["error"] or candidate["score"] is not None for candidate in result["candidates"])
    uploads = Uploads()
    drawn = [asyncio.run(uploads.add(png_bytes(draw(panel, 64), OWN), "hero.png")) for panel in all_panels()[:2]]
    assert host.judge(Job("2", "judgement"), drawn)["mean"] > 0
    assert len(answered) >= 2
    assert all(answered)
    host.close()


def test_every_example_can_be_asked_for():
    tiny, real = StudioModels(), StudioModels(model="black-forest-labs/FLUX.1-dev")
    asked = [example(tiny, number) for number in range(20)]
    for one in asked:
        assert prompt_for(tiny, one["theme"], one["panels"], None).grid.count == 4
        assert len(board_for(tiny, one["board"]).scenes) == 4
        assert edit_prompt(tiny, one["instruction"]).text == one["instruction"]
    assert len({one["theme"] for one in asked}) > 5
    for number in range(len(EXAMPLES)):
        one = example(real, number)
        assert prompt_for(real, one["theme"], one["panels"], None).panels == tuple(one["panels"])
        assert board_for(real, one["board"]).characters
    assert words(real) == {}
    assert "crown" in words(tiny)["hat"]
    with pytest.raises(ValueError, match="two panels or more, 1 is described"):
        prompt_for(real, "a fox", ["runs"], None)


# --- the API ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The application on a test client; its models are never loaded."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    from starlette.testclient import TestClient

    from pacorl.studio import server as module
    from pacorl.studio.models import ModelHost

    monkeypatch.setattr(ModelHost, "load", lambda self, job: {})

    def make(self, job, asked, sampling, *, sources=()):
        """What a real host returns, of two red candidates."""
        names = [f"source-{number}" for number, _ in enumerate(sources, 1)]
        job.images |= {"adapter-0": png(64), "adapter-1": png(64), **{name: png() for name in names}}
        recipe = {"prompt": getattr(asked, "text", "") or asked.title, "seed": str(sampling.seed)}
        one = {"base": None, "recipe": recipe, "layout": "1x1" if sources else "2x2", "panels": ["a"], "rank": 1}
        one |= {"width": 64, "height": 64, "score": 0.5, "matrix": [], "error": "", "seed": sampling.seed}
        result = {"kind": "edit" if sources else "set", "theme": recipe["prompt"], "sources": names}
        candidates = [{**one, "image": f"adapter-{number}"} for number in range(2)]
        return {**result, "candidates": candidates, "sampling": asdict(sampling)}

    monkeypatch.setattr(ModelHost, "make_set", make)
    monkeypatch.setattr(ModelHost, "make_storyboard", make)
    monkeypatch.setattr(
        ModelHost, "judge", lambda self, job, uploads, **options: {"names": [one.name for one in uploads]}
    )
    monkeypatch.setattr(
        ModelHost,
        "check",
        lambda self, job, uploads, **options: {**options, "prompts": len(options.get("prompts", []))},
    )
    studio = module.AppState("secret", folder=tmp_path / "sets")
    with TestClient(module.make_app(studio), follow_redirects=False, base_url="http://localhost") as client:
        yield client, studio
    studio.close()


SET = {
    "theme": "red round hero, crown, night",
    "panels": ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"],
}


def enter(client) -> None:
    answer = client.post("/join", json={"token": "secret"})
    assert (answer.status_code, answer.json()) == (200, {"path": "/"})
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]


def result_of(client, studio, answer):
    assert answer.status_code == 200, answer.text
    ended(studio.jobs.find(answer.json()["id"]))
    return client.get(f"/api/jobs/{answer.json()['id']}").json()


def test_nothing_without_the_token(server):
    client, _ = server
    for method, path in [
        ("GET", "/api/state"),
        ("GET", "/api/example"),
        ("POST", "/api/sets"),
        ("POST", "/api/uploads"),
        ("POST", "/api/judgements"),
        ("GET", "/api/jobs/1"),
        ("DELETE", "/api/jobs/1"),
        ("GET", "/images/1/a.png"),
        ("GET", "/uploads/x"),
        ("POST", "/api/edits"),
        ("POST", "/api/storyboards"),
        ("DELETE", "/api/history/1"),
        ("GET", "/sets/1/0.zip"),
    ]:
        assert client.request(method, path, json=SET if path == "/api/sets" else None).status_code in (401, 422), path
    assert client.get("/api/state", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/api/state", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.post("/join", json={"token": "wrong"}).status_code == 401
    assert client.get("/").status_code == 200


def test_every_answer_forbids_foreign_requests(server):
    client, _ = server
    for path in ("/", "/page/page.js", "/page/style.css", "/page/base.css", "/api/state", "/nowhere"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in policy
    assert client.get("/page/server.py").status_code == 404
    assert client.get("/page/..%2Fserver.py").status_code == 404


def test_a_set_is_queued_or_refused_at_once(server):
    client, studio = server
    enter(client)
    assert sampled(client, studio, "/api/sets", {**SET, "seed": 7})["seed"] == 7
    assert sampled(client, studio, "/api/sets", {**SET, "candidates": 50})["candidates"] == 50
    for change, fault in [
        ({"theme": "a dragon"}, "'dragon'"),
        ({"panels": ["waving, flag"]}, "two panels or more"),
        ({"candidates": 51}, "candidates: Input should be less than or equal to 50"),
        ({"lora_scale": 0.5}, "LoRA strength has no LoRA to act on; choose one under Models"),
        ({"lora_scale": 2.5}, "lora_scale: Input should be less than or equal to 2"),
        ({"seed": -1}, "seed: "),
        ({"size": "9000x64"}, "too large"),
        ({"layout": "wide"}, "no layout such as"),
        ({"speed": 1}, "speed: "),
    ]:
        answer = client.post("/api/sets", json={**SET, **change})
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text
    state = client.get("/api/state").json()
    assert state["latest"]["set"] == "3"
    assert client.get("/api/jobs/77").status_code == 404
    assert client.get("/images/2/none.png").status_code == 404


def test_panels_are_written_from_a_sentence_and_can_be_made(server):
    client, studio = server
    sentence = "Four images of a red round hero with a crown at night: waving by a flag, jumping by a boat, "
    sentence += "standing by a tree and waving by a lamp"
    assert client.post("/api/panels", json={"text": sentence}).status_code == 401
    enter(client)
    draft = client.post("/api/panels", json={"text": sentence}).json()
    assert (len(draft["panels"]), draft["note"]) == (4, "")
    sampled(client, studio, "/api/sets", {"theme": draft["theme"], "panels": draft["panels"]})
    vague = client.post("/api/panels", json={"text": "four images of a fox"}).json()
    assert "does not list what each panel shows" in vague["note"]
    answer = client.post("/api/panels", json={"text": "99 images of a fox"})
    assert (answer.status_code, "2 to 16 panels" in answer.json()["error"]) == (422, True)


def sampled(client, studio, path, form) -> dict:
    return result_of(client, studio, client.post(path, json=form))["result"]["sampling"]


def test_the_strength_of_a_lora_is_handed_on(server):
    client, studio = server
    enter(client)
    studio.names = StudioModels(adapter="mine")
    assert sampled(client, studio, "/api/sets", {**SET, "lora_scale": 0.35})["lora_scale"] == 0.35
    assert sampled(client, studio, "/api/sets", SET)["compare"] is True
    assert sampled(client, studio, "/api/sets", {**SET, "lora_scale": 0})["compare"] is False


def test_an_edit_starts_from_uploads(server):
    client, studio = server
    enter(client)
    source = client.post("/api/uploads", params={"name": "me.png"}, content=png()).json()["id"]
    form = {"instruction": "Paint the hero green.", "sources": [source]}
    result = result_of(client, studio, client.post("/api/edits", json=form))["result"]
    assert (result["kind"], result["theme"], result["sources"]) == ("edit", form["instruction"], ["source-1"])
    assert client.get(f"{result['images']}/source-1.png").content == png()
    for change, status, fault in [
        ({"sources": []}, 422, "sources: List should have at least 1 item"),
        ({"sources": ["nobody"]}, 404, "hand it in again"),
        ({"instruction": " "}, 422, "the instruction is empty"),
        ({"instruction": "add a dragon"}, 422, "add a dragon"),
    ]:
        answer = client.post("/api/edits", json={**form, **change})
        assert (answer.status_code, fault in answer.json()["error"]) == (status, True), answer.text


BOARD = {
    "title": "A hero's day",
    "style": "night",
    "characters": {"hero": "red round hero, crown"},
    "scenes": ["{hero}, waving, flag", "{hero}, jumping, boat", "{hero}, standing, tree", "{hero}, waving, lamp"],
}


def test_a_storyboard_is_queued_or_refused_at_once(server):
    client, studio = server
    enter(client)
    result = result_of(client, studio, client.post("/api/storyboards", json=BOARD))["result"]
    assert (result["theme"], result["asked"]["characters"]) == (BOARD["title"], BOARD["characters"])
    for change, fault in [
        ({"title": ""}, "title must be a text"),
        ({"scenes": []}, "scenes must be a list of texts"),
        ({"scenes": ["{villain}, waving, flag"]}, "names 'villain', who is none of hero"),
        ({"characters": {"hero": "a dragon"}}, "'dragon'"),
        ({"layout": "9x9"}, "81 panels a page"),
    ]:
        answer = client.post("/api/storyboards", json={**BOARD, **change})
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text


# --- the history -----------------------------------------------------------------------------------------------


def test_sets_outlast_the_studio_and_can_be_exported_and_forgotten(server, tmp_path):
    from starlette.testclient import TestClient

    from pacorl.studio import server as module

    client, studio = server
    enter(client)
    first = result_of(client, studio, client.post("/api/sets", json=SET))["result"]
    second = result_of(client, studio, client.post("/api/sets", json={**SET, "seed": 5}))["result"]
    assert studio.jobs.find("2").images == {}, "a set is kept once, on the disk"
    studio.close()
    again = module.AppState("secret", folder=tmp_path / "sets")
    with TestClient(module.make_app(again), follow_redirects=False, base_url="http://localhost") as client:
        for path in ("/api/history", f"/api/history/{first['id']}", f"{first['images']}/adapter-0.png"):
            assert client.get(path).status_code == 401, path
        enter(client)
        listed = client.get("/api/history").json()
        assert [(one["id"], one["count"], one["score"]) for one in listed] == [
            (second["id"], 2, 0.5),
            (first["id"], 2, 0.5),
        ]
        assert client.get(f"/api/history/{first['id']}").json()["asked"]["theme"] == SET["theme"]
        assert client.get(f"{first['images']}/adapter-1.png").content == png(64)
        archive = zipfile.ZipFile(io.BytesIO(client.get(f"/sets/{second['id']}/1.zip").content))
        assert archive.namelist() == ["image.png", *(f"panel-{number}.png" for number in range(1, 5)), "recipe.json"]
        assert Image.open(archive.open("panel-4.png")).size == (32, 32)
        recipe = json.loads(archive.read("recipe.json"))
        assert (recipe["recipe"]["seed"], recipe["score"], recipe["of"], recipe["asked"]["seed"]) == ("5", 0.5, 2, 5)
        for path in ("/sets/77/0.zip", f"/sets/{first['id']}/2.zip", f"/sets/{first['id']}/no.png", "/api/history/77"):
            assert client.get(path).status_code == 404, path
        assert [one["id"] for one in client.delete(f"/api/history/{first['id']}").json()] == [second["id"]]
        assert client.get(f"{first['images']}/adapter-0.png").status_code == 404
        assert not list((tmp_path / "sets").glob(f"set-{first['id']}*"))
    again.close()


IMAGE = {"image": "i", "layout": "1x2", "score": None, "rank": 1, "matrix": [], "recipe": {}, "error": "", "base": None}
DOCUMENT = {"kind": "set", "theme": "a", "sources": [], "asked": {}, "candidates": [IMAGE]}


def test_the_history_keeps_the_newest_and_lives_with_what_is_damaged(tmp_path, caplog):
    history = History(tmp_path, max_sets=3)
    names = [history.add({**DOCUMENT, "theme": str(number)}, {"i": png()}) for number in range(5)]
    assert [one["theme"] for one in history.summaries()] == ["4", "3", "2"]
    assert history.read(names[0]) is history.image(names[0], "i") is None
    with pytest.raises(ValueError, match="is another studio's history; name another folder with --history"):
        History(tmp_path)
    history.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("set-*.zip")} == {0o600}
    newest = tmp_path / f"set-{names[4]}.zip"
    newest.write_bytes(newest.read_bytes()[:40])
    # A file that is half written is not one of the sets, and nobody writes it any more.
    (tmp_path / f".set-{names[4]}.zip.{platform.node()}-99999999-0123abcd.part").write_bytes(b"")
    again = History(tmp_path, max_bytes=1)
    assert f"{newest}: damaged (File is not a zip file); this set is not shown" in caplog.text
    assert not list(tmp_path.glob("*.part"))
    assert [one["theme"] for one in again.summaries()] == ["3", "2"]
    assert again.add(DOCUMENT, {"i": png()}) == f"{int(names[4]) + 1:06d}", "no number is given twice"
    assert [one["theme"] for one in again.summaries()] == ["a"], "the newest stays, however large"
    again.close()


@pytest.mark.parametrize("damage", ["pipe", "folder", "key", "layout", "compression"])
def test_a_damaged_set_is_named_and_left_out(tmp_path, caplog, damage):
    path = tmp_path / "set-000001.zip"
    candidate = IMAGE | ({"layout": "x"} if damage == "layout" else {})
    document = {**DOCUMENT, "candidates": [candidate], "sources": None if damage == "key" else []}
    first = History(tmp_path)
    first.add(document, {"i": png()})
    first.close()
    content = path.read_bytes()
    if damage in ("pipe", "folder"):
        path.unlink()
        os.mkfifo(path) if damage == "pipe" else path.mkdir()
    if damage == "compression":  # of a kind that nobody knows
        at = content.index(b"PK\x01\x02") + 10
        path.write_bytes(content[:at] + b"\x63\x00" + content[at + 2 :])
    (tmp_path / "set-of-mine.zip").write_bytes(b"")  # somebody else's
    again = History(tmp_path)
    assert f"{path}: damaged (" in caplog.text
    assert again.summaries() == []
    assert again.read("000001") is again.export("000001", 0) is None
    assert again.add(DOCUMENT, {"i": png()}) == "000002"
    again.close()


@pytest.mark.parametrize("file", ["set.json", "i.png"])
def test_a_set_that_is_a_zip_bomb_is_not_unpacked(tmp_path, caplog, monkeypatch, file):
    monkeypatch.setattr("pacorl.studio.history.DOCUMENT_BYTES", 4000)
    monkeypatch.setattr("pacorl.studio.history.IMAGE_BYTES", 4000)
    document = json.dumps({**DOCUMENT, "made": ""}) + " " * (5000 if file == "set.json" else 0)
    with zipfile.ZipFile(tmp_path / "set-000001.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("set.json", document)
        archive.writestr("i.png", png() + bytes(5000 if file == "i.png" else 0))
    history = History(tmp_path)
    assert len(history.summaries()) == (file == "i.png")
    assert (f"{len(document):,} bytes unpacked, and at most 4,000 are read" in caplog.text) == (file == "set.json")
    assert (history.image("000001", "i") is None) == (file == "i.png")
    history.close()


def test_an_image_of_a_set_that_is_none_is_named(tmp_path):
    history = History(tmp_path)
    history.add(DOCUMENT, {"i": b"no image"})
    with pytest.raises(ValueError, match="set 000001, image i: not an image of a known format"):
        history.export("000001", 0)
    history.close()


def test_a_set_that_the_disk_has_no_room_for_is_shown_all_the_same(server, monkeypatch):
    client, studio = server
    enter(client)

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "set.zip")

    monkeypatch.setattr(studio.history, "add", full)
    job = result_of(client, studio, client.post("/api/sets", json=SET))
    assert job["result"]["note"] == "This set is not in the history: No space left on device."
    assert client.get(f"/images/{job['id']}/adapter-0.png").content == png(64)


def test_uploads_are_judged(server):
    client, studio = server
    enter(client)
    ids = []
    for name in ("a.png", "b ü.png"):
        answer = client.post("/api/uploads", params={"name": name}, content=png())
        assert (answer.status_code, answer.json()["name"]) == (200, name)
        ids.append(answer.json()["id"])
    assert client.get(f"/uploads/{ids[0]}").headers["content-type"] == "image/png"
    judged = result_of(client, studio, client.post("/api/judgements", json={"uploads": ids}))
    assert judged["result"]["names"] == ["a.png", "b ü.png"]
    for form, status, fault in [
        ({"uploads": ids[:1]}, 422, "nothing to be compared with"),
        ({"uploads": ids, "layout": "2x2"}, 422, "a grid image is cut alone"),
        ({"uploads": ids[:1], "layout": "1x1"}, 422, "2 to 12 can be judged"),
        ({"uploads": ["nobody", *ids]}, 404, "hand it in again"),
    ]:
        answer = client.post("/api/judgements", json=form)
        assert (answer.status_code, fault in answer.json()["error"]) == (status, True), answer.text
    left = client.delete(f"/api/uploads/{ids[0]}").json()["uploads"]
    assert [one["id"] for one in left] == ids[1:]


def test_the_images_of_a_judgement_have_one_budget(server, monkeypatch):
    """They are opened at a time, so their pixels are added up before that."""
    client, studio = server
    enter(client)
    ids = [client.post("/api/uploads", content=png(64)).json()["id"] for _ in range(3)]
    monkeypatch.setattr("pacorl.studio.server.MAX_JUDGED_PIXELS", 3 * 64**2 - 1)
    answer = client.post("/api/judgements", json={"uploads": ids})
    assert answer.status_code == 422
    assert "the images have 12,288 pixels together; at most 12,287 are judged" in answer.json()["error"]
    edited = client.post("/api/edits", json={"instruction": "Change the scene to sunset.", "sources": ids})
    assert (edited.status_code, "12,288 pixels together" in edited.json()["error"]) == (422, True)
    assert studio.jobs.find("2") is None
    assert client.post("/api/judgements", json={"uploads": ids[:2]}).status_code == 200


def test_a_browser_sees_its_own_images_and_jobs_alone(server):
    """In every list and by every address, in both directions; of the history and the characters all see all."""
    client, studio = server
    browsers = []
    for name in ("first.png", "second.png"):
        client.cookies.clear()
        enter(client)
        assert client.get("/api/state").json()["uploads"] == []
        assert client.get("/api/state").json()["latest"] == {}
        ids = [client.post("/api/uploads", params={"name": name}, content=png()).json()["id"] for _ in range(2)]
        page = result_of(client, studio, client.post("/api/sets", json=SET))["id"]
        judged = result_of(client, studio, client.post("/api/judgements", json={"uploads": ids}))["id"]
        browsers.append((dict(client.cookies), ids, page, judged))

    for own, other in (browsers, browsers[::-1]):
        client.cookies.clear()
        client.cookies.update(own[0])
        state = client.get("/api/state").json()
        assert [one["id"] for one in state["uploads"]] == own[1]
        assert state["latest"] == {"set": own[2], "judgement": own[3]}
        _, ids, page, judged = other
        for address in (
            f"/uploads/{ids[0]}",
            f"/api/jobs/{page}",
            f"/api/jobs/{judged}",
            f"/images/{page}/adapter-0.png",
        ):
            assert client.get(address).status_code == 404, address
        assert client.delete(f"/api/jobs/{page}").status_code == 404
        for path, form in [
            ("/api/judgements", {"uploads": ids}),
            ("/api/checks", {"uploads": ids, "least": 0.5}),
            ("/api/repairs", {"uploads": ids, "least": 0.5, "texts": [f"{SET['theme']}, waving, flag"] * 2}),
            ("/api/edits", {"instruction": "Change the scene to sunset.", "sources": ids[:1]}),
        ]:
            assert client.post(path, json=form).status_code == 404, path
        assert [one["id"] for one in client.delete(f"/api/uploads/{ids[0]}").json()["uploads"]] == own[1]
    assert len(studio.uploads._uploads) == 4
    enter(client)  # again: it stays the same browser
    assert len(client.get("/api/state").json()["uploads"]) == 2


def test_half_a_character_is_refused(server):
    client, _ = server
    enter(client)
    for body in (b'{"theme": "\\ud800", "panels": ["a", "b"]}', b'{"theme": "a", "panels": [], "\\ud800": 1}'):
        answer = client.post("/api/sets", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text


def test_no_images_and_too_large_ones(server):
    client, _ = server
    enter(client)
    answer = client.post("/api/uploads", params={"name": "letter.txt"}, content=b"Dear Sir")
    assert (answer.status_code, answer.json()["error"]) == (422, "letter.txt: not a PNG, JPEG or WebP image")
    assert client.post("/api/uploads", content=b"x" * (limits.MAX_BYTES + 1)).status_code == 413


def test_a_waiting_set_can_be_cancelled(server, monkeypatch):
    from pacorl.studio.models import ModelHost

    client, studio = server
    enter(client)
    gate = threading.Event()
    monkeypatch.setattr(ModelHost, "make_set", lambda self, job, *_, **__: {**DOCUMENT, "waited": gate.wait(10)})
    first, second = (client.post("/api/sets", json=SET).json()["id"] for _ in range(2))
    told = client.get(f"/api/jobs/{second}").json()
    assert (told["status"], told["ahead"]) == ("queued", 1)
    assert client.delete(f"/api/jobs/{second}").json()["status"] == "cancelled"
    gate.set()
    assert ended(studio.jobs.find(first)).status == "done"


def test_a_check_needs_a_threshold_and_a_repair_a_text_for_each_image(server, tmp_path):
    client, studio = server
    enter(client)
    ids = [client.post(f"/api/uploads?name={name}", content=png()).json()["id"] for name in "abcd"]
    form = {"uploads": ids, "least": 0.4}
    assert client.get("/api/state").json()["calibrated"] is False
    assert result_of(client, studio, client.post("/api/checks", json=form))["result"]["least"] == 0.4
    texts = [f"{SET['theme']}, {text}" for text in SET["panels"]]
    repair = result_of(client, studio, client.post("/api/repairs", json=form | {"texts": texts, "tries": 2}))
    assert (repair["result"]["prompts"], repair["result"]["tries"]) == (4, 2)

    for path, changes, fault in (
        ("checks", {"least": None}, "no threshold"),
        ("checks", {"least": 1.5}, "least: "),
        ("checks", {"uploads": ids[:1]}, "nothing to be compared with"),
        ("repairs", {"texts": texts[:3]}, "3 lines describe 4 images; write one line for each image"),
        ("repairs", {"texts": ["a fox"] * 4}, "fox"),
        ("repairs", {"texts": texts, "tries": 21}, "tries: "),
    ):
        answer = client.post(f"/api/{path}", json=form | changes)
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_repaired_page_is_a_set_of_the_history(server, monkeypatch, is_cancelled):
    client, studio = server
    enter(client)
    asked = {}

    def check(self, job, uploads, **options):
        """What a real host leaves behind, of a page whose second panel was drawn again."""
        asked.update(options)
        job.images["page"] = png(64, colour="blue")
        matrix = [[None, 0.5], [0.5, None]]
        job.result = {"judge": "a judge", "mean": 0.5, "matrix": matrix, "images": ["0", "try-1"]}
        if is_cancelled:
            raise CancelledError
        return job.result

    monkeypatch.setattr(ModelHost, "check", check)
    page = client.post("/api/uploads", content=png()).json()["id"]
    theme, shared = SET["theme"], f"2x2 grid layout of {SET['theme']}."
    form = {"uploads": [page], "layout": "2x2", "theme": theme, "shared": shared, "least": 0.5}
    form["texts"] = [f"{theme}, {text}" for text in SET["panels"]]
    job = result_of(client, studio, client.post("/api/repairs", json=form))
    assert job["status"] == ("cancelled" if is_cancelled else "done")
    assert asked["theme"] == shared, "the question of the ranking"

    kept = client.get(f"/api/history/{job['result']['kept']}").json()
    (one,) = kept["candidates"]
    assert (kept["theme"], kept["sources"], one["panels"]) == (theme, ["source-1"], SET["panels"])
    assert (one["score"], one["shared"], kept["asked"]["panels"]) == (0.5, shared, SET["panels"])
    with Image.open(io.BytesIO(client.get(f"{kept['images']}/page.png").content)) as image:
        assert (image.size, image.getpixel((0, 0)), image.info["theme"]) == ((64, 64), (0, 0, 255), theme)
    names = zipfile.ZipFile(io.BytesIO(client.get(f"/sets/{kept['id']}/0.zip").content)).namelist()
    assert names == ["image.png", "source-1.png", *(f"panel-{number}.png" for number in range(1, 5)), "recipe.json"]

    # A mere check is no set.
    checked = result_of(
        client, studio, client.post("/api/checks", json={"uploads": [page], "layout": "2x2", "least": 0})
    )
    assert "kept" not in (checked["result"] or {})
    assert len(client.get("/api/history").json()) == 1


def test_a_panel_of_a_set_is_drawn_again_as_the_set_was(server, monkeypatch):
    client, studio = server
    enter(client)
    asked = {}

    def redraw(self, job, candidate, page, **options):
        """What a real host leaves behind."""
        asked.update(options, page=page.size)
        job.images = {"page": png(64, colour="blue"), "source-1": png(64)}
        recipe = candidate["recipe"]
        one = {**candidate, "image": "page", "score": 0.75, "seed": None, "recipe": recipe}
        return {"kind": "set", "sources": ["source-1"], "candidates": [one]}

    monkeypatch.setattr(ModelHost, "redraw_panel", redraw)
    theme = SET["theme"]
    texts = [f"{theme}, {text}" for text in SET["panels"]]
    one = {"image": "adapter-0", "base": None, "layout": "2x2", "panels": SET["panels"], "shared": theme, "rank": 1}
    one |= {"recipe": {"theme": theme, "panels": json.dumps(texts)}, "score": 0.5, "matrix": [], "error": "", "seed": 4}
    form = {"theme": theme, "panels": SET["panels"], "layout": "2x2", "steps": 3, "seed": 4, "character": "hero"}
    document = {"kind": "set", "theme": theme, "sources": [], "asked": form, "candidates": [one]}
    name = studio.history.add(document, {"adapter-0": png(64)})

    job = result_of(client, studio, client.post(f"/api/history/{name}/panels", json={"panel": 2}))
    assert (asked["page"], asked["panel"], asked["prompt"].panels) == ((64, 64), 2, (texts[2],) * 4)
    assert (asked["sampling"].steps, asked["sampling"].candidates) == (3, 1)
    assert job["result"]["note"] == (
        "Panel 3 was drawn again. The page has 0.75, and had 0.50 before. The page before is in the history."
    )
    kept = client.get(f"/api/history/{job['result']['id']}").json()
    assert (kept["theme"], kept["asked"]["character"], kept["candidates"][0]["image"]) == (theme, "hero", "page")
    assert [one["id"] for one in client.get("/api/history").json()] == [kept["id"], name]

    for number, panel, fault in ((name, 4, "has 4 panels"), ("000099", 0, "no candidate 0 of a set '000099'")):
        answer = client.post(f"/api/history/{number}/panels", json={"panel": panel})
        assert (answer.status_code, fault in answer.json()["error"]) == (404, True), answer.text


def test_a_calibration_gives_the_threshold(server, tmp_path):
    from pacorl.studio import server as module

    client, studio = server
    enter(client)
    path = tmp_path / "calibration.json"
    Calibration("tiny", {"": Curve()}, {"panels": {2: 0.3, 4: 0.2}}).save(path)
    calibrated = module.AppState("other", StudioModels(calibration=path), tmp_path / "other")
    calibrated.close()
    studio.calibration = calibrated.calibration
    ids = [client.post(f"/api/uploads?name={name}", content=png()).json()["id"] for name in "ab"]
    assert client.get("/api/state").json()["calibrated"] is True
    assert result_of(client, studio, client.post("/api/checks", json={"uploads": ids}))["result"]["least"] == 0.3
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"calibration\.json"):
        module.AppState("third", StudioModels(calibration=path), tmp_path / "third")
