"""Generator and judge of `pacorl generate`: their options, checks, plan and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from typer import Exit

from pacorl.cli.gate import CheckOptions, waiting
from pacorl.cli.shared import echo, echo_errors, print_json
from pacorl.config.options import (
    LARGEST,
    CalibratedJudge,
    GeneratorOptions,
    JudgeOptions,
    ModelOptions,
    inherited,
    one_of,
    option,
)
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.models.policies.spec import PolicySpec
    from pacorl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class AdaptedGenerator(GeneratorOptions):
    """The generator, with adapters of any strength."""

    adapter: str = inherited(
        ModelOptions,
        "adapter",
        help="A LoRA of any form: folder, file, ORG/NAME or ORG/NAME:FILE on the hub; SOURCE:0.5 for half of it, "
        "'A:0.5 + B' for two.",
    )

    @property
    def adapters(self) -> dict[str, float]:
        """Adapter → strength."""
        from pacorl.models.adapters import read_adapters

        return read_adapters(self.adapter)

    def by_recipe(self, texts: Mapping[str, str]) -> AdaptedGenerator:
        """Take what is not given from the recipe of an image."""
        given = self.policy_options
        names = ("guidance_scale", "true_cfg_scale", "negative_prompt", "max_sequence_length")
        further = [f"{name}={texts[name]}" for name in names if name in texts and name not in given]
        return replace(
            self,
            model=texts.get("model", TINY) if self.model == TINY else self.model,
            adapter=self.adapter or texts.get("adapter", ""),
            steps=self.steps or int(texts.get("steps", 0)) or None,
            options=[*self.options, *further] if self.model == TINY else self.options,
        )


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(CalibratedJudge):
    """Number of images, the choice among candidates, and the gate."""

    panel: ClassVar[str] = "Choice"

    judge: str = inherited(
        JudgeOptions, "judge", default="", help="Who ranks and checks: folder, hub name, server's URL#MODEL, or tiny."
    )
    count: int = option(1, "Images per prompt.", least=1, most=LARGEST)
    # Each candidate is an image in memory until the best is known.
    best_of: int = option(1, "Generate so many candidates for each, and keep the judge's best.", least=1, most=1000)
    keep_all: bool = option(False, "Keep every candidate, with its rank in the name.")
    ask: str = option(
        "theme", "What the judge is asked of pairs: theme, or the written criteria.", parse=one_of("theme", "criteria")
    )
    least: float | None = inherited(
        CheckOptions,
        "least",
        help="Least P(same) of a panel, as for `pacorl check`: panels below it are drawn again. Exit code 4: the set "
        "still fails.",
    )
    tries: int = option(4, "With --min: panels of a set drawn again at most.", least=1, most=1000)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the images go."""

    panel: ClassVar[str] = "Output"

    out: Path = option(Path("generated"), "The folder for the images.")
    report: Path | None = option(None, "Also write a self-contained page (a storyboard always gets one).")
    as_json: bool = option(False, "Print JSON.", flags=("--json",))
    dry_run: bool = option(
        False, "Print what generator and judge would need, and load nothing. Exit code 2: one is absent."
    )


# --- checks and plan ---------------------------------------------------------------------------------------------


def check_models(options: AdaptedGenerator, judge: str, prompts: Sequence[Prompt]) -> PolicySpec:
    """Check generator, judge and size before diffusers is imported; returns the generator's kind."""
    from pacorl.judge import check_judge

    spec = checked_spec(options, prompts)
    for adapter in options.adapters or [""]:
        spec.check_source(options.model, adapter=adapter, size=options.size)
    spec.options_for(options.model, dtype="float32", **options.policy_options)
    if judge:
        check_judge(judge)
    return spec


def checked_spec(options: GeneratorOptions, prompts: Sequence[Prompt]) -> PolicySpec:
    """Return the generator's kind. Raises ValueError if it does not take the prompts' images."""
    from pacorl.models.policies import POLICIES, kind_of
    from pacorl.models.policies.policy import check_images

    spec = POLICIES.named(options.kind or kind_of(options.model, edits=any(prompt.sources for prompt in prompts)))
    for prompt in prompts:
        check_images(spec.policy, prompt, options.model)
    return spec


def dry_run(
    options: GeneratorOptions,
    choice: JudgeOptions,
    source: str,
    *,
    prompts: Sequence[Prompt],
    panels: Sequence[str],
    as_json: bool,
) -> NoReturn:
    """Print what generator and judge would need, and end the command.

    Args:
        options: The generator.
        choice: Access to the judge.
        source: The judge; empty for none.
        prompts: The prompts, whose images count.
        panels: Text of each panel for people.
        as_json: Print JSON.
    """
    from pacorl.io.documents import parse_json
    from pacorl.judge import judge_from
    from pacorl.plan.plan import judge_options, plan_generation
    from pacorl.plan.sources import silent_judge

    # The generator.
    spec = checked_spec(options, prompts)
    # The prompt with the most images decides the peak.
    images = max((len(prompt.sources) + len(prompt.references) for prompt in prompts), default=0)
    policy = spec.options_for(
        options.model,
        dtype="float32" if options.model == TINY else "bfloat16",
        memory=choice.memory,
        **options.policy_options,
    )

    judge = judge_options(source, choice.memory)

    # Both on the device, together or in turns; a judge over HTTP needs its server.
    plan = plan_generation(policy, size=options.size, low=choice.in_turns, judge=judge, images=images)
    if source and judge is None:
        silent = silent_judge("--judge", source, lambda: judge_from(source)[0])
        plan = replace(plan, absences=(*plan.absences, silent)) if silent else plan
    # JSON with the panels, or a table.
    if as_json:
        print_json({"panels": list(panels)} | parse_json(plan.to_json()))
    else:
        echo(plan)
    raise Exit(plan.exit_code)


def load_judge(model: Generator, judge: str, choice: CalibratedJudge) -> PacoReward:
    """Load the judge of the candidates; with little memory it takes turns with the generator."""
    from pacorl.gate.paco_reward import PacoReward

    with model.judging():
        reward = PacoReward.from_pretrained(judge, **choice.judge_access)
        model.judged_by(reward.judge)
    return waiting(reward)


def load_generator(options: AdaptedGenerator, *, memory: str, edits: bool) -> Generator:
    """Load the generator of a command; `edits` selects the tiny editor."""
    from pacorl.generate.generator import Generator
    from pacorl.models.policies import kind_of

    # The request selects the tiny checkpoint: one makes sets, the other edits.
    kind = options.kind or kind_of(options.model, edits=edits)
    model = Generator.from_pretrained(
        options.model, kind=kind, adapter=options.adapters, memory=memory, **options.policy_options
    )
    echo_errors(*model.loras)
    return model
