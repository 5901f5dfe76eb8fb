"""Labelled pairs as a parquet file that Hugging Face `datasets` opens with its images decoded. Needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pacorl.dataset.records import LabelledPair
from pacorl.io.files import inside, replacing

ROWS_PER_GROUP = 100
"""So many rows are in memory at a time, images included; the hub's viewer likes groups of this size too."""

TEXTS = ("question", "reasons", "category", "group")


def write_pairs_parquet(path: Path, pairs: Sequence[LabelledPair], *, root: Path) -> None:
    """Writes one row per pair, images inside the file.

    Raises:
        ValueError: if pyarrow or an image is missing.
    """
    pa, pq = arrow()
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    fields = [
        ("image_1", image),
        ("image_2", image),
        ("consistent", pa.bool_()),
        *((name, pa.string()) for name in TEXTS),
    ]
    schema = pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": _features()}})})
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(pairs), ROWS_PER_GROUP):
            rows = [_row(pair, root) for pair in pairs[start : start + ROWS_PER_GROUP]]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def arrow() -> tuple[Any, Any]:
    """pyarrow and its parquet module. Raises ValueError that says how to install them."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("parquet files need pyarrow; install it with `pip install 'pacorl[data]'`") from None
    return pa, pq


def _features() -> dict[str, Any]:
    image, text = {"_type": "Image"}, {"dtype": "string", "_type": "Value"}
    return {
        "image_1": image,
        "image_2": image,
        "consistent": {"dtype": "bool", "_type": "Value"},
        **dict.fromkeys(TEXTS, text),
    }


def _row(pair: LabelledPair, root: Path) -> dict[str, Any]:
    first, second = ({"bytes": inside(root, name).read_bytes(), "path": name} for name in pair.images)
    texts = {name: getattr(pair, name) for name in TEXTS}
    return {"image_1": first, "image_2": second, "consistent": pair.consistent, **texts}
