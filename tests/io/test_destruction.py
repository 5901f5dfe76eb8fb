"""Every place of the package that deletes, replaces or creates files is listed here, with the reason why it may.

`pacorl.io.files` has what others need: `write_atomic` and `replacing` write whole files under random names,
`open_regular` never follows a link, `remove_made` deletes a folder's own files alone, `claim_folder`, `check_made`,
`check_new` and `check_no_run` refuse what a command did not make.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pacorl

SOURCE = Path(pacorl.__file__).parent
ROOT = SOURCE.parents[1]

METHODS = {"unlink", "rmdir", "rename", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "truncate"}
"""Names of methods that delete, replace or create files, whatever their object."""
FUNCTIONS = {
    "shutil": {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"},
    "os": {"open", "remove", "unlink", "rename", "replace", "rmdir", "removedirs", "link", "symlink", "truncate"},
    "sqlite3": {"connect"},
    "torch": {"save"},
}
SAVERS = {"save_file", "save_pretrained", "save_model", "save_checkpoint", "ParquetWriter", "SummaryWriter"}
"""Functions of libraries that write files."""
DOWNLOADS = {"snapshot_download", "hf_hub_download"}
"""Functions that write into a given `local_dir`; without one they fill the hub's cache."""
OPENERS = {"open", "ZipFile"}
"""Functions and methods that write files if their mode has a letter of WRITING."""
WRITING = set("wax+")

TO_MEMORY, ASIDE = "writes into memory", "writes a file or folder that this very block has made"
ALLOWED = {
    ("io/files.py", "read_bytes"): (["os.open"], "reads"),
    ("io/files.py", "flush_to_disk"): (["os.open"], "reads"),
    ("io/files.py", "open_regular"): (["os.open"], "the one opening of existing names for writing: follows no link"),
    ("io/files.py", "write_atomic"): (["write_bytes"], ASIDE),
    ("io/files.py", "replacing"): (["Path.replace", "unlink"], "a file of a random name takes the real one"),
    ("io/files.py", "open_aside"): (["shutil.rmtree"], "a hidden folder of an exact name, made by a killed run"),
    ("io/files.py", "remove_made"): (["rename", "rmdir", "unlink"], "the one deletion of folders: given names alone"),
    ("io/files.py", "sweep"): (["unlink"], "half-written files of this machine's dead processes, by their exact form"),
    ("io/files.py", "sole_holder"): (["open", "truncate"], "a regular file that contains a lock's note or nothing"),
    ("io/documents.py", "append_jsonl"): (["open"], "appends, by a descriptor of `open_regular`"),
    ("cli/__init__.py", "main"): (["open"], "/dev/null"),
    ("cli/shared.py", "begin_report"): (["unlink"], "an earlier page of pacorl's own, which `check_made` has read"),
    ("grpo/checkpoint.py", "publish"): (["shutil.copy2", "shutil.rmtree"], ASIDE),
    ("grpo/checkpoint.py", "put_in_place"): (["rename", "rename"], "the folder aside takes the name"),
    ("grpo/checkpoint.py", "write_checkpoint"): (["save_file", "shutil.rmtree"], ASIDE),
    ("grpo/checkpoint.py", "recover"): (["rename", "shutil.rmtree"], "hidden folders of exact names"),
    ("grpo/checkpoint.py", "prune"): (["rename"], "a checkpoint, before `remove_made` deletes its files"),
    ("character_training/character_trainer.py", "CharacterTrainer._open_records"): (
        ["truncate"],
        "lines of the log, by `write_atomic`",
    ),
    ("grpo/run.py", "Run._build_records"): (["truncate"], "lines of the log, by `write_atomic`"),
    ("judge_training/judge_trainer.py", "JudgeTrainer._save"): (
        ["Path.replace", "save_model", "shutil.rmtree"],
        "a hidden folder of an exact name, whose files take their names one by one",
    ),
    ("judge_training/tuning.py", "merge_and_save"): (["save_pretrained"], "merged/ of the run's own folder"),
    ("judge_training/tuning.py", "save_processor"): (["save_pretrained"], "model/ or merged/ of the run's own folder"),
    ("models/lora.py", "write_lora"): (["save_file", "save_file"], ASIDE),
    ("grpo/conditioning.py", "ConditioningFiles._add.write"): (["save_file"], ASIDE),
    ("runtime/logbook.py", "TensorBoard.__init__"): (["SummaryWriter"], "event files have names of their own"),
    ("dataset/export.py", "link_or_copy"): (["os.link", "unlink"], "an image in a folder that `claim_folder` checked"),
    ("dataset/export.py", "_remove_earlier"): (["unlink"], "files with the content that the last export wrote"),
    ("dataset/export.py", "write_parquet"): (["ParquetWriter"], ASIDE),
    ("dataset/published.py", "PublishedData.download"): (
        ["rename", "snapshot_download", "unlink"],
        "its own hidden folder, and a file in it",
    ),
    ("cli/check.py", "calibrate"): (["Image.save"], "the package's own `Calibration.save`, by `write_atomic`"),
    ("dataset/folder.py", "connect"): (["sqlite3.connect"], "a database that is there; `Store` makes it"),
    ("studio/history.py", "History.add"): (["ZipFile"], ASIDE),
    ("studio/history.py", "History._remove"): (["unlink"], "a set that the history lists"),
    ("studio/history.py", "History.export"): (["ZipFile"], TO_MEMORY),
    ("studio/trainer_process.py", "TrainerProcess.launch"): (["open"], "a log, by a descriptor of `open_regular`"),
    ("studio/model_choice.py", "Downloads.start"): (["open"], "a log, by a descriptor of `open_regular`"),
    ("studio/server.py", "save_character"): (["Image.save"], "the package's own `Characters.save`, by `write_atomic`"),
    ("studio/server.py", "write_captions.work"): (["Image.save"], "the package's own `Characters.save`, likewise"),
    ("cli/generate.py", "_deliver"): (["Image.save"], "the package's own `files.save`, by `write_atomic`"),
    ("generate/generated_images.py", "save_pdf"): (["Image.save"], ASIDE),
    ("io/images.py", "png_bytes"): (["Image.save"], TO_MEMORY),
    ("judge/http/messages.py", "encode"): (["Image.save"], TO_MEMORY),
    ("report/figures.py", "_base64"): (["Image.save"], TO_MEMORY),
}
"""(Module, function) → its calls, and why they may be there."""
MEND = "delete, replace or create files by pacorl.io.files, or give the call and its reason in ALLOWED of this test"


def kind_of(call: ast.Call) -> str:
    """What a call that may delete, replace or create files is called in ALLOWED; empty for all other calls."""
    function, arguments = call.func, [*call.args, *call.keywords]
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    of = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in FUNCTIONS.get(of, ()):
        return f"{of}.{name}"
    if name in SAVERS or (of and name in METHODS):
        return name
    if name in OPENERS and is_writing(call):
        return name
    if name in DOWNLOADS and any(keyword.arg == "local_dir" for keyword in call.keywords):
        return name
    # Texts have a `replace` of two arguments, and dataclasses one of names.
    if of and name == "replace" and len(arguments) == 1 and call.args:
        return "Path.replace"
    return "Image.save" if of not in ("", "self") and name == "save" and arguments else ""


def is_writing(call: ast.Call) -> bool:
    """Whether the mode of an `open` or ZipFile writes."""
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    mode = named.get("mode", next(iter(call.args[0 if is_method else 1 :]), None))
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool(WRITING & set(mode.value))


def calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, str, int]]:
    """(Function with its class, kind, line) of every call that may delete, replace or create files."""
    for node in ast.iter_child_nodes(tree):
        inner = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and (kind := kind_of(node)):
            yield function, kind, node.lineno
        yield from calls(node, inner)


def faults_of(module: str, source: str) -> list[str]:
    """A line for each call that is not allowed, and for each that is and is not there."""
    found = Counter[tuple[str, str]]()
    lines: dict[tuple[str, str], int] = {}
    for function, kind, line in calls(ast.parse(source)):
        found[function, kind] += 1
        lines[function, kind] = line
    allowed = Counter(
        (function, kind) for (name, function), (kinds, _) in ALLOWED.items() if name == module for kind in kinds
    )
    faults = [
        f"{module}:{lines[site]}: {site[1]} in {site[0] or 'the module'}(): {MEND}" for site in sorted(found - allowed)
    ]
    return faults + [
        f"{module}: no {kind} in {function}() any more: drop it from ALLOWED"
        for function, kind in sorted(allowed - found)
    ]


def modules() -> dict[str, Path]:
    """Every module of the package by its path there, and of integrations/ by that in the repository."""
    package = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    others = (ROOT / "integrations").rglob("*.py")
    return package | {path.relative_to(ROOT).as_posix(): path for path in others}


@pytest.mark.slow
def test_files_are_deleted_and_replaced_where_it_is_known_whose_they_are() -> None:
    faults = [fault for name, path in modules().items() for fault in faults_of(name, path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)


def test_the_list_names_modules_that_are_there() -> None:
    assert {module for module, _ in ALLOWED} <= modules().keys()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("shutil.rmtree(out)", "shutil.rmtree"),
        ("path.unlink(missing_ok=True)", "unlink"),
        ("(out / name).write_text(text)", "write_text"),
        ("aside.replace(path)", "Path.replace"),
        ("path.open('wb')", "open"),
        ("path.open(mode='a')", "open"),
        ("open(path, 'w+')", "open"),
        ("zipfile.ZipFile(path, 'w')", "ZipFile"),
        ("image.save(path, quality=90)", "Image.save"),
        ("model.save_pretrained(out)", "save_pretrained"),
        ("os.open(path, flags)", "os.open"),
        ("save_file(tensors, path)", "save_file"),
        ("torch.save(tensors, path)", "torch.save"),
        ("snapshot_download(source, local_dir=out)", "snapshot_download"),
    ],
)
def test_a_new_call_is_named_with_its_line_and_the_fix(code: str, kind: str) -> None:
    (fault,) = faults_of("plan/plan.py", f"class Plan:\n    def clear(self):\n        return {code}\n")
    assert fault == f"plan/plan.py:3: {kind} in Plan.clear(): {MEND}"


def test_a_second_call_in_a_listed_function_is_one_too_many() -> None:
    source = "def calibrate(image):\n    image.save()\n    image.save()\n"
    assert len(faults_of("cli/check.py", source)) == 1
    assert faults_of("cli/check.py", "") == [
        "cli/check.py: no Image.save in calibrate() any more: drop it from ALLOWED"
    ]


@pytest.mark.parametrize(
    "code",
    [
        "text.replace('a', 'b')",
        "replace(plan, seed=1)",
        "path.open()",
        "Image.open(path)",
        "self.save()",
        "f.save()",
        "snapshot_download(x)",
    ],
)
def test_reading_and_texts_are_free(code: str) -> None:
    assert not list(calls(ast.parse(code)))
