"""The processor of judges of random weights; tests of the lowest transformers leave out what comes with a later one."""

from importlib.util import find_spec

import pytest
from judges import processor_of_any_size

from pacorl.io.processor import ImageTextProcessor

collect_ignore = [] if find_spec("transformers.decision") else ["test_decision.py"]


@pytest.fixture(scope="module")
def processor() -> ImageTextProcessor:
    return processor_of_any_size()
