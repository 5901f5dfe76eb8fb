"""Untrusted images are decoded elsewhere: the same image, the same refusals, and nothing that is not survived."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from pacorl.io import decoder
from pacorl.io.children import start_confined
from pacorl.io.decoder import open_upload, submit_upload
from pacorl.io.images import ImageError, open_image
from pacorl.types import Size


def png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert("RGBA").save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def scans(count: int, side: int) -> bytes:
    """A progressive JPEG whose last scan is repeated; each repetition is a few bytes that cost the whole image."""
    buffer = io.BytesIO()
    picture = Image.linear_gradient("L").resize((side, side)).convert("RGB")
    picture.save(buffer, format="JPEG", progressive=True, subsampling=0)
    data = buffer.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * count + data[-2:]


def child() -> subprocess.Popen[bytes]:
    """The process that decodes."""
    open_upload(png(8), name="a")
    (process,) = [process._process for process in decoder._DECODERS.processes if process._process]
    return process


@pytest.fixture(autouse=True)
def fresh_decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    decoders = decoder._Decoders()
    monkeypatch.setattr(decoder, "_DECODERS", decoders)
    yield
    decoders.close()


def test_an_upload_is_the_image_that_a_file_is() -> None:
    data = png(40)
    assert open_upload(data, name="a").tobytes() == open_image(data).tobytes()
    with pytest.raises(ImageError, match=r"^b: 40x40 is too large; an image may have 99 pixels"):
        open_upload(data, name="b", max_pixels=99)
    with pytest.raises(ImageError, match=r"^c: empty"):
        open_upload(b"", name="c")
    assert open_upload(data, name="d").size == (40, 40)


@pytest.mark.parametrize("quarter_turns", [False, True])
def test_an_image_is_resized_where_it_is_decoded(quarter_turns: bool) -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6 if quarter_turns else 1
    Image.linear_gradient("L").resize((60, 40)).save(buffer, format="PNG", exif=exif)
    whole = open_image(buffer.getvalue())

    small = submit_upload(buffer.getvalue(), name="a", resized=Size(height=20, width=30)).result(timeout=120)
    assert small.size == ((20, 30) if quarter_turns else (30, 20))
    assert small.tobytes() == whole.resize(small.size, Image.Resampling.BICUBIC).tobytes()


def test_the_process_is_another_one_and_a_dead_one_is_replaced() -> None:
    first = child()
    assert first.pid != os.getpid()
    first.kill()
    first.wait()
    assert open_upload(png(8), name="a").size == (8, 8)
    assert child() != first


@pytest.mark.slow
def test_an_image_that_takes_too_much_cpu_time_is_refused_and_the_next_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "MAX_CPU_SECONDS", 0)  # up to the process' next whole second
    with pytest.raises(ImageError, match=r"^slow: decoding it takes too much time or memory"):
        open_upload(scans(80, 8000), name="slow")
    monkeypatch.undo()
    assert open_upload(png(8), name="a").size == (8, 8)


@pytest.mark.slow
def test_time_in_which_a_busy_machine_runs_others_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_CPU_SECONDS", 1)
    process = child()
    process.send_signal(signal.SIGSTOP)
    image = submit_upload(png(8), name="a")
    time.sleep(1.5)
    assert not image.done()
    process.send_signal(signal.SIGCONT)
    assert image.result(timeout=120).size == (8, 8)
    assert child() == process


def test_a_process_that_waits_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = child()
    monkeypatch.setattr(decoder, "MAX_SECONDS", 0.2)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ImageError, match=r"^slow: decoding it takes too much time or memory"):
        open_upload(png(8), name="slow")


def test_a_decoder_that_does_not_start_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "start_confined", lambda entry: start_confined("pacorl.nothing:serve"))
    with pytest.raises(ImageError, match=r"^a: not decoded, since the decoder does not start; `.* -I -c 'import PIL'`"):
        open_upload(png(8), name="a")


@pytest.mark.parametrize(
    "answer",
    ['{"size": [8, 8], "bytes": 1000000000000}', '{"size": [9, 9], "bytes": 0}', '{"bytes": 0}', "[]", "[" * 60_000],
)
def test_no_answer_of_a_taken_over_process_is_believed(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; print('{{\"bytes\": 0}}', flush=True); sys.stdin.buffer.readline(); print({answer!r})"

    def start(_: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(decoder, "start_confined", start)
    with pytest.raises(ImageError, match=r"^a: decoding it takes too much time or memory"):
        open_upload(png(8), name="a")


def test_the_memory_is_bounded() -> None:
    pytest.importorskip("resource")
    code = "from pacorl.io.children import limit; limit('RLIMIT_AS', 2**29); bytes(2**29)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr


# --- callers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Images are "decoded" as soon as it is set, those called "fast" at once."""
    held = threading.Event()

    def opened(self: decoder._Process, data: bytes, *, name: str, max_pixels: int, resized: Size | None) -> Image.Image:
        if name != "fast":
            held.wait(120)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(decoder._Process, "open", opened)
    yield held
    held.set()


def test_a_callers_slow_images_occupy_one_decoder(hold: threading.Event) -> None:
    slow = [submit_upload(b"", name="slow", caller="a") for _ in range(8)]
    assert submit_upload(b"", name="fast", caller="b").result(timeout=120).size == (8, 8)
    assert not any(image.done() for image in slow)
    hold.set()
    assert [image.result(timeout=120).size for image in slow] == [(8, 8)] * 8


def test_callers_take_turns(hold: threading.Event) -> None:
    done: list[str] = []
    for caller in ("a", "b"):  # both decoders
        submit_upload(b"", name="first", caller=caller)
    later = [(caller, submit_upload(b"", name="next", caller=caller)) for caller in "aaaaaaaac"]
    for caller, image in later:
        image.add_done_callback(lambda _, caller=caller: done.append(caller))
    hold.set()
    wait([image for _, image in later], timeout=20)
    assert done.index("c") < 4


def test_a_callers_small_image_waits_for_one_large_one(hold: threading.Event) -> None:
    done: list[int] = []
    submit_upload(b"", name="first", caller="a")
    for pixels in (900, 800, 100, 700):
        image = submit_upload(b"", name="fast", max_pixels=pixels, caller="a")
        image.add_done_callback(lambda _, pixels=pixels: done.append(pixels))
    hold.set()
    wait([submit_upload(b"", name="fast", max_pixels=1000, caller="a")], timeout=20)
    assert done == [100, 700, 800, 900]


def test_an_image_that_is_cancelled_is_not_decoded(hold: threading.Event) -> None:
    first = submit_upload(b"", name="first", caller="a")
    second = submit_upload(b"", name="second", caller="a")
    assert second.cancel()
    hold.set()
    assert first.result(timeout=120).size == submit_upload(b"", name="third", caller="a").result(timeout=120).size


# --- surroundings -------------------------------------------------------------------------------------------------


def test_the_working_directory_is_not_searched_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("yaml", "pydantic", "json", "PIL", "pacorl", "ctypes"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert open_upload(png(8), name="a").size == (8, 8)
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_process_inherits_no_key_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    process = Path(f"/proc/{child().pid}")
    variables = {line.partition("=")[0] for line in (process / "environ").read_text().split("\0") if line}
    assert variables <= {"PATH", "LANG", "LD_LIBRARY_PATH"}
    assert (process / "cwd").readlink() == Path("/")
    assert "NoNewPrivs:\t1" in (process / "status").read_text()
    assert "CapEff:\t0000000000000000" in (process / "status").read_text()
