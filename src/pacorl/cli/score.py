"""`pacorl score`: do these images belong together?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, Exit

from pacorl.cli.shared import (
    BELOW,
    INCOMPLETE,
    OnlyJudge,
    begin_report,
    echo,
    echo_errors,
    print_json,
)
from pacorl.config.options import STRONGEST, FrugalJudge, option

if TYPE_CHECKING:
    from pacorl.judge.scores import Scores


@dataclass(frozen=True, kw_only=True)
class ScoreJudge(OnlyJudge, FrugalJudge):
    """The judge of a score."""

    temperature: float = option(
        1.0, "Divides the judge's logit; above 1 tells apart what it is too sure of.", least=0, most=STRONGEST
    )
    calibration: Path | None = option(None, "A file of `pacorl calibrate`, whose curves map P(Yes).")

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
    least: float | None = option(
        None,
        "Exit with code 4 if an image's lowest median over the questions, with the other images, is below.",
        flags=("--min",),
        least=0,
        most=1,
    )
    least_mean: float | None = option(
        None, "Exit with code 4 if the mean of all pairs is below.", flags=("--min-mean",), least=0, most=1
    )


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
    from pacorl.io.imports import frozen_imports
    from pacorl.judge import check_judge, default_judge
    from pacorl.judge import score_set as scoring
    from pacorl.judge.judge import is_address
    from pacorl.judge.paco_reward import PacoReward
    from pacorl.judge.scores import table, write_page

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

    # The thresholds, of one panel and of the mean.
    below = _below_least(scores, output.least) + _below_mean(scores, output.least_mean)
    incomplete = bool(refused or scores.missing)

    # Output; a gate without all scores has no verdict.
    if output.as_json:
        has_gate = output.least is not None or output.least_mean is not None
        verdict = {"passed": None if incomplete else not below} if has_gate else {}
        print_json({"judge": name, "note": note} | verdict | scores.to_dict() | {"left_out": refused})
    else:
        echo(table(scores))
    echo_errors(*refused.values())
    if output.report:
        write_page(output.report, scores, judge=name, note=note, theme=ask.theme, refused=refused)
        echo_errors(f"page: {output.report}")

    # The exit code.
    if incomplete:
        return INCOMPLETE
    echo_errors(*below)
    return BELOW if below else 0


def _below_least(scores: Scores, least: float | None) -> list[str]:
    """Report a score below `--min`."""
    if least is None:
        return []
    from pacorl.judge.check import failing, panel_scores

    # Of a ranking each image is compared with the reference.
    panels = panel_scores(scores, [[0]] if scores.ranking else [])
    failed = failing(panels, least)
    lowest = next((panel for panel in failed if panel.score is not None), None)
    if lowest is None:
        return []
    if len(scores.names) == 2:
        return [f"the pair has P(Yes) {lowest.score:.4f}, below --min {least:g}"]
    name = scores.names[lowest.panel]
    compared = "the reference" if scores.ranking else "the others"
    return [f"the lowest image, {name}, has the median {lowest.score:.4f} with {compared}, below --min {least:g}"]


def _below_mean(scores: Scores, least: float | None) -> list[str]:
    """Report a mean below `--min-mean`."""
    if least is None or scores.mean is None or scores.mean >= least:
        return []
    return [f"the mean of {len(scores.pairs)} pairs is {scores.mean:.4f}, below --min-mean {least:g}"]


def _check_complete(scores: Scores, *, keep_going: bool) -> None:
    failed = scores.missing
    if failed and not keep_going:
        raise RuntimeError(
            f"{len(failed)} of {len(scores.pairs)} pairs have no score, the first because: {failed[0].error}; "
            "--keep-going prints the rest"
        )
