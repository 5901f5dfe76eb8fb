"""The server of the studio: NiceGUI behind the guard of all servers, on this machine only."""

import hmac
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from nicegui import binding, ui

from pacorl.config.options import StudioModels
from pacorl.studio.page import MOST_BYTES, StudioPage
from pacorl.studio.work import Studio
from pacorl.web import HEADERS, Door, Guard, RefusedError, listening, run

HOST = "127.0.0.1"
binding.MAX_PROPAGATION_TIME = 1.0  # seconds until it warns: a busy machine is no fault
# NiceGUI compiles its pages in the browser, from scripts within the page; still no other server is asked.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def make_app(studio: Studio) -> FastAPI:
    """Build the application of one studio; NiceGUI allows one per process."""

    def page_of(token: str) -> str:
        # In constant time: a shorter time would show how much of a token is right.
        if not hmac.compare_digest(token.encode(), studio.folder.key.encode()):
            raise RefusedError("open the page by the link that the studio printed", status=401)
        return "/"

    door = Door("pacorl_studio", page_of)
    app = FastAPI(title="pacorl studio", docs_url=None, redoc_url=None, openapi_url=None, max_body_size=13 * MOST_BYTES)
    app.include_router(door.router())

    # The pictures, which the page shows by their paths.
    app.mount("/file", StaticFiles(directory=studio.folder.path))
    ui.run_with(
        app,
        root=lambda: StudioPage(studio) and None,
        title=app.title,
        dark=None,
        language="en-US",
        tailwind=False,
        show_welcome_message=False,
    )
    app.add_middleware(Guard, admit=door.admit, headers=HEADERS | {"Content-Security-Policy": POLICY})
    return app


def serve(names: StudioModels, *, folder: Path, port: int = 8767, announce: Callable[[str], None] = print) -> None:
    """Serve on this machine until SIGINT or SIGTERM, which ends this process; port 0 takes a free port.

    Raises:
        OSError: if the port is taken.
        ValueError: if another studio has the folder.
    """
    # uvicorn raises a signal again once it has shut down, and SIGTERM's default would end the process before `close`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # NiceGUI looks for its server among all objects, torch's deprecated ones included.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    with listening(HOST, port) as (listener, url):
        studio = Studio(folder, names)
        app = make_app(studio)
        announce(f"{url}/join#{studio.folder.key}")
        run(app, listener)
        # Loading a model cannot be stopped. Files are whole, and a trainer saves itself at the end of its input.
        studio.stop()
        studio.save()
        os._exit(0)  # Python's own end takes two seconds with models loaded
