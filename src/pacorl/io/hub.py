"""The hub of models, before its libraries ask it: without a network they try every file of a checkpoint five times, for
minutes, and then say that a file is missing."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SECONDS = 5.0
"""How long the hub may take to answer at all."""


def check_hub(source: str, *files: str) -> None:
    """Check that a checkpoint can be had, if `source` names one of the hub's.

    One that lies in the cache is used as it is if the hub does not answer.

    Args:
        files: Names in the repository; one of them is in the cache if the checkpoint is.

    Raises:
        ValueError: It is not on this machine, and the hub cannot be asked.
    """
    if not HUB_NAME.fullmatch(source) or Path(source).exists():
        return
    from huggingface_hub import constants, try_to_load_from_cache

    if not (fault := "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _silence(constants.ENDPOINT)):
        return
    if not any(isinstance(try_to_load_from_cache(source, file), str) for file in files):
        raise ValueError(
            f"{source} is not on this machine, and the hub cannot be asked for it ({fault}): name a folder, or run "
            f"`hf download {source}` with a network (HF_ENDPOINT names a mirror)"
        )
    constants.HF_HUB_OFFLINE = True  # or every cached file would be asked for, in vain


@cache
def _silence(endpoint: str) -> str:
    """Why the hub cannot be reached; empty if it answers anything."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # the client, and so its errors, are the library's choice
        return f"{endpoint}: {' '.join(str(error).split()) or type(error).__name__}"
    return ""
