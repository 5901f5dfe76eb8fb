"""A run's adapter with a model card: what it is, what made it, what it was measured to do. For sharing.

The card says what the run's own files say and nothing else. Nothing leaves this machine unless a repository is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pacorl.core.metric_names import ALARM, MONITOR, SECONDS, current_name
from pacorl.io.documents import dump_yaml, read_jsonl, read_object, read_yaml
from pacorl.io.files import write_atomic
from pacorl.policies import POLICIES
from pacorl.report.folder import numbers

CARD = "README.md"
FOLDERS = ("adapter", "merged")
"""Folders of a run that are worth sharing, first come first."""
JUDGE_LICENCES = {"Qwen/Qwen2.5-VL-7B-Instruct": ("apache-2.0", "")}
"""Of the bases that the judges' recipes name: an adapter is bound by its base's."""
PRIVATE = ("out", "api_key_env", "key_env")
"""Config keys that are about a machine, and not about a model."""


def write_card(run: Path, *, licence: str = "", benchmarks: Sequence[Path] = ()) -> Path:
    """Write the card into the run's adapter folder; returns the folder.

    licence: an identifier of the hub's; needed if the base is not known. benchmarks: folders of
    `pacorl benchmark`, whose main tables go into the card. Raises ValueError if a file is absent.
    """
    folder = next((run / name for name in FOLDERS if (run / name).is_dir()), None)
    if folder is None:
        raise ValueError(f"{run} has neither adapter/ nor merged/; name the folder of a finished run")
    config = _config(run)
    base = str((config.get("model") or {}).get("checkpoint") or "")
    is_judge = "data" in config
    header = _header(base, licence, is_judge=is_judge, is_adapter=folder.name == FOLDERS[0])
    train = (config.get("data" if is_judge else "prompts") or {}).get("train")
    sources = train if isinstance(train, list) else [train]
    body = [
        f"# {run.resolve().name}",
        f"Made of `{base}` with {'PaCo-Reward' if is_judge else 'PaCo-GRPO'} (arXiv 2512.04784) by pacorl.",
        "Trained on: " + ", ".join(f"`{_name_of(str(source))}`" for source in sources) + ".",
        *_measured(run),
        *(text for benchmark in benchmarks for text in _benchmark(benchmark)),
        "## Config",
        f"```yaml\n{dump_yaml(_public(config))}```",
    ]
    write_atomic(folder / CARD, f"---\n{dump_yaml(header)}---\n\n" + "\n\n".join(body) + "\n")
    return folder


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder to the hub as the user who is logged in there; returns the address."""
    from huggingface_hub import HfApi

    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no {CARD}; write the card first")
    api = HfApi()
    address = api.create_repo(repository, private=private, exist_ok=True)
    # Hidden files are locks and half-written ones.
    api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=[".*"])
    return str(address)


def _config(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    try:
        document = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{run} is no run's folder: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: a config is a mapping of keys, this is a {type(document).__name__}")
    return document


def _header(base: str, licence: str, *, is_judge: bool, is_adapter: bool) -> dict[str, Any]:
    """The card's front matter, in the hub's keys."""
    generators = {spec.published: spec.licence for spec in POLICIES.values()}
    base_licence, licence_name = (generators | JUDGE_LICENCES).get(base, ("", ""))
    if not (licence or base_licence):
        raise ValueError(f"the licence of {base or 'the base'} is not known here; name one with --licence")
    header: dict[str, Any] = {"license": licence or base_licence}
    if licence_name and not licence:
        header["license_name"] = licence_name
    if base not in ("", "tiny"):  # the hub links the base, and has none of this name
        header["base_model"] = base
    header["library_name"] = ("peft" if is_judge else "diffusers") if is_adapter else "transformers"
    return header | {"tags": ["pacorl", "lora" if is_adapter else "merged", "judge" if is_judge else "paco-grpo"]}


def _name_of(source: str) -> str:
    """A source without the folders of the machine that it lay on."""
    return Path(source).name if Path(source).is_absolute() else source


def _measured(run: Path) -> Iterator[str]:
    """The summary's figures, else the last evaluation of the log."""
    path, log = run / "summary.json", run / "metrics.jsonl"
    summary = read_object(path) if path.is_file() else {}
    sides = ("before", "after", "difference")
    rows = [
        (name, *(_figure(summary.get(side, {}).get(name)) for side in sides)) for name in summary.get("after") or {}
    ]
    heads: tuple[str, ...] = ("", *sides)
    if not rows:
        lines = read_jsonl(log) if log.is_file() else []
        newest = numbers(next((line for line in reversed(lines) if line.get("kind") == "evaluation"), {}))
        # How long it took and what the monitor saw is about the run; a card is about the adapter.
        apart = ("epoch", "step", SECONDS, MONITOR, ALARM)
        heads = ("last evaluation", "")
        rows = [(name, _figure(value)) for name, value in newest.items() if not current_name(name).startswith(apart)]
    if rows:
        yield "## Measured"
        yield _table(heads, rows)


def _figure(value: Any) -> str:
    """`0.512 [0.480, 0.544]`; – if there is nothing."""
    interval = value if isinstance(value, Mapping) else {"mean": value}
    if not isinstance(interval.get("mean"), int | float):
        return "–"
    low, high = interval.get("low"), interval.get("high")
    return f"{interval['mean']:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def _benchmark(folder: Path) -> Iterator[str]:
    """The measured rows of a benchmark's main table."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; name a folder of `pacorl benchmark`")
    document = read_object(path)
    table = document["tables"][0]
    # The paper's rows are not this adapter's.
    measured = [row for row in table["rows"] if row["source"] == "measured"]
    yield f"## {table['title']}"
    yield _table(("", *table["columns"]), [(row["name"], *map(_figure, row["values"].values())) for row in measured])
    if not document["complete"]:
        yield f"Over {document['measured']} of {document['wanted']} items."


def _public(value: Any) -> Any:
    """A config without what is about a machine: its folders, and the names of its keys."""
    if isinstance(value, Mapping):
        return {key: _public(inner) for key, inner in value.items() if key not in PRIVATE}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return _name_of(value) if isinstance(value, str) else value
