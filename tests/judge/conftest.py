"""Tests of the lowest transformers leave out what comes with a later one."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("transformers.decision") else ["test_decision.py"]
