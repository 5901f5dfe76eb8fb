"""The project's three servers, each in a process of its own: `python -m qa.attack.serving judge|studio|annotate`.

They are the real applications on real sockets. The studio's models are left out, since a request that is taken would
sample for seconds; what stands before them is what strangers reach.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from PIL import Image

from pacorl.io.files import text_digest
from pacorl.web.connections import run
from pacorl.web.site import listening

TOKEN, ADMIN_TOKEN = "a-token-of-the-attack", "a-token-of-the-administrator"


def judge() -> FastAPI:
    from pacorl.judge.local import LocalJudge
    from pacorl.serve.builtin import create_app

    return create_app({"judge": LocalJudge.from_pretrained("tiny")}, api_key=TOKEN)


def studio() -> FastAPI:
    from qa.attack.tables import prepare_set

    from pacorl.studio import server
    from pacorl.studio.models import ModelHost

    def nothing(self: ModelHost, job: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    for name in ("load", "make_set", "make_sheet", "make_storyboard", "judge"):
        setattr(ModelHost, name, nothing)
    state = server.AppState(TOKEN)
    prepare_set(state.history)
    return server.make_app(state)


def annotate() -> FastAPI:
    from pacorl.dataset.folder import Instance, write_records
    from pacorl.studio.annotate.links import Sharing
    from pacorl.studio.annotate.routes import make_app, prepare
    from pacorl.studio.annotate.store import Store

    folder = Path(tempfile.mkdtemp(prefix="attack-annotate-"))
    (folder / "images").mkdir()
    names = [f"images/{number}.png" for number in range(5)]
    for name in names:
        Image.new("RGB", (8, 8)).save(folder / name)
    rows = [Instance(f"i{number}", "g", names[0], tuple(names[1:])) for number in range(40)]
    write_records(folder / "instances.jsonl", rows)
    store = Store(folder / "annotations.db")
    prepare(store, folder, ["ann"], sharing=Sharing(controls=0))
    with store._transaction() as db:  # a token that the other process knows
        for name, token in {"ann": TOKEN, "admin": ADMIN_TOKEN}.items():
            db.execute("UPDATE people SET token_hash = ? WHERE name = ?", (text_digest(token), name))
    return make_app(folder, store)


def clumsy() -> FastAPI:
    """A server with every fault that the attack looks for, at paths of their own."""
    app, kept = FastAPI(), list[bytes]()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/{fault}")
    async def answer(fault: str, request: Request) -> Response:
        body = await request.body()
        if fault == "blocks":
            end = time.process_time() + float(body)
            while time.process_time() < end:
                pass
        elif fault == "computes":
            await asyncio.to_thread(lambda: [hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**6) for _ in range(60)])
        elif fault == "keeps":
            kept.append(b"x" * int(body))  # zeros would take no memory
        elif fault == "echoes":
            return Response(b"x" * int(body), status_code=400)
        elif fault == "dies":
            os._exit(1)
        return Response(b"{}")

    return app


def main(name: str) -> None:
    app = {"judge": judge, "studio": studio, "annotate": annotate, "clumsy": clumsy}[name]()
    with listening("127.0.0.1", 0) as (listener, url):
        print(url, flush=True)
        run(app, sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
