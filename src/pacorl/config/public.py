"""Masking of keys in published configs: model card, report and trackers show `public(config)`."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

MASK = "***"
SECRETS = re.compile(
    "|".join(
        (
            r"\b(?:sk-|nvapi-|xai-)[\w-]{16,}",  # OpenAI and providers with its form, NVIDIA, xAI
            r"\b(?:hf|gsk|r8|npm)_[A-Za-z0-9]{10,}",  # Hugging Face, Groq, Replicate, npm
            r"\bgh[oprsu]_[A-Za-z0-9]{10,}|\bgithub_pat_\w{10,}",
            r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|agent)-[\w-]{10,}",  # GitLab
            r"\bpypi-(?:AgE[\w-]{10,}|\w{30,})",
            r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # AWS
            r"\bAIza[\w-]{10,}|\bya29\.[\w-]{10,}",  # Google
            r"\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9]{10,}",  # Stripe
            r"\bxox[a-z]-[\w-]{10,}|\bxapp-[\w-]{10,}|hooks\.slack\.com/(?:services|workflows|triggers)/\w[\w/]*",
            r"discord(?:app)?\.com/api/(?:v\d{1,3}/)?webhooks/\d{1,30}/[\w-]+",
            r"\beyJ[\w-]{8,500}\.eyJ[\w-]{8,}",  # a JSON Web Token: its first two parts begin with `{"`
            r"\bBearer\s+(?!auth|cert)[\w.~+/-]{8,}|\bbearer\s+[\w.~+/-]{16,}",
            r"\bBasic\s+(?P<login>[A-Za-z0-9+/]{8,}={0,2})",
            # Weights & Biases: 40 hex digits, like a commit, so only after a word for a key.
            r"(?i:(?:\b|_|api)(?:key|token|secret|password|wandb|login))\W{1,5}[0-9a-f]{40}\b",
            r"-----BEGIN [A-Z ]*PRIVATE KEY",
            r"""://[^/\s@"']+@""",
            r"""(?i:[?&]\w{0,40}(?:token|key|secret|password|sig|signature)=)[^&\s"']+""",
        )
    )
)
"""Keys of the usual services, logins, user names in addresses, and keys in the queries of addresses."""
SECRET_NAME = re.compile(
    r"(?:^|[\W_]|api|access|auth|private)(?:key|token|secret|password|passwd|credentials?|authorization)$",
    re.IGNORECASE,
)
"""A name whose value is a key, whatever it looks like."""
ARGUMENT = re.compile(r"--?(?:[\w-]*[_-])?(?:key|token|secret|password)=.", re.IGNORECASE)
"""An argument with such a value, as `--api-key=abc`."""


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
        # `[--api-key, abc]`: an argument names the value after it.
        names = [name, *(str(item) if str(item).startswith("-") else name for item in value)]
        return [public(item, name=before) for before, item in zip(names, value, strict=False)]
    if isinstance(value, str):
        return MASK if find_secret(f"{name}: {value}") or ARGUMENT.match(value) else value
    return value


def find_secret(text: str) -> re.Match[str] | None:
    """Find the first part of a text in the form of a key or password."""
    for match in SECRETS.finditer(text):
        if not match["login"] or _is_login(match["login"]):
            return match
    return None


def _is_login(code: str) -> bool:
    """Check whether a text is `user:password` in base64, not a word after "Basic"."""
    try:
        return ":" in b64decode(code).decode("ascii")
    except ValueError:
        return False
