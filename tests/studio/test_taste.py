"""You are the reward: what is asked for becomes a run, a person's ranks reach it, and it can be stopped and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacorl.config import base as configs
from pacorl.config.options import StudioModels
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.records.prompts import load_prompts
from pacorl.rewards import human
from pacorl.studio.models import taste_example
from pacorl.studio.taste import TasteRequest, TasteRuns, parse_prompts, run_config
from pacorl.web.guard import RefusedError

TINY = StudioModels()
REQUEST = TasteRequest(name="mine", prompts=tuple(taste_example(TINY, 3)), rounds=2, groups=2, group_size=4)


def test_a_request_becomes_a_run_whose_first_reward_is_the_person(tmp_path):
    runs = TasteRuns(tmp_path, TINY)
    runs.create(REQUEST)
    config = configs.load(PolicyConfig, tmp_path / "mine" / "config.yaml")
    assert [(r.name, round(r.weight, 3)) for r in config.rewards] == [
        ("human_ranking", 0.5),
        ("consistency", 0.333),
        ("panel_match", 0.167),
    ]
    assert config.rewards[0].args == {"folder": str(tmp_path / "mine" / "rankings")}
    assert (config.epochs, config.prompts_per_epoch, config.group_size) == (2, 2, 4)
    assert len(load_prompts(config.prompts.train)) == 3
    state = runs.state("mine")
    assert (state["status"], state["done"], state["task"], state["rounds"]) == ("stopped", 0, None, 2)


def test_a_real_generator_takes_the_studios_judge_and_a_recipe_its_own(tmp_path):
    real = StudioModels(model="black-forest-labs/FLUX.1-dev", judge="http://127.0.0.1:8000", judge_model="PaCo")
    config = run_config(REQUEST, real, tmp_path, None)
    assert (config.model.checkpoint, config.judge.checkpoint, config.judge.model) == (real.model, real.judge, "PaCo")
    assert config.sampling.batch == 1
    recipe = Path("configs/flux_t2is_1gpu.yaml")
    alone = run_config(replace(REQUEST, judge_share=0), real, tmp_path, recipe)
    assert ([reward.name for reward in alone.rewards], alone.judge) == (["human_ranking"], None)
    assert alone.model == configs.load(PolicyConfig, recipe).model


def test_on_a_small_card_a_taste_is_taught_in_little_memory(tmp_path):
    for names in (StudioModels(memory="lowest"), StudioModels(model="black-forest-labs/FLUX.1-dev", memory="lowest")):
        config = run_config(REQUEST, names, tmp_path, None)
        assert (config.memory, config.model.stream, config.judge.quantize) == ("lowest", True, "int8")


@pytest.mark.parametrize(
    ("change", "names", "fault"),
    [
        ({"prompts": ("  ",)}, TINY, "there are no prompts; write one a line"),
        ({"prompts": ("a dragon | w | x | y | z",)}, TINY, "prompt 1: .*'dragon'"),
        ({"name": "../x"}, TINY, "cannot name a folder"),
        ({}, StudioModels(kind="kontext"), "changes pictures; a taste is taught to a generator of sets"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, change, names, fault):
    with pytest.raises(ValueError, match=fault):
        TasteRuns(tmp_path, names).create(replace(REQUEST, **change))
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_given_once(tmp_path):
    runs = TasteRuns(tmp_path, TINY)
    runs.create(REQUEST)
    with pytest.raises(ValueError, match="there is a LoRA called mine already; continue it, or give another name"):
        runs.create(REQUEST)
    with pytest.raises(RefusedError, match="there is no LoRA called 'yours'"):
        runs.state("yours")


def test_prompts_stand_one_a_line():
    words = parse_prompts("some/model", ["a fox in watercolour | it runs | it sleeps", "", "one owl"])
    assert [(prompt.theme, prompt.panels) for prompt in words] == [
        ("a fox in watercolour", ("it runs", "it sleeps")),
        ("", ()),
    ]


def test_a_run_that_is_about_to_start_has_the_machine_and_can_be_stopped(tmp_path):
    runs = TasteRuns(tmp_path, TINY)
    runs.create(REQUEST)
    runs.announce("mine")
    assert runs.state("mine")["status"] == "starting"
    with pytest.raises(RefusedError, match="mine is being taught and has the machine") as refused:
        runs.trainer.check_idle()
    assert refused.value.status == 409
    runs.trainer.stop()
    runs.launch("mine")  # the studio's queue comes to it too late
    assert runs.state("mine")["status"] == "stopped"


def test_a_runs_log_is_never_written_through_a_link(tmp_path):
    runs = TasteRuns(tmp_path, TINY)
    runs.create(REQUEST)
    for name in ("config.yaml", "prompts.jsonl", "request.json"):
        assert (tmp_path / "mine" / name).stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").write_text("secret")
    (tmp_path / "mine" / "log.txt").symlink_to(tmp_path / "key")
    with pytest.raises(OSError, match=r"a link, and nothing is written through links here; delete it.*log\.txt"):
        runs.launch("mine")
    assert (tmp_path / "key").read_text() == "secret"


# --- the API ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The application on a test client; its own models, which teaching does not need, are never loaded."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    from starlette.testclient import TestClient

    from pacorl.studio import server as module

    monkeypatch.setattr(module.ModelHost, "load", lambda self, job: {})
    studio = module.AppState("secret", folder=tmp_path / "sets")
    headers = {"Authorization": "Bearer secret"}
    with TestClient(module.make_app(studio), base_url="http://localhost", headers=headers) as client:
        yield client, studio
    studio.close()


def form(**changes: Any) -> dict[str, Any]:
    return {"name": "mine", "prompts": taste_example(TINY, 3), "rounds": 2, "groups": 2, "group_size": 4, **changes}


def test_a_run_that_cannot_be_launched_leaves_the_machine_free(server, tmp_path, monkeypatch):
    client, studio = server
    monkeypatch.setattr("pacorl.studio.jobs.MAX_WAITING", 0)
    assert client.post("/api/taste", json=form()).status_code == 429
    studio.trainer.check_idle()
    monkeypatch.undo()

    # A folder that somebody else has put a link into.
    (tmp_path / "key").write_text("secret")
    (tmp_path / "sets" / "taste" / "mine" / "log.txt").symlink_to(tmp_path / "key")
    client.post("/api/taste/mine/continue")
    deadline = time.monotonic() + 60
    while (state := client.get("/api/taste?name=mine").json()["current"])["status"] == "starting":
        assert time.monotonic() < deadline, state
        time.sleep(0.01)
    assert (state["status"], "nothing is written through links" in state["error"]) == ("failed", True)
    assert (tmp_path / "key").read_text() == "secret"
    studio.trainer.check_idle()


def test_damaged_files_of_a_run_are_named_in_one_line(server, tmp_path):
    client, studio = server
    studio.taste.create(REQUEST)
    folder = tmp_path / "sets" / "taste" / "mine"
    for name, content, fault in [
        ("run/metrics.jsonl", '{"kind": "epoch", "epoch": "x"}', "metrics.jsonl: 0.epoch"),
        ("request.json", '{"rounds": 1}', "request.json: groups"),
        ("request.json", "[]", "request.json: "),
    ]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        answer = client.get("/api/taste?name=mine")
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text


def test_bad_requests_are_one_line(server):
    client, studio = server
    for change, fault in [
        ({"group_size": 12}, "group_size: Input should be less than or equal to 9"),
        ({"judge_share": 1}, "judge_share: Input should be less than 1"),
        ({"prompts": []}, "there are no prompts"),
        ({"name": "a/b"}, "cannot name a folder"),
    ]:
        answer = client.post("/api/taste", json=form(**change))
        assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text
    assert client.get("/api/taste").json()["runs"] == []
    studio.taste.create(REQUEST)
    for path, body, status, fault in [
        ("/api/taste/mine/ranks", {"group": "x", "ranks": [1]}, 422, "is not of this round any more"),
        ("/api/taste/yours/continue", {}, 404, "there is no LoRA called 'yours'"),
    ]:
        answer = client.post(path, json=body)
        assert (answer.status_code, fault in answer.json()["error"]) == (status, True), answer.text
    assert client.get("/taste/mine/x/0.png").status_code == 404
    assert client.get("/loras/taste/mine/before-0.png").status_code == 404
    studio.taste.announce("mine")
    sets = {"theme": "red round hero, crown, night", "panels": ["waving, flag"] * 4}
    assert client.post("/api/sets", json=sets).status_code == 409
    assert client.post("/api/taste", json=form(name="other")).status_code == 409
    studio.trainer.stop()


def until(look: Callable[[], dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 300
    while not wanted(state := look()):
        assert time.monotonic() < deadline, state
        assert state["status"] != "failed", state["error"]
        time.sleep(0.1)
    return state


@pytest.mark.slow
def test_a_person_teaches_stops_and_goes_on(server, tmp_path):
    client, _ = server

    def look() -> dict[str, Any]:
        return client.get("/api/taste").json()["current"]

    def rank(state: dict[str, Any]) -> dict[str, Any]:
        assert len(client.get(state["task"]["images"][3]).content) > 500
        body = {"group": state["task"]["group"], "ranks": [2, 1, 3, 3]}
        return client.post("/api/taste/mine/ranks", json=body).json()

    assert client.post("/api/taste", json=form()).json()["status"] == "starting"
    first = rank(until(look, lambda state: state["task"]))["asked"][0]
    second = until(look, lambda state: state["task"] and state["task"]["group"] != first)
    # The group before can be mended, until the round is whole.
    assert client.get("/api/taste", params={"group": first}).json()["current"]["task"]["ranks"] == [2, 1, 3, 3]
    assert client.post("/api/taste/mine/stop").json()["status"] == "stopped"
    client.post("/api/taste/mine/continue")
    again = until(look, lambda state: state["task"])
    assert again["task"]["group"] == second["task"]["group"], "what was ranked before the stop is not asked again"
    while (state := until(look, lambda state: state["task"] or state["status"] == "done"))["status"] != "done":
        rank(state)
    assert (state["done"], state["ranked"]) == (2, 4)
    before, after = (client.get(f"/loras/taste/mine/{when}-0.png").content for when in ("before", "after"))
    assert before != after
    lines = map(json.loads, (tmp_path / "sets/taste/mine/run/metrics.jsonl").read_text().splitlines())
    means = [line["reward/human_ranking/mean"] for line in lines if line["kind"] == "epoch"]
    assert means == pytest.approx([0.5, 0.5])
    assert client.get("/api/models").json()["loras"] == ["taste/mine"]
    client.post("/api/models", json={"model": "tiny", "loras": {"taste/mine": 1}})
    assert client.get("/api/state").json()["loras"] == {"taste/mine": 1}
    assert human.asked_groups(tmp_path / "sets/taste/mine/rankings")


@pytest.mark.slow
def test_a_studio_that_is_told_to_end_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "pacorl", "studio", "--port", "0", "--history", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stdout
    assert process.stdout.readline().startswith("studio: ")
    assert list(tmp_path.glob("pacorl-history-*"))
    process.terminate()
    process.wait(60)
    process.stdout.close()
    # `close` ran, which ends a trainer too.
    assert list(tmp_path.glob("pacorl-*")) == []


TEACHES = """
import sys
from pathlib import Path
from pacorl.config.options import StudioModels
from pacorl.studio.models import taste_example
from pacorl.studio.taste import TasteRequest, TasteRuns
models = StudioModels()
runs = TasteRuns(Path(sys.argv[1]), models)
runs.create(TasteRequest(name="mine", prompts=tuple(taste_example(models, 3)), rounds=2, groups=2, group_size=4))
runs.announce("mine")
runs.launch("mine")
sys.stdin.read()
"""


@pytest.mark.campaign
def test_a_trainer_stops_and_saves_if_its_studio_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", TEACHES, str(tmp_path)], stdin=subprocess.PIPE) as studio:
        deadline = time.monotonic() + 240
        while not human.asked_groups(tmp_path / "mine/rankings"):  # it waits for a person from now on
            assert time.monotonic() < deadline
            time.sleep(0.1)
        studio.kill()
    while "pacorl: stopped after epoch 0, and saved" not in (tmp_path / "mine/log.txt").read_text():
        assert time.monotonic() < deadline, "the trainer outlived its studio"
        time.sleep(0.1)
