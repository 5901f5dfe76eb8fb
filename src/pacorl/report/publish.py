"""A run's adapter with a model card for sharing: its base, its training and its measurements.

The card's text comes from the run's own files only.
"""

import shlex
from pathlib import Path

from pacorl.io.files import write_atomic
from pacorl.models.policies import POLICIES
from pacorl.report.folder import read_run
from pacorl.report.results import change_text, rows_of
from pacorl.types import TINY

CARD = "README.md"
PUBLISHED = (
    *(CARD, "decision.json"),
    *("adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"),
)
"""Files to upload of an adapter's folder, which may hold others of its owner."""
KINDS = {
    "train-policy": ("paco-grpo", "PaCo-GRPO (arXiv 2512.04784)"),
    "train-character": ("character", "flow matching on images of a character"),
    "train-reward": ("judge", "PaCo-Reward (arXiv 2512.04784)"),
}
"""Command that trained a model → its tag, and its method in words."""
TEMPLATE = Path(__file__).with_name("templates") / "card.md"


def write_card(run: Path) -> Path:
    """Write the card into the adapter folder of a run, unless it has one; return the folder.

    The card has the licence of a known base, and no other.

    Raises:
        ValueError: a file is absent.
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder = run / "adapter"
    if not folder.is_dir():
        raise ValueError(f"{run} has no adapter; name the folder of a finished run")
    # A card may have been edited by hand: never replace it.
    if (folder / CARD).exists():
        return folder

    # Base, licence and kind of the model.
    read = read_run(run)
    base = read.settings.get("model.checkpoint", "")
    tag, method = KINDS.get(read.command, KINDS["train-policy"])
    is_judge = tag == "judge"
    licences = {spec.published: spec.licence for spec in POLICIES.values()}
    licence, licence_name = licences.get(base, (None, None))
    data = ModelCardData(
        license=licence,
        license_name=licence_name,
        base_model=base if base not in ("", TINY) else None,  # the hub links the base, and has no tiny one
        library_name="peft" if is_judge else "diffusers",
        tags=["pacorl", "lora", tag],
        ignore_metadata_errors=True,
    )

    # The card, from the run's config and results.
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text("utf-8"),
        name=run.resolve().name,
        base=_name_of(base),
        method=method,
        trained_on=", ".join(f"`{_name_of(source)}`" for source in read.trained_on),
        is_judge=is_judge,
        is_editor=read.is_editor,
        is_tiny=base == TINY,
        results=rows_of(read),
        change_text=change_text,
    )
    write_atomic(folder / CARD, str(card))
    return folder


def upload_command(folder: Path) -> str:
    """Return the command that uploads an adapter with its card, and no other file of its folder."""
    command = ["hf", "upload", "OWNER/NAME", str(folder), ".", "--private"]
    for name in PUBLISHED:
        if (folder / name).is_file():
            command += ["--include", name]
    return shlex.join(command)


def _name_of(source: str) -> str:
    """Remove this machine's folders and network addresses from a source."""
    if "://" in source:
        return "(an address)"
    if Path(source).is_absolute() or source.startswith("~"):
        return Path(source).name
    return source
