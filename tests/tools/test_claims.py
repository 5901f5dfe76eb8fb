"""Claims: every file is valid, atoms run from the pinned revision, stale results are refused, the page is rendered."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.claims import atoms, page, summary
from tools.claims.__main__ import main
from tools.claims.atoms import run_missing
from tools.claims.claim import ROOT, Claim, Prediction, Result, read_claims, read_results

from pacorl.core.ranking import Interval

SCRIPT = """
import json, os, pathlib, sys
seed, out = int(sys.argv[2]), pathlib.Path(sys.argv[3])
if seed == 1 and not pathlib.Path(os.environ["MENDED"]).exists():
    sys.exit("it broke")
(out / "found.json").write_text(json.dumps({"rows": [{"score": float(sys.argv[1]) + seed / 10}]}))
"""
FILE: dict[str, Any] = {
    "title": "More is better",
    "claim": "b scores more than a.",
    "paper": "2.",
    "price": 0.1,
    "command": "python script.py {settings} {seed} {out}",
    "result": "found.json",
    "metrics": {"score": "rows.0.score"},
    "arms": {"a": "1", "b": "2"},
    "seeds": [0, 1],
    "quick": "",
    "predictions": [
        {
            "text": "b beats a",
            "figure": "difference",
            "metric": "score",
            "arm": "b",
            "against": "a",
            "interval": [0.5, 1.5],
            "rule": "at least 0.5",
        }
    ],
}


def git(root: Path, *words: str) -> str:
    named = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(named, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one claim, whose script has changed since the pinned revision."""
    root = tmp_path / "repository"
    (root / "claims").mkdir(parents=True)
    git(root, "init", "-q")
    git(root, "config", "user.name", "a")
    git(root, "config", "user.email", "a@b")
    (root / ".gitignore").write_text("/build/\n")
    (root / "script.py").write_text(SCRIPT)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "code")
    write(root, FILE | {"revision": git(root, "rev-parse", "HEAD")})
    (root / "script.py").write_text("raise SystemExit('not the pinned code')")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "claim")
    monkeypatch.setenv("MENDED", str(tmp_path / "mended"))
    monkeypatch.setattr(atoms, "machine", lambda: "2 cores")
    return root


def write(root: Path, document: dict[str, Any]) -> None:
    (root / "claims" / "more.yaml").write_text(yaml.safe_dump(document))


def test_every_claim_is_valid_and_its_revision_has_the_script() -> None:
    found = read_claims()
    assert [claim.name for claim in found] == [
        "alpha",
        "hacking",
        "hacking_fast",
        "judge_quality",
        "log_taming",
        "long_run",
        "resolution",
        "resolution_sizes",
        "table5",
    ]
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("a shallow clone lacks the pinned revisions")
    for claim in found:
        script = claim.argv("", 0, Path("out"))[1]
        assert atoms.git(ROOT, "cat-file", "-t", f"{claim.revision}:{script}") == "blob"


def test_the_page_is_the_rendering_of_the_results() -> None:
    assert (ROOT / page.PAGE).read_text("utf-8") == page.render(read_claims())


def test_atoms_run_from_the_pinned_revision_and_a_failed_one_runs_again(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = git(root, "rev-list", "--count", "HEAD")
    assert run_missing(read_claims(root), minutes=99, commit=True, root=root) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [f"more {arm}, seed 1: failed: exit 1: it broke" for arm in "ab"]
    assert sorted(path.name for path in (root / "claims/results/more").iterdir()) == ["a-0.json", "b-0.json"]
    assert int(git(root, "rev-list", "--count", "HEAD")) == int(before) + 2
    assert git(root, "show", "--name-only", "--format=%s", "HEAD").split("\n\n") == [
        "Claim more: b, seed 0",
        "claims/results/more/b-0.json",
    ]

    (tmp_path / "mended").touch()
    kept = (root / "claims/results/more/a-0.json").read_bytes()
    assert run_missing(read_claims(root), minutes=99, commit=False, root=root) == 0
    assert (root / "claims/results/more/a-0.json").read_bytes() == kept
    [claim] = read_claims(root)
    scores = {atom: result.metrics["score"] for atom, result in read_results(claim, root).items()}
    assert scores == {("a", 0): 1.0, ("b", 0): 2.0, ("a", 1): 1.1, ("b", 1): 2.1}
    assert list((root / "build").iterdir()) == []
    assert len(git(root, "worktree", "list").splitlines()) == 1
    assert "| b beats a | 0.5 to 1.5 | difference at least 0.5 | 1.000 (1.000 to 1.000) | 2 of 2 | **holds** |" in (
        page.render([claim], root)
    )


def test_a_result_of_another_version_is_stale_and_notes_are_no_version(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    assert run_missing(read_claims(root), minutes=0.1, commit=False, root=root) == 0
    document = yaml.safe_load((root / "claims/more.yaml").read_text())
    write(root, document | {"notes": "Found later."})
    [claim] = read_claims(root)
    assert list(read_results(claim, root)) == [("a", 0)]

    write(root, document | {"paper": "3."})
    [claim] = read_claims(root)
    with pytest.raises(ValueError, match=r"claims/results/more/a-0\.json is stale: claims/more\.yaml has changed"):
        read_results(claim, root)


def test_predictions_are_committed_before_a_run(root: Path) -> None:
    write(root, yaml.safe_load((root / "claims/more.yaml").read_text()) | {"paper": "3."})
    with pytest.raises(ValueError, match=r"claims/more\.yaml is not committed: predictions precede runs"):
        run_missing(read_claims(root), minutes=99, commit=False, root=root)


@pytest.mark.slow
def test_an_atom_is_stopped_at_its_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [claim] = read_claims(root)
    (root / "script.py").write_text("while True: pass")
    monkeypatch.setattr(atoms, "CPU_MINUTES", 0)
    with pytest.raises(ValueError, match="killed, as after 0 CPU minutes"):
        atoms.run_atom(claim, "a", 0, root)


def test_a_price_below_the_measured_one_is_corrected(root: Path) -> None:
    [claim] = read_claims(root)
    assert atoms.prices([claim], root).splitlines()[1].split() == ["more", "2", "2", "0/4", "0.1", "0"]
    slow = Result(claim=claim.hash, revision="", seconds=180, machine="", metrics={"score": 1.0})
    atoms.save(claim, "a", 0, slow, commit=False, root=root)
    assert atoms.prices([claim], root).splitlines()[1].split() == ["more", "2", "2", "1/4", "3.0", "9"]
    assert run_missing([claim], minutes=2.9, commit=False, root=root) == 0
    assert list(read_results(claim, root)) == [("a", 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {"a": ""}}, "arm b is not in arms; there are a"),
        ({"metrics": {"other": "x"}}, "metric score is not in metrics; there are other"),
        ({"command": "python script.py {seed} {out}"}, "command lacks the word {settings}"),
        ({"predictions": [FILE["predictions"][0] | {"rule": "it is good"}]}, "predictions.0.rule"),
        ({"revision": "HEAD"}, "revision"),
        (
            {"predictions": [FILE["predictions"][0] | {"figure": "mean"}]},
            "'b beats a': a mean is of one arm; leave against out",
        ),
    ],
)
def test_a_fault_of_a_file_is_named(root: Path, change: dict[str, Any], message: str) -> None:
    write(root, yaml.safe_load((root / "claims/more.yaml").read_text()) | change)
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        read_claims(root)


@pytest.mark.parametrize(
    ("rule", "low", "high", "count", "words"),
    [
        ("at least 0.05", 0.05, 0.2, 4, "**holds**"),
        ("at least 0.05", 0.04, 0.2, 4, "undecided"),
        ("at least 0.05", -0.1, 0.04, 4, "**does not hold**"),
        ("at most 0.6", 0.4, 0.6, 4, "**holds**"),
        ("between -0.05 and 0.05", -0.04, 0.05, 4, "**holds**"),
        ("between -0.05 and 0.05", 0.06, 0.07, 4, "**does not hold**"),
        ("at least 0.05", 0.05, 0.2, 3, "undecided"),
    ],
)
def test_the_rule_decides_when_every_seed_has_run(rule: str, low: float, high: float, count: int, words: str) -> None:
    prediction = Prediction.model_validate(FILE["predictions"][0] | {"rule": rule})
    assert summary.verdict(prediction, Interval((low + high) / 2, low, high), count, 4) == words
    assert summary.verdict(prediction, None, 0, 4) == "not run yet"


def test_arms_are_paired_by_seed() -> None:
    claim = Claim.model_validate({"name": "more", "revision": "0" * 40, **FILE, "seeds": [0, 1, 2]})
    scores = {("a", 0): 1.0, ("a", 1): 2.0, ("a", 2): 4.0, ("b", 0): 2.0, ("b", 1): 4.0}
    results = {
        atom: Result(claim=claim.hash, revision="", seconds=1, machine="", metrics={"score": score})
        for atom, score in scores.items()
    }
    ratio = claim.predictions[0].model_copy(update={"figure": "ratio"})
    assert summary.figure_of(claim.predictions[0], claim, results) == (Interval(1.5, 1.0, 2.0, groups=2), 2)
    assert summary.figure_of(ratio, claim, results) == (Interval(2.0, 2.0, 2.0, groups=2), 2)
    alone = claim.predictions[0].model_copy(update={"figure": "mean", "against": None})
    assert summary.figure_of(alone, claim, results) == (Interval(3.0, 2.0, 4.0, groups=2), 2)


def test_a_figure_outside_of_its_predicted_interval_is_marked() -> None:
    prediction = Prediction.model_validate(FILE["predictions"][0])
    words = [page.outside(prediction, Interval(mean, mean, mean)) for mean in (0.4, 0.5, 1.6)]
    assert words == [", below the predicted", "", ", above the predicted"]


def test_the_page_says_what_holds_what_cannot_be_asked_and_the_figures_of_the_notes(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    assert run_missing(read_claims(root), minutes=99, commit=False, root=root) == 0
    document = yaml.safe_load((root / "claims/more.yaml").read_text())
    notes = "b has [[claims/more; b; score; {0:.2f}]], more by [[claims/more/predictions; 1; figure; {0:.2f}]]."
    write(root, document | {"notes": notes, "answer": "It holds.", "not_asked": "Why."})
    rendered = page.render(read_claims(root), root)
    assert "| More is better | It holds. | 1 |  |  |  |" in rendered
    assert "What cannot be asked here:\n\n- More is better: Why.\n" in rendered
    assert rendered.endswith("b has 2.05, more by 1.00.\n")

    write(root, document | {"notes": "[[claims/more; c; score]]"})
    with pytest.raises(ValueError, match=r"\[\[claims/more; c; score\]\]: no row 'c'; there are a, b"):
        page.render(read_claims(root), root)


@pytest.mark.slow
@pytest.mark.parametrize("name", [claim.name for claim in read_claims()])
def test_a_claim_runs_in_small(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: a tiny atom took")
