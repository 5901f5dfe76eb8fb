"""`pacorl studio`: serves the page until it is stopped."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

from pacorl.studio.work import Models


def serve(
    models: Models,
    *,
    host: str = "127.0.0.1",
    port: int = 8767,
    announce: Callable[[str], None] = print,
) -> None:
    """Serves until SIGINT or SIGTERM; port 0 takes a free one. Raises OSError where the port is taken."""
    import uvicorn

    from pacorl.studio.server import Studio, make_app

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listening, host, port)
        studio = Studio(secrets.token_urlsafe(16), models)
        shown = f"[{host}]" if ":" in host else host
        announce(f"studio: http://{shown}:{listening.getsockname()[1]}/join/{studio.token}")
        config = uvicorn.Config(make_app(studio), log_level="warning", access_log=False, timeout_graceful_shutdown=3)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            studio.close()


def _bind(listening: socket.socket, host: str, port: int) -> None:
    try:
        listening.bind((host, port))
        listening.listen(128)  # whoever follows the link at once is kept waiting, not refused
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port") from None
