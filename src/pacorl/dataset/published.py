"""Published data sets by name: their source, licence and hashes, and their download.

data = find_published("t2is")
print("\n".join(data.describe()))
data.download(Path("data/t2is"))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pacorl.io.files import digest, make_folder, write_atomic

GITHUB = "https://raw.githubusercontent.com"
SHOWN = 5
"""Files whose hashes a description lists."""
UNSTATED = "not stated by its authors: ask them before you redistribute it"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One file of a data set."""

    name: str
    """Path in the data set."""
    source: str
    """Path at its source."""
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digits; empty if the source states none, as for small files of the hub."""


@dataclass(frozen=True, slots=True)
class PublishedData:
    """A data set at one revision."""

    source: str
    """Repository."""
    revision: str
    """Commit of the repository, which determines every byte."""
    licence: str
    """Licence as the source states it."""
    files: tuple[PublishedFile, ...]
    """Files of the data set."""
    on_hub: bool = True
    """Whether the repository is a data set of the hub; else it is on GitHub."""

    def describe(self) -> list[str]:
        """Describe source, licence, commit, size and hashes, in lines."""
        megabytes = sum(file.size for file in self.files) / 1e6
        lines = [
            f"source:  {self.source}",
            f"licence: {self.licence}",
            f"commit:  {self.revision}",
            f"files:   {len(self.files)}, {megabytes:,.1f} MB",
        ]
        hashed = [file for file in self.files if file.sha256]
        lines += [f"sha256:  {file.sha256}  {file.name}" for file in hashed[:SHOWN]]
        if len(hashed) > SHOWN:
            lines.append(f"         and {len(hashed) - SHOWN} more, each compared after the download")
        return lines

    def download(self, folder: Path) -> None:
        """Download into a new folder, and compare every hash.

        Raises:
            ValueError: the folder is not empty, or a file differs from its hash and was removed.
            OSError: the source does not answer.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is not empty, and nothing is overwritten; name a new folder with --out")
        with _connection_errors(self.source):
            if self.on_hub:
                from huggingface_hub import snapshot_download

                snapshot_download(self.source, repo_type="dataset", revision=self.revision, local_dir=folder)
            else:
                self._download_from_github(folder)
        for file in self.files:
            path = folder / file.name
            if file.sha256 and digest(path) != file.sha256:
                path.unlink()
                raise ValueError(f"{path} differs from its SHA-256 {file.sha256}, and was removed; download it again")

    def _download_from_github(self, folder: Path) -> None:
        from huggingface_hub import get_session

        for file in self.files:
            address = f"{GITHUB}/{self.source}/{self.revision}/{file.source}"
            answer = get_session().get(address, follow_redirects=True)
            answer.raise_for_status()
            make_folder(folder)
            write_atomic(folder / file.name, answer.content)


T2IS = "PaCo-GRPO/dataset/T2IS/half_2by2"
PINNED = PublishedData(
    source="X-GenGroup/PaCo-RL",
    revision="08caac6f22c174e2c71019d2a4481abf9ad313d2",
    licence=UNSTATED,
    files=(
        PublishedFile(
            name="train.jsonl",
            source=f"{T2IS}/train_metadata.jsonl",
            size=860_685,
            sha256="1a5792f8cd114e6a15cea9070eddaa470b5abeab5c33ba9b054ee908cc601cea",
        ),
        PublishedFile(
            name="test.jsonl",
            source=f"{T2IS}/test_metadata.jsonl",
            size=783_418,
            sha256="fff9ab7359350fc46424e6853f5122e1ca2529cdc9ff7fe54606ca4f673f10af",
        ),
    ),
    on_hub=False,
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
        info = HfApi().dataset_info(HUB[name], files_metadata=True)
    files = []
    for file in info.siblings or ():
        sha256 = str(file.lfs.sha256) if file.lfs else ""
        files.append(PublishedFile(file.rfilename, file.rfilename, file.size or 0, sha256))
    licence = info.card_data.get("license") if info.card_data else None
    return PublishedData(HUB[name], str(info.sha), str(licence or UNSTATED), tuple(files))


@contextmanager
def _connection_errors(source: str) -> Iterator[None]:
    """Convert errors of the HTTP client to an OSError in one line."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, ConnectionError) as error:
        fault = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"{source} cannot be downloaded: {fault}") from None
