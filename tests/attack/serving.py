"""The project's three servers, each in a process of its own: `python -m tests.attack.serving judge|studio|annotate`.

They are the real applications on real sockets. The studio's models are left out, since a request that is taken would
sample for seconds; what stands before them is what strangers reach.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from PIL import Image

from pacorl.web.connections import run
from pacorl.web.site import listening

TOKEN, ADMIN_TOKEN = "a-token-of-the-attack", "a-token-of-the-administrator"


def judge() -> FastAPI:
    from pacorl.judges.local import LocalJudge
    from pacorl.serve.builtin import create_app

    return create_app({"judge": LocalJudge.from_pretrained("tiny")}, api_key=TOKEN)


def studio() -> FastAPI:
    from tests.attack.tables import prepare_set

    from pacorl.studio import server
    from pacorl.studio.models import ModelHost

    def nothing(self: ModelHost, job: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    for name in ("load", "make_set", "make_storyboard", "judge"):
        setattr(ModelHost, name, nothing)
    state = server.AppState(TOKEN)
    prepare_set(state.history)
    return server.make_app(state)


def annotate() -> FastAPI:
    from pacorl.annotate.server import make_app, prepare
    from pacorl.annotate.sharing import Sharing
    from pacorl.annotate.store import Store, sha256
    from pacorl.dataset.records import Instance, write_records

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
            db.execute("UPDATE people SET token_hash = ? WHERE name = ?", (sha256(token), name))
    return make_app(folder, store)


def main(name: str) -> None:
    app = {"judge": judge, "studio": studio, "annotate": annotate}[name]()
    with listening("127.0.0.1", 0) as (listener, url):
        print(url, flush=True)
        run(app, sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
