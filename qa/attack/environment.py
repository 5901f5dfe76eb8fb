"""Commands as they are installed, in an environment that is odd, full, or full of traps.

They are processes of their own, in a folder that somebody else packed: it holds a file for each module that Python
might look for there, and none of them may ever run. Variables are missing or nonsense, files may not grow, the terminal
is gone. The command does its work, or says in one line why it cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qa.attack import documents, links
from qa.attack.harness import Target, WrongError
from qa.campaign.stories import SET, SMALL, STORIES, draw_images

CONSOLE = Path(sys.executable).with_name("pacorl")
CASE = ".case"
"""What surrounds the command, in JSON, in an input's folder."""
MARKS = "marks"
"""A line for each trap that ran: its module and its process."""
PATIENCE = 240
"""Seconds by the clock, which a command takes only if it hangs."""
TRAP = """import os
with open({marks!r}, "a") as marks:
    print({name!r}, os.getpid(), file=marks)
"""
THIRD_PARTY = (
    *("yaml", "PIL", "numpy", "torch", "pydantic", "pydantic_core", "typer", "rich", "safetensors", "transformers"),
    *("diffusers", "peft", "accelerate", "fastapi", "starlette", "uvicorn", "h11", "anyio", "httpx2", "einops"),
    *("jinja2", "tensorboard", "tqdm", "regex", "tokenizers", "huggingface_hub", "pyarrow", "sklearn"),
    *("wandb", "swanlab", "rapidocr", "dreamsim", "pacorl", "sitecustomize", "usercustomize", "a"),
)
FOLDERS = ("xml", "email", "json", "http", "numpy", "PIL", "pacorl")
"""Traps that are packages."""

# --- commands --------------------------------------------------------------------------------------------------

LIGHT: dict[str, Sequence[str]] = {
    "key": ("config", "sampling.steps"),
    "schema": ("config", "schema"),
    "check": ("prompts", "check", "p.jsonl", "--against", "tiny:dev:2"),
    "split": ("prompts", "split", "tiny:train:40", "--out", "made", "--test", "10"),
    "report": ("report", "run"),
    "publish": ("publish", "run", "--licence", "mit"),
    "import": ("dataset", "import", "imported", "rankings.csv", "--kind", "rankings"),
    "annotate-plan": ("dataset", "annotate", "ranked", "--annotators", "ben", "--dry-run"),
    "version": ("--version",),
    "help": ("train-policy", "--help"),
}
HEAVY: dict[str, Sequence[str]] = {
    "score": ("score", "a.png", "b.png", "--judge", "tiny", "--report", "page.html"),
    "generate": ("generate", "--prompt", "red round hero, crown, night", *SET, *SMALL, "--out", "made"),
}
COMMANDS = LIGHT | HEAVY

# --- what surrounds them ---------------------------------------------------------------------------------------

NOWHERE = ("/nonexistent", "/dev/null", "/dev/null/x", "/proc/x", "", " ", "x" * 5000, "a\udcffb", ".", "~", "file:///")
VARIABLES: dict[str, Sequence[str | None]] = {
    "HOME": (None, *NOWHERE),
    "TMPDIR": (None, *NOWHERE),
    "XDG_CACHE_HOME": NOWHERE,
    "HF_HOME": NOWHERE,
    "HF_HUB_CACHE": NOWHERE,
    "TORCH_HOME": NOWHERE,
    "LANG": (None, "C", "POSIX", "xx_YY.garbage", ""),
    "LC_ALL": ("C", "POSIX", "xx_YY.garbage", ""),
    "PYTHONUTF8": ("0",),
    "PYTHONIOENCODING": ("ascii", "latin-1", "ascii:strict"),
    "PYTHONWARNINGS": ("garbage",),
    "TERM": (None, "dumb", "", "garbage", "x" * 5000),
    "COLUMNS": ("0", "1", "-5", "garbage", "99999999", ""),
    "LINES": ("0", "1", "garbage"),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1", "garbage"),
    "OMP_NUM_THREADS": ("garbage", "0", "-1", "100000", "", "1,1"),
    "MKL_NUM_THREADS": ("garbage", "0"),
    "CUDA_VISIBLE_DEVICES": ("garbage", "-1", "99"),
    "RANK": ("garbage", "-1", ""),
    "LOCAL_RANK": ("garbage", "", "99"),
    "WORLD_SIZE": ("garbage", "0", "", "-1"),
    "MASTER_PORT": ("garbage", "-1"),
    "TOKENIZERS_PARALLELISM": ("garbage",),
    "TRANSFORMERS_VERBOSITY": ("garbage",),
    "PACORL_HOSTS": (",,,", "\udcff", "x" * 50_000, "*"),
    "PACORL_API_KEY": ("", " ", "é", "a\udcffb", "x" * 5000),
    "PACORL_UNKNOWN": ("1",),
    "OPENAI_BASE_URL": ("garbage", "http://[::1"),
    "http_proxy": ("garbage://x", "http://127.0.0.1:1", "x" * 5000),
    "HTTPS_PROXY": ("garbage://x", "http://127.0.0.1:1"),
    "ALL_PROXY": ("socks5://127.0.0.1:1", "garbage"),
    "NO_PROXY": ("*", "[::1", ",,,"),
    "SSL_CERT_FILE": NOWHERE,
    "TZ": ("garbage", "x" * 5000),
    "SOURCE_DATE_EPOCH": ("garbage", "-1"),
    "PATH": (None, "", "/nonexistent", "."),
    "PYTHONPATH": ("traps",),
}
"""Variable → what it is set to; None for not at all. Of PYTHONPATH's traps only processes that pacorl starts count."""
ENDS = {
    "full terminal": 'exec "$@" > /dev/full',
    "no terminal": 'exec "$@" >&-',
    "no errors": 'exec "$@" 2>&-',
    "no input": 'exec "$@" <&-',
    "reader gone": 'exec "$@"',
    "few files": 'ulimit -n 40; exec "$@"',
    "folder gone": 'cd gone; rmdir ../gone; exec "$@"',
    **{f"no file beyond {blocks * 512} bytes": f'ulimit -f {blocks}; exec "$@"' for blocks in (0, 1, 8, 40, 200)},
}
"""What the command runs into, and the line of a shell that has it so."""


def prepare(folder: Path) -> None:
    """What the commands read, and a run of the toy world."""
    from toy_world import toy_world

    from pacorl.cli import app

    with contextlib.chdir(folder):
        draw_images()
        with toy_world():
            app(STORIES["train-policy"][0], standalone_mode=False)
    documents.write(folder / "p.jsonl", documents.READERS["p.jsonl"][0])
    (folder / "ranked").mkdir()
    links.prepare_annotations(folder / "ranked")
    (folder / CASE).write_text(json.dumps({"command": "score"}))


def drawn_command(draw: random.Random) -> str:
    return draw.choice(list(draw.choices([LIGHT, HEAVY], [9, 1])[0]))


def set_traps(folder: Path, marks: Path) -> None:
    """A module of every name that Python might look for."""
    folder.mkdir(exist_ok=True)
    for name in (*sys.stdlib_module_names, *THIRD_PARTY):
        text = TRAP.format(marks=str(marks), name=name)
        if name in FOLDERS:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "__init__.py").write_text(text)
        elif name.isidentifier():
            (folder / f"{name}.py").write_text(text)


def mutate_traps(folder: Path, draw: random.Random) -> str:
    """The working folder is full of modules."""
    set_traps(folder, folder / MARKS)
    command = draw.choice(list(COMMANDS))
    (folder / CASE).write_text(json.dumps({"command": command}))
    return f"traps around {command}"


def mutate_variables(folder: Path, draw: random.Random) -> str:
    """One to three variables are missing or odd."""
    names = draw.sample(list(VARIABLES), draw.choice([1, 1, 2, 3]))
    chosen = {name: draw.choice(VARIABLES[name]) for name in names}
    if "PYTHONPATH" in chosen:
        (folder / "traps").mkdir()
        # Python imports it by itself, and goes on as before: the user's own process may.
        (folder / "traps/sitecustomize.py").write_text(TRAP.format(marks=str(folder / MARKS), name="sitecustomize"))
    command = drawn_command(draw)
    (folder / CASE).write_text(json.dumps({"command": command, "variables": chosen}))
    shown = {name: value if value is None or len(value) < 40 else f"{value[:20]}…" for name, value in chosen.items()}
    return f"{command} with {shown}"


def mutate_ends(folder: Path, draw: random.Random) -> str:
    """The disk, the terminal or the folder is full or gone."""
    command, end = drawn_command(draw), draw.choice(list(ENDS))
    (folder / CASE).write_text(json.dumps({"command": command, "end": end}))
    return f"{command} with {end}"


# --- processes -------------------------------------------------------------------------------------------------


def run(folder: Path) -> Any:
    """Runs the command. Raises WrongError for a trap that ran, and for a traceback."""
    case = json.loads((folder / CASE).read_text())
    command, end = case["command"], case.get("end", "")
    process = _started(COMMANDS[command], folder, surroundings(case.get("variables", {})), end)
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise WrongError("slow", f"not ended after {PATIENCE} s") from None
    finally:
        process.kill()
        process.wait()
        _check_marks(folder, process.pid)
    if "Traceback (most recent call last)" in (errors or "") or "Exception ignored" in (errors or ""):
        raise WrongError("traceback", errors[-1500:])
    code = process.returncode
    if end == "no errors" or (end == "reader gone" and code != 0):
        return 0  # there is nobody left to tell
    if code in (1, 2) and output and "pacorl: " not in errors:
        return 0  # a check whose result is no
    print(errors, file=sys.stderr)
    return code


def surroundings(variables: dict[str, str | None]) -> dict[str, str]:
    """The environment of a command."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment.pop("PYTHONPATH", None)
    for name, value in variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _check_marks(folder: Path, own: int) -> None:
    marks = folder / MARKS
    for line in marks.read_text().splitlines() if marks.exists() else ():
        name, process = line.split()
        if name != "sitecustomize" or int(process) != own or not (folder / "traps").exists():
            raise WrongError("wrong", f"{name}.py of the folder ran")


def _started(words: Sequence[str], folder: Path, environment: dict[str, str], end: str) -> subprocess.Popen[str]:
    reader, writer = os.pipe()
    os.close(reader)
    (folder / "gone").mkdir()
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", ENDS.get(end, 'exec "$@"'), "sh", str(CONSOLE), *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writer if end == "reader gone" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    finally:
        os.close(writer)


def targets() -> list[Target]:
    mutators: dict[str, Callable[[Path, random.Random], str]] = {
        "traps": mutate_traps,
        "variables": mutate_variables,
        "ends": mutate_ends,
    }
    return [
        Target(name=f"environment/{name}", prepare=prepare, mutate=mutate, run=run, names=("pacorl",), codes=(1, 2))
        for name, mutate in mutators.items()
    ]
