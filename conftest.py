"""What holds for every test."""

import gc
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from browsers import CHROMIUM, playwright

NO_CHROMIUM = "no Chromium is installed"


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files of tests need not survive a power failure; a suite syncs thousands, at some milliseconds each.

    What is written in which order is tested in `tests/io`, and what a killed process leaves in processes of their own,
    which do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # a closed file still raises OSError
        patch.setattr(os, "sync", lambda: None, raising=False)  # Windows has none
        yield


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes a line on what a test counted; the summary shows it with the minutes since the test began."""
    started = time.monotonic()
    return lambda line: record_property("measured", f"{line}, {(time.monotonic() - started) / 60:.1f} minutes")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        for name, line in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(line)
    skipped = sum(NO_CHROMIUM in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests of pages were skipped: {NO_CHROMIUM}", yellow=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium; of a module, since other tests may not run beside its event loop."""
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test of a page that is skipped though a Chromium is there."""
    report = yield
    if report.skipped and CHROMIUM and item.get_closest_marker("browser"):
        report.outcome, report.longrepr = "failed", f"skipped, though {CHROMIUM} is there: {report.longrepr}"
    return report


COMPILER_WARNINGS = (
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:.*Function.* should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning",  # in diffusers, of a constant
)
"""Warnings of torch's own compiler, which fail a compilation if they are errors."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the compiler's warnings in tests marked `compiles`, and skip those marked `browser` without one."""
    # The longest files first: they would keep one process alone at the end.
    items.sort(key=lambda item: item.path.parent.name not in ("fullsize", "zoo"))
    for item in items:
        if CHROMIUM is None and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
        if item.get_closest_marker("compiles"):
            for warning in COMPILER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without looking for garbage, and leaves what was imported out of every later look.

    It stays to the end, and there is so much of it that a look takes about a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        _pass_on_records_of_torch()


def _pass_on_records_of_torch() -> None:
    """Let torch's loggers propagate: pytest would add its handlers to each of these 60 six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("torch."):
            logger.propagate = True
