"""Images by URL."""

from __future__ import annotations

from itertools import repeat

import pytest
from app_server import serving_app
from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from PIL import Image

from pacorl.gate.panels import open_panels
from pacorl.io.images import ImageError, png_bytes
from pacorl.io.remote import open_source

RED = Image.new("RGB", (32, 24), "red")


def web() -> FastAPI:
    app = FastAPI()
    app.get("/red.png")(lambda: Response(png_bytes(RED, {}), media_type="image/png"))
    app.get("/moved/{times}")(
        lambda times: RedirectResponse(f"/moved/{int(times) - 1}" if times != "0" else "/red.png")
    )
    app.get("/endless")(lambda: StreamingResponse(repeat(bytes(2**20)), media_type="image/png"))
    return app


def test_an_image_is_fetched_through_redirects() -> None:
    with serving_app(web()) as url:
        names, images, _ = open_panels([f"{url}/red.png", f"{url}/moved/1"])
        assert names[1] == f"{url}/moved/1"
        assert images[0].tobytes() == images[1].tobytes() == RED.tobytes()
        for path, named in (("/moved/99", "redirects"), ("/absent.png", "404"), ("/endless", "64 MiB")):
            with pytest.raises(ImageError, match=named) as caught:
                open_source(f"{url}{path}?token=secret")
            assert "secret" not in str(caught.value)
