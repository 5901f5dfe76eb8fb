"""The T2IS records of the paper's runs, 150 and 135, which are on GitHub alone (`pacorl data t2is`)."""

import hashlib
from pathlib import Path

from pacorl.io.files import check_new, make_folder, write_atomic

SOURCE = "X-GenGroup/PaCo-RL"
REVISION = "08caac6f22c174e2c71019d2a4481abf9ad313d2"
"""Commit of the repository, which determines every byte."""
FILES = {
    "train.jsonl": (
        "PaCo-GRPO/dataset/T2IS/half_2by2/train_metadata.jsonl",
        "1a5792f8cd114e6a15cea9070eddaa470b5abeab5c33ba9b054ee908cc601cea",
    ),
    "test.jsonl": (
        "PaCo-GRPO/dataset/T2IS/half_2by2/test_metadata.jsonl",
        "fff9ab7359350fc46424e6853f5122e1ca2529cdc9ff7fe54606ca4f673f10af",
    ),
}
"""File → path in the repository, and SHA-256."""
ABOUT = f"{SOURCE}, commit {REVISION}; its authors state no licence: ask them before you redistribute it"


def download_t2is(folder: Path) -> None:
    """Download the records into a new folder, which appears with both files or not at all.

    Raises:
        ValueError: the folder exists, or a file differs from its hash and was not kept.
        OSError: the source does not answer.
    """
    import httpx2
    from huggingface_hub import get_session

    check_new(folder, fix="name a new folder with --out")
    partial = folder.with_name(f".{folder.name}.part")
    make_folder(partial)
    for name, (path, sha256) in FILES.items():
        url = f"https://raw.githubusercontent.com/{SOURCE}/{REVISION}/{path}"
        try:
            content = get_session().get(url, follow_redirects=True).raise_for_status().content
        except (httpx2.HTTPError, ConnectionError) as error:
            raise OSError(f"{url} cannot be downloaded: {' '.join(str(error).split())}") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{url} differs from its SHA-256 {sha256}; download again")
        write_atomic(partial / name, content)
    partial.rename(folder)
