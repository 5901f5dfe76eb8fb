"""The process of a download: `python -m pacorl.studio.download_process ORG/NAME` prints the bytes to fetch first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError
from huggingface_hub.utils.tqdm import disable_progress_bars

from pacorl.io.documents import read_object
from pacorl.io.terminal import print_line, printable
from pacorl.studio.model_choice import INDEX, VARIANTS, WEIGHTS


def download(name: str) -> None:
    """Fetch a model into the hub's cache: a pipeline's folders, or the files of a judge or a LoRA."""
    try:
        parts = read_object(Path(hf_hub_download(name, INDEX)))
    except EntryNotFoundError:
        patterns = list(WEIGHTS)
    else:
        # Some repositories have the weights a second time, beside the folders or in foreign ones.
        patterns = [INDEX, *[f"{part}/{kind}" for part in parts if not part.startswith("_") for kind in WEIGHTS]]
    files: Any = {"allow_patterns": patterns, "ignore_patterns": list(VARIANTS)}
    sizes = [file.file_size for file in snapshot_download(name, **files, dry_run=True)]
    # Before the download: the page takes the total from the first line.
    print_line(str(sum(sizes)))
    snapshot_download(name, **files)


def main() -> None:
    """Run a download; a fault is its last line."""
    name = sys.argv[1]
    disable_progress_bars()
    try:
        download(name)
    except GatedRepoError:
        sys.exit(f"{name} asks you to accept its licence: do it at huggingface.co/{name}, and give your access token")
    except (HfHubHTTPError, OSError, ValueError) as error:
        sys.exit(printable(f"{name} cannot be downloaded: {' '.join(str(error).split())}"))


if __name__ == "__main__":
    main()
