"""A judge of random weights, and the built-in server over it on a free port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import uvicorn

from pacorl.data.characters import vocabulary
from pacorl.judges.local import LocalJudge
from pacorl.serve.builtin import create_app
from pacorl.twins import tiny_judge


@pytest.fixture(scope="session")
def local_judge() -> LocalJudge:
    torch.manual_seed(0)
    return LocalJudge(*tiny_judge(vocabulary()), batch_tokens=600)


@contextmanager
def _serving(judges: dict[str, LocalJudge], **options: Any) -> Iterator[str]:
    app = create_app(judges, **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def serving() -> Callable[..., Any]:
    return _serving


@pytest.fixture(scope="session")
def url(local_judge: LocalJudge) -> Iterator[str]:
    with _serving({"judge": local_judge}) as url:
        yield url
