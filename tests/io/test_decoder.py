"""Images from strangers are decoded elsewhere: the same image, the same refusals, and nothing that is not survived."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from PIL import Image

from pacorl.io import decoder
from pacorl.io.decoder import open_upload
from pacorl.io.images import ImageError, open_image


def png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert("RGBA").save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def test_an_upload_is_the_image_that_a_file_is() -> None:
    data = png(40)
    assert open_upload(data, name="a").tobytes() == open_image(data).tobytes()
    with pytest.raises(ImageError, match=r"^b: 40x40 is too large; an image may have 99 pixels"):
        open_upload(data, name="b", max_pixels=99)
    with pytest.raises(ImageError, match=r"^c: empty"):
        open_upload(b"", name="c")
    assert open_upload(data, name="d").size == (40, 40)


def test_the_process_is_another_one_and_a_dead_one_is_replaced() -> None:
    open_upload(png(8), name="a")
    first = decoder._DECODER._process
    assert first
    assert first.pid != os.getpid()
    first.kill()
    first.wait()
    assert open_upload(png(8), name="a").size == (8, 8)


def test_an_image_that_takes_too_long_is_refused_and_the_next_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(3000)
    open_upload(png(8), name="a")
    monkeypatch.setattr(decoder, "MAX_SECONDS", 0.001)
    with pytest.raises(ImageError, match=r"^slow: decoding it takes too much time or memory"):
        open_upload(data, name="slow")
    monkeypatch.undo()
    assert open_upload(png(8), name="a").size == (8, 8)


def test_the_memory_is_bounded() -> None:
    pytest.importorskip("resource")
    code = "from pacorl.io.decoder import _limit_memory; _limit_memory(2**29); bytes(2**29)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr
