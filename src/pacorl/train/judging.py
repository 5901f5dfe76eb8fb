"""The judges of a run: which of them anything asks, and how each is had.

A judge of another process is reached before weights load, one of this process is loaded after the encoders left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacorl.config.base import ConfigError
from pacorl.config.policy_run import PolicyRun
from pacorl.judges import JUDGES, open_judge
from pacorl.judges.judge import BackendOptions, Judge
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


def reach_judge(options: BackendOptions, *, processes: int) -> Judge | None:
    """A judge of another process, after it was met; None for one of this process.

    Raises:
        JudgeRefusedError: for a wrong name or key.
        ConnectionError: if nobody answers.
    """
    in_process = JUDGES[options.backend].in_process
    return None if in_process else open_judge(options, device="cpu", processes=processes)


def load_judge(options: BackendOptions, *, device: torch.device) -> Judge:
    """A judge in this process."""
    return open_judge(options, device=device)
