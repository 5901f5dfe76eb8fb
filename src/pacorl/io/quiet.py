"""Suppression of libraries' messages and progress bars that duplicate pacorl's own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Raise the level of these loggers to ERROR for the block."""
    loggers = [logging.getLogger(name) for name in names]
    # Restored afterwards, since the levels may be the user's.
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def quiet_loading() -> None:
    """Switch off the bars that diffusers and transformers show while they load: commands show their own progress."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
