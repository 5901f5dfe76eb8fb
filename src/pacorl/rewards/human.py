"""A person's rankings as a reward: groups are laid out in a folder, and who shows them writes the rankings there.

    FOLDER/asked.json                the groups of the present round, in order
    FOLDER/000012-3f…/group.json     the prompt and the number of images, written last
    FOLDER/000012-3f…/0.png …        the images of the group's samples
    FOLDER/000012-3f…/ranks.json     one rank per image: 1 is the best, and equal images share it

`pacorl studio` shows them. All state is on disk: a resumed run samples its round again, finds the same images,
and repeats no question. The policy does not change while a round is ranked, so the rankings are always of the policy
that learns from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from PIL.Image import Image
from pydantic import BaseModel, Field

from pacorl.io.documents import blamed_on, read_json, typed, write_json
from pacorl.io.files import PRIVATE, make_folder, safe_name, write_atomic
from pacorl.io.images import png_bytes
from pacorl.rewards.reward import RewardError
from pacorl.types import Prompt

UNRANKED = 0.5
"""Score of an unranked image: the middle of a group."""


class AskedGroups(BaseModel):
    """asked.json."""

    groups: list[str]


class ShownGroup(BaseModel):
    """group.json."""

    prompt: str
    theme: str
    panels: list[str]
    grid: str
    images: Annotated[int, Field(ge=1, le=1024)]


class HumanRanking:
    """Ranks by a person, as scores from 0 (the last of its group) to 1 (the first); ties share their mean.

    Nobody is asked outside of training: an evaluation's images all have UNRANKED.
    """

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: folder of the groups and rankings of one run.
        """
        self.folder = Path(folder)
        self._round: list[_Group] = []
        self._is_complete = False
        """Whether the scores of the round were asked for, after which no image joins it."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises RewardError if the run has several processes: each would see a part of a group."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            raise RewardError(
                f"human_ranking shows whole groups to one person, and this run has {world} processes; launch one"
            )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [UNRANKED] * len(images)

    def begin(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> Callable[[], list[float | None] | None]:
        """Lay samples out for the person; a group is shown as soon as its last image is here.

        Args:
            prompts: one per image; a group's images are adjacent, also over several calls.
            images: as they were sampled.

        Returns:
            A function that gives their scores, or None as long as a group of the round is not ranked. Its first call
            says that the round is complete.
        """
        if self._is_complete:
            self._round = []
        self._is_complete = False
        positions: list[tuple[_Group, int]] = []
        for prompt, image in zip(prompts, images, strict=True):
            if not self._round or self._round[-1].prompt != prompt:
                self._show_last()
                self._round.append(_Group(prompt))
            positions.append((self._round[-1], len(self._round[-1].pngs)))
            self._round[-1].pngs.append(png_bytes(image))
        return partial(self._scores, positions)

    def _scores(self, positions: Sequence[tuple[_Group, int]]) -> list[float | None] | None:
        if not self._is_complete:
            self._is_complete = True
            self._show_last()
        # Together, so that a ranking can be mended until the last one of its round is there.
        if self._round and not all(read_ranks(self.folder, group.name) for group in self._round):
            return None
        scores = {id(group): scores_of_ranks(read_ranks(self.folder, group.name)) for group, _ in positions}
        return [scores[id(group)][index] for group, index in positions]

    def _show_last(self) -> None:
        if self._round and not self._round[-1].name:
            group = self._round[-1]
            group.name = _lay_out(self.folder, group)
            write_json(self.folder / "asked.json", {"groups": [group.name for group in self._round]}, mode=PRIVATE)


@dataclass(slots=True)
class _Group:
    """The samples of one prompt in one round."""

    prompt: Prompt
    pngs: list[bytes] = field(default_factory=list)
    name: str = ""
    """Name of its folder, once shown."""


def _lay_out(folder: Path, group: _Group) -> str:
    """Write a group's images, unless the stopped run has written them, and return the folder's name."""
    # By content: a resumed run finds the groups that it has laid out before.
    content = sha256(b"".join([group.prompt.text.encode(), *(sha256(png).digest() for png in group.pngs)]))
    mark = content.hexdigest()[:16]
    earlier = next(folder.glob(f"*-{mark}/group.json"), None)
    if earlier:
        return earlier.parent.name
    name = f"{len(list(folder.glob('*-*'))) + 1:06d}-{mark}"
    for number, png in enumerate(group.pngs):
        write_atomic(folder / name / f"{number}.png", png)
    prompt = group.prompt
    described = {"prompt": prompt.text, "theme": prompt.theme, "panels": list(prompt.panels), "grid": str(prompt.grid)}
    write_json(folder / name / "group.json", {**described, "images": len(group.pngs)}, mode=PRIVATE)
    return name


# --- for who shows the groups ------------------------------------------------------------------------------------


def asked_groups(folder: Path) -> list[str]:
    """List the sampled groups of the current round, in order."""
    path = folder / "asked.json"
    document = read_json(path) if path.exists() else {"groups": []}
    with blamed_on(path):
        return [safe_name(name) for name in typed(document, AskedGroups).groups]


def read_group(folder: Path, name: str) -> dict[str, Any]:
    """Read a group: its prompt, theme, panels, grid, and how many images."""
    path = folder / safe_name(name) / "group.json"
    document = read_json(path)
    with blamed_on(path):
        return typed(document, ShownGroup).model_dump()


def read_ranks(folder: Path, name: str) -> list[int]:
    """Read a group's ranks, one per image; empty while it is not ranked."""
    path = folder / safe_name(name) / "ranks.json" if name else None
    if not path or not path.exists():
        return []
    document = read_json(path)
    with blamed_on(path):
        return check_ranks(document)


def write_ranks(folder: Path, name: str, ranks: Sequence[int]) -> None:
    """Keep a person's ranks of a group: on the disk when this returns.

    Raises:
        ValueError: there is no such group, or the ranks are not one per image from 1 on.
    """
    if name not in asked_groups(folder):
        raise ValueError(f"group {name[:40]!r} is not of this round any more; rank the one that is shown")
    count = read_group(folder, name)["images"]
    if len(check_ranks(ranks)) != count:
        raise ValueError(f"the group has {count} images, and {len(ranks)} ranks are given")
    write_json(folder / name / "ranks.json", list(ranks), mode=PRIVATE)


def check_ranks(ranks: Any) -> list[int]:
    """Ranks as they are. Raises ValueError if they are not whole numbers from 1 on."""
    if not isinstance(ranks, list) or not ranks or any(type(rank) is not int or rank < 1 for rank in ranks):
        raise ValueError(f"ranks are whole numbers from 1, one per image, got {str(ranks)[:60]}")
    return ranks


def scores_of_ranks(ranks: Sequence[int]) -> list[float]:
    """Compute (#worse + ½·#equal) / (n − 1) of each image: 1 for the best, 0 for the last; UNRANKED for one image."""
    if len(ranks) == 1:
        return [UNRANKED]
    scores = []
    for rank in ranks:
        worse = sum(other > rank for other in ranks)
        ties = ranks.count(rank) - 1
        scores.append((worse + 0.5 * ties) / (len(ranks) - 1))
    return scores


def prepare(folder: Path) -> None:
    """Create the folder, and clear the pending groups of an earlier process."""
    make_folder(folder)
    (folder / "asked.json").unlink(missing_ok=True)
