"""Loading bars of the libraries: noise where a command shows its own progress."""

from __future__ import annotations


def quiet_loading() -> None:
    """Switches off the bars that diffusers and transformers show while they load."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
