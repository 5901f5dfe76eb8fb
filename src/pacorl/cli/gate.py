"""`pacorl score` gives numbers, `pacorl check` a verdict, and `pacorl calibrate` makes P(Yes) a share."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, Exit, Option

from pacorl.cli.shared import JSON, announce, asking, echo, echo_errors, fault_line, print_json
from pacorl.config.options import BELOW, INCOMPLETE, CalibratedJudge, UsageError, option
from pacorl.io.net import UnreachableError
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.gate.panels import Panels

SEVERITY = (0, INCOMPLETE, BELOW, 5, 2, 1, UnreachableError.exit_code)
"""Exit codes of a set, the worst last: an error outranks a verdict, and after an outage sets are left."""
SILENCE_SECONDS = 20.0
"""Wait for a judge's server that falls silent in the middle of a check: a restart behind a balancer takes seconds."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """The judge's question about each pair."""

    panel: ClassVar[str] = "Question"

    theme: str = option("", "What all images are to share.")
    grid: str = option("", "Cut the one image into ROWSxCOLS panels; by default the layout in its recipe.")


def score(
    images: list[str] = Argument(help="Two images or more: files or folders; or one page of panels."),
    *,
    judge: CalibratedJudge,
    ask: QuestionOptions,
    rank: bool = Option(False, "--rank", help="Rank the images after the first by how well they fit the first."),
    reasons: bool = Option(False, "--reasons", help="Have the judge explain every pair."),
    as_json: bool = JSON,
) -> None:
    """Score how well images belong together: P(Yes) of every pair, and the mean."""
    from pacorl.gate.panels import files_of, open_panels
    from pacorl.gate.scores import score_set
    from pacorl.runtime.cores import use_cores

    # Questions and images, before a judge is loaded, which takes minutes.
    use_cores()
    panels = open_panels(images, grid=ask.grid)
    if len(panels.images) < 2:  # it may be a page of another tool
        raise ValueError(
            f"{panels.names[0]} has nothing to be compared with; give two images or more, or cut a page into panels by "
            "--grid, such as 2x2"
        )
    source = _judge_of(judge, files_of(images))

    with load_judge(source, judge) as reward:
        # Before any number: the judge's numbers may be meaningless for these images.
        echo_errors(reward.note)
        with asking(reward.name) as advance:
            scores = score_set(
                reward.judge,
                panels.images,
                names=panels.names,
                theme=ask.theme,
                ranking=rank,
                reasons=reasons,
                progress=advance,
            )
        if as_json:
            print_json(reward.about | scores.to_dict())
        else:
            echo(scores)
    if scores.missing:
        raise Exit(INCOMPLETE)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(QuestionOptions):
    """Question and threshold of a check."""

    panel: ClassVar[str] = "Check"

    character: list[str] = option(
        [], "A character of the images, by name or folder; of several, an image's recipe says which it shows."
    )
    least: float | None = option(
        None, "Least P(Yes) of a panel; by default the calibration's, or 0.5.", "--min", min=0, max=1
    )


def check(
    images: list[str] = Argument([], help="Panels: files or folders; or one page of panels."),
    *,
    sets: Path | None = Option(None, help="Check each subfolder, or generated page, of this folder as a set."),
    judge: CalibratedJudge,
    ask: CheckOptions,
    report: Path | None = Option(None, help="Write a self-contained page; of --sets one for each, into a folder."),
    as_json: bool = JSON,
) -> None:
    """Check that images show the same; exit code 4 and the odd one out if not, 5 if its judge fails the controls."""
    from pacorl.gate.check import check_lines, check_page
    from pacorl.gate.panels import files_of, open_panels
    from pacorl.io.files import check_made, check_writable, claim_folder, write_atomic
    from pacorl.runtime.cores import use_cores

    use_cores()
    if bool(images) == bool(sets):
        raise UsageError("give either images, or --sets with a folder of sets")

    # If this check fails, an earlier page would pass for its page.
    if report:
        check_writable(report, folder=bool(sets))
        if sets:
            claim_folder(report)
        for page in report.glob("*.html") if sets else [report]:
            check_made(page)
            if page.is_file():
                page.unlink()
                echo_errors(f"removed: {page}, of an earlier check")
    # Panels, references, questions and threshold, before a judge is loaded. Of many sets one is open at a time.
    gate = Gate(ask, judge.calibration)
    if sets:
        files = _sets_in(sets)
        gate.least(panels=2)
    else:
        panels = open_panels(images, grid=ask.grid)
        files = {"": files_of(images)}
        gate.least(len(panels.images))
    source = _judge_of(judge, [*chain(*files.values()), *gate.references])

    with load_judge(source, judge) as reward:
        echo_errors(reward.note)
        if sets:
            raise Exit(_check_sets(gate, reward, files, report=report, as_json=as_json))
        checked = gate.check(reward, panels)

    # The page comes before the output, which may fail on a closed pipe.
    if report:
        write_atomic(report, check_page(checked, judge=reward.name, note=reward.note))
        echo_errors(f"page: {report}")
    if as_json:
        print_json(reward.about | checked.to_dict())
    else:
        echo("\n".join(check_lines(checked, judge=reward.name)))
    echo_errors(*dict.fromkeys(pair.error for pair in checked.scores.missing))
    raise Exit(checked.code)


def _sets_in(folder: Path) -> dict[str, list[str]]:
    """List the files of each set in a folder: of a subfolder, or a page. Raises ValueError if there is none."""
    from pacorl.gate.panels import files_of
    from pacorl.io.images import images_in, recipe_of

    files = {}
    pages = images_in(folder)
    stems = {page.stem for page in pages}
    # Any image is a page, so that none passes unseen, but the panels of one. `tries` are drafts.
    for path in [*sorted(folder.glob("*/")), *pages]:
        is_panel = path.stem.rpartition("-panel-")[0] in stems and "panel" in recipe_of(path)
        if path.name != "tries" and not is_panel:
            files[path.name] = files_of([path])
    if not files:
        raise ValueError(f"{folder} holds no sets; --sets takes a folder with a subfolder or a page for each set")
    return files


def _check_sets(
    gate: Gate, reward: PacoReward, sets: Mapping[str, Sequence[str]], *, report: Path | None, as_json: bool
) -> int:
    """Check each set of files until the judge falls silent, and return the worst exit code."""
    from pacorl.gate.check import check_lines, check_page
    from pacorl.gate.panels import open_panels
    from pacorl.io.files import write_atomic
    from pacorl.report.html import render

    documents: list[dict[str, Any]] = []
    begun_at = time.monotonic()
    for title, files in sets.items():
        if len(documents) == 1:
            announce(f"{len(sets):,} sets take", (time.monotonic() - begun_at) * len(sets))
        # A fault ends its own set alone, but a silent judge will not answer about the next sets.
        try:
            panels = open_panels(files, grid=gate.ask.grid if len(files) == 1 else "")
            checked = gate.check(reward, panels)
        except (ValueError, OSError, RuntimeError) as fault:
            code = getattr(fault, "exit_code", 1)
            verdict: dict[str, Any] = {"passed": None, "code": code, "error": fault_line(fault)}
            lines = ["no verdict", verdict["error"]]
        else:
            verdict, lines = checked.to_dict(), check_lines(checked, judge=reward.name, panels=False)
            if report:
                write_atomic(report / f"{title}.html", check_page(checked, judge=reward.name, note=reward.note))
        documents.append({"set": title, **reward.about, **verdict})
        if not as_json:
            echo("\n    ".join([f"{title}: {lines[0]}", *lines[1:]]))
        if verdict["code"] == UnreachableError.exit_code:
            break
    if report:
        write_atomic(report / "index.html", render("sets.html", name="check", title="Sets", documents=documents))
    if as_json:
        print_json(documents)
    codes: list[int] = [document["code"] for document in documents]
    echo_errors(f"{codes.count(0)} of {len(sets)} sets pass")
    return max(codes, key=SEVERITY.index)


class Gate:
    """The gate of a command."""

    def __init__(self, ask: CheckOptions, calibration: Path | None) -> None:
        """Raises ValueError if a character or the calibration cannot be read."""
        from pacorl.judge.calibration import read_calibration
        from pacorl.records.characters import find_character

        self.ask = ask
        self.calibration = read_calibration(calibration or "")
        self.characters = [find_character(name) for name in ask.character]
        """The characters, with all of their images."""

    @property
    def references(self) -> list[Path]:
        """First image of each character, with which every panel is compared."""
        # One of each: every one costs a question per panel.
        return [character.images[0] for character in self.characters]

    def least(self, panels: int) -> float:
        """Return the threshold. Raises ValueError if one panel is to be compared with none."""
        from pacorl.judge.calibration import threshold

        return threshold(
            self.calibration,
            self.ask.least,
            panels=panels,
            references=[1] * len(self.characters),
            plain=not self.ask.theme,
        )

    def check(self, reward: PacoReward, panels: Panels) -> Check:
        """Check a set under a progress bar."""
        from pacorl.gate.check import check_set
        from pacorl.records.characters import characters_of
        from pacorl.types import Grid, Prompt

        # The characters of each panel: those named in its text, or all if it names none.
        texts = tuple(panels.texts)
        prompt = Prompt(0, "", grid=Grid(1, len(texts)), panels=texts, characters=tuple(self.characters))
        casts = []
        for cast in characters_of(prompt):
            casts.append([character.name for character in cast or self.characters])
        with asking(reward.name) as advance:
            return check_set(
                reward.judge,
                panels.images,
                least=self.least(len(panels.images)),
                names=panels.names,
                characters=[(character.name, character.images[:1]) for character in self.characters],
                casts=casts,
                theme=self.ask.theme,
                progress=advance,
            )


def _judge_of(judge: CalibratedJudge, images: Sequence[Path | str]) -> str:
    """Return the named judge, or the default one of some images. Raises ValueError if it is missing or no default."""
    from pacorl.judge import check_judge, default_judge

    source = judge.judge or default_judge(images)
    check_judge(source, calibration=judge.calibration or "")
    return source


def load_judge(source: str, judge: CalibratedJudge) -> PacoReward:
    """Load the judge of a command; an unreachable server is retried for a while."""
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.judge.judge import RemoteJudge

    reward = PacoReward.from_pretrained(source, memory=judge.memory, calibration=judge.calibration or "")
    if isinstance(reward.judge, RemoteJudge):
        reward.judge.wait_for_outages(SILENCE_SECONDS)
    return reward


def calibrate(
    judge: str = Argument(help="A judge's folder or hub name, a server's URL (URL#MODEL), or tiny."),
    data: str = Argument(help="Labelled pairs, as for train-reward."),
    *,
    out: Path = Option(Path("calibration.json"), help="The file to write."),
) -> None:
    """Fit a temperature and a bias on 200 labelled pairs or more; a threshold for sets is yours to choose (--min)."""
    from pacorl.core.calibration import fit_curve
    from pacorl.gate.calibrate import ask_comparisons, check_pairs, held_out_line
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.io.files import check_new, check_writable
    from pacorl.io.images import check_readable
    from pacorl.judge import check_judge, identity_at
    from pacorl.judge.calibration import LEAST, Calibration
    from pacorl.records.comparisons import comparisons_from
    from pacorl.records.prompts import TINY_PREFIX
    from pacorl.report.html import render
    from pacorl.runtime.cores import use_cores

    check_new(out, fix="name another file with --out")
    check_writable(out)
    check_judge(judge)
    use_cores()
    # The tiny world's training pairs are drawn, so that no record of them tells them from others.
    if judge == TINY and data.startswith(f"{TINY_PREFIX}train"):
        raise ValueError(f"{data} are the pairs that the tiny judge was trained on; give tiny:dev or tiny:test")
    # Some sources write their images into the scratch folder, which must last until the judge has read them.
    with TemporaryDirectory() as scratch:
        pairs = comparisons_from(data, scratch=Path(scratch))
        check_readable(chain(*(pair.images for pair in pairs)))
        check_pairs(judge, pairs)
        with PacoReward.from_pretrained(judge) as reward, asking(reward.name) as advance:
            name, identity = reward.name, identity_at(judge, reward.judge)
            answers = ask_comparisons(reward.judge, pairs, progress=advance)
            # As controls of a check do.
            identical = [replace(pair, images=(pair.images[0],) * 2) for pair in pairs[:16]]
            same, _ = ask_comparisons(reward.judge, identical)

    curve = fit_curve(*answers)
    held_out = held_out_line(answers)
    # Saved before the output, which may fail on a closed pipe.
    Calibration(name, curve, identity=identity, pairs=len(pairs)).save(out)
    figures = {"labels": answers[1], "curve": curve, "held_out": held_out, "most": curve(max(same)), "least": LEAST}
    echo(render("calibration.txt", judge=judge, out=out, quoted=shlex.quote, **figures).rstrip())
