"""Generator and judge of `pacorl generate`: their options, checks, plan and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

from pacorl.cli import gate
from pacorl.cli.shared import echo_errors, end_with
from pacorl.config.options import LARGEST, MEMORY, CalibratedJudge, GeneratorOptions, JudgeOptions, inherited, option
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.models.policies.spec import PolicySpec
    from pacorl.types import Prompt


RECIPE_OPTIONS = ("guidance_scale", "true_cfg_scale", "negative_prompt", "max_sequence_length")
"""Options of a generator that a recipe records."""


@dataclass(frozen=True, kw_only=True)
class AdaptedGenerator(GeneratorOptions):
    """The generator, with adapters of any strength."""

    adapter: str = inherited(
        GeneratorOptions,
        "adapter",
        help="A LoRA of any form: folder, file, ORG/NAME or ORG/NAME:FILE on the hub; SOURCE:0.5 for half of it, "
        "'A:0.5 + B' for two.",
    )

    @property
    def adapters(self) -> dict[str, float]:
        """Adapter → strength."""
        from pacorl.models.adapters import read_adapters

        return read_adapters(self.adapter)

    @property
    def dtype(self) -> str:
        """Type of the weights in a plan."""
        return "float32" if self.model == TINY else "bfloat16"

    def spec_of(self, prompts: Sequence[Prompt]) -> PolicySpec:
        """Return the generator's kind. Raises ValueError if it does not take the prompts' images."""
        from pacorl.models.policies import POLICIES, kind_of
        from pacorl.models.policies.policy import check_images

        edits = any(prompt.sources for prompt in prompts)
        spec = POLICIES.named(self.kind or kind_of(self.model, edits=edits))
        for prompt in prompts:
            check_images(spec.policy, prompt, self.model)
        return spec

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check checkpoint, adapters, size and options before diffusers is imported."""
        spec = self.spec_of(prompts)
        spec.check_source(self.model, adapters=spec.adapters_of(self.model, self.adapters), size=self.size)
        spec.options_for(self.model, dtype=self.dtype, **self.policy_options)

    def load(self, *, memory: str, edits: bool) -> Generator:
        """Load the generator; `edits` selects the tiny editor."""
        from pacorl.generate.generator import Generator
        from pacorl.models.policies import kind_of

        # The request selects the tiny checkpoint: one makes sets, the other edits.
        kind = self.kind or kind_of(self.model, edits=edits)
        model = Generator.from_pretrained(
            self.model, kind=kind, adapter=self.adapters, memory=memory, **self.policy_options
        )
        echo_errors(*model.loras)
        return model

    def by_recipe(self, texts: Mapping[str, str]) -> AdaptedGenerator:
        """Take the generator of an image's recipe, unless a model is named; given options win."""
        if self.model != TINY:
            return self
        options = [f"{name}={texts[name]}" for name in RECIPE_OPTIONS if name in texts]
        return replace(
            self,
            model=texts.get("model", TINY),
            adapter=self.adapter or texts.get("adapter", ""),
            steps=self.steps or int(texts.get("steps", 0)) or None,
            options=[*options, *self.options],
        )


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(CalibratedJudge):
    """Number of images, the choice among candidates, and the gate."""

    panel: ClassVar[str] = "Choice"

    judge: str = inherited(
        JudgeOptions, "judge", default="", help="Who ranks and checks: folder, hub name, server's URL#MODEL, or tiny."
    )
    count: int = option(1, "Images per prompt.", min=1, max=LARGEST)
    # Each candidate is an image in memory until the best is known.
    best_of: int = option(1, "Generate so many candidates for each, and keep the judge's best.", min=1, max=1000)
    least: float | None = inherited(
        gate.CheckOptions,
        "least",
        help="Least P(Yes) of a panel, as for `pacorl check`: panels below it are drawn again. Exit code 4: the set "
        "still fails.",
    )
    tries: int = option(4, "With --min: panels of a set drawn again at most.", min=1, max=1000)

    def load(self, source: str, generator: Generator) -> PacoReward:
        """Load the judge of the candidates; with little memory it takes turns with the generator."""
        with generator.judging():
            reward = gate.load_judge(source, self)
            generator.judged_by(reward.judge)
        return reward


def print_plan(
    generator: AdaptedGenerator,
    choice: ChoiceOptions,
    source: str,
    prompts: Sequence[Prompt],
    *,
    card: int,
    as_json: bool,
) -> NoReturn:
    """Print the memory and downloads of generator and judge, and end the command."""
    from pacorl.plan.plan import plan_generation

    spec = generator.spec_of(prompts)
    policy = spec.options_for(generator.model, dtype=generator.dtype, memory=choice.memory, **generator.policy_options)
    plan_of = partial(plan_generation, size=generator.size, judge=source, prompts=prompts, card=card)
    plan = plan_of(policy)
    for memory in MEMORY if plan.shortage else ():
        if memory != choice.memory and not plan_of(policy.in_memory(memory)).shortage:
            echo_errors(f"it fits with --memory {memory}")
            break
    end_with(plan, as_json=as_json)
