"""Config sections of rewards."""

from typing import Any

from pydantic import Field

from pacorl.config.base import Section


class MeasureConfig(Section):
    """One reward by name, and its arguments (checked by the reward itself)."""

    name: str
    """A reward of pacorl, or `path/to/file.py:NAME`."""
    label: str = Field("", pattern=r"^[\w.-]*$")
    """Name of its curves; `name` if empty. Two rewards of one name need labels."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward, by name."""

    @property
    def key(self) -> str:
        """Name in tables and logs."""
        return self.label or self.name.rpartition(":")[2]


class RewardConfig(MeasureConfig):
    """One reward that is trained on."""

    weight: float = 1.0
    """Weight of its advantage, or of its score, in the aggregate's sum."""

    @property
    def compares_samples(self) -> bool:
        """Whether a call of training compares the samples of a prompt, and so must hold whole groups."""
        return self.name == "consistency" and bool(self.args.get("contrast"))
