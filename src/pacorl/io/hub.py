"""Checks of a checkpoint, in a folder or on the hub, before the libraries that load it are imported.

The libraries take seconds to import. Without a network they try every file of a checkpoint five times, for minutes, and
then report a missing file.
"""

import hashlib
import re
from functools import cache
from pathlib import Path, PurePosixPath

from pacorl.io.files import kept_digest

CONFIGS = (
    *("config.json", "adapter_config.json", "generation_config.json", "processor_config.json"),
    *("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.json"),
    "chat_template.jinja",
)
"""Files that decide, with the weights, a checkpoint's outputs."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
PIPELINE = "model_index.json"
"""File of a diffusers pipeline, whose parts are in folders."""
OF_PIPELINE = ("--include", PIPELINE, "--include", "'*/*'", "--exclude", "'text_encoders/*'")
"""Flags that select a pipeline's files: its repository may hold the weights a second time, in single files."""
OF_MODEL = ("--include", "'*.json'", "--include", "'*.txt'", "--include", "model.safetensors")
"""Flags that select the files of a model in one file: its repository may hold the weights in several formats."""
SECONDS = 5.0
"""Timeout of the hub's first answer."""


def check_checkpoint(source: str, *files: str) -> None:
    """Check that a checkpoint is available.

    If the hub does not answer, its cache is used.

    Args:
        source: A folder, ORG/NAME on the hub, or ORG/NAME:PATH for a file or folder in it.
        files: Names in the folder or repository; one of them is there if the checkpoint is.

    Raises:
        ValueError: It is no folder with such a file and no name of the hub; or it is not on this machine, and the hub
            cannot be asked.
    """
    # A folder or file of this machine.
    if Path(source).exists():
        if not any((Path(source) / file).is_file() for file in files):
            raise ValueError(f"{source} is no checkpoint: it holds no {' and no '.join(files)}; name a folder with it")
        return
    if not HUB_NAME.fullmatch(source.partition(":")[0]):
        raise ValueError(f"there is no {source}: name a folder, or a checkpoint of the hub as ORG/NAME")

    # A name on the hub, or in its cache.
    from huggingface_hub import constants

    fault = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _silence(constants.ENDPOINT)
    if not fault:
        return
    if not any(local_file(source, file) for file in files):
        command = download_command(source, *(OF_PIPELINE if PIPELINE in files else ()))
        raise ValueError(
            f"{source} is not on this machine, and the hub cannot be asked for it ({fault}): name a folder, or run "
            f"`{command}` with a network (HF_ENDPOINT names a mirror)"
        )
    constants.HF_HUB_OFFLINE = True  # or every cached file would be asked for, in vain


def download_command(source: str, *files: str) -> str:
    """Return the command that downloads a checkpoint from the hub, or the files that its options select."""
    return " ".join(["hf download", source, *files])


def fetch_files(source: str, *names: str, fetch: bool = True) -> Path:
    """Download files of a folder on the hub, ORG/NAME or ORG/NAME:FOLDER, and return its local copy.

    Args:
        names: Names or patterns; a file that the folder lacks is left out.
        fetch: Allow downloads; otherwise the cache alone is searched.
    """
    from huggingface_hub import snapshot_download

    repo, _, folder = source.partition(":")
    patterns = [str(PurePosixPath(folder, name)) for name in names]
    return Path(snapshot_download(repo, allow_patterns=patterns, local_files_only=not fetch), folder)


def local_file(source: str, name: str) -> Path | None:
    """Return a checkpoint's file in its folder or in the hub's cache; None if it is not on this machine."""
    path = Path(source) / name
    repo, _, folder = source.partition(":")
    if Path(source).exists() or not HUB_NAME.fullmatch(repo):
        if not path.is_file():
            return None
        return path
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, str(PurePosixPath(folder, name)))
    if isinstance(cached, str):
        return Path(cached)
    return None


def checkpoint_digest(source: str) -> str:
    """Hash a checkpoint's weights and its CONFIGS with SHA-256, in a folder or in the hub's cache.

    Args:
        source: A file of weights, a folder, or ORG/NAME on the hub.

    Returns:
        Hexadecimal digits; empty if the checkpoint is not on this machine.
    """
    files = [Path(source)]
    if not Path(source).is_file():
        folder = Path(source)
        configs = []
        for name in CONFIGS:
            config = local_file(source, name)
            if config:
                configs.append(config)
                folder = config.parent
        files = sorted(folder.glob("*.safetensors")) + configs

    # With the names: files of exchanged content are another checkpoint.
    content = hashlib.sha256()
    for path in files:
        # The hub's cache names large files by their SHA-256: 16 GB need not be read again at each start.
        sha256 = path.resolve().name
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            sha256 = kept_digest(path)
        content.update(f"{path.name} {sha256}\n".encode())
    if not files:  # a folder without weights
        return ""
    return content.hexdigest()


@cache
def _silence(endpoint: str) -> str:
    """Return the reason why the hub cannot be reached; empty if it answers anything."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # the client, and so its errors, are the library's choice
        return f"{endpoint}: {' '.join(str(error).split()) or type(error).__name__}"
    return ""
