"""The studio without a browser: its queue, its uploads, and its HTTP API with what it must refuse."""

from __future__ import annotations

import io
import threading
import time

import pytest
from PIL import Image

from pacorl.config.options import StudioModels
from pacorl.data.characters import all_panels, draw
from pacorl.io.images import ImageError, png_bytes
from pacorl.studio import models as limits
from pacorl.studio.jobs import MAX_ENDED, MAX_WAITING, BusyError, Job, JobQueue
from pacorl.studio.models import EXAMPLES, ModelHost, Uploads, example, prompt_for, words


def png(width: int = 64, height: int = 64, colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def ended(job: Job) -> Job:
    deadline = time.monotonic() + 30
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
    assert ended(jobs.submit("set", lambda job: {})).status == "done"
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
        (b"Dear Sir", "x.png: not an image of a known format"),
        (png()[:60], "x.png: damaged or cut off"),
        (png(5001, 5000), "x.png: 5001x5000 is too large"),
        (png(3, 64), "x.png: 3x64 is too small"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(data, fault):
    with pytest.raises(ImageError, match=fault):
        Uploads().add(data, "x.png")


def test_uploads_are_few_and_can_be_taken_back(monkeypatch):
    monkeypatch.setattr(limits, "MAX_IMAGES", 2)
    uploads = Uploads()
    first = uploads.add(png(600, 300), "a\n  b.png")
    uploads.add(png(), "")
    with pytest.raises(ValueError, match="2 images are here already"):
        uploads.add(png(), "c.png")
    assert (first.name, first.size, uploads.of("")[1].name) == ("a b.png", (600, 300), "image")
    assert Image.open(io.BytesIO(first.preview)).size == (512, 256)
    assert first.open().size == (600, 300)
    uploads.remove(first.id)
    uploads.remove("nobody")
    assert uploads.find(first.id) is None
    uploads.add(png(), "c.png")


# --- what can be asked for -------------------------------------------------------------------------------------


def test_the_judge_tab_says_what_it_cannot_judge():
    """By the committed models, as the page's own jobs run."""
    drawn = [draw(panel, 64) for panel in all_panels()[:4000:3000]]
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    uploads = Uploads()
    handed_in = [uploads.add(png_bytes(image), f"{number}.png") for number, image in enumerate([*drawn, noise])]
    host = ModelHost(StudioModels())
    result = host.judge(Job("1", "judgement"), handed_in)
    host.close()
    scored = {tuple(pair["images"]): pair["p_yes"] for pair in result["pairs"]}
    assert (scored[0, 1] is None, scored[0, 2], scored[1, 2]) == (False, None, None)
    assert result["mean"] == scored[0, 1]
    assert {pair["error"] for pair in result["pairs"]} == {
        "",
        "this judge knows the tiny world of drawn characters only, and image 2 shows something else",
    }


def test_every_example_can_be_asked_for():
    tiny, real = StudioModels(), StudioModels(model="black-forest-labs/FLUX.1-dev")
    asked = [example(tiny, number) for number in range(20)]
    for one in asked:
        assert prompt_for(tiny, one["theme"], one["panels"], None).grid.count == 4
    assert len({one["theme"] for one in asked}) > 5
    for number in range(len(EXAMPLES)):
        one = example(real, number)
        assert prompt_for(real, one["theme"], one["panels"], None).panels == tuple(one["panels"])
    assert words(real) == {}
    assert "crown" in words(tiny)["hat"]
    with pytest.raises(ValueError, match="two panels or more, 1 is described"):
        prompt_for(real, "a fox", ["runs"], None)


# --- the API ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """The application on a test client; its models are never loaded."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    from starlette.testclient import TestClient

    from pacorl.studio import server as module
    from pacorl.studio.models import ModelHost

    monkeypatch.setattr(ModelHost, "load", lambda self, job: {})
    monkeypatch.setattr(
        ModelHost,
        "make_set",
        lambda self, job, prompt, **options: {name: options[name] for name in ("seed", "compare")},
    )
    monkeypatch.setattr(
        ModelHost, "judge", lambda self, job, uploads, **options: {"names": [one.name for one in uploads]}
    )
    studio = module.AppState("secret")
    with TestClient(module.make_app(studio), follow_redirects=False, base_url="http://localhost") as client:
        yield client, studio
    studio.close()


SET = {
    "theme": "red round hero, crown, night",
    "panels": ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"],
}


def enter(client) -> None:
    answer = client.get("/join/secret", headers={"Sec-Fetch-Site": "none"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
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
    ]:
        assert client.request(method, path, json=SET if path == "/api/sets" else None).status_code in (401, 422), path
    assert client.get("/api/state", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/api/state", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/join/wrong").status_code == 401
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
    assert result_of(client, studio, client.post("/api/sets", json={**SET, "seed": 7}))["result"]["seed"] == 7
    for change, fault in [
        ({"theme": "a dragon"}, "'dragon'"),
        ({"panels": ["waving, flag"]}, "two panels or more"),
        ({"candidates": 99}, "candidates: Input should be less than or equal to 9"),
        ({"seed": -1}, "seed: "),
        ({"size": "9000x64"}, "too large"),
        ({"layout": "wide"}, "no layout such as"),
        ({"speed": 1}, "speed: "),
    ]:
        answer = client.post("/api/sets", json={**SET, **change})
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text
    state = client.get("/api/state").json()
    assert state["latest"]["set"] == "2"
    assert client.get("/api/jobs/77").status_code == 404
    assert client.get("/images/2/none.png").status_code == 404


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


def test_a_browser_sees_its_own_images_and_jobs_alone(server):
    client, studio = server
    seen = []
    for name in ("first.png", "second.png"):
        client.cookies.clear()
        enter(client)
        ids = [client.post("/api/uploads", params={"name": name}, content=png()).json()["id"] for _ in range(2)]
        job = result_of(client, studio, client.post("/api/judgements", json={"uploads": ids}))["id"]
        state = client.get("/api/state").json()
        assert ([one["id"] for one in state["uploads"]], state["latest"]) == (ids, {"judgement": job})
        seen.append((ids, job))
    (ids, job), _ = seen
    assert client.get(f"/uploads/{ids[0]}").status_code == 404
    assert client.get(f"/api/jobs/{job}").status_code == 404
    assert client.post("/api/judgements", json={"uploads": ids}).status_code == 404
    client.delete(f"/api/uploads/{ids[0]}")
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
    assert (answer.status_code, answer.json()["error"]) == (422, "letter.txt: not an image of a known format")
    assert client.post("/api/uploads", content=b"x" * (limits.MAX_BYTES + 1)).status_code == 413


def test_a_waiting_set_can_be_cancelled(server, monkeypatch):
    from pacorl.studio.models import ModelHost

    client, studio = server
    enter(client)
    gate = threading.Event()
    monkeypatch.setattr(ModelHost, "make_set", lambda self, job, prompt, **options: {"waited": gate.wait(10)})
    first, second = (client.post("/api/sets", json=SET).json()["id"] for _ in range(2))
    told = client.get(f"/api/jobs/{second}").json()
    assert (told["status"], told["ahead"]) == ("queued", 1)
    assert client.delete(f"/api/jobs/{second}").json()["status"] == "cancelled"
    gate.set()
    assert ended(studio.jobs.find(first)).status == "done"
