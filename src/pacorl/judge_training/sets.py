"""Distillation of a set judge: it learns the pair judge's P(Yes) of each pair of a set.

The pair judge is the training's initial checkpoint. It is asked about both orders of each pair, so that training may
shuffle a set's panels. A pair's loss is the Kullback-Leibler divergence from the pair judge's
answer, which is 0 if both agree.

Legend: R pairs of a batch, S sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, permutations
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from pacorl.core.advantages import advantages
from pacorl.core.advantages.log_tamed import LogTamed
from pacorl.core.set_scores import panel_shares
from pacorl.io.images import check_readable, open_image
from pacorl.judge.adapter import merge_adapter
from pacorl.judge.judge import Judge
from pacorl.judge.local import LocalJudge, joined_digest, single_token, weight_digests
from pacorl.judge.pairwise import Pair, ask
from pacorl.judge.prompting import Prompting
from pacorl.judge.set_judge import SetRecord, check_can_read_sets, pairs_of, set_hidden
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.loop import Outcome, WeightedLikelihoodTrainer, decision_metrics, processes
from pacorl.judge_training.tuning import load_model, processor_of
from pacorl.records.panel_sets import panel_sets_from
from pacorl.types import PanelSet, Question, RewardTable

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIDENT = 12.0
"""Logits of the pair judge are clamped to ± this value: P(Yes) hardly changes beyond it."""
TEMPERATURES = (1.0, 4.0)
"""Temperatures at which both judges' answers are compared: as they are, and as rewards soften them, where pairs differ
of which the pair judge is sure."""
BATCH_TOKENS = 8192
"""Most tokens of a forward, padding included."""
CORRELATION = "panel_correlation"
"""Metric of an evaluation: correlation of panel advantages with the pair judge's."""
ASKED_SETS = 64
"""Sets per call of the pair judge."""


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """A row of a dataset with its images opened."""

    index: int
    panel_set: PanelSet
    images: list[Image]


class SetDataset(Dataset[LoadedSet]):
    """Sets with lazily opened images, so that worker processes open them."""

    def __init__(self, sets: Sequence[PanelSet]) -> None:
        self.sets = list(sets)

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, index: int) -> LoadedSet:
        panel_set = self.sets[index]
        return LoadedSet(index, panel_set, [open_image(path) for path in panel_set.images])


def collate(rows: Sequence[LoadedSet]) -> dict[str, Any]:
    """Collate rows to a batch; `index` (S,) identifies them."""
    return {"sets": list(rows), "index": torch.tensor([row.index for row in rows])}


@dataclass(frozen=True, slots=True)
class SetData:
    """Training and evaluation sets of a run, with the pair judge's scores."""

    train: list[PanelSet]
    evaluation: list[PanelSet]
    processor: Any
    origin: SetRecord
    """The pair judge and the numbers of sets; its correlation is measured later."""


def load_sets(config: JudgeConfig) -> SetData:
    """Read and check a run's sets, and ask the pair judge about those without scores.

    Raises:
        ValueError: for invalid data, several processes, or a checkpoint that cannot be a set judge.
    """
    if processes().num_processes > 1:
        raise ValueError("form set trains in one process, whose gradients no other shares; start a single one")
    read = partial(panel_sets_from, scratch=config.out / "data")
    train: list[PanelSet] = []
    for source in config.data.train:
        train += read(source)
    evaluation: list[PanelSet] = []
    for source in config.data.evaluation:
        evaluation += read(source, limit=config.data.evaluation_limit)
    check_readable(path for panel_set in [*train, *evaluation] for path in panel_set.images)

    # The pair judge: the initial weights.
    checkpoint, start = config.model.checkpoint, config.tuning.start
    processor = processor_of(checkpoint, max_pixels=config.model.max_pixels)
    model = load_model(checkpoint, dtype=config.model.dtype)
    check_can_read_sets(model.config)
    if start:
        model = merge_adapter(model, start)
    judge = LocalJudge(model.to(processes().device), processor)
    digests = weight_digests(checkpoint, start)
    origin = SetRecord(
        checkpoint=f"{checkpoint} + {start}" if start else checkpoint,
        digest=joined_digest(digests) if all(digests) else "",
        panel_correlation=None,
        train_sets=len(train),
        held_out_sets=len(evaluation),
    )
    return SetData(with_scores(train, judge), with_scores(evaluation, judge), processor, origin)


def with_scores(sets: Sequence[PanelSet], judge: Judge) -> list[PanelSet]:
    """Ask a pair judge about both orders of each pair of the sets without scores."""
    scored = list(sets)
    without = [number for number, panel_set in enumerate(sets) if not panel_set.p_yes]
    for start in range(0, len(without), ASKED_SETS):
        questions = {}
        for number in without[start : start + ASKED_SETS]:
            images = [open_image(path) for path in sets[number].images]
            for pair in permutations(range(len(images)), 2):
                both = (images[pair[0]], images[pair[1]])
                questions[number, pair] = Question(both, sets[number].question)

        verdicts = ask(judge, questions)
        for number in without[start : start + ASKED_SETS]:
            places = range(len(sets[number].images))
            rows = [[verdicts[number, (i, j)].p_yes if i != j else None for j in places] for i in places]
            scored[number] = replace(sets[number], p_yes=tuple(map(tuple, rows)))
    return scored


class SetTrainer(WeightedLikelihoodTrainer):
    """Trainer that minimises the divergence from the pair judge's answers."""

    def __init__(self, *, processor: Any, most_pairs: int, **trainer: Any) -> None:
        super().__init__(alpha=None, **trainer)
        self.prompting = Prompting(_judge_model(self.model), processor)
        self.most_pairs = most_pairs

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Return 0: transformers counts by the tokens of a batch, which are not known here."""
        return 0

    def _outcome(self, model: Any, batch: Mapping[str, Any]) -> Outcome:
        rows: list[LoadedSet] = batch["sets"]
        orders = [self._order(row) if model.training else list(range(len(row.images))) for row in rows]
        logit_R = self._logits(model, rows, orders)
        targets = [target_logits(row.panel_set, order) for row, order in zip(rows, orders, strict=True)]
        target_R = torch.cat(targets).to(logit_R)

        # Each set weighs the same.
        counts = [len(target) for target in targets]
        losses = [loss_R.mean() for loss_R in divergence(logit_R, target_R).split(counts)]
        agrees = [agree_R.double().mean() for agree_R in ((logit_R > 0) == (target_R > 0)).split(counts)]
        p_yes_SR = logit_R.new_full((len(rows), self.most_pairs), math.nan)
        for own_R, p_R in zip(p_yes_SR, logit_R.detach().sigmoid().split(counts), strict=True):
            own_R[: len(p_R)] = p_R
        decision_R = F.binary_cross_entropy_with_logits(logit_R.detach(), target_R.sigmoid(), reduction="none")
        nll = torch.stack([nll_R.mean() for nll_R in decision_R.split(counts)]).mean()
        right = float(torch.stack(agrees).sum())
        return Outcome(torch.stack(losses).mean(), p_yes_SR, right, {"decision_nll": float(nll)})

    def _order(self, row: LoadedSet) -> list[int]:
        """Draw the order of a set's panels at this step."""
        # From the step and the row, so that a resumed run draws the same.
        order = list(range(len(row.images)))
        Random(f"{self.args.seed} {self.state.global_step} {row.index}").shuffle(order)
        return order

    def _logits(self, model: Any, rows: Sequence[LoadedSet], orders: Sequence[Sequence[int]]) -> Tensor:
        """Compute the logits Yes − No of all pairs, in fp32 or wider."""
        judge = _judge_model(model)
        questions = []
        for row, order in zip(rows, orders, strict=True):
            panels = tuple(row.images[panel] for panel in order)
            questions.append(Question((), row.panel_set.question, panels=panels))
        # The model's own forward, which accelerate wraps in autocast, is not called.
        with torch.autocast(judge.device.type, dtype=torch.bfloat16, enabled=bool(self.args.bf16)):
            sets = self.prompting.set_prompts(questions)
            hidden_RD = set_hidden(judge, self.prompting, sets, batch_tokens=BATCH_TOKENS, vision_tokens=BATCH_TOKENS)
            logit_R2 = F.linear(hidden_RD, judge.lm_head.weight[[self.yes, self.no]])
        wide_R2 = logit_R2.to(torch.promote_types(logit_R2.dtype, torch.float32))
        return wide_R2[:, 0] - wide_R2[:, 1]


def build_set_trainer(data: SetData, **trainer: Any) -> SetTrainer:
    """Build the trainer of a set judge; `trainer` are the arguments common to all judges."""
    tokenizer = data.processor.tokenizer
    sizes = [len(panel_set.images) for panel_set in [*data.train, *data.evaluation]]
    return SetTrainer(
        processor=data.processor,
        most_pairs=len(pairs_of(max(sizes))),
        yes=single_token(tokenizer, "Yes"),
        no=single_token(tokenizer, "No"),
        measure=lambda p_yes, step: set_metrics(data.evaluation, p_yes),
        train_dataset=SetDataset(data.train),
        eval_dataset=SetDataset(data.evaluation) if data.evaluation else None,
        data_collator=collate,
        **trainer,
    )


def _judge_model(model: Any) -> Any:
    """Return the vision-language model, with its adapter in place, of what is trained."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --- the loss --------------------------------------------------------------------------------------------------


def target_logits(panel_set: PanelSet, order: Sequence[int]) -> Tensor:
    """Compute the pair judge's logits (R,) of a set's pairs, with its panels in this order; fp64."""
    p_yes = [panel_set.p_yes[order[first]][order[second]] for first, second in pairs_of(len(order))]
    return torch.tensor(p_yes, dtype=torch.float64).logit().clamp(-CONFIDENT, CONFIDENT)


def divergence(logit_R: Tensor, target_R: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each answer from the pair judge's, summed over `TEMPERATURES`.

    Divided by T, a logit's gradient is too; the factor T gives all temperatures the same say.
    """
    loss_R = torch.zeros_like(logit_R)
    for temperature in TEMPERATURES:
        p_yes_R = torch.sigmoid(target_R / temperature)
        cross_R = F.binary_cross_entropy_with_logits(logit_R / temperature, p_yes_R, reduction="none")
        least_R = F.binary_cross_entropy_with_logits(target_R / temperature, p_yes_R, reduction="none")
        loss_R = loss_R + temperature * (cross_R - least_R)
    return loss_R


# --- how well a set judge agrees -------------------------------------------------------------------------------


def set_metrics(sets: Sequence[PanelSet], p_yes: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """Measure a set judge against the pair judge.

    Args:
        sets: The evaluated sets.
        p_yes: Number of a set → P(Yes) of its pairs, and padding.

    Returns:
        `decision_metrics` with the pair judge's decisions as labels, and `panel_correlation`.
    """
    # Both judges' answers by pair, without padding.
    own: list[dict[Pair, float]] = []
    expected: list[dict[Pair, float]] = []
    for number, panel_set in enumerate(sets):
        pairs = pairs_of(len(panel_set.images))
        own.append(dict(zip(pairs, p_yes[number], strict=False)))
        expected.append({(i, j): float(panel_set.p_yes[i][j] or 0.0) for i, j in pairs})
    own_R = list(chain(*(answers.values() for answers in own)))
    expected_R = list(chain(*(answers.values() for answers in expected)))
    measured = decision_metrics(
        own_R,
        [value > 0.5 for value in expected_R],
        swapped=[None] * len(own_R),
        category=[""] * len(own_R),
    )
    del measured["order_gap"]  # a query has no order
    questions = [panel_set.question for panel_set in sets]
    return measured | {CORRELATION: panel_correlation(own, expected, questions=questions)}


def panel_correlation(
    first: Sequence[Mapping[Pair, float]], second: Sequence[Mapping[Pair, float]], *, questions: Sequence[str]
) -> float:
    """Correlate the panel advantages of two judges, with the sets about one question as a group; NaN without groups."""
    advantage = [panel_advantages(answers, questions) for answers in (first, second)]
    finite = advantage[0].isfinite() & advantage[1].isfinite()
    both = torch.stack([values[finite] for values in advantage])
    return float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else math.nan


def panel_advantages(answers: Sequence[Mapping[Pair, float]], questions: Sequence[str]) -> Tensor:
    """Compute the paper's advantages with panel credit, (S, P); NaN beyond a set's panels and for groups of one."""
    number_of = {question: number for number, question in enumerate(dict.fromkeys(questions))}
    group_S = torch.tensor([number_of[question] for question in questions])
    # The parts of each score by panel; sets with fewer panels leave the rest NaN.
    panels = [max(chain(*pairs)) + 1 for pairs in answers]
    part_SP = torch.full((len(answers), max(panels)), math.nan, dtype=torch.float64)
    for part_P, pairs, count in zip(part_SP, answers, panels, strict=True):
        part_P[:count] = torch.tensor(panel_shares(pairs, count), dtype=torch.float64)
    score_RS = torch.tensor([[fmean(pairs.values()) for pairs in answers]], dtype=torch.float64)
    table = RewardTable(("consistency",), score_RS, score_RS.isfinite(), group_S, part_SP[None])

    # The paper's aggregate: set judges are compared before a run's rewards and weights are known.
    found = advantages(table, LogTamed(credit="panel"), weights=[1.0])
    assert found.value_BP is not None
    return found.value_BP.masked_fill(~found.used_B[:, None], math.nan)
