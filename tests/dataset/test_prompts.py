from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from typer.testing import CliRunner

from pacorl.cli.dataset import app
from pacorl.dataset.folder import read_prompts
from pacorl.dataset.prompts import (
    PAPER,
    TINY,
    Draft,
    PromptOrder,
    Subject,
    compose,
    llm_writer,
    make_writer,
    orders,
    read_taxonomy,
    tiny_writer,
    write_all,
    write_sentences,
)
from pacorl.io.documents import object_within, read_jsonl, typed
from pacorl.judge.http.chat import ChatRefusedError
from pacorl.records.prompts import load_prompts
from pacorl.types import Grid

SQUARE = Grid(2, 2)
SUBJECTS = read_taxonomy(PAPER)


def draft(count=4, dimensions=("Identity",), theme="A fox who travels by train."):
    return {
        "theme": theme,
        "shared": "The same small red fox in a watercolour style",
        "panels": [f"The fox waits at station number {n}" for n in range(count)],
        "criteria": {name: {"Looks": "The fox has the same fur in all images."} for name in dimensions},
    }


def wanted(messages):
    """What a request asks for: panels and dimensions."""
    text = messages[0]["content"]
    return int(re.search(r"set of (\d+) images", text)[1]), re.search(r"must keep: ([\w, ]+)\.", text)[1].split(", ")


def obedient(messages, number):
    count, dimensions = wanted(messages)
    return "Here you are:\n```json\n" + json.dumps(draft(count, dimensions, f"Theme number {number}.")) + "\n```"


def order(dimensions=("Identity",), grid=SQUARE):
    return PromptOrder("k", Subject("Character", "Multi-pose", dimensions), grid, 0)


def run(folder, writer, count=12, **options):
    options = {"subjects": SUBJECTS, "grids": [SQUARE], "options": {}} | options
    return write_all(folder, writer, count=count, **options)


def test_the_papers_taxonomy():
    assert len(SUBJECTS) == 32
    assert Counter(subject.category for subject in SUBJECTS) == {
        "Design Style": 5, "Story": 5, "Progression": 6, "Instruction": 6, "Character": 5, "Editing": 5,
    }  # fmt: skip


def test_orders_are_balanced():
    found = orders(SUBJECTS, count=2000, grids=[SQUARE, Grid(1, 3)])
    by_category = Counter(one.subject.category for one in found)
    assert max(by_category.values()) - min(by_category.values()) <= 1
    for category in by_category:
        by_name = Counter(one.subject.name for one in found if one.subject.category == category)
        assert max(by_name.values()) - min(by_name.values()) <= 1
    assert len({one.key for one in found}) == 2000
    layouts = Counter(one.grid for one in found)
    assert min(layouts.values()) > 600


@pytest.mark.parametrize("grid", [SQUARE, Grid(1, 2), Grid(1, 7), Grid(2, 4), Grid(3, 4)])
def test_a_composed_record_reads_back(tmp_path, grid):
    record = compose(Draft(**draft(grid.count)), order(grid=grid))
    (tmp_path / "p.jsonl").write_text(json.dumps({"idx": "1", **record}) + "\n")
    prompt = read_prompts(tmp_path / "p.jsonl")[0].prompt
    assert prompt.grid == grid
    assert list(prompt.panels) == [f"The fox waits at station number {n}." for n in range(grid.count)]
    assert prompt.theme == "A fox who travels by train."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"panels": ["Only one panel here"]}, "needs 4 panels, got 1"),
        ({"criteria": {"Style": {"a": "Must hold in all images."}}}, "exactly Identity"),
        ({"panels": ["It says. NOTE: this is no tag"] * 4}, "would be read as a panel's tag"),
    ],
)
def test_drafts_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        compose(Draft(**draft() | change), order())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Sorry, no.", "no JSON object"),
        ('{"theme": "x', "no JSON object"),
        ('{"theme": }', "malformed"),
        ("{}", "theme"),
    ],
)
def test_answers_that_are_no_drafts(text, message):
    with pytest.raises(ValueError, match=message):
        typed(object_within(text), Draft)


def test_llm_writes_everything_and_a_second_call_asks_nothing(tmp_path, llm):
    server, model = llm(obedient)
    counts = run(tmp_path, llm_writer(model), workers=4)
    assert counts["records"] == 12
    assert set(counts["by_category"].values()) == {2}
    records = read_prompts(tmp_path / "prompts.jsonl")
    assert [record.idx for record in records] == [f"{n:04d}" for n in range(12)]
    assert run(tmp_path, llm_writer(model)) == counts
    assert len(server.requests) == 12
    assert model.usage.prompt_tokens == 1200


def test_malformed_answers_are_asked_for_again_with_their_fault(tmp_path, llm):
    def clumsy(messages, number):
        return obedient(messages, number) if len(messages) > 1 else "I would love to! But what about?"

    server, model = llm(clumsy)
    assert run(tmp_path, llm_writer(model), count=3)["records"] == 3
    assert model.usage.malformed == 3
    assert (
        "no JSON object" in server.requests[1][-1]["content"] or "no JSON object" in server.requests[2][-1]["content"]
    )


def test_what_stays_malformed_is_reported_and_tried_again(tmp_path, llm):
    broken = {"now": True}

    def moody(messages, number):
        return "{" if broken["now"] and "Cooking" in messages[0]["content"] else obedient(messages, number)

    _, model = llm(moody)
    counts = run(tmp_path, llm_writer(model, attempts=2), count=32)
    assert counts["records"] == 31
    assert list(counts["failed"]) == ["Progression/Cooking/0"]
    assert "no JSON object" in counts["failed"]["Progression/Cooking/0"]
    broken["now"] = False
    assert run(tmp_path, llm_writer(model), count=32)["records"] == 32


def test_a_killed_run_goes_on(tmp_path, llm):
    def dies(messages, number):
        return obedient(messages, number) if number < 5 else (404, b'{"error": {"message": "no model stub"}}')

    _, model = llm(dies)
    with pytest.raises(ChatRefusedError, match="refuses 'stub'"):
        run(tmp_path, llm_writer(model))
    server, model = llm(obedient)
    assert run(tmp_path, llm_writer(model))["records"] == 12
    assert len(server.requests) == 7


@pytest.mark.parametrize("trouble", [(500, b"{}"), (200, b"<html>"), (200, b'{"choices": []}')])
def test_a_server_in_trouble_fails_records_and_no_more(tmp_path, llm, trouble):
    _, model = llm(lambda messages, number: trouble, retries=0)
    counts = run(tmp_path, llm_writer(model), count=2)
    assert counts["records"] == 0
    assert len(counts["failed"]) == 2


def test_a_theme_that_exists_is_asked_for_again(tmp_path, llm):
    def dull(messages, number):
        count, dimensions = wanted(messages)
        return json.dumps(
            draft(count, dimensions, "Always the same." if len(messages) == 1 else f"New {number} themes.")
        )

    _, model = llm(dull)
    subjects = [Subject("Character", "Multi-pose", ("Identity",))]
    run(tmp_path, llm_writer(model), count=1, subjects=subjects)
    run(tmp_path, llm_writer(model), count=2, subjects=subjects)
    themes = [row["theme"] for row in read_jsonl(tmp_path / "prompts.jsonl")]
    assert themes[0] == "Always the same."
    assert themes[1].startswith("New")


def test_themes_of_the_same_run_are_told_and_not_repeated(tmp_path, llm):
    def dull(messages, number):
        count, dimensions = wanted(messages)
        return json.dumps(draft(count, dimensions, f"Theme {number // 2} of all."))  # every one of them twice

    server, model = llm(dull)
    subjects = [Subject("Character", "Multi-pose", ("Identity",))]
    assert run(tmp_path, llm_writer(model), count=6, subjects=subjects, workers=1)["records"] == 6
    themes = [row["theme"] for row in read_jsonl(tmp_path / "prompts.jsonl")]
    assert len(set(themes)) == 6
    assert model.usage.malformed == 5
    told = server.requests[-1][0]["content"]
    assert all(theme in told for theme in sorted(themes)[:5])


def test_threads_do_not_take_the_same_theme(tmp_path, llm):
    def dull(messages, number):
        count, dimensions = wanted(messages)
        return json.dumps(draft(count, dimensions, f"Theme {number // 2} of all."))

    _, model = llm(dull)
    assert run(tmp_path, llm_writer(model, attempts=24), workers=4)["records"] == 12
    assert len({row["theme"] for row in read_jsonl(tmp_path / "prompts.jsonl")}) == 12


def test_the_command_says_what_it_would_cost_and_what_it_took(tmp_path, llm):
    server, _ = llm(obedient)
    words = ["prompts", str(tmp_path), "--count", "12", "--price", "2/8", "--json"]
    asked = ["--model", "stub", "--endpoint", server.url]
    planned = json.loads(CliRunner().invoke(app, [*words, *asked, "--dry-run"], catch_exceptions=False).stdout)
    assert planned["estimate"]["cost"] == pytest.approx(12 * (600 * 2 + 900 * 8) / 1e6)
    assert server.requests == []
    done = json.loads(CliRunner().invoke(app, [*words, *asked], catch_exceptions=False).stdout)
    assert done["usage"]["calls"] == len(server.requests) == 12
    assert done["usage"]["cost"] == pytest.approx(12 * (100 * 2 + 10 * 8) / 1e6)
    free = CliRunner().invoke(app, ["prompts", str(tmp_path / "b"), "--writer", "tiny", "--dry-run", "--json"])
    assert json.loads(free.stdout)["estimate"] == {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompts", "x", "--price", "2"], "--price '2' is not two numbers with a slash between them"),
        (["explain", "x", "--price", "a/b"], "--price 'a/b' is not two numbers"),
        (
            ["generate", "x", "--checkpoint", "tiny", "--dry-run", "--shard", "1"],
            "shard '1' is not of the form INDEX/COUNT",
        ),
    ],
)
def test_malformed_options_are_named(words, message):
    assert message in str(CliRunner().invoke(app, words).exception)


def test_dry_run_asks_nothing_and_estimates(tmp_path, llm):
    server, model = llm(obedient)
    counts = run(tmp_path, llm_writer(model), dry_run=True, price=(1, 2))
    assert counts["to_write"] == 12
    assert counts["estimate"]["completion_tokens"] == 12 * 900
    assert counts["estimate"]["cost"] == pytest.approx(12 * (600 + 2 * 900) / 1e6)
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


def test_the_tiny_writer_needs_no_network_and_the_oracle_reads_it(tmp_path):
    from pacorl.tiny.characters import Panel

    counts = run(tmp_path, tiny_writer(count=10), count=10, subjects=read_taxonomy(TINY), grids=[SQUARE, Grid(1, 3)])
    assert counts["records"] == 10
    for record in read_prompts(tmp_path / "prompts.jsonl"):
        assert len({Panel.parse(text).kept for text in record.prompt.panels}) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Story: [Comic]", "expected a mapping"),
        ("Story:\n  Comic: [Colour]", r"name some of Style, Identity, Logic, got \['Colour'\]"),
        ("Story: {", "not valid YAML"),
        ("{}", "names no subcategories"),
    ],
)
def test_bad_taxonomies_are_named(tmp_path, content, message):
    (tmp_path / "t.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_taxonomy(tmp_path / "t.yaml")


def test_unknown_writers_and_no_model(llm):
    with pytest.raises(ValueError, match="there are llm and tiny"):
        make_writer("gpt", count=1, seed=0, chat=None)
    _, model = llm(obedient)
    model.model = ""
    with pytest.raises(ValueError, match="give --model"):
        make_writer("llm", count=1, seed=0, chat=model)


def test_sentences_become_records(tmp_path):
    source = tmp_path / "sentences.txt"
    source.write_text("Two images of one fox: it runs, it sleeps\n\nA 3-step recipe: boil, steep, pour\n")
    folder = tmp_path / "set"
    assert write_sentences(folder, source, dry_run=True) == {"records": 2}
    assert not (folder / "prompts.jsonl").exists()
    assert write_sentences(folder, source) == {"records": 2}
    fox, recipe = load_prompts(folder / "prompts.jsonl")
    assert (str(fox.grid), str(recipe.grid)) == ("1x2", "1x3")
    assert fox.theme == "one fox"
    assert recipe.criteria["Logic"]
    assert write_sentences(folder, source) == {"records": 2}
    source.write_text("Two images of a fox\nAll 99 images of a fox\n\n40 images of a fox\n")
    with pytest.raises(ValueError, match=r"sentences\.txt:4: '40 images of a fox' asks for 40"):
        write_sentences(folder, source)


def panels_reply(messages, number):
    text = messages[0]["content"]
    count = int(re.search(r"set of (\d+) images", text)[1])
    panels = [f"a fox, scene {position}" for position in range(count)]
    return json.dumps({"theme": f"fox of request {number}", "panels": panels, "criteria": {"Logic": {"Order": "..."}}})


def test_a_language_model_writes_the_panels_of_sentences(tmp_path, llm):
    """A fault is one line's, and the next call asks about that line alone."""
    source = tmp_path / "sentences.txt"
    source.write_text("Two images of one fox\n\nThree images of a bear\n")
    folder = tmp_path / "set"
    server, model = llm(lambda messages, number: "No." if "bear" in str(messages) else panels_reply(messages, number))
    dry = write_sentences(folder, source, writer="llm", chat=model, dry_run=True)
    assert (dry["to_write"], server.requests) == (2, [])
    counts = write_sentences(folder, source, writer="llm", chat=model, workers=2)
    assert counts["records"] == 1
    assert "answers in a row could not be used" in counts["failed"]["3: Three images of a bear"]
    assert model.usage.malformed == 3

    server, model = llm(panels_reply)
    assert write_sentences(folder, source, writer="llm", chat=model) == {"records": 2}
    assert len(server.requests) == 1
    fox, bear = load_prompts(folder / "prompts.jsonl")
    assert (fox.panels, str(bear.grid)) == (("a fox, scene 0", "a fox, scene 1"), "1x3")
    assert fox.criteria == {"Logic": {"Order": "..."}}
    assert write_sentences(folder, source, writer="llm", chat=model) == {"records": 2}
    assert len(server.requests) == 1


def test_the_command_takes_a_url_as_the_writer_of_sentences(tmp_path, llm):
    source = tmp_path / "sentences.txt"
    source.write_text("Two images of one fox\n")
    server, _ = llm(panels_reply)
    words = ["prompts", str(tmp_path / "set"), "--sentences", str(source), "--writer", server.url, "--json"]
    assert "no language model is named" in str(CliRunner().invoke(app, words).exception)
    done = json.loads(CliRunner().invoke(app, [*words, "--model", "stub"], catch_exceptions=False).stdout)
    assert (done["records"], done["usage"]["calls"]) == (1, 1)
    assert "there is no nowhere" in str(CliRunner().invoke(app, [*words[:5], "nowhere"]).exception)
