"""A run's adapter with a model card for sharing: its base, its training and its measurements.

The card's text comes from the run's own files only. No file leaves this machine unless a repository is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from pacorl.config.base import changed_keys
from pacorl.config.public import find_secret, public
from pacorl.core.metric_names import ALARM, MONITOR, SECONDS
from pacorl.io.documents import JsonObject, blamed_on, dump_yaml, read_jsonl, read_object, read_text, read_yaml, typed
from pacorl.io.files import digest, text_digest, write_atomic
from pacorl.models.policies import DEFAULT_KIND, POLICIES
from pacorl.report.folder import number, numbers
from pacorl.types import TINY

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

CARD = "README.md"
PICTURE = "before-after.png"
"""Comparison image that the quickstart draws into its run's folder."""
FOLDERS = ("adapter", "merged")
"""A run's folders to publish, the first existing."""
JUDGE_LICENCES = dict.fromkeys(("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.5-9B"), ("apache-2.0", ""))
"""Of the bases that the judges' recipes name: an adapter is bound by its base's."""
WHOLE: tuple[str, ...] = ()
REWARD = ("name", "label", "weight")
SHOWN: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("seed", "epochs", "prompts_per_epoch", "group_size"), WHOLE),
    **dict.fromkeys(("model", "adapter", "tuning", "sampling", "advantages", "objective", "optimizer", "loss"), WHOLE),
    "prompts": ("train", "evaluation", "evaluation_limit", "leaks"),
    "data": ("train", "evaluation", "evaluation_limit"),
    **dict.fromkeys(("steps", "size", "fit", "trigger", "held_out", "patience"), WHOLE),
    "evaluation": ("size", "steps", "samples_per_prompt"),
    "rewards": REWARD,
    "judge": ("checkpoint", "adapter", "model", "symmetric", "variants"),
}
"""Config keys of a card → the keys of their sections or lists, or WHOLE. A list of keys to leave out would forget the
next key that holds a password: arguments of rewards, `trainer`."""
TEXT_FILES = (".json", ".md", ".txt", ".jinja")
PUBLISHED = re.compile(
    "|".join(
        (
            rf"{re.escape(CARD)}|{re.escape(PICTURE)}",
            r"adapter_config\.json|adapter_model\.safetensors|pytorch_lora_weights\.safetensors",
            r"(?:generation_)?config\.json|model(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json",
            r"(?:pre|video_pre)?processor_config\.json|chat_template\.(?:jinja|json)",
            r"tokenizer(?:_config)?\.json|tokenizer\.model|vocab\.json|merges\.txt",
            r"(?:special_tokens_map|added_tokens|decision)\.json",
        )
    )
)
"""Names of the files that are uploaded: card, image, adapter, model, processor, tokenizer, decisions."""


class CardRow(BaseModel):
    name: str
    source: str
    values: JsonObject


class CardTable(BaseModel):
    title: str
    columns: list[str]
    rows: list[CardRow]


class BenchmarkSummary(BaseModel):
    """Keys of a benchmark's summary.json for a card."""

    tables: list[CardTable] = Field(min_length=1)
    complete: bool
    measured: int
    wanted: int


def write_card(run: Path, *, licence: str = "", benchmarks: Sequence[Path] = ()) -> Path:
    """Write the card into the adapter folder of a run; return the folder.

    licence: an identifier of the hub's; needed if the base is not known. benchmarks: folders of
    `pacorl benchmark`, whose main tables go into the card. Raises ValueError if a file is absent, or if something in
    the card looks like a secret.
    """
    from huggingface_hub import ModelCard

    folder = next((run / name for name in FOLDERS if (run / name).is_dir()), None)
    if folder is None:
        raise ValueError(f"{run} has neither adapter/ nor merged/; name the folder of a finished run")
    check_no_link(folder)  # a card written through a link would replace any file of the user
    check_replaceable(folder, picture=run / PICTURE)

    # The front matter.
    config = _config(run)
    base = str(config.get("model", {}).get("checkpoint") or "")
    is_judge = "data" in config
    is_adapter = folder.name != "merged"
    tag = "judge" if is_judge else "character" if "character" in config else "paco-grpo"
    header = _header(base, licence, is_judge=is_judge, is_adapter=is_adapter, tag=tag, task=_task(config))

    # The text.
    check_no_link(run / PICTURE)
    picture = (run / PICTURE).read_bytes() if (run / PICTURE).is_file() else b""
    shown = {}
    for key, value in config.items():
        if key in SHOWN:
            shown[key] = _shown(value, SHOWN[key])

    method, trained_on = _training(config)
    body = [
        f"# {run.resolve().name}",
        f"Made of `{base}` with {method} by pacorl.",
        f"Trained on: {trained_on}.",
        *([f"![The same prompts and noise before (above) and after (below)]({PICTURE})"] if picture else []),
        *_usage(
            f"OWNER/{run.resolve().name}",
            _name_of(base),
            is_judge=is_judge,
            is_adapter=is_adapter,
        ),
        *_measured(run),
    ]
    for benchmark in benchmarks:
        body += _benchmark(benchmark)
    body += ["## Config", f"```yaml\n{dump_yaml(shown)}```"]
    card = str(ModelCard(f"---\n{header}\n---\n\n" + "\n\n".join(body) + "\n"))

    # No secrets. `public` masks values under a password's key; the user has to learn of it before publishing.
    check_no_secret(card, name=str(run / "config.yaml"))
    masked = changed_keys(shown, public(shown))
    if masked:
        name = next(iter(masked)).rpartition(".")[2]
        raise ValueError(f"the config's {name} looks like a secret; take it out before you publish the run")

    # Written last, when every check has passed.
    if picture:
        write_atomic(folder / PICTURE, picture)
    write_atomic(folder / CARD, sealed(card))
    return folder


def sealed(card: str) -> str:
    """Append the hash of a card's text in a comment, so that an edit is detected."""
    return f"{card}\n<!-- pacorl publish {text_digest(card)} -->\n"


def check_replaceable(folder: Path, *, picture: Path) -> None:
    """Raise ValueError if the folder's card or picture was not written by `write_card`."""
    card = folder / CARD
    if card.exists():
        text = read_text(card)
        if sealed(text.rpartition("\n<!-- pacorl publish ")[0]) != text:
            raise ValueError(f"{card} is not as this command wrote it, and is not replaced; move it away")
    elif picture.is_file() and (folder / PICTURE).exists() and digest(folder / PICTURE) != digest(picture):
        raise ValueError(f"{folder / PICTURE} is not the run's, and is not replaced; move it away")


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder to the hub as the user who is logged in there; return the address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no {CARD}; write the card first")
    # Every text is searched for secrets before the first byte leaves this machine.
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
    """List a folder's files to upload: names in PUBLISHED, without subfolders.

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
        raise ValueError(f"{path} is a link, and links are not published; copy its target")


def _config(run: Path) -> JsonObject:
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


def _header(base: str, licence: str, *, is_judge: bool, is_adapter: bool, tag: str, task: str) -> ModelCardData:
    """Build the front matter of the card, with the keys of the hub."""
    from huggingface_hub import ModelCardData

    # The base decides the licence: an adapter is bound by it.
    generators = {spec.published: spec.licence for spec in POLICIES.values()}
    base_licence, licence_name = (generators | JUDGE_LICENCES).get(base, ("", ""))
    if not (licence or base_licence):
        raise ValueError(f"the licence of {base or 'the base'} is not known here; name one, e.g. --licence apache-2.0")
    adapter_library = "peft" if is_judge else "diffusers"
    return ModelCardData(
        license=licence or base_licence,
        license_name=None if licence else licence_name or None,
        base_model=None if base in ("", TINY) else base,  # the hub links the base, and has none of this name
        library_name=adapter_library if is_adapter else "transformers",
        tags=["pacorl", "lora" if is_adapter else "merged", tag],
        pipeline_tag=task,
    )


def _training(config: JsonObject) -> tuple[str, str]:
    """Describe the method of a run and its data."""
    if "character" in config:
        return "flow matching on images of a character", f"the images of `{Path(config['character']).name}`"
    method, section = ("PaCo-Reward", "data") if "data" in config else ("PaCo-GRPO", "prompts")
    train = config.get(section, {}).get("train")
    sources = train if isinstance(train, list) else [train]
    return f"{method} (arXiv 2512.04784)", ", ".join(f"`{_name_of(str(source))}`" for source in sources)


def _task(config: JsonObject) -> str:
    """Return the hub's name of the model's task."""
    if "data" in config:
        return "image-text-to-text"
    kind = str(config.get("model", {}).get("kind") or DEFAULT_KIND)
    if kind in POLICIES and not POLICIES[kind].sets:
        return "image-to-image"
    return "text-to-image"


def _usage(name: str, base: str, *, is_judge: bool, is_adapter: bool) -> Iterator[str]:
    """Show how to load it, with this project and, for a generator's adapter, with diffusers."""
    yield "## Use"
    # A judge is asked through this project, a generator may be loaded by diffusers too.
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
    """Remove this machine's folders and network addresses from a source."""
    if "://" in source:
        check_no_secret(source, name="the config")  # not shown, but its owner should learn of it
        return "(an address)"
    if Path(source).is_absolute() or source.startswith("~"):
        return Path(source).name
    return source


def _measured(run: Path) -> Iterator[str]:
    """Tabulate the summary's figures, else the last evaluation of the log."""
    # The quickstart's summary has both sides and their difference.
    path = run / "summary.json"
    summary = read_object(path) if path.is_file() else {}
    sides = ("before", "after", "difference")
    with blamed_on(path):
        figures = [typed(summary.get(side) or {}, JsonObject) for side in sides]
    rows = []
    for name in figures[1]:
        rows.append([name, *(_figure(side.get(name)) for side in figures)])
    heads = ["", *sides]

    if not rows:
        log = run / "metrics.jsonl"
        lines = read_jsonl(log) if log.is_file() else []
        newest = numbers(next((line for line in reversed(lines) if line.get("kind") == "evaluation"), {}))
        # Times and the monitor's signs are about the run; a card is about the adapter.
        apart = ("epoch", "step", SECONDS, MONITOR, ALARM)
        heads = ["last evaluation", ""]
        rows = [[name, _figure(value)] for name, value in newest.items() if not name.startswith(apart)]

    if rows:
        yield "## Measured"
        yield _table(heads, rows)


def _figure(value: Any) -> str:
    """`0.512 [0.480, 0.544]`; – for a missing mean."""
    interval = value if isinstance(value, Mapping) else {"mean": value}
    mean = number(interval.get("mean"))
    low = number(interval.get("low"))
    high = number(interval.get("high"))
    if mean is None:
        return "–"
    if low is None or high is None:
        return f"{mean:.3f}"
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *rows])


def _benchmark(folder: Path) -> Iterator[str]:
    """Tabulate the measured rows of a benchmark's main table."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; name a folder of `pacorl benchmark`")
    with blamed_on(path):
        summary = typed(read_object(path), BenchmarkSummary)
    table = summary.tables[0]
    rows = []
    for row in table.rows:
        if row.source == "measured":  # the paper's rows are not this adapter's
            rows.append([row.name, *(_figure(value) for value in row.values.values())])
    yield f"## {table.title}"
    yield _table(["", *table.columns], rows)
    if not summary.complete:
        yield f"Over {summary.measured} of {summary.wanted} items."


def _shown(value: Any, keys: Sequence[str]) -> Any:
    """Select a setting's `keys`, without the folders of this machine."""
    if isinstance(value, Mapping):
        return {key: _shown(inner, WHOLE) for key, inner in value.items() if not keys or key in keys}
    if isinstance(value, list):
        return [_shown(item, keys) for item in value]
    if isinstance(value, str):
        return _name_of(value)
    return value


def check_no_secret(text: str, *, name: str) -> None:
    """Raise ValueError if a text seems to hold a key or a password; the message shows its beginning only."""
    match = find_secret(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        raise ValueError(
            f"{name}: {match[0][:6]}… (line {line} of the text to publish) looks like a secret; take it out, and "
            "make a new key if anyone else could have read it"
        )
