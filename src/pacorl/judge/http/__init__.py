"""A judge behind an OpenAI-compatible API: its options, and its line of `JUDGES`.

`judge` asks, `batch` asks nothing twice, `messages` writes requests and reads answers, `client` sends them, and
`endpoints` says where judges are.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pacorl.config.base import Positive
from pacorl.io.net import is_url, service_url
from pacorl.io.outage import OUTAGE_SECONDS, UnreachableError
from pacorl.judge.calibration import read_calibration
from pacorl.judge.http.endpoints import address_of, listens, load_endpoints
from pacorl.judge.http.http_judge import HttpJudge
from pacorl.judge.judge import BackendOptions, JudgeSpec

logger = logging.getLogger(__name__)
DAY = 86_400.0
"""Limit of all waiting times in seconds."""


class HttpOptions(BackendOptions):
    """A judge behind an OpenAI-compatible API."""

    backend: Literal["http"] = "http"
    checkpoint: str = ""
    """A URL, or a YAML file of endpoints."""
    model: str = ""
    """The model's name there."""
    api_key_env: str = ""
    """The environment variable that holds the key."""
    concurrency: Positive = 32
    """Requests that an endpoint is sent at a time, by all processes together."""
    timeout: float = Field(60.0, gt=0, le=DAY)
    """Seconds for an answer."""
    retries: int = Field(6, ge=0, le=1000)
    """Further attempts before a verdict is missing."""
    startup: float = Field(180.0, ge=0, le=DAY)
    """Seconds that a server is waited for which does not answer yet when a run begins: a 7B model loads that long."""

    outage: float = Field(OUTAGE_SECONDS, ge=0, le=DAY)
    """Seconds for which a training retries questions that no server answers; then it saves, and ends with
    exit code 75. 0: such verdicts are missing, and count for advantages.max_missing."""

    def patience(self, missing: int) -> float:
        rounds = 1 + math.ceil(missing / self.concurrency)
        return self.startup + self.outage + rounds * (1 + self.retries) * self.timeout

    def on_resume(self) -> HttpOptions:
        # Its server has answered this run before, so that it is an outage and no wrong address.
        return self.model_copy(update={"startup": max(self.startup, self.outage)})

    def identity(self) -> str:
        model = self.model or load_endpoints(Path(self.checkpoint)).named().name
        return " ".join([f"model {model}", *self.calibration_digests])

    @model_validator(mode="before")
    @classmethod
    def _no_adapter(cls, section: Any) -> Any:
        if isinstance(section, dict) and (adapter := section.get("adapter")):
            raise ValueError(f"adapter {adapter} is a server's own affair; name it there, and here as the model")
        return section

    @model_validator(mode="after")
    def _has_an_address(self) -> HttpOptions:
        if not claims(self.checkpoint):
            raise ValueError(
                f"checkpoint {self.checkpoint!r} is no address; backend http needs a URL such as "
                "http://127.0.0.1:8000/v1, or a YAML file of endpoints"
            )
        if is_url(self.checkpoint) and service_url(self.checkpoint, name="checkpoint") and not self.model:
            raise ValueError(f"model is empty; name the model to ask at {self.checkpoint}")
        return self

    @property
    def name(self) -> str:
        return self.model or self.checkpoint


def claims(source: str) -> bool:
    """Whether a judge's name is a server's address or a YAML of endpoints."""
    return is_url(source) or source.endswith((".yaml", ".yml"))


def open_http(options: HttpOptions, *, processes: int = 1, device: Any = None, waits: bool = True) -> HttpJudge:
    """Open the judge of a config, after a handshake with every endpoint; `device` is unused."""
    keys = {"model", "api_key_env", "concurrency", "timeout", "retries", "outage", "symmetric", "variants"}
    settings = options.model_dump(include=keys)
    calibration = read_calibration(options.calibration)
    startup = waits * options.startup
    return connected(options.checkpoint, processes=processes, startup=startup, calibration=calibration, **settings)


def connected(source: str, *, startup: float = 0.0, **options: Any) -> HttpJudge:
    """Connect an `HttpJudge`, closing it if an endpoint's handshake fails for `startup` seconds."""
    judge = HttpJudge.connect(source, **options)
    try:
        try:
            judge.check()
        except ConnectionError as fault:
            if not startup:
                raise
            logger.warning("%s; waiting up to %g s for it (Ctrl-C ends it)", fault, startup)
            judge.check(patience=startup)
    except BaseException:  # a Ctrl-C too: the judge's thread would outlive it
        judge.close()
        raise
    return judge


def from_source(
    source: str, *, adapter: str = "", quantize: str = "", stream: bool = False, **options: Any
) -> tuple[HttpJudge, str]:
    """Open a judge by its address, after its handshake. Raises UnreachableError if no server answers."""
    if adapter:
        raise ValueError("a server's adapters have names of their own; name one as the model instead of an adapter")
    try:
        judge = connected(source, **options)
    except ConnectionError as fault:
        raise UnreachableError(str(fault)) from None
    return judge, judge.model


def how_to_serve(options: HttpOptions) -> str:
    """Explain how to start a server of this machine whose port is closed."""
    # The closed ports among the endpoints.
    from_file = not is_url(options.checkpoint)
    urls = load_endpoints(Path(options.checkpoint)).urls if from_file else [options.checkpoint]
    silent = []
    for url in urls:
        host, port = address_of(url)
        if host and not listens(host, port):
            silent.append((host, port))
    if not silent:
        return ""

    ports = ", ".join(f"{host}:{port}" for host, port in silent)
    served = options.checkpoint if from_file else f"CHECKPOINT --name {options.model} --port {silent[0][1]}"
    return f" (nobody listens at {ports}: `pacorl serve {served} --backend vllm`)"


SPEC = JudgeSpec(options=HttpOptions, open=open_http, from_source=from_source, claims=claims, remedy=how_to_serve)
