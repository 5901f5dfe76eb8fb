"""Scores of a video's frames over time: each frame beside its neighbours, and beside the first frame.

Neighbours show a sudden change, and the first frame shows a slow drift. n frames take 2n − 3 pairs instead of n²/2.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.io.animations import read_animation
from pacorl.io.images import images_in, open_image
from pacorl.judge.check import PanelScore, panel_score
from pacorl.judge.scores import p_yes_text, summary
from pacorl.records.prompts import evenly_spread

if TYPE_CHECKING:
    from PIL import Image

    from pacorl.judge.pairwise import Pair
    from pacorl.judge.scores import Scores


def read_frames(source: Path, count: int) -> tuple[tuple[str, ...], tuple[Image.Image, ...]]:
    """Read evenly spread frames of a folder of images, by name, or of an animation.

    Returns:
        The names and the images of at most `count` frames.

    Raises:
        ImageError: the file is no animation, or has a damaged or too large frame.
        ValueError: there are fewer than two frames.
    """
    if source.is_dir():
        paths = evenly_spread(images_in(source), count)
        frames = {}
        for path in paths:
            frames[str(path)] = open_image(path)
    else:
        frames = read_animation(source, lambda numbers: evenly_spread(numbers, count))
    if len(frames) < 2:
        raise ValueError(f"{source} has {len(frames)} frames; a video needs two or more")
    return tuple(frames), tuple(frames.values())


def frame_pairs(count: int) -> list[Pair]:
    """Pair each frame with the previous one, and with the first one."""
    return [(number - 1, number) for number in range(1, count)] + [(0, number) for number in range(2, count)]


def frame_scores(scores: Scores) -> list[PanelScore]:
    """Score each frame after the first by the gate's rule: the lower of its medians with both groups.

    The groups are its neighbours, and the first frame.
    """
    count = len(scores.names)
    scored = []
    for frame in range(1, count):
        neighbours = []
        for other in (frame - 1, frame + 1):
            if other < count:
                neighbours.append(other)

        scored.append(panel_score(scores, frame, [neighbours, [0]]))
    return scored


def over_time(scores: Scores) -> dict[str, Any]:
    """Return the JSON of a video: both scores of each frame after the first, and the lowest pair."""
    # By pair: frame n beside n − 1, and beside frame 0.
    p_yes = {(pair.first, pair.second): pair.p_yes for pair in scores.pairs}
    frames = []
    for number in range(1, len(scores.names)):
        both = {"with_previous": p_yes[number - 1, number], "with_first": p_yes[0, number]}
        frames.append({"frame": scores.names[number], **both})
    present = [pair for pair in scores.ranked if pair.p_yes is not None]
    lowest = None
    if present:
        pair = present[-1]
        lowest = {"frames": [scores.names[pair.first], scores.names[pair.second]], "p_yes": pair.p_yes}
    return {"over_time": frames, "lowest_pair": lowest}


def video_table(scores: Scores) -> str:
    """Format the scores over time for a terminal."""
    document = over_time(scores)
    lines = ["previous   first  frame"]
    for frame in document["over_time"]:
        previous = p_yes_text(frame["with_previous"])
        lines.append(f"{previous:>8} {p_yes_text(frame['with_first']):>7}  {frame['frame']}")
    lowest = document["lowest_pair"]
    if lowest:
        first, second = lowest["frames"]
        lines.append(f"Lowest pair: {first} and {second}, {p_yes_text(lowest['p_yes'])}.")
    return "\n".join([*lines, *summary(scores)])
