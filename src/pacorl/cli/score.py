"""`pacorl score`: do these images belong together?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, Exit

from pacorl.cli.shared import (
    INCOMPLETE,
    OnlyJudge,
    begin_report,
    echo,
    echo_errors,
    print_json,
)
from pacorl.config.options import STRONGEST, FrugalJudge, option

if TYPE_CHECKING:
    from pacorl.gate.scores import Scores


@dataclass(frozen=True, kw_only=True)
class ScoreJudge(OnlyJudge, FrugalJudge):
    """The judge of a score."""

    temperature: float = option(
        1.0, "Divides the judge's logit; above 1 tells apart what it is too sure of.", least=0, most=STRONGEST
    )
    calibration: Path | None = option(None, "A file of `pacorl calibrate`, whose curve maps P(Yes).")

    def __post_init__(self) -> None:
        from pacorl.judge import check_temperature

        check_temperature(self.temperature, key="--temperature")
        if self.calibration and self.temperature != 1:
            raise ValueError("--calibration has a temperature of its own; leave --temperature out")

    @property
    def judge_access(self) -> dict[str, Any]:
        return super().judge_access | {"temperature": self.temperature, "calibration": self.calibration or ""}


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """The judge's questions."""

    panel: ClassVar[str] = "Questions"

    theme: str = option("", "What all images are to share.")
    criteria: list[str] = option([], "A criterion in words, or a JSON file of them; may be repeated.")
    grid: str = option("", "Cut the one image into ROWSxCOLS panels, e.g. 2x2.")
    rank: bool = option(False, "Rank the images after the first by how well they fit the first.")
    symmetric: bool = option(False, "Ask in both orders and take the mean.")
    reasons: bool = option(False, "Have the judge explain every pair.")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Output of the scores."""

    panel: ClassVar[str] = "Output"

    report: Path | None = option(None, "Write a self-contained page.")
    as_json: bool = option(False, "Print JSON.", flags=("--json",))
    keep_going: bool = option(False, "Leave out what cannot be used; exit with code 3.")


def score(
    images: list[str] = Argument(help="Two images or more: files, folders or URLs; with --grid, one."),
    *,
    judge: ScoreJudge,
    ask: QuestionOptions,
    output: ReportOptions,
) -> None:
    """Score how well images belong together: P(Yes) for two, a matrix and the odd one out for more."""
    # No heavy import before these checks.
    from pacorl.runtime.cores import use_cores

    begin_report(output.report)
    use_cores()
    code = _score_images(images, judge, ask, output)
    if code:
        raise Exit(code)


def _score_images(images: list[str], judge: ScoreJudge, ask: QuestionOptions, output: ReportOptions) -> int:
    """Score images and return the exit code."""
    from pacorl.gate import score_set as scoring
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.gate.scores import table, write_page
    from pacorl.io.imports import frozen_imports
    from pacorl.judge import check_judge, default_judge
    from pacorl.judge.judge import is_address

    # Questions and images, before a judge is loaded, which takes minutes.
    questions = scoring.questions_about(ask.theme, scoring.read_criteria(ask.criteria))
    names, opened, refused, advice = scoring.open_panels(images, grid=ask.grid, keep_going=output.keep_going)
    scoring.check_count(len(opened), ranking=ask.rank)
    files = [Path(file) for file in scoring.files_of(images) if file not in refused]
    source = judge.judge or default_judge(files)
    check_judge(source, adapter=judge.judge_adapter)
    if not is_address(source):
        with frozen_imports():
            from pacorl.io import processor  # noqa: F401 - the most that loading it imports

    # One load of the judge for all questions.
    with PacoReward.from_pretrained(source, **judge.judge_access) as reward:
        name = reward.name
        note = reward.note
        # Before any number: the judge's numbers may be meaningless for these images.
        echo_errors(note, advice)
        scores = scoring.score_set(
            reward.judge,
            opened,
            names=names,
            questions=questions,
            ranking=ask.rank,
            symmetric=ask.symmetric,
            reasons=ask.reasons,
        )
        _check_complete(scores, keep_going=output.keep_going)

    incomplete = bool(refused or scores.missing)

    # Output.
    if output.as_json:
        print_json({"judge": name, "note": note} | scores.to_dict() | {"left_out": refused})
    else:
        echo(table(scores))
    echo_errors(*refused.values())
    if output.report:
        write_page(output.report, scores, judge=name, note=note, theme=ask.theme, refused=refused)
        echo_errors(f"page: {output.report}")

    return INCOMPLETE if incomplete else 0


def _check_complete(scores: Scores, *, keep_going: bool) -> None:
    failed = scores.missing
    if failed and not keep_going:
        raise RuntimeError(
            f"{len(failed)} of {len(scores.pairs)} pairs have no score, the first because: {failed[0].error}; "
            "--keep-going prints the rest"
        )
