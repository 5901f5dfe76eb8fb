from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from asked import Asked
from fake_server import FakeServer, Handler, completion, images_of
from judges import by_grey, grey
from PIL import Image
from tiny_sets import set_of
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.cli.gate import CheckOptions, Gate
from pacorl.config.options import BELOW
from pacorl.core.calibration import Curve
from pacorl.core.grid import join
from pacorl.gate.paco_reward import PacoReward
from pacorl.gate.panels import open_panels
from pacorl.gate.scores import question_about
from pacorl.io.files import PAGE_MARK
from pacorl.io.images import png_bytes
from pacorl.judge import identity_at
from pacorl.judge.calibration import Calibration, read_calibration
from pacorl.tiny.world import draw, with_another
from pacorl.types import Grid

SUBJECT = ("red", "round", "crown", "night")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character of one image, five sound panels, and a wrong one."""
    folder = tmp_path_factory.mktemp("set")
    panels = set_of(SUBJECT, 6, random.Random(1))
    (folder / "hero").mkdir()
    (folder / "hero" / "card.yaml").write_text("description: a red round hero\n")
    draw(panels[0], 64).save(folder / "hero" / "1.png")
    for number, panel in enumerate(panels[1:], 1):
        draw(panel, 64).save(folder / f"{number}.png")
    draw(with_another(panels[5], "hat", random.Random(0)), 64).save(folder / "wrong.png")
    return folder


def run(*arguments: object) -> Result:
    named = ["--judge", "tiny"] if arguments[0] in ("check", "score") and "--judge" not in arguments else []
    return CliRunner().invoke(app, [*map(str, arguments), *named])


@pytest.mark.slow
def test_a_threshold_comes_from_the_calibration_or_is_a_half(folder: Path, tmp_path: Path) -> None:
    pair = (folder / "1.png", folder / "2.png")
    assert json.loads(run("check", *pair, "--json").stdout)["least"] == 0.5
    path = tmp_path / "c.json"
    Calibration("tiny", Curve(), {"panels": {4: 0.25}}).save(path)
    result = run("check", *pair, "--calibration", path, "--json")
    assert result.exit_code == 0, result.output
    assert (json.loads(result.stdout)["least"], json.loads(result.stdout)["calibrated_on"]) == (0.25, 0)
    # It is of the plain question, and no threshold of another.
    themed = [*pair, "--theme", "a red hero"]
    assert "--min" in str(run("check", *themed, "--calibration", path).exception)
    assert json.loads(run("check", *themed, "--json").stdout)["question"] == question_about("a red hero")


@pytest.mark.slow
def test_a_calibration_is_written_from_pairs_and_replaces_no_file(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    result = run("calibrate", "tiny", "tiny:dev:120", "--out", out)
    assert result.exit_code == 0, result.output
    assert re.search(r"ECE of held-out pairs: [\d.]+ before, [\d.]+ after", result.stdout)
    assert "identical images" not in result.stdout
    before = read_calibration(out)
    assert (before.identity, before.pairs) == (identity_at("tiny"), 120)
    assert "is there already" in str(run("calibrate", "tiny", "tiny:dev:60", "--out", out).exception)
    assert "trained on" in str(run("calibrate", "tiny", "tiny:train:120", "--out", tmp_path / "b.json").exception)
    assert read_calibration(out) == before is not None


def test_a_folder_is_a_set_of_all_its_pictures_in_natural_order_but_the_sheet_of_panels(
    folder: Path, tmp_path: Path
) -> None:
    """A bad picture under another name must not pass unseen."""
    for name in ("1", "2", "10", "set-1", "set-1-panel-1"):
        shutil.copy(folder / "1.png", tmp_path / f"{name}.png")
    Image.open(folder / "wrong.png").save(tmp_path / "3.bmp")
    (tmp_path / "._1.png").write_bytes(b"\0\5\x16\7 of a Mac")
    (tmp_path / "1.txt").write_text("a red hero")
    result = run("check", tmp_path, "--min", 0.5, "--json")
    document = json.loads(result.stdout)
    names = ["1.png", "2.png", "3.bmp", "10.png", "set-1-panel-1.png"]
    assert [Path(panel["image"]).name for panel in document["panels"]] == names
    assert (result.exit_code, document["odd_one_out"]) == (BELOW, str(tmp_path / "3.bmp"))


@pytest.mark.parametrize("name", ["3.heic", "3.png", "3", "link.png", "twice.png", "folder"])
def test_a_folder_with_a_picture_that_cannot_be_read_has_no_verdict(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "set").mkdir()
    for number in (1, 2):
        shutil.copy(folder / f"{number}.png", tmp_path / "set")
    path = tmp_path / "set" / name
    if name == "folder":
        path.mkdir()
    elif name in ("link.png", "twice.png"):
        path.symlink_to("1.png" if name == "twice.png" else "/absent")
    else:
        path.write_bytes(b"\xff\xd8\xff cut off" if name == "3" else b"\0\0\0 ftypheic")
    result = run("check", tmp_path / "set", "--min", 0.5)
    assert (result.exit_code, str(tmp_path / "set" / name) in str(result.exception)) == (1, True)


def test_a_foreign_image_or_reference_asks_for_a_judge(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sets" / "a").mkdir(parents=True)
    own = []
    for number in (1, 2, 3):
        own.append(str(tmp_path / "sets" / "a" / f"{number}.png"))
        texts = {"Software": "pacorl 0.1.0", "model": "tiny"}
        Path(own[-1]).write_bytes(png_bytes(Image.open(folder / f"{number}.png").convert("RGB"), texts))
    gate = ["--min", "0.5"]
    for arguments in (own, [str(tmp_path / "sets" / "a")]):
        result = CliRunner().invoke(app, ["check", *arguments, *gate])
        assert result.exit_code == 0, result.output
    for arguments in ([*own, str(folder / "1.png")], [*own, "--character", str(folder / "hero")]):
        result = CliRunner().invoke(app, ["check", *arguments, *gate])
        assert getattr(result.exception, "exit_code", 0) == 2
        assert "name a judge with --judge" in str(result.exception)
    # Of several sets each has its own fault: a broken file, a folder without images.
    shutil.copytree(tmp_path / "sets" / "a", tmp_path / "sets" / "broken")
    (tmp_path / "sets" / "broken" / "4.png").write_bytes(b"cut off")
    (tmp_path / "sets" / "empty").mkdir()
    several = ["check", "--sets", str(tmp_path / "sets"), "--json", *gate]
    documents = json.loads(CliRunner().invoke(app, [*several, "--judge", "tiny"]).stdout)
    assert [document["code"] for document in documents] == [0, 1, 1]
    assert all(fault in document["error"] for fault, document in zip(("4.png", "empty"), documents[1:], strict=True))
    assert "name a judge with --judge" in str(CliRunner().invoke(app, several).exception)


def test_an_error_leaves_no_page_of_an_earlier_verdict(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG no image")
    sound = [folder / "1.png", folder / "2.png"]
    absent = ("--judge", "http://127.0.0.1:9/v1#judge", "--min", 0.5)
    for arguments, code in (([*sound, broken, "--min", 0.5], 1), ([*sound, *absent], 75), ([*sound, "--min", 0], 5)):
        page.write_text(f"{PAGE_MARK.decode()} Passed: all 5 panels")
        result = run("check", *arguments, "--report", page)
        assert getattr(result.exception, "exit_code", 1) == code, result.output
        assert not page.exists()
        assert f"removed: {page}" in result.stderr


def test_a_judge_that_falls_silent_in_a_check_ends_it_with_code_75(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as an error of the set: a scheduler may run the check again."""
    monkeypatch.setattr("pacorl.cli.gate.SILENCE_SECONDS", 0.3)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)

    answered = 3

    def only_controls(handler: Handler, number: int) -> bool:
        if number > answered:
            handler.fail(503, "loading")
        else:
            body = handler.fake.chats[number - 1]
            first, second = images_of(body)
            # The drawn figure of another character has a size of its own.
            handler.answer(completion(body, 0.9 if first.size == second.size else 0.1))
        return True

    with FakeServer(behave=only_controls).running() as server:
        access = ("--judge", f"{server.url}#judge", "--min", 0.5, "--json")
        result = run("check", *(folder / f"{number}.png" for number in (1, 2, 3)), *access)
        for name in "abc":
            (tmp_path / name).mkdir()
            for number in (1, 2):
                shutil.copy(folder / f"{number}.png", tmp_path / name)
        checked: list[object] = []
        check = Gate.check
        monkeypatch.setattr(Gate, "check", lambda *given: checked.append(given) or check(*given))
        answered = len(server.chats) + 4 + 3  # a set, and the next one's controls
        several = run("check", "--sets", tmp_path, *access)
    assert getattr(result.exception, "exit_code", 0) == 75
    assert "has not answered" in str(result.exception)
    # The sets before an outage keep their verdicts, and those after it do not wait each for itself.
    documents = json.loads(several.stdout)
    assert (several.exit_code, len(checked)) == (75, 2)
    assert [(document["set"], document["code"]) for document in documents] == [("a", 0), ("b", 75)]
    assert "has not answered" in documents[1]["error"]
    assert "1 of 3 sets pass" in several.stderr


def test_a_folder_of_sets_has_one_document_and_the_worst_code(folder: Path, tmp_path: Path) -> None:
    sets = tmp_path / "sets"
    for name, panels in (("sound", "1234"), ("wrong", "123"), ("lone", "1")):
        (sets / name).mkdir(parents=True)
        for number in panels:
            shutil.copy(folder / f"{number}.png", sets / name / f"{number}.png")
    shutil.copy(folder / "wrong.png", sets / "wrong" / "4.png")
    # What `pacorl generate --min` leaves: a page, its panels, and drafts.
    recipe = {"Software": "pacorl 0.1.0", "layout": "2x2"}
    sound = [Image.open(folder / f"{number}.png") for number in (1, 2, 3, 4)]
    (sets / "set-1.png").write_bytes(png_bytes(join(sound, Grid(2, 2)), recipe))
    (sets / "set-1-panel-1.png").write_bytes(png_bytes(sound[0], {**recipe, "panel": "waving"}))
    shutil.copytree(sets / "lone", sets / "tries")

    result = run("check", "--sets", sets, "--min", 0.5, "--json")
    documents = json.loads(result.stdout)
    assert result.exit_code == 1, result.output
    found = [(document["set"], document["code"], document["passed"]) for document in documents]
    assert found == [("lone", 1, None), ("sound", 0, True), ("wrong", BELOW, False), ("set-1.png", 0, True)]
    assert documents[2]["odd_one_out"] == str(sets / "wrong" / "4.png")

    # No panel without its page, and no link to nothing, passes unseen.
    (sets / "set-2-panel-1.png").write_bytes((sets / "set-1-panel-1.png").read_bytes())
    (sets / "absent").symlink_to("/absent")
    documents = json.loads(run("check", "--sets", sets, "--min", 0.5, "--json").stdout)
    assert {document["set"] for document in documents if document["code"] == 1} == {
        "lone",
        "absent",
        "set-2-panel-1.png",
    }
    for name in ("absent", "set-2-panel-1.png", "set-1-panel-1.png"):
        (sets / name).unlink()

    # An error outranks a verdict, and a failed set a sound one. Each set has a page; --grid cuts pages alone.
    shutil.rmtree(sets / "lone")
    join(sound, Grid(1, 4)).save(sets / "strip.png")
    (sets / "set-1.png").unlink()
    pages = tmp_path / "pages"
    for _ in range(2):
        result = run("check", "--sets", sets, "--grid", "1x4", "--min", 0.5, "--report", pages)
        assert result.exit_code == BELOW, result.output
        assert {page.stem for page in pages.glob("*.html")} == {"index", "sound", "wrong", "strip.png"}
        assert 'href="strip.png.html"' in (pages / "index.html").read_text("utf-8")
        (pages / "gone.html").write_text(PAGE_MARK.decode())


def test_of_a_character_one_image_is_compared(tmp_path: Path) -> None:
    (tmp_path / "hero").mkdir()
    (tmp_path / "hero" / "card.yaml").write_text("description: a hero")
    for number in range(3):
        Image.new("RGB", (16, 16)).save(tmp_path / "hero" / f"{number}.png")
        Image.new("RGB", (16, 16)).save(tmp_path / f"{number}.png")
    gate = Gate(CheckOptions(character=[str(tmp_path / "hero")], least=0.5), None)
    assert [Path(path).name for path in gate.references] == ["0.png"]
    checked = gate.check(PacoReward(Asked(by_grey)), open_panels([tmp_path / "0.png", tmp_path / "1.png"]))
    assert (len(checked.scores.names), len(checked.scores.pairs)) == (3, 2)


def test_a_page_and_its_panels_show_the_characters_that_their_recipe_names(tmp_path: Path) -> None:
    shades = {"ann": 20, "bob": 120}
    for name, shade in shades.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "card.yaml").write_text(f"description: a {name}")
        grey(shade)[0].save(tmp_path / name / "1.png")
    texts = {"Software": "pacorl 0.1.0", "layout": "1x2", "panels": json.dumps(["Ann waves", "Bob runs"])}
    images = grey(*shades.values())
    page = tmp_path / "page.png"
    page.write_bytes(png_bytes(join(images, Grid(1, 2)), texts))
    for name, image in zip(shades, images, strict=True):
        (tmp_path / f"{name}.png").write_bytes(png_bytes(image, texts | {"panel": f"{name} waves"}))
    gate = Gate(CheckOptions(character=[str(tmp_path / name) for name in shades], least=0.5), None)
    for files in ([page], [tmp_path / "ann.png", tmp_path / "bob.png"]):
        checked = gate.check(PacoReward(Asked(by_grey)), open_panels(files))
        assert checked.passed
        assert [panel.character for panel in checked.panels] == ["ann", "bob"]
