"""The judges of a run: which of them anything asks, and how each is had.

A judge behind HTTP is reached before weights load, one of this process is loaded after the encoders left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacorl.config.base import ConfigError
from pacorl.config.policy_run import JudgeConfig, PolicyRun
from pacorl.judges.http.judge import HttpJudge
from pacorl.judges.judge import JUDGES, Judge
from pacorl.rewards import asks_judge

if TYPE_CHECKING:
    import torch


def without_idle_judges(config: PolicyRun) -> PolicyRun:
    """Drop the judges that nothing asks: no reward, no measure of the evaluation, and not `best_by`.

    Returns:
        The config, its `judge` and `evaluation.judge` None unless they are asked. Doing it again changes nothing.

    Raises:
        ConfigError: `judge` is none, and a reward or measure asks it; the message names which.
    """
    rewards = [f"rewards.{reward.key}" for reward in config.rewards if asks_judge(reward)]
    measures = [f"evaluation.rewards.{reward.key}" for reward in config.evaluation.rewards if asks_judge(reward)]
    asking = rewards + ([] if config.evaluation.judge else measures)
    asking += ["best_by p_yes"] if config.best_by == "p_yes" else []
    if asking and config.judge is None:
        raise ConfigError(
            f"judge is none, and {', '.join(asking)} {'asks' if len(asking) == 1 else 'ask'} a judge; name one "
            "(judge.checkpoint=…), or leave out what asks it"
        )
    evaluation = config.evaluation.model_copy(update={"judge": config.evaluation.judge if measures else None})
    return config.model_copy(update={"judge": config.judge if asking else None, "evaluation": evaluation})


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
