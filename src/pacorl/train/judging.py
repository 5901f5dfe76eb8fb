"""The judge of a run: reached before weights load where it is behind HTTP, loaded after the encoders left otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacorl.models.http_judge import HttpJudge
from pacorl.models.judge import JUDGES, Judge

if TYPE_CHECKING:
    import torch

    from pacorl.config import JudgeConfig


def reach_judge(config: JudgeConfig, *, processes: int) -> HttpJudge | None:
    """A judge behind HTTP, after it was met; None for one of this process.

    Raises JudgeRefusedError for a wrong name or key, ConnectionError where nobody answers.
    """
    if config.backend != "http":
        return None
    judge = HttpJudge.connect(
        config.checkpoint,
        model=config.model,
        api_key_env=config.api_key_env,
        concurrency=config.concurrency,
        processes=processes,
        timeout=config.timeout,
        retries=config.retries,
        symmetric=config.symmetric,
        variants=config.variants,
    )
    try:
        judge.check()
    except BaseException:
        judge.close()
        raise
    return judge


def load_judge(config: JudgeConfig, *, device: torch.device) -> Judge:
    """A judge in this process."""
    return JUDGES[config.backend](
        config.checkpoint,
        adapter=config.adapter,
        dtype=config.dtype,
        device=device,
        batch_tokens=config.batch_tokens,
        symmetric=config.symmetric,
        variants=config.variants,
    )


def close_judge(judge: Judge | None) -> None:
    """Ends what a judge runs beside the training."""
    if isinstance(judge, HttpJudge):
        judge.close()
