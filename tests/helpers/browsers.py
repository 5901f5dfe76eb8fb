"""Chromium for the tests of pages, which are marked `browser`; conftest.py skips them where there is none."""

from __future__ import annotations

import shutil
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 240_000
"""Milliseconds until models are loaded and four images are generated, on a busy machine."""

playwright: Any = None
try:
    from playwright import sync_api as playwright

    playwright.expect.set_options(timeout=60_000)  # a busy machine answers late
except ImportError:
    pass
