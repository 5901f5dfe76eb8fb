"""Images from strangers are decoded elsewhere: the same image, the same refusals."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pacorl.io import uploads
from pacorl.io.images import ImageError, open_image
from pacorl.io.uploads import submit_upload

SIDE = 24


def open_upload(data: bytes, **options: Any) -> Image.Image:
    return submit_upload(data, **options).result(timeout=300)


def saved(kind: str, mode: str = "RGB", side: int = SIDE, **options: Any) -> bytes:
    image = Image.linear_gradient("L").resize((side + 8, side))
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, format=kind, **options)
    return buffer.getvalue()


def jpeg(*, scans: int, **options: Any) -> bytes:
    """A JPEG with repetitions of its last scan."""
    data = saved("JPEG", progressive=True, **options)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:]


# --- the process -------------------------------------------------------------------------------------------------


def child() -> subprocess.Popen[bytes]:
    """The process that decodes."""
    open_upload(saved("PNG"), name="a")
    assert uploads._DECODER.process is not None
    return uploads._DECODER.process


@pytest.fixture(autouse=True)
def fresh_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    decoder = uploads._Decoder()
    monkeypatch.setattr(uploads, "_DECODER", decoder)
    yield
    decoder.close()


def test_an_upload_is_the_image_that_a_file_is() -> None:
    data = saved("PNG", "RGBA", side=40)
    assert open_upload(data, name="a").tobytes() == open_image(data).tobytes()
    with pytest.raises(ImageError, match=r"^b: 48x40 is too large; an image may have 99 pixels"):
        open_upload(data, name="b", max_pixels=99)
    assert open_upload(data, name="d").size == (48, 40)


def test_the_process_is_another_one_and_a_dead_one_is_replaced() -> None:
    first = child()
    assert first.pid != os.getpid()
    first.kill()
    first.wait()
    assert child() != first


@pytest.mark.slow
def test_an_image_that_takes_too_much_cpu_time_is_refused_and_the_next_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few blocks: 90 scans of 64 million pixels."""
    slow = jpeg(scans=90, side=7900)
    original = uploads.start_python

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        code = "from pacorl.io import uploads; uploads.MAX_CPU_SECONDS = 0; uploads.serve()"
        return original("-c", code, **options)

    monkeypatch.setattr(uploads, "start_python", start)  # up to the process' next whole second
    with pytest.raises(ImageError, match=r"^slow: decoding it takes too much time or memory"):
        open_upload(slow, name="slow")
    monkeypatch.undo()
    assert open_upload(saved("PNG"), name="a").size == (32, 24)


@pytest.mark.parametrize(
    "answer", ['{"size": [90000, 90000]}', '{"size": [9, 9]}', '{"size": [-9, 9]}', "{}", "[]", "[" * 60_000]
)
def test_no_answer_of_a_taken_over_process_is_believed(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; sys.stdin.buffer.readline(); print({answer!r})"
    original = uploads.start_python
    monkeypatch.setattr(uploads, "start_python", lambda *_, **options: original("-c", code, **options))
    with pytest.raises(ImageError, match=r"^a: decoding it takes too much time or memory"):
        open_upload(saved("PNG"), name="a")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_process_inherits_no_key_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    process = Path(f"/proc/{child().pid}")
    variables = {line.partition("=")[0] for line in (process / "environ").read_text().split("\0") if line}
    assert variables <= {*uploads.INHERITED}
    code = (
        "import io, os; from PIL import Image; from pacorl.io import uploads; b = io.BytesIO(); "
        "Image.new('L', (8, 8)).save(b, 'PNG'); uploads.submit_upload(b.getvalue(), name='a').result(); "
        "print(uploads._DECODER.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    gone = Path(f"/proc/{int(killed.stdout)}/stat")
    deadline = time.monotonic() + 60
    while gone.exists() and gone.read_text().rpartition(") ")[2][0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.05)
