"""Frames of animated images."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from pacorl.io.files import read_bytes
from pacorl.io.images import MAX_BYTES, MAX_PIXELS, ImageError, as_rgb

ANIMATIONS = ("GIF", "WEBP", "PNG")
"""Formats of several frames that Pillow reads."""


def read_animation(source: Path, choose: Callable[[range], Sequence[int]]) -> dict[str, Image.Image]:
    """Read some frames of an animation, named by number from 1.

    Args:
        source: GIF, WebP or PNG file.
        choose: selects numbers of frames, from 0.

    Raises:
        ImageError: the file is no animation, or has a damaged or too large frame.
    """
    frames = {}
    data = read_bytes(source, limit=MAX_BYTES)
    try:
        with Image.open(io.BytesIO(data), formats=ANIMATIONS) as animation:
            if animation.width * animation.height > MAX_PIXELS:
                raise ImageError(f"{source}: a frame has more than {MAX_PIXELS} pixels")
            # Only the chosen frames: an animation may have thousands.
            for number in choose(range(getattr(animation, "n_frames", 1))):
                animation.seek(number)
                name = f"{source}[{number + 1}]"
                frames[name] = as_rgb(animation.copy(), name)
    except UnidentifiedImageError:
        raise ImageError(
            f"{source}: not a GIF, WebP or PNG animation; extract its frames, e.g. "
            f"`ffmpeg -i {source.name} -vf fps=2 frames/%04d.png`, and give the folder"
        ) from None
    except (OSError, EOFError, SyntaxError) as error:
        raise ImageError(f"{source}: frame {len(frames) + 1} cannot be read ({error})") from None
    return frames
