"""Equal bits: run a base revision beside this checkout, on one machine in one thread, and compare the results.

    python research/same_bits.py                     # all cases, some ten CPU minutes
    python research/same_bits.py --cache /tmp/base   # keep the base's results for the next run on this machine
    python research/same_bits.py --only tiny score

The base is f8246822 or later, because both revisions get the same commands; each runs with its own config files.
Weights are compared tensor by tensor, images pixel by pixel, and records by the values that both revisions write. A
resumed run is compared with the base's run that nothing stopped. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
BASE = "e0e06df9"
"""Since here the benchmark of an export has its families of prompts; no later revision moved a bit."""

SHORT = (
    "epochs=2 prompts_per_epoch=2 group_size=6 save_every=1 trackers=[] sampling.batch=3 evaluation.batch=2 "
    "prompts.evaluation_limit=2"
)
PROMPTS = "prompts.train={{data}}/{0}/train.jsonl prompts.evaluation={{data}}/{0}/test.jsonl"
RECIPES = {"tiny": "", "quickstart": "", "tiny_edit": PROMPTS.format("edits"), "tiny_hero": PROMPTS.format("heroes")}
LAUNCH = "accelerate.commands.launch --config_file {source}/configs/launch/ddp.yaml --main_process_port {port}"
PANELS = "--panel 'waving, flag' --panel 'jumping, boat'"
MORE_PANELS = "--panel 'standing, tree' --panel 'waving, lamp'"
SCORE = "pacorl score --judge tiny --json {data}/edits/test/0000.png {data}/edits/test/0001.png"
GENERATE = "pacorl generate --judge tiny --json"

VOLATILE = re.compile("seconds|version|sha256|digest|path|time|per_second|created|host|pid|inputs|outputs|monitor")
"""Keys of durations, paths and digests of files with paths."""


@dataclass
class Case:
    """Commands that run one after the other in a folder of their own, and the files to compare."""

    commands: list[str]
    """Words behind `python -m`; `{out}`, `{data}`, `{source}` and `{base}` are the case's folder, the prompts, the
    checkout and the base's checkout."""
    files: dict[str, str]
    """Row of the table → glob of the files that it compares."""
    like: str = ""
    """Case of the base whose results these must be; the case itself if empty."""


def policy(recipe: str, settings: str = "", *, processes: int = 1, resumed: bool = False, like: str = "") -> Case:
    """Return a policy run of two epochs; a resumed run stops after the first."""
    launch = f"{LAUNCH} --num_processes {processes} -m " if processes > 1 else ""
    folder = "examples" if recipe in ("tiny_edit", "tiny_hero") else "configs"
    command = f"{launch}pacorl train-policy {{source}}/{folder}/{recipe}.yaml out={{out}}/run {SHORT}"
    command += f" {RECIPES[recipe]} {settings} "
    commands = [command + "epochs=1", command + "--resume auto"] if resumed else [command]
    files = {"weights": "run/checkpoints/step-000004/state.safetensors"}
    if not resumed:
        files |= {"metrics": "run/metrics.jsonl", "samples": "run/samples/epoch-*.png"}
        files["LoRA"] = "run/adapter/adapter_model.safetensors"
    return Case(commands, files, like)


CASES = {
    **{name: policy(name) for name in RECIPES},
    **{f"{name}, two processes": policy(name, processes=2) for name in RECIPES},
    **{f"{name}, resumed": policy(name, resumed=True, like=name) for name in RECIPES},
    "tiny, two processes, resumed": policy("tiny", processes=2, resumed=True, like="tiny, two processes"),
    "tiny, bfloat16": policy("tiny", "model.dtype=bfloat16"),
    "tiny, int8": policy("tiny", "memory=low"),
    "score": Case(
        [
            f"{SCORE} {{data}}/edits/test/0002.png",
            SCORE,
            f"{SCORE} {{data}}/edits/test/0002.png {{data}}/edits/test/0003.png --rank",
            f"{SCORE} --theme 'a red hero with a crown in town'",
        ],
        {"answers": "stdout-*.json"},
    ),
    "generate": Case(
        [
            f"{GENERATE} 'a red hero with a crown in town' {PANELS} {MORE_PANELS} --best-of 3 --out {{out}}/sets",
            f"{GENERATE} hero {PANELS} --kind kontext --character {{data}}/hero --separate --size 64x64 "
            "--out {out}/separate",
            f"{GENERATE} --image {{data}}/edits/test/0000.png 'Paint the hero green.' --seed 7 --out {{out}}/edit",
            f"{GENERATE} {{source}}/configs/cases/tiny_journey.yaml --out {{out}}/journey",
        ],
        {"images": "*/**/*.png", "scores": "stdout-*.json"},
    ),
    "train-reward": Case(
        [
            "pacorl train-reward {source}/configs/reward/tiny.yaml out={out}/run max_steps=8 trackers=[] "
            "data.train=[tiny:train:64] data.evaluation=[tiny:test:16] optimizer.batch=8 optimizer.micro_batch=4 "
            "evaluate_every=4 save_every=4"
        ],
        {"adapter": "run/adapter/adapter_model.safetensors", "metrics": "run/metrics.jsonl"},
    ),
    "dataset": Case(
        [
            "pacorl dataset prompts {out}/set --model tiny --count 8",
            "pacorl dataset diversify {out}/set --number 4",
            "pacorl dataset generate {out}/set --model tiny --grids 2",
            "pacorl dataset pair {out}/set",
            "pacorl dataset export {out}/own --rankings {base}/examples/rankings/rankings.csv --test-share 0.25",
        ],
        {"prompts": "set/[!g]*.jsonl", "images": "set/**/*.png", "export": "own/export/**/consistency_*.jsonl"},
    ),
}


# --- running -----------------------------------------------------------------------------------------------------


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out a revision in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as parent:
        folder = Path(parent) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, revision], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def run(case: Case, out: Path, *, source: Path, base: Path, data: Path) -> None:
    """Run a case's commands with the code of a checkout, unless the folder has its results."""
    if (out / "done").exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for number, command in enumerate(case.commands):
        fields = {"out": out, "data": data, "source": source, "base": base, "port": free_port()}
        words = [word.format_map(fields) for word in shlex.split(command)]
        (out / f"stdout-{number}.json").write_text(call(words, source))
    (out / "done").touch()


def call(words: Sequence[str], source: Path) -> str:
    """Run a module of a checkout in one thread and return its standard output."""
    environment = os.environ | {"PYTHONPATH": f"{source / 'src'}:{source}", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


# --- comparing ---------------------------------------------------------------------------------------------------


def compare(before: Path, after: Path, pattern: str) -> str:
    """Compare the files of a pattern; return `equal`, or the first difference."""
    first = {path.relative_to(before): path for path in sorted(before.glob(pattern))}
    second = {path.relative_to(after): path for path in sorted(after.glob(pattern))}
    if not first:
        return f"no file {pattern} at the base"
    if first.keys() - second.keys():
        return f"{sorted(first.keys() - second.keys())[0]} is missing"
    findings = [differences(first[name], second[name]) for name in first]
    unequal = [f"{name}: {finding}" for name, finding in zip(first, findings, strict=True) if finding]
    return "; ".join(unequal[:2]) or "equal"


def differences(first: Path, second: Path) -> str:
    """Compare two files; return an empty string if they are equal."""
    if first.suffix == ".safetensors":
        return tensors_differ(load_file(first), load_file(second))
    if first.suffix == ".png":
        one, two = (np.asarray(Image.open(path), dtype=int) for path in (first, second))
        if one.shape != two.shape:
            return f"size {one.shape} -> {two.shape}"
        return f"by {np.abs(one - two).max()} of 255" if (one != two).any() else ""
    faults = list(values_differ(document(first), document(second), ""))
    return f"{len(faults)} values, {faults[0]}" if faults else ""


def tensors_differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> str:
    """Compare tensors by name."""
    if first.keys() != second.keys():
        return f"other names, e.g. {sorted(first.keys() ^ second.keys())[0]}"
    if any((one.dtype, one.shape) != (second[name].dtype, second[name].shape) for name, one in first.items()):
        return "other shapes or types"
    if all(torch.equal(first[name], second[name]) for name in first):
        return ""
    largest = max(
        float((first[name].double() - second[name].double()).abs().max()) for name in first if first[name].numel()
    )
    return f"by {largest:.2g}"


def document(path: Path) -> Any:
    """Read the documents of a file: JSON lines, or the JSON document that standard output begins with."""
    text = path.read_text().lstrip()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.JSONDecoder().raw_decode(text)[0] if text.startswith(("{", "[")) else None


def values_differ(first: Any, second: Any, name: str) -> Iterator[str]:
    """Yield the differences of two documents, of keys that both have."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in first.keys() & second.keys():
            if not VOLATILE.search(key):
                yield from values_differ(first[key], second[key], f"{name}.{key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (one, two) in enumerate(zip(first, second, strict=True)):
            yield from values_differ(one, two, f"{name}[{number}]")
    elif first != second and not (isinstance(first, str) and "/" in first):
        yield f"{name}: {str(first)[:60]} -> {str(second)[:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="revision to compare with")
    parser.add_argument("--cache", type=Path, help="folder that keeps the base's results, for this machine")
    parser.add_argument("--head", type=Path, default=ROOT, help="checkout to compare")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    options = parser.parse_args()

    differ = False
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary, worktree(options.base) as base:
        cache = (options.cache.resolve() if options.cache else Path(temporary)) / options.base
        data = cache / "data"
        if not (data / "hero").exists():
            for kind in ("edits", "heroes"):
                call(["research.tiny", kind, "--out", str(data)], base)
            (data / "hero").mkdir()
            shutil.copy(data / "heroes/test/0000-0.png", data / "hero")
            (data / "hero" / "card.yaml").write_text("description: a round hero\nkeep: {palette: day}\n")
        for name in options.only:
            case = CASES[name]
            before, after = cache / (case.like or name), Path(temporary) / "head" / name
            run(CASES[case.like or name], before, source=base, base=base, data=data)
            try:
                run(case, after, source=options.head.resolve(), base=base, data=data)
                rows = {row: compare(before, after, pattern) for row, pattern in case.files.items()}
            except RuntimeError as error:
                rows = {"runs": str(error)}
            for row, finding in rows.items():
                differ |= finding != "equal"
                print(f"{name:30} {row:10} {finding if finding == 'equal' else f'DIFFERS: {finding}'}", flush=True)
    sys.exit(differ)


if __name__ == "__main__":
    main()
