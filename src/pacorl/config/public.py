"""Masking of keys in published configs: model card, report and trackers show `public(config)`."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
SECRETS = re.compile(
    r"\b(?:sk-|nvapi-|xai-)[\w-]{16,}"
    r"|\b(?:hf|gsk|r8|gh[oprsu])_[A-Za-z0-9]{10,}|\bgithub_pat_\w{10,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{10,}"
    r"|\bBearer\s+(?!auth|cert)[\w.~+/-]{8,}|\bbearer\s+[\w.~+/-]{16,}"
    r"|\beyJ[\w-]{8,500}\.eyJ[\w-]{8,}"  # a JSON Web Token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"""|://[^/\s@"']+@"""
    r"""|(?i:[?&]\w{0,40}(?:token|key|secret|password|sig|signature)=)[^&\s"']+"""
)
"""Keys of models' services and hosts, tokens, user names in addresses, and keys in the queries of addresses."""
SECRET_NAME = re.compile(
    r"(?:^|[\W_]|api|access|auth|private)(?:key|token|secret|password|passwd|credentials?|authorization)$",
    re.IGNORECASE,
)
"""A name whose value is a key, whatever it looks like."""


def public(value: Any, *, name: str = "") -> Any:
    """Replace every key in a config, or a part of it, by `***`.

    Args:
        value: a JSON value.
        name: config key of the value. Secrets are recognised by name or form.
    """
    if value and SECRET_NAME.search(name):
        return MASK
    if isinstance(value, Mapping):
        return {key: public(item, name=str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item, name=name) for item in value]
    if isinstance(value, str) and SECRETS.search(value):
        return MASK
    return value
