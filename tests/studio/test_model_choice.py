"""Models chosen on the page: names, memory, LoRAs with strengths, downloads."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from pacorl.config.options import StudioModels
from pacorl.io.children import start_python
from pacorl.studio import model_choice, models
from pacorl.studio.characters import offers_for_characters
from pacorl.studio.jobs import Job
from pacorl.studio.model_choice import Downloads, Fit, check_name, fit_of, offers, with_memory
from pacorl.studio.models import ModelHost, Sampling, _options, edit_prompt, editor_of
from pacorl.web.guard import RefusedError

FLUX = "black-forest-labs/FLUX.1-dev"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The application on a test client; its models are never loaded."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    from starlette.testclient import TestClient

    from pacorl.studio import server as module

    monkeypatch.setattr(module.ModelHost, "load", lambda self, job: {})
    started = StudioModels(adapter=str(tmp_path / "mine"))
    studio = module.AppState("secret", started, folder=tmp_path / "sets")
    headers = {"Authorization": "Bearer secret"}
    with TestClient(module.make_app(studio), base_url="http://localhost", headers=headers) as client:
        yield client, studio
    studio.close()


def finished(client, job) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (now := client.get(f"/api/jobs/{job['id']}").json())["status"] in ("queued", "running"):
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    return now


def test_the_list_has_what_each_model_does_and_its_licence():
    listed = {offer.name: offer for offer in offers(StudioModels())}
    embedded = listed["tiny"]
    assert (embedded.sets, embedded.edits, embedded.judges, embedded.licence) == (True, True, True, "")
    assert (listed[model_choice.JUDGE].judges, listed[model_choice.JUDGE].sets) == (True, False)
    assert (listed[FLUX].gated, listed[FLUX].licence) == (True, "flux-1-dev-non-commercial-license")
    klein = listed["black-forest-labs/FLUX.2-klein-base-4B"]
    assert (klein.sets, klein.edits, klein.gated) == (True, True, False)


def test_the_page_names_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert check_name("OWNER/name-1.0") == "OWNER/name-1.0"
    assert check_name("OWNER/name:file.safetensors") == "OWNER/name:file.safetensors"
    assert check_name("/known", ("/known",)) == "/known"
    for name in (
        "/etc/passwd",
        "../x",
        "owner/name",
        "owner/name:x",
        "a/..",
        "gpt2",
        "",
        "a/b/c",
        "A/b:../../x",
        "A/b\n",
        "A/b:c\0",
        "A/b:" + "x" * 252,
        "A/b.py:NAME",
    ):
        with pytest.raises(ValueError, match="is no model of the list"):
            check_name(name)


def test_the_memory_is_set_by_the_card(monkeypatch):
    asked = []

    def planned(model, kind, judge, judge_adapter, memory):
        asked.append((model, memory))
        return Fit("low", 20 * 2**30, 24 * 2**30, "a card", 0)

    monkeypatch.setattr(model_choice, "_planned", planned)
    names = StudioModels(model=FLUX)
    assert with_memory(names, FLUX, "flux").memory == "low"
    assert with_memory(replace(names, memory="lowest"), FLUX, "flux").memory == "lowest"
    assert fit_of(StudioModels(), "tiny").memory == "normal"
    assert asked == [(FLUX, "auto")]
    for fit, fault in [
        (
            Fit("lowest", 23 * 2**30, 24 * 2**30, "a card", 0),
            "needs 23.0 GiB even with the least memory, and a card has 24.0",
        ),
        (
            Fit("normal", 0, 24 * 2**30, "a card", 0, (FLUX,)),
            "FLUX.1-dev is not on this machine; download it under Models",
        ),
    ]:
        monkeypatch.setattr(model_choice, "_planned", lambda *_, fit=fit: fit)
        with pytest.raises(ValueError, match=fault):
            with_memory(names, FLUX, "flux")


def test_models_are_not_planned_while_others_load(monkeypatch):
    planned: list[str] = []
    monkeypatch.setattr(model_choice, "_plan", lambda model, *_: planned.append(model) or Fit("low", 0, 2**40, "", 0))
    plan = Thread(target=lambda: fit_of(StudioModels(model=FLUX), FLUX))
    while_loading: list[str] = []

    def load(names, model, kind):
        plan.start()
        plan.join(timeout=0.2)
        while_loading.extend(planned)
        raise ValueError("no model is needed")

    monkeypatch.setattr(models, "with_memory", load)
    host = ModelHost(StudioModels())
    with pytest.raises(ValueError, match="no model is needed"):
        host.load(Job("1", "models"))
    host.close()
    plan.join(timeout=60)
    assert (while_loading, planned) == ([], [FLUX])


@pytest.mark.slow
def test_the_plan_of_a_real_model_needs_neither_weights_nor_network():
    fit = fit_of(StudioModels(model=FLUX), FLUX)
    assert fit.absent == (FLUX,)
    assert 30e9 < fit.disk < 40e9
    assert fit.needed > 10 * 2**30


def test_a_choice_is_checked_and_loaded(server, tmp_path):
    client, studio = server
    listed = client.get("/api/models").json()
    assert listed["chosen"]["loras"] == {str(tmp_path / "mine"): 1.0}
    assert (listed["chosen"]["editor"], listed["chosen"]["memory"]) == ("tiny", "auto")
    form = {"model": "tiny", "loras": {str(tmp_path / "mine"): 0.5, "OWNER/other": -1}}
    job = client.post("/api/models", json=form).json()
    assert client.get("/api/models").json()["chosen"]["loras"] == form["loras"]
    finished(client, job)
    assert studio.host.names.strengths == form["loras"]
    assert studio.characters.names is studio.names
    assert client.post("/api/models", json={"model": "tiny"}).status_code == 200
    assert client.get("/api/state").json()["loras"] == {}
    for change, fault in [
        ({"model": str(tmp_path)}, "is no model of the list"),
        ({"editor": "../x"}, "is no model of the list"),
        ({"judge": "http://127.0.0.1:1"}, "is no model of the list"),
        ({"writer": "http://127.0.0.1:1"}, "is no model of the list"),
        ({"writer": "OWNER/writer"}, "is no model of the list"),
        ({"model": FLUX, "memory": "low"}, f"{FLUX} is not on this machine; download it under Models"),
        ({"judge": "OWNER/judge:adapter"}, "OWNER/judge:adapter is not on this machine; download it under Models"),
        ({"loras": {f"O/{n}": 1 for n in range(5)}}, "at most 4 items"),
        ({"loras": {"O/n": 9}}, "less than or equal to 2"),
        ({"memory": "all"}, "'auto', 'normal', 'low' or 'lowest'"),
    ]:
        answer = client.post("/api/models", json={"model": "tiny", **change})
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text


def test_models_change_only_if_their_load_is_queued(server, monkeypatch):
    client, studio = server
    monkeypatch.setattr("pacorl.studio.jobs.MAX_WAITING", 0)
    assert client.post("/api/models", json={"model": "tiny", "memory": "low"}).status_code == 429
    assert studio.names == studio.started_with


def test_a_plan_without_an_absent_model_is_kept(monkeypatch):
    fits = [Fit("low", 9, 12, "a card", 34, (FLUX,)), Fit("low", 9, 12, "a card", 34)]
    monkeypatch.setattr(model_choice, "_plan", cache(lambda *_: fits.pop(0)))
    assert fit_of(StudioModels(), FLUX).absent == (FLUX,)
    assert fit_of(StudioModels(), FLUX).absent == fit_of(StudioModels(), FLUX).absent == ()


def test_the_memory_check_is_a_job(server, monkeypatch):
    client, _ = server
    monkeypatch.setattr(model_choice, "_planned", lambda *_: Fit("low", 9 * 2**30, 12 * 2**30, "a card", 34))
    job = client.post("/api/models", json={"model": FLUX, "check": True}).json()
    now = finished(client, job)
    assert (now["result"]["fits"], now["result"]["memory"], now["result"]["disk"]) == (True, "low", 34)


def test_a_generator_beyond_the_practice_model_asks_for_a_judge(server, monkeypatch):
    client, studio = server
    monkeypatch.setattr(model_choice, "check_cached", lambda name: None)
    answer = client.post("/api/models", json={"model": FLUX})
    assert (answer.status_code, f"choose a judge for {FLUX} too" in answer.json()["error"]) == (422, True)
    assert studio.names == studio.started_with


def test_a_licence_is_accepted_before_a_download(server, monkeypatch):
    client, _ = server
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    answer = client.post("/api/downloads", json={"model": FLUX})
    assert answer.status_code == 409
    assert "has the licence flux-1-dev-non-commercial-license; read it at huggingface.co" in answer.json()["error"]
    answer = client.post("/api/downloads", json={"model": FLUX, "accepted": True})
    assert (answer.status_code, "started with HF_HUB_OFFLINE" in answer.json()["error"]) == (409, True)
    for form in ({"model": "/etc", "accepted": True}, {"model": FLUX, "accepted": True, "token": "a b"}):
        assert client.post("/api/downloads", json=form).status_code == 422
    assert client.delete("/api/downloads").json() == {"download": None}


def test_a_download_is_one_process_with_its_token_in_the_environment_alone(tmp_path, monkeypatch):
    started = []

    def start(*arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
        started.append((arguments, pipes))
        return start_python("-c", "import time; time.sleep(100)", **pipes)

    monkeypatch.setattr(model_choice, "start_python", start)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    downloads = Downloads(tmp_path / "download.txt")
    refusals = []

    def ask() -> None:
        try:
            downloads.start(NAME, token="hf_secret")
        except RefusedError as refusal:
            refusals.append(str(refusal))

    together = [Thread(target=ask) for _ in range(6)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    downloads.stop()
    assert len(refusals) == 5
    assert refusals[0].startswith(f"{NAME} is being downloaded")
    ((arguments, pipes),) = started
    assert arguments == ("-m", "pacorl.studio.download_process", NAME)
    assert pipes["env"] == os.environ | {"HF_TOKEN": "hf_secret"}
    assert "HF_TOKEN" not in os.environ
    assert (tmp_path / "download.txt").stat().st_mode & 0o777 == 0o600

    # A history that somebody else packed.
    (tmp_path / "key").write_text("secret")
    (tmp_path / "download.txt").unlink()
    (tmp_path / "download.txt").symlink_to(tmp_path / "key")
    with pytest.raises(OSError, match="a link, and nothing is written through links here"):
        downloads.start(NAME)
    assert (tmp_path / "key").read_text() == "secret"
    assert downloads.state() is None


@pytest.mark.slow
def test_the_generator_and_the_editor_are_both_embedded_and_options_are_set():
    host = ModelHost(StudioModels())
    assert (host.modes, editor_of(host.names)) == ({}, "tiny")
    generator, _ = host._models(Job("1", "load"))
    editor, _ = host._models(Job("2", "load"), edits=True)
    assert (generator.sets, editor.edits, len(host._generators)) == (True, True, 2)
    assert (generator.adapter, editor.adapter) == ("", "steady")
    before = generator._cache
    generator.set_options(guidance_scale=None)
    assert generator._cache is before
    generator.set_options(true_cfg_scale=2.0, negative_prompt="night")
    assert (generator.true_cfg_scale, generator.policy.options.negative_text) == (2.0, "night")
    generator.set_options()
    assert generator.true_cfg_scale is None
    with pytest.raises(ValueError, match="no effect without guidance; set true_cfg_scale above 1"):
        generator.set_options(negative_prompt="night")
    with pytest.raises(ValueError, match="takes no contrast"):
        generator.set_options(contrast=1)
    with pytest.raises(ValueError, match="set strict guidance above 1"):  # the page's own words
        _options(Job("3", "set"), generator, host._rewards["tiny"], Sampling(options={"negative_prompt": "night"}))
    host.choose(Job("3", "load"), StudioModels(kind="kontext"))
    assert (len(host._generators), set(host.modes)) == (1, {"set", "storyboard"})
    host.close()
    wordy = ModelHost(StudioModels(model=FLUX))
    prompt = edit_prompt(wordy.names, "make it red")
    with pytest.raises(ValueError, match=r"sees no picture\. Choose an editor under Models"):
        wordy.make_sheet(Job("4", "set"), {0: prompt}, Sampling(), sources=[])
    wordy.close()


# --- a hub on loopback -------------------------------------------------------------------------------------------

NAME = "owner/flux"
FILES = {
    "model_index.json": json.dumps({"_class_name": "FluxPipeline", "vae": ["diffusers", "X"]}).encode(),
    "vae/config.json": b"{}",
    "vae/model.safetensors": b"v" * 5000,
    "vae/model.fp16.safetensors": b"h" * 50,
    "flux.safetensors": b"all of it once more",
}
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    contents: ClassVar[Mapping[str, bytes]] = {}
    status: ClassVar[int] = 200
    tokens: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.tokens.append(self.headers.get("Authorization", ""))
        content = self.contents.get(self.path.partition("?")[0])
        self.send_response(404 if content is None else self.status)
        if self.status == 403:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", f'"{abs(hash(content)):x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[None]:
    siblings = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
    info = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
    contents = {f"/api/models/{NAME}": info, f"/api/models/{NAME}/revision/main": info}
    contents[f"/api/models/{NAME}/revision/{COMMIT}"] = info
    for name, content in FILES.items():
        contents[f"/{NAME}/resolve/main/{name}"] = contents[f"/{NAME}/resolve/{COMMIT}/{name}"] = content
    tree = [{"type": "file", "path": name, "size": len(content), "oid": "1" * 40} for name, content in FILES.items()]
    contents[f"/api/models/{NAME}/tree/{COMMIT}"] = contents[f"/api/models/{NAME}/tree/main"] = json.dumps(
        tree
    ).encode()
    monkeypatch.setattr(Hub, "contents", contents)
    monkeypatch.setattr(Hub, "tokens", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        for name, value in {
            "HF_ENDPOINT": f"http://127.0.0.1:{running.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        yield
        running.shutdown()


def ended(downloads: Downloads) -> dict:
    deadline = time.monotonic() + 120
    while (state := downloads.state()) and state["runs"]:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    assert state
    return state


@pytest.mark.slow
def test_a_download_fetches_a_pipelines_folders_and_is_measured(hub, tmp_path):
    downloads = Downloads(tmp_path / "log.txt")
    downloads.start(NAME, token="hf_secret")
    with pytest.raises(RefusedError, match="is being downloaded; stop that first"):
        downloads.start("owner/other")
    state = ended(downloads)
    wanted = ("model_index.json", "vae/config.json", "vae/model.safetensors")
    assert state["fault"] == ""
    assert state["total"] == state["done"] == sum(len(FILES[name]) for name in wanted)
    snapshot = tmp_path / "home" / "hub" / "models--owner--flux" / "snapshots" / COMMIT
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()} == set(wanted)
    assert "Bearer hf_secret" in Hub.tokens
    assert "hf_secret" not in (tmp_path / "log.txt").read_text()
    assert "HF_TOKEN" not in os.environ


@pytest.mark.slow
def test_a_gated_model_says_how_to_accept_its_licence(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "status", 403)
    downloads = Downloads(tmp_path / "log.txt")
    downloads.start(NAME)
    assert "asks you to accept its licence: do it at huggingface.co/owner/flux" in ended(downloads)["fault"]


def test_one_model_is_marked_to_start_with_by_its_rule():
    listed = offers_for_characters(offers(StudioModels()))
    assert [one["name"] for one in listed if one["start"]] == ["black-forest-labs/FLUX.2-klein-base-4B"]
    learning = {one["name"]: one["learns"] for one in listed if one["learns"]}
    assert learning == {"black-forest-labs/FLUX.1-dev": 12, "black-forest-labs/FLUX.2-klein-base-4B": 12}
    unknown = [one["name"] for one in listed if not one["download"]]
    assert unknown == ["tiny"]
