"""What an epoch of the policy loop costs, what it survives, and every objective through the real loop."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import metrics, tiny_run, train_policy

from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo import checkpoint, scoring
from pacorl.grpo.builders import first_draw
from pacorl.grpo.monitor import COUPLES, PAIRS
from pacorl.grpo.rollout import draw_samples
from pacorl.grpo.rows import divide, epoch_rows
from pacorl.grpo.scoring import Scorer
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.grpo.update import ratio_warning
from pacorl.models.adapters import AdapterCopy
from pacorl.models.policies.flux import FluxPolicy
from pacorl.types import Prompt, Question, Samples, Size, Verdict

ENCODED: list[tuple[str, Size]] = []


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyTrainer]:
    """A prepared run of 2 prompts × 4 at half of the evaluation's size; each test sets its config anew."""
    encode = FluxPolicy.encode

    def counted(self: FluxPolicy, prompts: Sequence[Prompt], size: Size) -> Any:
        ENCODED.extend((prompt.text, size) for prompt in prompts)
        return encode(self, prompts, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FluxPolicy, "encode", counted)
        config = tiny_run([*SETTINGS, f"out={tmp_path_factory.mktemp('engine') / 'run'}"])
        made = PolicyTrainer(config)
        yield made
        made.close()


SETTINGS = [
    "epochs=1",
    "prompts_per_epoch=2",
    "group_size=4",
    "trackers=[]",
    "prompts.train=tiny:train:3",
    "prompts.evaluation=tiny:dev:2",
    "sampling.size=[32,32]",
    "sampling.steps=4",
    "sampling.suffix={}",
    "sampling.batch=2",
    "sampling.sde_steps=[1,2]",
    "sampling.tree={}",
    "evaluation.size=[64,64]",
    "evaluation.steps=2",
    "optimizer.updates_per_epoch=1",
]


def configure(training: PolicyTrainer, *overrides: str) -> None:
    """Give a built trainer other settings."""
    training.config = tiny_run([*SETTINGS, f"out={training.config.out}", *overrides])
    training.objective = OBJECTIVES[training.config.objective.name]
    training.division = divide(training.config)
    training.first_draw = first_draw(training.config, training.policy, training.cache, training.division)


class Work:
    """Counts what an epoch does: rows of forwards by kind, decoded images, backwards, questions."""

    def __init__(self, training: PolicyTrainer, patch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        self._hook = training.lora.transformer.register_forward_pre_hook(self._forward, with_kwargs=True)
        vae, judge = training.policy.pipeline.vae, training.judge  # type: ignore[attr-defined]
        decode, verdicts, backward = vae.decode, judge.verdicts, torch.Tensor.backward

        def decoded(codes: torch.Tensor, **options: Any) -> Any:
            self.count["decoded"] += len(codes)
            return decode(codes, **options)

        def asked(questions: Sequence[Question]) -> list[Verdict]:
            self.count["questions"] += len(questions)
            return verdicts(questions)

        def back(loss: torch.Tensor) -> None:
            self.count["backward"] += 1
            backward(loss)

        patch.setattr(vae, "decode", decoded)
        patch.setattr(judge, "verdicts", asked)
        patch.setattr(torch.Tensor, "backward", back)

    def _forward(self, module: torch.nn.Module, args: Any, options: dict[str, Any]) -> None:
        kind = "trained" if torch.is_grad_enabled() else "sampled"
        self.count[kind] += len(options["hidden_states"])

    def done(self) -> Counter[str]:
        self._hook.remove()
        return self.count


@pytest.mark.parametrize(
    ("overrides", "forwards"),
    [
        pytest.param([], (4, 2, 0), marks=pytest.mark.slow),
        pytest.param(["objective.name=grpo_guard"], (4, 2, 0), marks=pytest.mark.slow),
        pytest.param(["objective.name=diffusion_nft"], (4, 2, 2), marks=pytest.mark.slow),
        pytest.param(["objective.name=awm", "optimizer.updates_per_epoch=2"], (4, 2, 1), marks=pytest.mark.slow),
        pytest.param(["objective.kl_weight=0.1"], (4, 2, 2), marks=pytest.mark.slow),
        (["objective.name=diffusion_nft", "objective.kl_weight=0.1"], (4, 2, 4)),
        pytest.param(["sampling.window.kind=random"], (4, 1, 0), marks=pytest.mark.slow),
    ],
)
def test_the_work_of_an_epoch(
    training: PolicyTrainer, monkeypatch: pytest.MonkeyPatch, overrides: list[str], forwards: tuple[int, int, int]
) -> None:
    """Forwards per image: T in sampling, and per trained step 1 with a backward, 1 of the policy that sampled for
    endpoints (after the first update if each epoch is sampled by the trained policy), 1 of the base for the KL."""
    configure(training, *overrides)
    training.lora.old = AdapterCopy(training.lora.transformer) if training.objective.needs == "endpoint" else None
    sampled, trained, extra = forwards
    known, work = len(ENCODED), Work(training, monkeypatch)
    training.run_epoch()
    count = work.done()
    assert count["trained"] == 8 * trained
    assert count["sampled"] == 8 * (sampled + extra)
    assert count["backward"] == 4 * trained, "one per micro-batch and trained step"
    assert count["decoded"] == 8
    of_monitor = COUPLES * 2 * PAIRS
    assert count["questions"] == 8 * (6 + 4) + of_monitor, "pairs for the consistency, panels for the match"
    assert len(ENCODED) == known, "a prompt was encoded again"


@pytest.mark.slow
def test_scores_beside_sampling_are_the_same_bit_for_bit(training: PolicyTrainer) -> None:
    configure(training)
    training.lora.old = None
    rows = epoch_rows(training.train_prompts, epoch=training.epoch, count=2, group_size=4, seed=3)
    found = []
    for overlap in (False, True):
        with closing(Scorer(training.rewards, overlap=overlap)) as scorer:
            for rollout in draw_samples(training.draw, rows, Samples()):
                scorer.submit(rollout)
            found.append(scorer.results())
    assert found[0] == found[1]
    assert len(found[0]) == 8


# --- whole runs ------------------------------------------------------------------------------------------------


REWARD = """
calls = []

def spotty(prompts, images):
    calls.append(len(images))
    if len(calls) < 2:
        return [1.0] * len(images)  # the trial before the run
    return {values}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ("[None if i % 2 else float(i) for i in range(len(images))]", "gave no reason"),
        ("[float('nan') if i % 2 else float(i) for i in range(len(images))]", "returned NaN or an infinity"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_a_spent_failure_budget_saves_and_stops(
    small: list[str], tmp_path: Path, values: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD.replace("{values}", values))
    rewards = f"rewards=[{{name: '{file}:spotty'}}]"
    config = tiny_run([*small, rewards])
    monkeypatch.setattr(scoring, "MAX_MISSING", 0.4)
    with pytest.raises(ValueError, match=rf"50% of the scores of epoch 1 are missing.*the state is saved.*{cause}"):
        train_policy(config)
    assert checkpoint.checkpoints(config.out / "checkpoints")
    monkeypatch.setattr(scoring, "MAX_MISSING", 0.5)
    out = train_policy(config, resume=True)
    (epoch,) = metrics(out, "epoch")
    assert epoch["samples/missing"] == epoch["samples/used"] == 0.5
    assert epoch["samples/not_finite"] == (0.5 if "nan" in values else 0.0)


def test_a_ratio_that_is_off_before_an_update_is_warned_of() -> None:
    tolerance = 1e-4
    for deviation, is_told in ((0.5, False), (2, True)):
        metrics = {"loss": 1.0, "ratio_deviation/1": deviation * tolerance}
        assert ("the ratio deviates from 1" in ratio_warning(metrics, tolerance, epoch=1)) == is_told
