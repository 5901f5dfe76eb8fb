"""A run's adapter with a model card for sharing: its base, its training and its measurements.

The card's text comes from the run's own files only. No file leaves this machine unless a repository is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pacorl.config.public import find_secret
from pacorl.io.documents import JsonObject, blamed_on, read_text, read_yaml, typed
from pacorl.io.files import write_atomic
from pacorl.models.policies import DEFAULT_KIND, POLICIES
from pacorl.report.figures import interval_text
from pacorl.report.folder import read_run
from pacorl.report.results import rows_of
from pacorl.types import TINY

CARD = "README.md"
FOLDERS = ("adapter", "merged")
"""A run's folders to publish, the first existing."""
JUDGE_LICENCES = dict.fromkeys(("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.5-9B"), ("apache-2.0", ""))
"""Of the bases that the judges' recipes name: an adapter is bound by its base's."""
TEXT_FILES = (".json", ".md", ".txt", ".jinja")
PUBLISHED = (
    *(CARD, "adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"),
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    *("model.safetensors.index.json", "*processor_config.json", "chat_template.*"),
    *(
        "decision*.json",
        "decision*.jinja",
        "tokenizer.*",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
    ),
    "added_tokens.json",
)
"""Patterns of the files that are uploaded: card, adapter, model, processor, tokenizer."""
TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

Made of `{{ base }}` with {{ method }} by pacorl. Trained on: {{ trained_on }}.

## Use

{{ usage }}
{% if measured %}

## Measured

| | before | after | difference |
| --- | --- | --- | --- |
{% for row in measured %}
| {{ row|join(" | ") }} |
{% endfor %}
{% endif %}
"""


def write_card(run: Path, *, licence: str = "") -> Path:
    """Write the card into the adapter folder of a run, unless it has one; return the folder.

    Args:
        run: the run's folder.
        licence: an identifier of the hub's; needed if the base is not known.

    Raises:
        ValueError: a file is absent or something in the card looks like a secret, or a card is there and `licence` asks
            for another one.
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder = next((run / name for name in FOLDERS if (run / name).is_dir()), None)
    if folder is None:
        raise ValueError(f"{run} has neither adapter/ nor merged/; name the folder of a finished run")
    check_no_link(folder)  # a card written through a link would replace any file of the user
    if (folder / CARD).exists():
        if licence:
            raise ValueError(f"{folder / CARD} is there already, and is not replaced; move it away")
        return folder

    # Base, licence and kind of the model.
    config = _config(run)
    base = str(config.get("model", {}).get("checkpoint") or "")
    is_judge = "data" in config
    is_adapter = folder.name != "merged"
    tag = "judge" if is_judge else "character" if "character" in config else "paco-grpo"
    licences = {spec.published: spec.licence for spec in POLICIES.values()} | JUDGE_LICENCES
    base_licence, licence_name = licences.get(base, ("", ""))
    if not (licence or base_licence):
        raise ValueError(f"the licence of {base or 'the base'} is not known here; name one, e.g. --licence apache-2.0")
    kind = str(config.get("model", {}).get("kind") or DEFAULT_KIND)
    edits = kind in POLICIES and not POLICIES[kind].sets
    data = ModelCardData(
        license=licence or base_licence,
        license_name=licence_name if not licence else None,
        base_model=base if base not in ("", TINY) else None,  # the hub links the base, and has no tiny one
        library_name="transformers" if not is_adapter else "peft" if is_judge else "diffusers",
        tags=["pacorl", "lora" if is_adapter else "merged", tag],
        pipeline_tag="image-text-to-text" if is_judge else "image-to-image" if edits else "text-to-image",
        ignore_metadata_errors=True,
    )

    # The text.
    method, sources = _training(config)
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=run.resolve().name,
        base=_name_of(base),
        method=method,
        trained_on=", ".join(f"`{_name_of(source)}`" for source in sources),
        usage=_usage(f"OWNER/{run.resolve().name}", _name_of(base), is_judge=is_judge, is_adapter=is_adapter),
        measured=_measured(run),
    )

    check_no_secret(str(card), name=str(run / "config.yaml"))
    write_atomic(folder / CARD, str(card))
    return folder


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder to the hub as the user who is logged in there; return the address."""
    from huggingface_hub import CommitOperationAdd, HfApi

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
    paths = [path for path in sorted(folder.iterdir()) if any(map(path.match, PUBLISHED))]
    for path in paths:
        check_no_link(path)
    return [path for path in paths if path.is_file()]


def check_no_link(path: Path) -> None:
    """Raise ValueError if a path is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and links are not published; copy its target")


def check_no_secret(text: str, *, name: str) -> None:
    """Raise ValueError if a text seems to hold a key or a password; the message shows its beginning only."""
    match = find_secret(text)
    if match:
        line = text.count("\n", 0, match.start()) + 1
        raise ValueError(
            f"{name}: {match[0][:6]}… (line {line} of the text to publish) looks like a secret; take it out, and "
            "make a new key if anyone else could have read it"
        )


def _config(run: Path) -> JsonObject:
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run} is no run's folder: it has no config.yaml")
    with blamed_on(path):
        config = typed(read_yaml(path), dict[str, Any])
        for key in ("model", "data", "prompts"):
            typed(config.get(key, {}), dict[str, Any])
    return config


def _training(config: JsonObject) -> tuple[str, list[str]]:
    """Describe the method of a run, and list its data."""
    if "character" in config:
        return "flow matching on images of a character", [Path(str(config["character"])).name]
    method, section = ("PaCo-Reward", "data") if "data" in config else ("PaCo-GRPO", "prompts")
    train = config.get(section, {}).get("train")
    return f"{method} (arXiv 2512.04784)", [str(source) for source in (train if isinstance(train, list) else [train])]


def _usage(name: str, base: str, *, is_judge: bool, is_adapter: bool) -> str:
    """Show how to load it, with this project and, for a generator's adapter, with diffusers."""
    if is_judge:
        source = f"{base} --adapter {name}" if is_adapter else name
        return f"```bash\npacorl score a.png b.png --judge {source}\n```"
    usage = f"```bash\npacorl generate --prompt TEXT --model {base} --adapter {name}\n```"
    if base == TINY:
        return usage
    return f"""{usage}

```python
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}", dtype=torch.bfloat16)
pipeline.load_lora_weights("{name}")
```"""


def _name_of(source: str) -> str:
    """Remove this machine's folders and network addresses from a source."""
    if "://" in source:
        check_no_secret(source, name="the config")  # not shown, but its owner should learn of it
        return "(an address)"
    return Path(source).name if Path(source).is_absolute() or source.startswith("~") else source


def _measured(run: Path) -> list[list[str]]:
    """Tabulate what the run's page shows."""
    rows = []
    for row in rows_of(read_run(run)) if (run / "metrics.jsonl").is_file() else []:
        sides = [interval_text(side) if side else "–" for side in (row.before, row.after)]
        rows.append([row.name, *sides, interval_text(row.difference, signed=True) if row.difference else "–"])
    return rows
