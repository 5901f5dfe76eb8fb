"""Published data sets by name: their source and licence, and their download.

    data = find_published("t2is")
    print("\n".join(data.describe()))
    data.download(Path("data/t2is"))

A download appears whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pacorl.io.files import check_new, make_folder, write_atomic

GITHUB = "https://raw.githubusercontent.com"
UNSTATED = "not stated by its authors: ask them before you redistribute it"


@dataclass(frozen=True, slots=True)
class PublishedData:
    """A data set at one revision."""

    source: str
    """Repository."""
    revision: str
    """Commit of the repository, which determines every byte."""
    licence: str
    """Licence as the source states it."""
    on_github: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """File → path in a repository of GitHub, and SHA-256; empty for a data set of the hub."""

    def describe(self) -> list[str]:
        """Describe source, licence and commit, in lines."""
        return [f"source:  {self.source}", f"licence: {self.licence}", f"commit:  {self.revision}"]

    def download(self, folder: Path) -> None:
        """Download into a new folder, which appears when all files are complete.

        Until then the files are in a hidden sibling folder `.NAME-REVISION.part`, from which a second call resumes.

        Raises:
            ValueError: the folder exists, or a file differs from its hash and was not kept.
            OSError: the source does not answer.
        """
        from huggingface_hub import get_session, snapshot_download

        check_new(folder, fix="name a new folder with --out")
        partial = folder.with_name(f".{folder.name}-{self.revision[:12]}.part")
        make_folder(partial)
        with _connection_errors(self.source):
            for name, (path, sha256) in self.on_github.items():
                answer = get_session().get(f"{GITHUB}/{self.source}/{self.revision}/{path}", follow_redirects=True)
                content = answer.raise_for_status().content
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise ValueError(f"{self.source}, {name} differs from its SHA-256 {sha256}; download again")
                write_atomic(partial / name, content)
            if not self.on_github:
                snapshot_download(self.source, repo_type="dataset", revision=self.revision, local_dir=partial)
        partial.rename(folder)


@contextmanager
def _connection_errors(source: str) -> Iterator[None]:
    """Name `source` in errors of the hub's HTTP client, in one line."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, ConnectionError) as error:
        raise OSError(f"{source} cannot be downloaded: {' '.join(str(error).split())}") from None


PINNED = PublishedData(
    source="X-GenGroup/PaCo-RL",
    revision="08caac6f22c174e2c71019d2a4481abf9ad313d2",
    licence=UNSTATED,
    on_github={
        "train.jsonl": (
            "PaCo-GRPO/dataset/T2IS/half_2by2/train_metadata.jsonl",
            "1a5792f8cd114e6a15cea9070eddaa470b5abeab5c33ba9b054ee908cc601cea",
        ),
        "test.jsonl": (
            "PaCo-GRPO/dataset/T2IS/half_2by2/test_metadata.jsonl",
            "fff9ab7359350fc46424e6853f5122e1ca2529cdc9ff7fe54606ca4f673f10af",
        ),
    },
)
"""T2IS records of the paper's runs, 150 and 135, which are on GitHub alone."""
HUB = {
    "gedit": "stepfun-ai/GEdit-Bench",
    "consistencyrank": "X-GenGroup/ConsistencyRank-Bench",
    "paco-dataset": "X-GenGroup/PaCo-Dataset",
}
"""Name → repository of the hub."""
FOLDERS = {
    "t2is": "data/t2is",
    "gedit": "GEdit-Bench",
    "consistencyrank": "data/ConsistencyRank-Bench",
    "paco-dataset": "data/PaCo-Dataset",
}
"""Name → folder by default, as the recipes and guides name it."""


def find_published(name: str) -> PublishedData:
    """Find a data set at its pinned commit, or on the hub at its newest.

    Raises:
        ValueError: there is none of that name.
        OSError: the hub does not answer.
    """
    if name == "t2is":
        return PINNED
    if name not in HUB:
        raise ValueError(f"there is no data set {name!r}; there are {', '.join(FOLDERS)}")
    from huggingface_hub import HfApi

    with _connection_errors(HUB[name]):
        info = HfApi().dataset_info(HUB[name])
    licence = info.card_data.get("license") if info.card_data else None
    return PublishedData(HUB[name], str(info.sha), str(licence or UNSTATED))
