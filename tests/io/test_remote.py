"""Images by URL."""

from __future__ import annotations

import pytest
from app_server import serving_app
from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse
from PIL import Image

from pacorl.gate.panels import open_panels
from pacorl.io.images import ImageError, png_bytes
from pacorl.io.remote import open_source

RED = Image.new("RGB", (32, 24), "red")


def test_an_image_is_fetched_through_redirects() -> None:
    app = FastAPI()
    app.get("/red.png")(lambda: Response(png_bytes(RED, {}), media_type="image/png"))
    app.get("/moved")(lambda: RedirectResponse("/red.png"))
    with serving_app(app) as url:
        images = open_panels([f"{url}/red.png", f"{url}/moved"]).images
        assert images[0].tobytes() == images[1].tobytes() == RED.tobytes()
        for source, named in ((f"{url}/absent.png?token=secret", "404"), ("http://[::1/?token=secret", "ValueError")):
            with pytest.raises(ImageError, match=named) as caught:
                open_source(source)
            assert "secret" not in str(caught.value)
