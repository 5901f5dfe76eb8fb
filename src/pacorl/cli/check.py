"""`pacorl check`, the gate of an image set, and `pacorl calibrate`, which makes a judge's probabilities mean shares."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from typer import Argument, BadParameter, Exit, Option

from pacorl.cli.shared import (
    BELOW,
    INCOMPLETE,
    JsonOption,
    OnlyJudge,
    begin_report,
    check_report,
    echo,
    echo_errors,
    echo_json,
    fault_line,
    print_json,
)
from pacorl.config.options import FrugalJudge, UsageError, option

if TYPE_CHECKING:
    from pacorl.core.ranking import Interval
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.types import Character, Comparison

SEVERITY = (0, INCOMPLETE, BELOW, 5, 2, 1, 75)
"""Exit codes of a set, the worst last: an error outranks a verdict, and an absent judge any other error."""
SILENCE_SECONDS = 20.0
"""Wait for a judge's server that falls silent in the middle of a check: a restart behind a balancer takes seconds."""


@dataclass(frozen=True, kw_only=True)
class CheckJudge(OnlyJudge, FrugalJudge):
    """The judge of a check."""

    calibration: Path | None = option(None, "A file of `pacorl calibrate`: a curve, and thresholds by panels.")


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Comparisons and threshold."""

    panel: ClassVar[str] = "Check"

    character: list[str] = option(
        [], "A character of the images, by name or folder; of several, an image's recipe says which it shows."
    )
    references: int = option(1, "Reference images per character; each costs a question per panel.", least=1, most=14)
    all_pairs: bool = option(False, "With characters, compare the panels with each other as well.")
    theme: str = option("", "What all images are to share.")
    criteria: list[str] = option([], "A criterion in words, or a JSON file of them; may be repeated.")
    grid: str = option("", "Cut the one image into ROWSxCOLS panels, e.g. 2x2.")
    symmetric: bool = option(False, "Ask in both orders and take the mean.")
    least: float | None = option(
        None, "Least P(same) of a panel; by default the calibration's.", flags=("--min",), least=0, most=1
    )

    def characters(self) -> list[Character]:
        """Read the characters, with as many images as are compared."""
        from pacorl.records.characters import find_character

        characters = [find_character(name) for name in self.character]
        return [replace(character, images=character.images[: self.references]) for character in characters]

    def casts(self, files: Sequence[str], characters: Sequence[Character]) -> list[list[str]]:
        """Name the characters that each file shows: of several those that the text in its recipe names, else all."""
        from pacorl.io.images import recipe_of
        from pacorl.records.characters import characters_of
        from pacorl.types import Grid, Prompt

        names = [character.name for character in characters]
        if len(names) < 2 or not files:
            return [names] * len(files)
        texts = tuple(recipe_of(Path(file)).get("panel", "") for file in files)
        prompt = Prompt(0, "", grid=Grid(1, len(texts)), panels=texts, characters=tuple(characters))
        casts = []
        for cast in characters_of(prompt):
            casts.append([character.name for character in cast] or names)
        return casts

    def pictures(self, sources: Iterable[str]) -> list[Path]:
        """List the files of the images and of the references."""
        from pacorl.gate.score_set import files_of

        references = chain(*(character.images for character in self.characters()))
        return [*map(Path, files_of(sources)), *references]

    def gate(
        self,
        files: Sequence[str],
        *,
        panels: int,
        calibration: Path | None = None,
    ) -> Callable[..., Check]:
        """Return `check_set` with these options, before a judge is loaded; panels of one cut file have no recipe.

        Raises:
            ValueError: A character, a criterion or the threshold is missing, or one panel is to be compared with none.
        """
        from pacorl.gate import score_set as scoring
        from pacorl.gate.check import check_set
        from pacorl.io.images import open_image
        from pacorl.judge.calibration import read_calibration, threshold

        # A panel is compared with the characters, or without any with the other panels.
        characters = self.characters()
        if not characters:
            scoring.check_count(panels)
        questions = scoring.questions_about(self.theme, scoring.read_criteria(self.criteria))
        # The calibration's thresholds hold for the plain question; a theme or criterion asks another.
        least = threshold(
            read_calibration(calibration or ""),
            self.least,
            panels=panels,
            references=[len(character.images) for character in characters],
            plain=not (self.theme or self.criteria),
            name="--min",
        )
        # The images are opened once, for every call of the gate.
        return partial(
            check_set,
            least=least,
            characters=[(character.name, list(map(open_image, character.images))) for character in characters],
            casts=self.casts(files, characters) if len(files) == panels else [],
            questions=questions,
            all_pairs=self.all_pairs,
            symmetric=self.symmetric,
        )


@dataclass(frozen=True, kw_only=True)
class CheckOutput(JsonOption):
    """Output of the check."""

    panel: ClassVar[str | None] = "Output"

    report: Path | None = option(None, "Write a self-contained page.")


def check(
    images: list[str] = Argument([], help="Panels: files, folders or URLs; with --grid, one image."),
    *,
    sets: Path = Option(
        None, "--sets", help="Check each subfolder of this folder as a set, with one load of the judge."
    ),
    judge: CheckJudge,
    ask: CheckOptions,
    output: CheckOutput,
) -> None:
    """Check that images show the same; exit code 4 and the odd one out if not, 5 if its judge fails the controls."""
    if bool(images) == bool(sets):
        raise BadParameter("give images, or --sets with a folder of sets", param_hint="'IMAGES...'")
    from pacorl.runtime.cores import use_cores

    begin_report(output.report)
    use_cores()
    codes = _check_sets(sets, judge, ask, output) if sets else [_check_images(images, judge, ask, output)]
    raise Exit(max(codes, key=SEVERITY.index))


def _check_images(images: Sequence[str], judge: CheckJudge, ask: CheckOptions, output: CheckOutput) -> int:
    """Check one set and return the exit code."""
    from pacorl.gate.check import ControlError, check_lines, check_page
    from pacorl.gate.score_set import open_panels
    from pacorl.io.files import write_atomic
    from pacorl.judge import check_judge, default_judge

    # Panels, references, questions and threshold, before a judge is loaded.
    names, opened, _, _ = open_panels(images, grid=ask.grid, whole_sets=False)
    gate = ask.gate(names, panels=len(opened), calibration=judge.calibration)
    source = judge.judge or default_judge(ask.pictures(images))
    check_judge(source, adapter=judge.judge_adapter)

    # Load the judge and ask it; the images are open already.
    with _load(source, judge) as reward:
        name = reward.name
        note = reward.note
        echo_errors(note)
        try:
            checked = gate(reward.judge, opened, names=names)
        except ControlError as refusal:
            if output.as_json:
                print_json({"judge": name, "note": note} | refusal.to_dict())
            raise

    # The page comes before the output, which may fail on a closed pipe.
    if output.report:
        write_atomic(output.report, check_page(checked, judge=name, note=note))
        echo_errors(f"page: {output.report}")
    if output.as_json:
        print_json({"judge": name, "note": note} | checked.to_dict())
    else:
        echo("\n".join(check_lines(checked, judge=name)))
    echo_errors(*dict.fromkeys(pair.error for pair in checked.scores.missing))
    return code_of(checked)


def _check_sets(folder: Path, judge: CheckJudge, ask: CheckOptions, output: CheckOutput) -> list[int]:
    """Check each subfolder with one load of the judge; an error of one set does not end the others."""
    from pacorl.io.images import check_readable
    from pacorl.judge import check_judge, default_judge

    if ask.grid:
        raise UsageError("--grid cuts one image; leave it out with --sets, whose folders hold panels")
    if output.report:
        raise UsageError("--report shows one set; leave it out with --sets, whose results --json prints")
    sets = sets_in(folder)
    # Characters, questions and threshold, before a judge is loaded.
    largest = max(sets.values(), key=len)
    ask.gate(largest, panels=max(2, len(largest)), calibration=judge.calibration)
    source = judge.judge
    if not source:
        pictures = ask.pictures(chain(*sets.values()))
        check_readable(pictures)  # an image that cannot be read has no recipe either, and this is its fault
        source = default_judge(pictures)
    check_judge(source, adapter=judge.judge_adapter)

    # One load of the judge; the images of one set are open at a time.
    codes = []
    documents = []
    with _load(source, judge) as reward:
        echo_errors(reward.note)
        for title, files in sets.items():
            code, document, lines = _check_set(files, reward, ask, judge.calibration)
            codes.append(code)
            documents.append({"set": title, "code": code, "judge": reward.name, "note": reward.note} | document)
            if not output.as_json:
                echo("\n    ".join([f"{title}: {lines[0]}", *lines[1:]]))
    if output.as_json:
        echo_json(json.dumps(documents, indent=2, ensure_ascii=False))
    return codes


def _check_set(
    files: Sequence[str], reward: PacoReward, ask: CheckOptions, calibration: Path | None
) -> tuple[int, dict[str, Any], list[str]]:
    """Check one set of a folder: exit code, document, and lines for people."""
    from pacorl.gate.check import ControlError, verdict_lines
    from pacorl.gate.score_set import open_panels

    try:
        names, opened, _, _ = open_panels(files, whole_sets=False)
        gate = ask.gate(names, panels=len(opened), calibration=calibration)
        checked = gate(reward.judge, opened, names=names)
    except (ValueError, OSError, RuntimeError) as error:
        line = fault_line(error)
        refused = error.to_dict() if isinstance(error, ControlError) else {"passed": None, "error": line}
        return int(getattr(error, "exit_code", 1)), refused, ["no verdict", *line.split("\n")]
    if checked.passed:
        return 0, checked.to_dict(), ["passes"]
    title = f"{len(checked.failed)} of {len(checked.panels)} panels fail"
    return code_of(checked), checked.to_dict(), [title, *verdict_lines(checked, judge=reward.name)]


def _load(source: str, judge: CheckJudge) -> PacoReward:
    """Load the judge. A server that falls silent is asked again for a while, and then ends the check as unreachable."""
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.io.outage import WaitsForOutages

    reward = PacoReward.from_pretrained(source, **judge.judge_access, calibration=judge.calibration or "")
    if isinstance(reward.judge, WaitsForOutages):
        reward.judge.wait_for_outages(SILENCE_SECONDS)
    return reward


def code_of(check: Check) -> int:
    """Return the exit code of a verdict."""
    # A low score outranks a missing score: it is certain.
    if any(panel.score is not None for panel in check.failed):
        return BELOW
    return INCOMPLETE if check.failed else 0


def sets_in(folder: Path) -> dict[str, list[str]]:
    """List the images of each subfolder by its name.

    Raises:
        ValueError: There is no subfolder, or no image in any of them.
    """
    from pacorl.gate.score_set import panels_in
    from pacorl.io.images import images_in, natural

    sets = {}
    for path in sorted(folder.iterdir(), key=natural):
        if path.is_dir() and not path.name.startswith("."):
            sets[path.name] = panels_in(path)
    if not any(sets.values()):
        raise ValueError(f"{folder} has no subfolder with images; --sets takes a folder with a subfolder for each set")
    if loose := images_in(folder):
        names = ", ".join(image.name for image in loose)
        echo_errors(f"{folder}: {names} {'is' if len(loose) == 1 else 'are'} in no subfolder and not checked")
    return sets


# --- calibrate ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Data and output of a calibration."""

    panel: ClassVar[str] = "Calibration"

    out: Path = option(Path("calibration.json"), "The file to write.")
    test: str = option("", "Held-out pairs or rankings, measured before and after.")
    limit: int | None = option(None, "Pairs at most, evenly spread.", least=20, most=1_000_000)
    report: Path | None = option(None, "Write a page with the reliability diagram.")
    judge_model: str = option("", "The judge's name at a server.", also=("--model",))
    judge_adapter: str = option("", "A PEFT adapter on the judge's checkpoint.", also=("--adapter",))
    api_key_env: str = option("", "The environment variable that holds the judge server's key.")


def calibrate(
    judge: str = Argument(help="A judge's folder or hub name, a server's URL, or tiny."),
    data: str = Argument(help="Labelled pairs, as for train-reward, or a CSV of rankings."),
    *,
    options: CalibrateOptions,
) -> None:
    """Fit a temperature and a bias on labelled pairs, and write a calibration file."""
    from pacorl.core.calibration import fit_curve, reliability
    from pacorl.gate.calibrate import ask_comparisons
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.io.files import check_writable, write_atomic
    from pacorl.io.images import check_readable
    from pacorl.judge import check_judge
    from pacorl.judge.calibration import Calibration, read_calibration
    from pacorl.runtime.cores import use_cores

    if options.out.exists():
        earlier = read_calibration(options.out)  # raises unless it is such a file, which alone is replaced
        if earlier and earlier.thresholds:
            raise ValueError(f"{options.out} has thresholds, which would be lost; name another file with --out")
    # Everything that can fail fails here, before the judge answers thousands of questions.
    check_writable(options.out)
    check_report(options.report)
    use_cores()
    check_judge(judge, adapter=options.judge_adapter)

    # Labelled pairs, and the judge's answers.
    access: dict[str, Any] = {
        "model": options.judge_model,
        "adapter": options.judge_adapter,
        "api_key_env": options.api_key_env,
    }
    # Some sources write their images into the scratch folder, which must last until the judge has read them.
    with TemporaryDirectory() as scratch:
        pairs = _labelled(data, options.limit, Path(scratch))
        test_pairs = _labelled(options.test, options.limit, Path(scratch)) if options.test else []
        check_readable(chain(*(pair.images for pair in [*pairs, *test_pairs])))
        trained = _trained_on(judge, pairs, Path(scratch))
        with PacoReward.from_pretrained(judge, **access) as reward:
            name = reward.name
            answers = ask_comparisons(reward.judge, pairs)
            held_out = ask_comparisons(reward.judge, test_pairs) if test_pairs else None

    # The fit, and its error.
    curve = fit_curve(answers.p_N, answers.yes_N)
    measured = {"of these pairs": answers.errors(curve)}
    if held_out:
        measured["held out"] = held_out.errors(curve)
    # Saved before the output, which may fail on a closed pipe.
    Calibration(name, curve).save(options.out)

    # Output.
    lines = [
        f"{len(answers.p_N)} pairs of {data}, {int(answers.yes_N.sum())} labelled Yes",
        f"temperature {curve.temperature:.3f}, bias {curve.bias:+.3f}",
    ]
    for kind, (before, fitted) in measured.items():
        counted = f"{kind}, {len(held_out.p_N)} pairs" if held_out and kind == "held out" else kind
        lines.append(f"ECE, {counted}: {_interval(before)} before, {_interval(fitted)} after")
    lines.append(_verdict(*measured[kind]))
    if not held_out:
        lines.append("the curve has seen these pairs; --test measures it on others")
    if trained:
        lines.append(
            f"{trained} of {len(pairs)} pairs were trained on; there the judge is surer than elsewhere: fit on others"
        )
    echo("\n".join([*lines, f"calibration: {options.out}"]))
    if options.report:
        from pacorl.report.figures import reliability_svg
        from pacorl.report.html import render

        # The page shows the reliability before and after.
        shown = held_out or answers
        after = reliability(curve.of(shown.p_N), shown.yes_N)
        contents: dict[str, Any] = {
            "verdict": lines,
            "diagram": reliability_svg(reliability(shown.p_N, shown.yes_N), after),
        }
        write_atomic(options.report, render("calibration.html", title=f"Calibration of {name}", name=name, **contents))
        echo_errors(f"page: {options.report}")


def _verdict(before: Interval, after: Interval) -> str:
    """Say whether the calibration helps."""
    if after.mean >= before.mean:
        return "the calibration does not lower the error: do without it, or fit it on more pairs"
    if before.low is None or after.high is None:
        return "the calibration lowers the error of these pairs; of so few groups (prompts), they give no interval"
    sure = "" if after.high < before.low else ", but the intervals overlap: more pairs would tell"
    return f"the calibration lowers the error{sure}"


def _trained_on(judge: str, pairs: Sequence[Comparison], scratch: Path) -> int:
    """Count the pairs with the images of a training pair of the run that a judge's folder belongs to.

    Images are compared by content: another export has them under other paths. Sources that are gone count nothing.
    """
    from pacorl.io.documents import read_yaml
    from pacorl.io.files import digest
    from pacorl.records.comparisons import comparisons_from

    configs = [folder / "config.yaml" for folder in (Path(judge), Path(judge).parent)]
    path = next(filter(Path.is_file, configs), None)
    config = read_yaml(path) if path else None
    trained: list[Comparison] = []
    for source in config.get("data", {}).get("train", []) if isinstance(config, dict) else []:
        with suppress(ValueError, OSError):
            trained += comparisons_from(source, scratch=scratch)

    # Few images are read: of the training data only such as are as large as an image of the pairs.
    sizes = {image.stat().st_size for image in chain(*(pair.images for pair in pairs))}
    digest_of = cache(digest)

    def content(pair: Comparison) -> frozenset[str]:
        if not all(image.is_file() and image.stat().st_size in sizes for image in pair.images):
            return frozenset()
        return frozenset(map(digest_of, pair.images))

    known = set(map(content, trained)) - {frozenset()}
    return sum(content(pair) in known for pair in pairs)


def _labelled(source: str, limit: int | None, scratch: Path) -> list[Comparison]:
    """Read labelled pairs, or rankings: the best candidates are labelled Yes, the worst No."""
    from pacorl.core.questions import consistent, same_theme
    from pacorl.dataset.rules import best_worst
    from pacorl.io.documents import blamed_on
    from pacorl.io.files import inside
    from pacorl.records.comparisons import comparisons_from
    from pacorl.records.prompts import evenly_spread
    from pacorl.records.rankings import load_rankings
    from pacorl.types import Comparison

    if not source.endswith(".csv"):
        return comparisons_from(source, limit=limit, scratch=scratch)
    # A file of rankings.
    folder = Path(source).parent
    pairs = []
    for ranking in load_rankings(source):
        question = same_theme(ranking.theme) if ranking.theme else consistent()
        for name, label in best_worst(ranking.tiers):
            with blamed_on(f"{source}, {ranking.reference}"):
                images = (inside(folder, ranking.reference), inside(folder, name))
            pairs.append(Comparison(images, question, label, group=ranking.group or ranking.reference))
    # Sorted by their labels, which otherwise take turns: every second pair would be a Yes.
    return evenly_spread(sorted(pairs, key=attrgetter("consistent")), limit)


def _interval(interval: Interval) -> str:
    if interval.low is None:
        return f"{interval.mean:.4f}"
    return f"{interval.mean:.4f} ({interval.low:.4f} to {interval.high:.4f})"
