"""A run's adapter with a model card: what it is, what made it, what it was measured to do. For sharing.

The card says what the run's own files say and nothing else. Nothing leaves this machine unless a repository is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from pacorl.config.base import changed_keys
from pacorl.config.public import find_secret, public
from pacorl.core.metric_names import ALARM, MONITOR, SECONDS
from pacorl.io.documents import blamed_on, dump_yaml, read_jsonl, read_object, read_text, read_yaml, typed
from pacorl.io.files import digest, write_atomic
from pacorl.models.policies import DEFAULT_KIND, POLICIES
from pacorl.report.folder import number, numbers
from pacorl.types import TINY

CARD = "README.md"
PICTURE = "before-after.png"
"""What the quickstart draws into its run's folder."""
FOLDERS = ("adapter", "merged")
"""Folders of a run that are worth sharing, first come first."""
JUDGE_LICENCES = {"Qwen/Qwen2.5-VL-7B-Instruct": ("apache-2.0", "")}
"""Of the bases that the judges' recipes name: an adapter is bound by its base's."""
WHOLE: tuple[str, ...] = ()
REWARD = ("name", "label", "weight")
SHOWN: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("seed", "epochs", "max_steps", "prompts_per_epoch", "group_size", "best_by"), WHOLE),
    **dict.fromkeys(("model", "adapter", "tuning", "sampling", "advantages", "objective", "optimizer", "loss"), WHOLE),
    "prompts": ("train", "evaluation", "evaluation_limit", "leaks"),
    "data": ("train", "evaluation", "evaluation_limit"),
    "evaluation": ("size", "steps", "samples_per_prompt"),
    "rewards": REWARD,
    "judge": ("backend", "checkpoint", "adapter", "model", "symmetric", "variants"),
}
"""The config keys of a card, and of their sections or lists these keys, or all. A list of what to leave out would
forget the next key that holds a password: arguments of rewards, `trainer`."""
TEXT_FILES = (".json", ".md", ".txt", ".jinja")
PUBLISHED = re.compile(
    "|".join(
        (
            rf"{re.escape(CARD)}|{re.escape(PICTURE)}",
            r"adapter_config\.json|adapter_model\.safetensors|pytorch_lora_weights\.safetensors",
            r"(?:generation_)?config\.json|model(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json",
            r"(?:pre|video_pre)?processor_config\.json|chat_template\.(?:jinja|json)|domain\.(?:json|safetensors)",
            r"tokenizer(?:_config)?\.json|tokenizer\.model|vocab\.json|merges\.txt",
            r"(?:special_tokens_map|added_tokens)\.json",
        )
    )
)
"""Names of the files that are uploaded: card, image, adapter, model, processor, a judge's domain, tokenizer."""


class CardRow(BaseModel):
    name: str
    source: str
    values: dict[str, Any]


class CardTable(BaseModel):
    title: str
    columns: list[str]
    rows: list[CardRow]


class BenchmarkSummary(BaseModel):
    """What a card takes of a benchmark's summary.json."""

    tables: list[CardTable] = Field(min_length=1)
    complete: bool
    measured: int
    wanted: int


def write_card(run: Path, *, licence: str = "", benchmarks: Sequence[Path] = ()) -> Path:
    """Write the card into the run's adapter folder; returns the folder.

    licence: an identifier of the hub's; needed if the base is not known. benchmarks: folders of
    `pacorl benchmark`, whose main tables go into the card. Raises ValueError if a file is absent, or if something in
    the card looks like a secret.
    """
    folder = next((run / name for name in FOLDERS if (run / name).is_dir()), None)
    if folder is None:
        raise ValueError(f"{run} has neither adapter/ nor merged/; name the folder of a finished run")
    check_no_link(folder)
    check_replaceable(folder, picture=run / PICTURE)
    config, picture = _config(run), _picture(run)
    shown = _shown_config(config)
    base = str(config.get("model", {}).get("checkpoint") or "")
    is_judge = "data" in config
    is_adapter = folder.name == FOLDERS[0]
    header = _header(base, licence, is_judge=is_judge, is_adapter=is_adapter) | {"pipeline_tag": _task(config)}
    train = config.get("data" if is_judge else "prompts", {}).get("train")
    sources = train if isinstance(train, list) else [train]
    body = [
        f"# {run.resolve().name}",
        f"Made of `{base}` with {'PaCo-Reward' if is_judge else 'PaCo-GRPO'} (arXiv 2512.04784) by pacorl.",
        "Trained on: " + ", ".join(f"`{_name_of(str(source))}`" for source in sources) + ".",
        *([f"![The same prompts and noise before (above) and after (below)]({PICTURE})"] if picture else []),
        *_usage(f"OWNER/{run.resolve().name}", _name_of(base), is_judge=is_judge, is_adapter=is_adapter),
        *_measured(run),
        *(text for benchmark in benchmarks for text in _benchmark(benchmark)),
        "## Config",
        f"```yaml\n{dump_yaml(shown)}```",
    ]
    card = f"---\n{dump_yaml(header)}---\n\n" + "\n\n".join(body) + "\n"
    check_no_secret(card, name=str(run / "config.yaml"))
    _check_names(shown)
    if picture:
        write_atomic(folder / PICTURE, picture)
    write_atomic(folder / CARD, sealed(card))
    return folder


def sealed(card: str) -> str:
    """A card with the hash of its text in a comment at its end, by which an edited one is known."""
    return f"{card}\n<!-- pacorl publish {hashlib.sha256(card.encode()).hexdigest()} -->\n"


def check_replaceable(folder: Path, *, picture: Path) -> None:
    """Raise ValueError if a folder has a card or a picture that `write_card` did not write."""
    card = folder / CARD
    if card.exists():
        text = read_text(card)
        if sealed(text.rpartition("\n<!-- pacorl publish ")[0]) != text:
            raise ValueError(f"{card} is not as this command wrote it, and is not replaced; move it away")
    elif picture.is_file() and (folder / PICTURE).exists() and digest(folder / PICTURE) != digest(picture):
        raise ValueError(f"{folder / PICTURE} is not the run's, and is not replaced; move it away")


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder to the hub as the user who is logged in there; returns the address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no {CARD}; write the card first")
    paths = published_files(folder)
    for path in paths:
        if path.suffix in TEXT_FILES:
            check_no_secret(read_text(path), name=str(path))
    api = HfApi()
    address = api.create_repo(repository, private=private, exist_ok=True)
    additions = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in paths]
    api.create_commit(repository, additions, commit_message="Upload with pacorl")
    return str(address)


def published_files(folder: Path) -> list[Path]:
    """List the files of a folder that are uploaded: those of PUBLISHED, and nothing in folders within.

    Raises:
        ValueError: the folder or one of the files is a link, whose target may be any file of the user.
    """
    check_no_link(folder)
    paths = [path for path in sorted(folder.iterdir()) if PUBLISHED.fullmatch(path.name)]
    for path in paths:
        check_no_link(path)
    return [path for path in paths if path.is_file()]


def check_no_link(path: Path) -> None:
    """Raise ValueError if a path is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and links are not published; copy what it points to")


def _config(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    try:
        document = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{run} is no run's folder: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: a config is a mapping of keys, this is a {type(document).__name__}")
    for key in ("model", "data", "prompts"):
        if not isinstance(document.get(key, {}), dict):
            raise ValueError(f"{path}: {key} is a section, this is a {type(document[key]).__name__}")
    return document


def _header(base: str, licence: str, *, is_judge: bool, is_adapter: bool) -> dict[str, Any]:
    """The card's front matter, in the hub's keys."""
    generators = {spec.published: spec.licence for spec in POLICIES.values()}
    base_licence, licence_name = (generators | JUDGE_LICENCES).get(base, ("", ""))
    if not (licence or base_licence):
        raise ValueError(f"the licence of {base or 'the base'} is not known here; name one, e.g. --licence apache-2.0")
    header: dict[str, Any] = {"license": licence or base_licence}
    if licence_name and not licence:
        header["license_name"] = licence_name
    if base not in ("", "tiny"):  # the hub links the base, and has none of this name
        header["base_model"] = base
    header["library_name"] = ("peft" if is_judge else "diffusers") if is_adapter else "transformers"
    return header | {"tags": ["pacorl", "lora" if is_adapter else "merged", "judge" if is_judge else "paco-grpo"]}


def _task(config: Mapping[str, Any]) -> str:
    """What the hub calls the model's task."""
    if "data" in config:
        return "image-text-to-text"
    kind = str(config.get("model", {}).get("kind") or DEFAULT_KIND)
    return "image-to-image" if kind in POLICIES and not POLICIES[kind].sets else "text-to-image"


def _picture(run: Path) -> bytes:
    """Read the run's comparison; empty if it made none."""
    check_no_link(run / PICTURE)
    return (run / PICTURE).read_bytes() if (run / PICTURE).is_file() else b""


def _usage(name: str, base: str, *, is_judge: bool, is_adapter: bool) -> Iterator[str]:
    """How to load it, with this project and, for a generator's adapter, with diffusers."""
    yield "## Use"
    if is_judge:
        source = f"{base} --adapter {name}" if is_adapter else name
        yield f"```bash\npacorl score a.png b.png --judge {source}\n```"
        return
    yield f"```bash\npacorl generate --prompt TEXT --model {base} --adapter {name}\n```"
    if base != TINY:
        yield "\n".join(
            [
                "```python",
                "import torch",
                "from diffusers import DiffusionPipeline",
                "",
                f'pipeline = DiffusionPipeline.from_pretrained("{base}", dtype=torch.bfloat16)',
                f'pipeline.load_lora_weights("{name}")',
                "```",
            ]
        )


def _name_of(source: str) -> str:
    """A source without the folders and the network of the machine that it lay on."""
    if "://" in source:
        check_no_secret(source, name="the config")  # who put one there should know, though it is not shown
        return "(an address)"
    return Path(source).name if Path(source).is_absolute() or source.startswith("~") else source


def _measured(run: Path) -> Iterator[str]:
    """The summary's figures, else the last evaluation of the log."""
    path, log = run / "summary.json", run / "metrics.jsonl"
    summary = read_object(path) if path.is_file() else {}
    sides = ("before", "after", "difference")
    with blamed_on(path):
        figures = {side: typed(summary.get(side) or {}, dict[str, Any]) for side in sides}
    rows = [(name, *(_figure(figures[side].get(name)) for side in sides)) for name in figures["after"]]
    heads: tuple[str, ...] = ("", *sides)
    if not rows:
        lines = read_jsonl(log) if log.is_file() else []
        newest = numbers(next((line for line in reversed(lines) if line.get("kind") == "evaluation"), {}))
        # How long it took and what the monitor saw is about the run; a card is about the adapter.
        apart = ("epoch", "step", SECONDS, MONITOR, ALARM)
        heads = ("last evaluation", "")
        rows = [(name, _figure(value)) for name, value in newest.items() if not name.startswith(apart)]
    if rows:
        yield "## Measured"
        yield _table(heads, rows)


def _figure(value: Any) -> str:
    """`0.512 [0.480, 0.544]`; – if there is nothing."""
    interval = value if isinstance(value, Mapping) else {"mean": value}
    mean, low, high = (number(interval.get(name)) for name in ("mean", "low", "high"))
    if mean is None:
        return "–"
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def _benchmark(folder: Path) -> Iterator[str]:
    """The measured rows of a benchmark's main table."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; name a folder of `pacorl benchmark`")
    with blamed_on(path):
        summary = typed(read_object(path), BenchmarkSummary)
    table = summary.tables[0]
    # The paper's rows are not this adapter's.
    measured = [row for row in table.rows if row.source == "measured"]
    yield f"## {table.title}"
    yield _table(("", *table.columns), [(row.name, *map(_figure, row.values.values())) for row in measured])
    if not summary.complete:
        yield f"Over {summary.measured} of {summary.wanted} items."


def _shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select a config's keys of SHOWN, without the folders of a machine."""
    return {key: _shown(value, SHOWN[key]) for key, value in config.items() if key in SHOWN}


def _check_names(shown: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting has the name of a key; a card could mask it, but the user should know."""
    if masked := changed_keys(shown, public(shown)):
        name = next(iter(masked)).rpartition(".")[2]
        raise ValueError(f"the config's {name} looks like a secret; take it out before you publish the run")


def _shown(value: Any, keys: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _shown(inner, WHOLE) for key, inner in value.items() if not keys or key in keys}
    if isinstance(value, list):
        return [_shown(item, keys) for item in value]
    return _name_of(value) if isinstance(value, str) else value


def check_no_secret(text: str, *, name: str) -> None:
    """Raise ValueError if a text holds what looks like a key or a password; the message shows its beginning only."""
    if match := find_secret(text):
        line = text.count("\n", 0, match.start()) + 1
        raise ValueError(
            f"{name}: {match[0][:6]}… (line {line} of what would be published) looks like a secret; take it out, and "
            "make a new key if others could have read it"
        )
