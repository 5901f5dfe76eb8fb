"""Regression test of refactors: runs the same commands at two revisions and compares all written files bit by bit.

    python tools/same_bits/same_bits.py record /tmp/before --revision REV   # a few minutes, one thread
    python tools/same_bits/same_bits.py record /tmp/after
    python tools/same_bits/same_bits.py compare /tmp/before /tmp/after

Weights are compared tensor by tensor, images pixel by pixel, metrics and records value by value; only durations may
differ. The comparison holds for one machine and one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacorl.io.files import claim_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

VOLATILE = re.compile(
    r"^(seconds(/.*)?|.*_seconds|.*_runtime|.*_per_second|sha256|inputs|outputs|time|created|version|versions|out|page|root|host|pid|numpy|python)$"
)
"""Keys of times, paths, versions, digests of files with paths, and unused random generators."""

COARSE = "story/policy/"
"""Run with a judge behind HTTP: the batches of its questions are random, so that scores agree to rounding only. Its
weights are not compared."""

PLACE = re.compile(r"/[^ \"']*?/(?=src/pacorl/|tools/same_bits/|configs/)")
"""The checkout at the beginning of a path in a record."""

POLICY = ["pacorl", "train-policy", str(HERE / "tiny.yaml")]
STORIES: dict[str, list[list[str]]] = {
    "policy": [[*POLICY, "out={out}/run"]],
    "policy_own_noise": [[*POLICY, "out={out}/run", "sampling.tree={}", "epochs=4"]],
    "policy_nft": [
        [*POLICY, "out={out}/run", "sampling.tree={}", "objective.name=diffusion_nft", "epochs=2"]
    ],
    "policy_resumed": [
        [*POLICY, "out={out}/run", "epochs=2", "save_every=1", "evaluation.every=0"],
        [*POLICY, "out={out}/run", "epochs=4", "save_every=1", "evaluation.every=0", "--resume", "auto"],
    ],
    "edits": [["pacorl", "train-policy", str(HERE / "tiny_edit.yaml"), "out={out}/run"]],
    "judge": [["pacorl", "train-reward", str(HERE / "train_reward.yaml"), "out={out}/run"]],
    "generate": [
        ["pacorl", "generate", "--prompt", "red round hero, crown, night", "--panel", "waving, flag",
         "--panel", "jumping, boat", "--panel", "standing, tree", "--panel", "waving, lamp",
         "--best-of", "3", "--keep-all", "--out", "{out}/sets", "--json"],
        ["pacorl", "generate", "--image", str(HERE / "edits/test/0000.png"), "--instruction", "Paint the hero green.",
         "--seed", "7", "--out", "{out}/edit", "--json"],
        ["pacorl", "generate", "--storyboard", str(ROOT / "configs/cases/tiny_journey.yaml"),
         "--out", "{out}/journey", "--json"],
    ],
    "score": [
        ["pacorl", "score", *(str(HERE / f"edits/test/{number:04d}.png") for number in range(3)), "--json"],
        ["pacorl", "score", *(str(HERE / f"edits/test/{number:04d}.png") for number in range(2)), "--symmetric",
         "--json"],
        ["pacorl", "score", *(str(HERE / f"edits/train/{number:04d}.png") for number in range(4)), "--rank", "--json"],
    ],
    "dataset": [
        ["tools.tiny", "dataset-story", "{out}/story", "--prompts", "8", "--grids", "2", "--judge-steps", "6",
         "--json"],
    ],
}  # fmt: skip
"""Story → its commands, modules with their arguments, one after the other; `{out}` is the story's folder."""


def record(folder: Path, *, revision: str, only: Sequence[str]) -> None:
    """Run every story into `folder`, with the code of `revision` or, if it is empty, of this checkout."""
    claim_folder(folder)
    with _source(revision) as source:
        for name in only or STORIES:
            out = folder / name
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            for number, command in enumerate(STORIES[name]):
                arguments = [word.replace("{out}", str(out)) for word in command]
                print(f"{name}: {' '.join(arguments)}", flush=True)
                (out / f"stdout-{number}.txt").write_text(_run(arguments, source))


@contextmanager
def _source(revision: str) -> Iterator[Path]:
    """Yield the folder of the code: this checkout, or a temporary worktree of another revision."""
    if not revision:
        yield ROOT
        return
    folder = Path(tempfile.mkdtemp(prefix="same-bits-")) / "checkout"
    subprocess.run(["git", "worktree", "add", "--detach", folder, revision], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def _run(arguments: Sequence[str], source: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": f"{source / 'src'}:{source}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


# --- comparing ---------------------------------------------------------------------------------------------------


def compare(before: Path, after: Path) -> int:
    """Print the differences and a count of equal values; return the number of differences."""
    differences = equal = 0
    stories = {path.name for path in (*before.iterdir(), *after.iterdir()) if path.is_dir()}
    for name in sorted(stories):
        # By name, so that a value of one side alone is a difference.
        first = dict(_contents(before / name))
        second = dict(_contents(after / name))
        for key in sorted({*first, *second}):
            if first.get(key) == second.get(key):
                equal += 1
                continue
            differences += 1
            if differences <= 40:
                print(f"{name}/{key}: {_short(first.get(key))} -> {_short(second.get(key))}")
    print(f"{equal} values equal, {differences} different")
    return differences


def _contents(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield every comparable value of a story's folder, with its file and path as the name."""
    # Weights and images by hash, documents value by value; other files are not compared.
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        file = str(path.relative_to(folder))
        if path.suffix in (".safetensors", ".png", ".jpg"):
            if not file.startswith(COARSE):
                yield from _tensors(path, file) if path.suffix == ".safetensors" else [(file, _pixels(path))]
        elif path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            if path.name == "explanations.jsonl":  # answers are written in the order in which they come in
                lines.sort()
            for number, line in enumerate(lines):
                yield from _values(json.loads(line), f"{file}:{number}", folder)
        elif path.suffix in (".json", ".txt") and path.read_text().lstrip().startswith(("{", "[")):
            # Standard output begins with a document, and may continue with the story's log.
            document, _ = json.JSONDecoder().raw_decode(path.read_text().lstrip())
            yield from _values(document, file, folder)


def _tensors(path: Path, file: str) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    for name, tensor in load_file(path).items():
        digest = hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()[:16]
        yield f"{file}:{name}", (str(tensor.dtype), tuple(tensor.shape), digest)


def _pixels(path: Path) -> tuple[Any, ...]:
    from PIL import Image

    with Image.open(path) as image:
        return image.mode, image.size, hashlib.sha256(image.tobytes()).hexdigest()[:16]


def _values(document: Any, name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    if isinstance(document, Mapping):
        for key, value in document.items():
            if not VOLATILE.match(key):
                yield from _values(value, f"{name}.{key}", folder)
    elif isinstance(document, list):
        if name.endswith("target_modules"):  # peft keeps them as a set
            document = sorted(document)
        for number, value in enumerate(document):
            yield from _values(value, f"{name}[{number}]", folder)
    elif isinstance(document, float) and name.startswith(COARSE):
        yield name, float(f"{document:.3g}")
    else:
        yield name, PLACE.sub("", document.replace(str(folder), "")) if isinstance(document, str) else document


def _short(value: Any) -> str:
    return "absent" if value is None else str(value)[:100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--revision", default="", help="a git revision; this checkout if it is left out")
    recording.add_argument("--only", nargs="*", default=(), choices=list(STORIES))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.folder.resolve(), revision=options.revision, only=options.only)
    else:
        sys.exit(compare(options.before, options.after) > 0)


if __name__ == "__main__":
    main()
