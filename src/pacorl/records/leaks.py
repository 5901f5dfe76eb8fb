"""Leaks of evaluation data into training data: finding shared prompts, and splits without them.

Two prompts are equal if their texts differ only in case, spaces and punctuation. Two edits are equal if they start from
one image, whatever the instruction: GEdit-Bench has each of its edits in two languages. The released recipes train on
150 prompts of T2IS-Bench, and on most of GEdit-Bench. Therefore a benchmark also reads the training data of a run, and
reports figures with and without the shared items.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from pacorl.core.batches import components
from pacorl.core.grid import shared_text
from pacorl.io.documents import blamed_on, read_jsonl, read_yaml
from pacorl.io.files import kept_digest
from pacorl.io.terminal import excerpt
from pacorl.records.comparisons import comparisons_from
from pacorl.records.prompts import load_prompts
from pacorl.types import Comparison, Prompt

LEAKS = "leaks.txt"
"""File of a run with its warning about training prompts that it evaluates on."""
CONFIG = "config.yaml"
"""File of a training run with its data."""
RUN_LEVELS = 3
"""Maximum depth of an adapter below its run's folder: RUN/checkpoints/step-000040/adapter."""
IDS = ("original_idx", "case_id")
"""Keys of a training record that name the benchmark's item it came from."""
QUOTED = re.compile(
    r"theme: \"((?:(?!theme: \").)+?)\", do the two|[Ii]nstruction:? '((?:(?![Ii]nstruction:? ').)+?)'(?:,|\. )",
    re.DOTALL,
)
"""The theme or instruction inside a judge's question (core/questions.py). Neither may hold its own beginning: a text of
nothing but beginnings would be searched to its end from each of them."""


def find_leaks(train: Sequence[Prompt], against: Iterable[Prompt]) -> list[tuple[Prompt, Prompt]]:
    """Find the training prompts that are also evaluated, each once, with the first equal prompt of `against`."""
    first_equal: dict[str, Prompt] = {}
    for prompt in against:
        for key in _keys(prompt):
            first_equal.setdefault(key, prompt)
    leaks = []
    for prompt in train:
        for key in _keys(prompt):
            if key in first_equal:
                leaks.append((prompt, first_equal[key]))
                break
    return leaks


def check_leaks(train: Sequence[Prompt], evaluation: Sequence[Prompt], *, deliberate: bool) -> str:
    """Return the report of the leaks between a run's prompts; empty if there are none.

    Args:
        deliberate: whether the evaluation's prompts are named as the training prompts themselves.

    Raises:
        ValueError: with the report and the fix, if there are leaks into other evaluation prompts.
    """
    leaks = find_leaks(train, evaluation)
    if not leaks:
        return ""
    prompt, other = leaks[0]
    report = (
        f"{len(leaks)} of {len(train)} training prompts are measured on. Training prompt {prompt.id} is "
        f"{other.place}: {excerpt(prompt.text)}"
    )
    if not deliberate:
        raise ValueError(
            f"{report}. Split them with `pacorl data SOURCE --test N --out FOLDER`, or set prompts.evaluation to the "
            "training prompts, and nothing is held out"
        )
    return report


def split_prompts(
    prompts: Sequence[Prompt], *, test: int, keep_out: Iterable[Prompt] = ()
) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into training and test; prompts of one text or one image stay together.

    Args:
        test: minimum number of test prompts, drawn at random.
        keep_out: prompts that belong to neither part, such as a benchmark's.

    Returns:
        (training, test), each in the order of `prompts`.

    Raises:
        ValueError: if no prompts are left for training.
    """
    # By identity: an id is a position in a file, and these prompts may come from several.
    dropped = {id(prompt) for prompt, _ in find_leaks(prompts, keep_out)}
    remaining = [prompt for prompt in prompts if id(prompt) not in dropped]
    families = components((number, key) for number, prompt in enumerate(remaining) for key in _keys(prompt))

    # Whole families, until there are enough.
    Random(42).shuffle(families)
    held_out: set[int] = set()
    while families and len(held_out) < test:
        held_out.update(families.pop())
    if not families:
        raise ValueError(
            f"{test} of {len(prompts)} prompts to test on, {len(dropped)} kept out, and those of one text or image on "
            "one side leave none to train on; hold out fewer, or add others"
        )
    train: list[Prompt] = []
    evaluation: list[Prompt] = []
    for number, prompt in enumerate(remaining):
        side = evaluation if number in held_out else train
        side.append(prompt)
    return train, evaluation


def id_text(name: str) -> str:
    """Format an item's id as one of its texts."""
    return f"id {name}"


def trained_on(texts: Mapping[str, Sequence[str]], run: Path) -> dict[str, str]:
    """Map each leaked item to the first text or id that it shares with the training data of a run's folder.

    Args:
        texts: item → its texts (`Benchmark.texts`).

    Raises:
        ValueError: if the folder or its training data is missing, since unread items must not count as clean.
    """
    # Skipping a missing source would hide a leak.
    with blamed_on(f"the training data of {run} cannot be compared with the items"):
        learned = {plain(text) for text in _trained_texts(run)} - {""}
    shared = {}
    for item, item_texts in texts.items():
        for text in item_texts:
            if plain(text) in learned:
                shared[item] = text[:80]
                break
    return shared


def run_of(weights: str) -> Path | None:
    """Return the folder of the training run that made these weights; None if they lie in none."""
    folder = Path(weights)
    if not weights or not folder.exists():
        return None
    for run in (folder, *folder.resolve().parents[:RUN_LEVELS]):
        if (run / CONFIG).is_file():
            return run
    return None


def pairs_trained_on(pairs: Sequence[Comparison], weights: str) -> list[Comparison]:
    """List the pairs that are in the training data of a judge; none if its weights lie in no run's folder.

    Raises:
        ValueError: if the training data is missing, since unread pairs must not count as clean.
    """
    run = run_of(weights)
    if not run:
        return []
    with blamed_on(f"the training data of {run} cannot be compared with the pairs"), TemporaryDirectory() as scratch:
        return shared_pairs(pairs, _trained_comparisons(run, Path(scratch)))


def shared_pairs(pairs: Sequence[Comparison], trained: Iterable[Comparison]) -> list[Comparison]:
    """List the pairs whose images are a pair of `trained` too, in either order, whatever the names and the question."""
    # A file of another size is another image: of a large data set few need to be read.
    sizes = {image.stat().st_size for pair in pairs for image in pair.images}
    trained_images = set()
    for other in trained:
        if all(image.stat().st_size in sizes for image in other.images):
            trained_images.add(frozenset(map(kept_digest, other.images)))
    return [pair for pair in pairs if frozenset(map(kept_digest, pair.images)) in trained_images]


def _trained_comparisons(run: Path, scratch: Path) -> Iterator[Comparison]:
    """Yield the training data of a judge's run; pairs of the tiny world that it lacks are drawn into `scratch`."""
    if (run / "data").is_dir():
        scratch = run / "data"
    match read_yaml(run / CONFIG):
        case {"data": {"train": [*sources]}}:
            for source in sources:
                yield from comparisons_from(source, scratch=scratch)
        case _:
            raise ValueError(f"its {CONFIG} names neither prompts nor data; name a training run")


def _trained_texts(run: Path) -> Iterator[str]:
    """Yield every text and id of the training data of a policy's or a judge's run."""
    match read_yaml(run / CONFIG):
        case {"prompts": {"train": str(source)}}:
            for prompt in load_prompts(source):
                yield from (prompt.text, prompt.theme, shared_text(prompt.text), *prompt.panels)
            for row in read_jsonl(Path(source)) if source.endswith(".jsonl") else ():
                for name in IDS:
                    if row.get(name):
                        yield id_text(str(row[name]))
        case _:
            with TemporaryDirectory() as scratch:
                for comparison in _trained_comparisons(run, Path(scratch)):
                    for quotations in QUOTED.findall(comparison.question):
                        yield from quotations


def _keys(prompt: Prompt) -> list[str]:
    """Return the keys of a prompt: the digests of an edit's images, else the text with its references' digests.

    Equal prompts share a key. Records of several characters may have one text, since their references show who acts.
    """
    if not prompt.sources:
        return [" ".join(["text", plain(prompt.text), *map(kept_digest, prompt.references)])]
    return [f"image {kept_digest(source)}" for source in prompt.sources]


def plain(text: str) -> str:
    """Normalise a text: case, spaces, punctuation and Unicode forms of a letter make no difference."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))
