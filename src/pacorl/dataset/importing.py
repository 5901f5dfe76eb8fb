"""Rankings of one's own files beside those of the annotation page (`pacorl dataset export --rankings`)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pacorl.dataset.answer_log import collect_answers
from pacorl.dataset.rules import question_of
from pacorl.io.documents import blamed_on
from pacorl.io.files import inside, kept_digest
from pacorl.records.images import images_beside
from pacorl.records.rankings import MOST_FAULTS, Ranking, load_rankings

UNNAMED = "unnamed"
"""The person of all rankings without an annotator."""


def joined_rankings(folder: Path, sources: Sequence[Path]) -> tuple[list[Ranking], dict[str, Path]]:
    """Read a folder's own rankings and those of CSV or JSONL files (`records.rankings`).

    Everybody may send a file with copies of the images. Their votes are about one pair, and a copy must not be in the
    other split: copies of an image have one name, and the same question has one instance. Rankings of one reference
    are a group, unless their file names its groups, each of which is one in all files.

    Returns:
        The rankings, and name → file of each of their images.

    Raises:
        ValueError: a person ranks the same candidates twice or has two spellings, or a record is malformed or an image
            missing; a line for each fault, with file and line.
    """
    # The folder's own rankings decide the name of each image and the instance of each question.
    answers = collect_answers(folder)
    own_images = set(chain.from_iterable(answer.images for answer in answers))
    file_of = {image: inside(folder, image) for image in own_images}
    name_of = {kept_digest(path): name for name, path in file_of.items()} if sources else {}
    first_of = {}
    voted = {}
    spelling = {}
    for answer in answers:
        question = _question(answer)
        first_of[question] = answer
        voted[question, answer.annotator] = answer.instance
        spelling[answer.annotator.casefold()] = answer.annotator

    faults: list[str] = []
    for source in sources:
        for line in load_rankings(source):
            origin = f"{source}:{line.instance}"
            with blamed_on(origin, faults):
                # An image is named by its content.
                names = {}
                for image, path in zip(line.images, images_beside(line.images, source.parent), strict=True):
                    digest = kept_digest(path)
                    names[image] = name_of.setdefault(digest, f"imported/{digest[:32]}{path.suffix}")
                    file_of.setdefault(names[image], path)
                if len(set(names.values())) < len(names):
                    raise ValueError("two of its images are the same; take one out")
                # Files of one name in two folders may have other images under the same paths.
                reference = names[line.reference]
                annotator = line.annotator or UNNAMED
                ranking = replace(
                    line,
                    instance=origin,
                    annotator=annotator,
                    group=line.group or f"{line.reference}:{kept_digest(file_of[reference])[:8]}",
                    reference=reference,
                    tiers=tuple(tuple(names[image] for image in tier) for tier in line.tiers),
                )
                known = spelling.setdefault(annotator.casefold(), annotator)
                if known != annotator:
                    raise ValueError(f"{annotator!r} is written {known!r} elsewhere; give one person one spelling")
                question = _question(ranking)
                vote = (question, annotator)
                if vote in voted:
                    raise ValueError(
                        f"{annotator} ranked the same candidates in {voted[vote]}; take one out, or name an "
                        "'annotator' in each if two people ranked"
                    )
                voted[vote] = origin
                first = first_of.setdefault(question, ranking)
                answers.append(replace(ranking, instance=first.instance, group=first.group))
    if faults:
        raise ValueError("\n  ".join(faults[:MOST_FAULTS]))
    return answers, file_of


def _question(answer: Ranking) -> tuple[str, str, frozenset[str]]:
    return question_of(answer), answer.reference, frozenset(answer.candidates)
