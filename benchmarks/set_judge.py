"""Does a set judge give the panel advantages of its pair judge, and what does it cost? On the tiny world.

    python examples/sample_sets.py runs/sets --size 64x64 --steps 6 --adapter "" runs/a/adapter
    pacorl train-reward reward/set_tiny 'data.train=[runs/sets/sets.jsonl, tiny:train:800]'
    python benchmarks/set_judge.py --set-judge runs/set_tiny/adapter --adapter "" runs/b/adapter

The pair judge reads two images per question: 12 for the 6 pairs of a 2×2 set. A set judge reads the question, the 4
panels, and a short query per pair.

Sets are groups of 12 about test prompts, sampled as configs/tiny.yaml samples them, by each adapter ("" for none). The
recipe's panel advantages by the set judge and by the pair judge are correlated, with 95 % bootstrap intervals over
groups; `exchanged` is the pair judge with the two images of each question exchanged. Accuracy is by the oracle: a pair
is right if all four kept attributes are equal. Cost is that of a call about 12 sets of one prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.advantages import advantages
from pacorl.core.grid import shared_text, split
from pacorl.core.questions import same_theme, shows_text
from pacorl.core.set_scores import panel_shares
from pacorl.generate.generator import Generator
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, draw_samples
from pacorl.grpo.rows import Row
from pacorl.io.quiet import quiet_loading
from pacorl.judge.local import LocalJudge
from pacorl.lab.probe.probing import configured_sampler
from pacorl.records.prompts import prompts_from
from pacorl.tiny import characters
from pacorl.types import Prompt, Question, RewardTable, Samples

GROUP = 12
PAIRS = tuple(itertools.combinations(range(4), 2))
SINGLES = tuple((panel,) for panel in range(4))
TEMPERATURE = 4.0
"""Of the rewards in configs/tiny.yaml."""

Panels = Sequence[Image.Image]


def main() -> None:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    judge = LocalJudge.from_pretrained("tiny", set_judge=options.set_judge)
    judge.temperature = TEMPERATURE

    rows = {}
    prompts = prompts_from(f"tiny:test:{options.groups * len(options.adapter)}")
    for number, adapter in enumerate(options.adapter):
        generator = Generator.from_pretrained("tiny", adapter=adapter)
        groups = list(sampled(generator, prompts[number :: len(options.adapter)], epoch=number))
        rows[adapter or "untrained"] = compared(judge, groups)
    result = {"agreement": rows, "cost": cost(judge)}
    print(json.dumps(result, indent=2) if options.json else table(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set-judge", required=True, help="adapter of `train-reward` with form: set")
    parser.add_argument("--adapter", nargs="*", default=[""], help="adapters of policies; '' for none")
    parser.add_argument("--groups", type=int, default=16, help="groups of 12 sets per policy")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@torch.no_grad()
def sampled(generator: Generator, prompts: Sequence[Prompt], *, epoch: int) -> Iterator[tuple[Prompt, list[Panels]]]:
    """Sample a group of sets per prompt, as the recipe draws them."""
    sampler = configured_sampler(configs.load(PolicyConfig, recipe(), []))
    cached = ConditioningCache(generator.policy)
    draw = Draw(generator.policy, sampler, cached, seed=1000, epoch=epoch, batch=GROUP)
    for number, prompt in enumerate(prompts):
        members = [Row(prompt, GROUP * number + member) for member in range(GROUP)]
        rollouts = draw_samples(draw, members, Samples())
        yield prompt, [split(image, prompt.grid) for rollout in rollouts for image in rollout.images]


# --- agreement -------------------------------------------------------------------------------------------------


def compared(judge: LocalJudge, groups: Sequence[tuple[Prompt, list[Panels]]]) -> dict[str, float]:
    """Compare the set judge with the pair judge, and both with the oracle, on groups of one policy."""
    by_set_S6, by_pairs_S6, exchanged_S6, texts_S4, equal_S6 = [], [], [], [], []
    for prompt, sets in groups:
        theme = shared_text(prompt.text)
        by_set_S6.append(answers(judge, about_pairs(theme, sets), len(sets)))
        with judge.pair_by_pair():
            by_pairs_S6.append(answers(judge, about_pairs(theme, sets), len(sets)))
            exchanged_S6.append(answers(judge, about_pairs(theme, sets, exchanged=True), len(sets)))
            texts_S4.append(answers(judge, about_texts(prompt, sets), len(sets)))
        equal_S6.append(equal_pairs(sets))

    text_S4, equal = torch.cat(texts_S4), torch.cat(equal_S6)
    asked = {"set": by_set_S6, "pair": by_pairs_S6, "exchanged": exchanged_S6}
    p_yes = {name: torch.cat(groups_S6) for name, groups_S6 in asked.items()}
    row = {f"{name}_accuracy": float(((p_S6 > 0.5) == equal).double().mean()) for name, p_S6 in p_yes.items()}
    for key, both in {"panel_advantages": True, "of_consistency_alone": False}.items():
        value = {name: credit(p_S6, text_S4, both=both) for name, p_S6 in p_yes.items()}
        row[key] = pearson(value["set"], value["pair"])
        row[f"{key}_exchanged"] = pearson(value["exchanged"], value["pair"])
        row[f"{key}_low"], row[f"{key}_high"] = interval(value["set"], value["pair"])
    return {key: round(number, 4) for key, number in row.items()}


def about_pairs(theme: str, sets: Sequence[Panels], *, exchanged: bool = False) -> list[Question]:
    """The questions of the reward, or those with the two images exchanged."""
    asked = []
    for panels in sets:
        for first, second in PAIRS:
            pair = (panels[second], panels[first]) if exchanged else (panels[first], panels[second])
            asked.append(Question(pair, same_theme(theme), panels=tuple(panels)))
    return asked


def about_texts(prompt: Prompt, sets: Sequence[Panels]) -> list[Question]:
    asked = []
    for panels in sets:
        asked += [Question((panel,), shows_text(text)) for panel, text in zip(panels, prompt.panels, strict=True)]
    return asked


def answers(judge: LocalJudge, asked: Sequence[Question], sets: int) -> Tensor:
    """P(Yes) of the questions, (S, Q)."""
    return torch.tensor([verdict.p_yes for verdict in judge.verdicts(asked)], dtype=torch.float64).view(sets, -1)


def equal_pairs(sets: Sequence[Panels]) -> Tensor:
    """(S, 6): do both panels show one hero in one palette, by the oracle?"""
    oracle = characters.Oracle()
    rows = []
    for panels in sets:
        kept = [panel.kept if panel else None for panel in oracle.read(panels)]
        rows.append([kept[i] is not None and kept[i] == kept[j] for i, j in PAIRS])
    return torch.tensor(rows)


def credit(pair_S6: Tensor, text_S4: Tensor, *, both: bool) -> Tensor:
    """(S, 4) panel advantages of the recipe, by both of its rewards or by consistency alone."""
    config = configs.load(PolicyConfig, recipe(), [])
    used = config.rewards[: 2 if both else 1]
    scores, parts = [], []
    for p_SQ, keys in ((pair_S6, PAIRS), (text_S4, SINGLES)):
        scores.append(p_SQ.mean(1))
        parts.append(torch.tensor([panel_shares(dict(zip(keys, p_Q, strict=True)), 4) for p_Q in p_SQ.tolist()]))
    score_RS, part_RSP = torch.stack(scores[: len(used)]), torch.stack(parts[: len(used)]).double()
    group_S = torch.arange(len(pair_S6)) // GROUP
    scored = RewardTable(tuple(one.key for one in used), score_RS, score_RS.isfinite(), group_S, part_RSP)
    nodes = [group_S.tolist(), list(range(len(group_S)))]
    found = advantages(scored, config.advantages, weights=[one.weight for one in used], nodes=nodes).value_LBP
    assert found is not None
    return found[0]


def pearson(first_SP: Tensor, second_SP: Tensor) -> float:
    """Correlation over all panels."""
    return float(torch.corrcoef(torch.stack([first_SP.flatten(), second_SP.flatten()]))[0, 1])


def interval(first_SP: Tensor, second_SP: Tensor, draws: int = 1000) -> list[float]:
    """95 % bootstrap interval of the correlation, over groups."""
    first_GSP, second_GSP = (value_SP.unflatten(0, (-1, GROUP)) for value_SP in (first_SP, second_SP))
    chosen = torch.randint(len(first_GSP), (draws, len(first_GSP)), generator=torch.Generator().manual_seed(0))
    found = [pearson(first_GSP[groups], second_GSP[groups]) for groups in chosen]
    return torch.tensor(found).quantile(torch.tensor([0.025, 0.975])).tolist()


# --- cost ------------------------------------------------------------------------------------------------------


def cost(judge: LocalJudge, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Arithmetic and CPU seconds of both forms about 12 sets of one prompt, images included; the quickest counts."""
    (prompt,) = prompts_from("tiny:test:1")
    drawn = characters.all_panels()[:: len(characters.all_panels()) // (4 * GROUP)]
    sets = [[characters.draw(panel, 32) for panel in drawn[4 * n : 4 * n + 4]] for n in range(GROUP)]
    asked = about_pairs(shared_text(prompt.text), sets)

    # New judges: one that has just met the images would not look at them again.
    def by_set() -> None:
        LocalJudge(judge.model, judge.processor, set_model=judge.set_model).verdicts(asked)

    def by_pairs() -> None:
        LocalJudge(judge.model, judge.processor).verdicts(asked)

    return {"pair judge": spent(by_pairs, repeats), "set judge": spent(by_set, repeats)}


def spent(ask: Callable[[], None], repeats: int) -> dict[str, float]:
    """GFLOP of a call and the CPU seconds of the quickest of several."""
    ask()
    with FlopCounterMode(display=False) as counter:
        ask()
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        ask()
        seconds.append(time.process_time() - started)
    return {"gflop": counter.get_total_flops() / 1e9, "cpu_seconds": min(seconds)}


def table(result: dict[str, Any]) -> str:
    """Render the agreement and the cost."""
    titles = ["policy", "panel advantages", "images exchanged", "of consistency alone", "accuracy", "of the pair judge"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for policy, row in result["agreement"].items():
        low, high = row["panel_advantages_low"], row["panel_advantages_high"]
        cells = [policy, f"{row['panel_advantages']:.3f} ({low:.3f} to {high:.3f})"]
        others = ("panel_advantages_exchanged", "of_consistency_alone", "set_accuracy", "pair_accuracy")
        cells += [f"{row[key]:.3f}" for key in others]
        lines.append(f"| {' | '.join(cells)} |")
    for judge, price in result["cost"].items():
        lines.append(f"{judge}: {price['gflop']:.2f} GFLOP and {1000 * price['cpu_seconds']:.0f} ms about 12 sets")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
