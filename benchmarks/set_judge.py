"""Can a judge read all panels of a set once? It is distilled from the pair judge on the tiny world, and held to it.

    python benchmarks/set_judge.py --out runs/set-judge --train runs/a/adapter --held-out runs/b/adapter
    python benchmarks/set_judge.py --out runs/named --query named      # queries that name their panels in words

The pair judge reads two images per question: 12 for the 6 pairs of a 2×2 set. The set judge reads the question, then
the 4 panels, and a short query per pair, whose last position has the logits of Yes and No. Queries are blind to each
other.
With `--query masked` a query sees the question and its own two panels only; with `named` it sees all panels, and names
two of them ("1 and 3").

Sets are groups of 12 as configs/tiny.yaml samples them, by the committed generator, by the adapters of `--train` (whole
and at half strength) and drawn ones with redrawn attributes. The language model of the committed judge learns the pair
judge's P(Yes), as it is and at the recipe's temperature, with the panels in all orders. Then the recipe's panel
advantages by both judges are correlated, on test prompts, for the committed generator and for adapters that it did not
learn from. Accuracy is by the oracle: a pair is right if all four kept attributes are equal. `other order` is the pair
judge with the two images of each question exchanged. Cost is that of a call about 12 sets of one prompt.

Sets and weights stay in --out; what is there is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
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
from pacorl.judge.prompting import ChatPrompt, DistinctImage
from pacorl.lab.probe.probing import configured_sampler
from pacorl.records.prompts import prompts_from
from pacorl.tiny import characters
from pacorl.types import Chat, Prompt, Question, RewardTable, Samples

PAIRS = tuple(itertools.combinations(range(4), 2))
ORDERED = tuple(itertools.permutations(range(4), 2))
END = "<|im_end|>\n<|im_start|>assistant\n"
GROUP = 12
DRAWN_GROUP = 8
TEMPERATURE = 4.0
"""Of the rewards in configs/tiny.yaml."""
CONFIDENT = 12.0
"""Targets are clamped to ± this logit, beyond which the recipe's P(Yes) hardly changes."""
ROWS = 4
SETS = 4
"""A batch: questions, and sets about each."""


@dataclass
class Sets:
    """Judged sets of several policies."""

    feature_SPND: Tensor
    """Of the judge's vision tower: 4 panels of 4 tokens."""
    logit_SPP: Tensor
    """Yes − No by the pair judge, of each ordered pair."""
    text_SP: Tensor
    """The same of each panel and its text."""
    kept_SPA: Tensor
    """Kept attributes by the oracle; −1 for invalid panels."""
    group_S: Tensor
    theme: list[str]
    policy: list[str]

    def pairs(self) -> Tensor:
        """(S, 6) logits of the pairs as the reward asks them."""
        return torch.stack([self.logit_SPP[:, i, j] for i, j in PAIRS], dim=1)

    def equal(self) -> Tensor:
        """(S, 6): do both panels show one hero in one palette?"""
        kept = self.kept_SPA
        return torch.stack([(kept[:, i] == kept[:, j]).all(-1) & (kept[:, i, 0] >= 0) for i, j in PAIRS], dim=1)


def main() -> None:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    judge = LocalJudge.from_pretrained("tiny")

    policies = [("base", "", 1.0)]
    for number, folder in enumerate(options.train):
        policies += [(f"train {number}", folder, 1.0), (f"train {number}, half", folder, 0.5)]
    held_out = [("base", "", 1.0)] + [(f"held out {n}", folder, 1.0) for n, folder in enumerate(options.held_out)]
    learned = judged_sets(
        options.out / "train", lambda: sets_of(judge, "train", policies, options.groups, options.drawn)
    )
    tested = judged_sets(options.out / "test", lambda: sets_of(judge, "test", held_out, options.test_groups, 96))

    student = SetJudge(LocalJudge.from_pretrained("tiny"), query=options.query)
    weights = options.out / "set-judge.safetensors"
    if weights.exists():
        student.language.load_state_dict(load_file(weights))
    else:
        teach(student, learned, options)
        save_file({name: value.contiguous() for name, value in student.language.state_dict().items()}, weights)

    exchanged = Sets(**{**vars(tested), "logit_SPP": tested.logit_SPP.mT})
    judges = {"set judge": answers(student, tested), "other order": exchanged.pairs()}
    result = {name: agreement(logit_S6, tested) for name, logit_S6 in judges.items()}
    result["cost"] = cost(judge, student)
    print(json.dumps(result, indent=2) if options.json else table(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", nargs="*", default=[], help="adapters of trained policies, to learn from")
    parser.add_argument("--held-out", nargs="*", default=[], help="adapters of trained policies, to measure on")
    parser.add_argument("--query", choices=["masked", "named"], default="masked")
    parser.add_argument("--groups", type=int, default=40, help="groups of 12 per policy to learn from")
    parser.add_argument("--test-groups", type=int, default=16)
    parser.add_argument("--drawn", type=int, default=2400, help="drawn sets to learn from")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# --- sets and the pair judge's answers -------------------------------------------------------------------------


def judged_sets(path: Path, make: Callable[[], Sets]) -> Sets:
    """Read sets, or make and write them."""
    tensors, texts = path.with_suffix(".safetensors"), path.with_suffix(".json")
    if not texts.exists():
        made = vars(make())
        save_file({name: value for name, value in made.items() if isinstance(value, Tensor)}, tensors)
        texts.write_text(json.dumps({name: value for name, value in made.items() if isinstance(value, list)}))
    columns: dict[str, Any] = {**load_file(tensors), **json.loads(texts.read_text())}
    return Sets(**columns)


def sets_of(judge: LocalJudge, part: str, policies: Sequence[tuple[str, str, float]], groups: int, drawn: int) -> Sets:
    """Sample and judge groups of each policy, and drawn sets."""
    columns: list[dict[str, Any]] = []
    prompts = prompts_from(f"tiny:{part}:{groups * len(policies)}")
    for number, (name, adapter, strength) in enumerate(policies):
        generator = Generator.from_pretrained("tiny", adapter={adapter: strength} if adapter else {})
        for prompt, images in sampled(generator, prompts[number :: len(policies)], epoch=number):
            columns.append(judged(judge, prompt, images, policy=name))
    rng = Random(f"set judge, {part}")
    for prompt in characters.character_prompts(part, drawn // DRAWN_GROUP, seed=77):  # type: ignore[arg-type]
        panels = [characters.Panel.parse(text) for text in prompt.panels]
        images = []
        for _ in range(DRAWN_GROUP):
            shown = characters.redrawn(panels, chance=rng.choice((0, 0.05, 0.1, 0.2, 0.3)), rng=rng)
            images.append(characters.draw_grid(shown, prompt.grid, 32))
        columns.append(judged(judge, prompt, images, policy="drawn"))

    joined: dict[str, Any] = {}
    for name, value in columns[0].items():
        parts = [column[name] for column in columns]
        joined[name] = torch.cat(parts) if isinstance(value, Tensor) else list(itertools.chain(*parts))
    group_S = torch.arange(len(columns)).repeat_interleave(torch.tensor([len(column["theme"]) for column in columns]))
    return Sets(**joined, group_S=group_S)


@torch.no_grad()
def sampled(
    generator: Generator, prompts: Sequence[Prompt], *, epoch: int
) -> Iterator[tuple[Prompt, list[Image.Image]]]:
    """A group of samples per prompt, as the recipe draws them."""
    sampler = configured_sampler(configs.load(PolicyConfig, recipe(), []))
    cached = ConditioningCache(generator.policy)
    draw = Draw(generator.policy, sampler, cached, seed=1000, epoch=epoch, batch=GROUP)
    for number, prompt in enumerate(prompts):
        rows = [Row(prompt, GROUP * number + member) for member in range(GROUP)]
        rollouts = draw_samples(draw, rows, Samples())
        yield prompt, [image for rollout in rollouts for image in rollout.images]


@torch.inference_mode()
def judged(judge: LocalJudge, prompt: Prompt, images: Sequence[Image.Image], *, policy: str) -> dict[str, Any]:
    """Let the pair judge answer about every ordered pair and text, and the oracle read the panels."""
    sets = [split(image, prompt.grid) for image in images]
    theme = shared_text(prompt.text)
    asked = [Question((panels[i], panels[j]), same_theme(theme)) for panels in sets for i, j in ORDERED]
    texts = [
        Question((panel,), shows_text(text))
        for panels in sets
        for panel, text in zip(panels, prompt.panels, strict=True)
    ]
    logit_SPP = torch.zeros(len(sets), 4, 4)
    first, second = torch.tensor(ORDERED).T
    logit_SPP[:, first, second] = logits(judge, asked).view(len(sets), -1)

    kept = []
    for panel in characters.Oracle().read([panel for panels in sets for panel in panels]):
        values = zip(characters.KEPT, panel.kept if panel else (), strict=False)
        kept.append([characters.VALUES[name].index(value) for name, value in values] or [-1] * len(characters.KEPT))
    return {
        "feature_SPND": features(judge, sets),
        "logit_SPP": logit_SPP,
        "text_SP": logits(judge, texts).view(len(sets), 4),
        "kept_SPA": torch.tensor(kept).view(len(sets), 4, -1),
        "theme": [theme] * len(sets),
        "policy": [policy] * len(sets),
    }


def logits(judge: LocalJudge, asked: Sequence[Question]) -> Tensor:
    """Yes − No of each question."""
    prompts = judge.prompting.chat_prompts(asked)
    logit_Q2 = judge._last_logits(prompts, torch.tensor([judge.yes_ids[0], judge.no_ids[0]]))
    return logit_Q2[:, 0] - logit_Q2[:, 1]


def features(judge: LocalJudge, sets: Sequence[Sequence[Image.Image]]) -> Tensor:
    """(S, 4, N, D) features of the panels by the judge's vision tower."""
    panels = [DistinctImage.of(panel, name="panel") for images in sets for panel in images]
    pixels = judge.prompting._pixels(panels)
    output = judge.model.model.get_image_features(**pixels, return_dict=True).pooler_output
    feature_ND = output if isinstance(output, Tensor) else torch.cat(list(output))
    return feature_ND.view(len(sets), 4, -1, feature_ND.shape[-1])


# --- the set judge ---------------------------------------------------------------------------------------------


class SetJudge:
    """A judge that reads a question and the panels of sets once, and answers about every pair of panels."""

    def __init__(self, judge: LocalJudge, *, query: str) -> None:
        self.judge = judge
        self.query = query
        self.language = judge.model.model.language_model
        self.image_token = int(judge.model.config.image_token_id)
        self.tails = [self._ids(f"{i + 1} and {j + 1}{END}" if query == "named" else END) for i, j in PAIRS]
        """Tokens of each pair's query."""
        self._prefix = cache(self._read)
        self._mask = cache(self._sight)

    def __call__(self, themes: Sequence[str], feature_TSPND: Tensor) -> Tensor:
        """(T, S, 6) logits of the pairs, for S sets about each of T themes."""
        # A row is a question, then its sets side by side: panels, then queries. Questions are padded on the left.
        rows, sets = feature_TSPND.shape[:2]
        prefixes = [self._prefix(theme) for theme in themes]
        start = max(start for _, _, start in prefixes)
        panel_tokens = len(prefixes[0][0]) - prefixes[0][2]
        sight_NN, ends = self._mask(start, panel_tokens, sets)
        padding_TN = torch.zeros(rows, len(sight_NN), dtype=torch.bool)
        tail_Q = torch.cat(self.tails)
        length = len(self.tails[0])
        ids, positions = [], []
        for row, (id_N, position_3N, own_start) in enumerate(prefixes):
            query_3Q = (position_3N.max() + 1 + torch.arange(length)).repeat(3, len(PAIRS))
            pad = start - own_start
            padding_TN[row, :pad] = True
            of_set = torch.cat([id_N[own_start:], tail_Q]).repeat(sets)
            ids.append(torch.cat([id_N.new_zeros(pad), id_N[:own_start], of_set]))
            of_set = torch.cat([position_3N[:, own_start:], query_3Q], dim=1).repeat(1, sets)
            positions.append(torch.cat([position_3N.new_zeros(3, pad), position_3N[:, :own_start], of_set], dim=1))

        id_TN = torch.stack(ids)
        embedded_TND = self.judge.model.get_input_embeddings()(id_TN)
        visual_TN = id_TN == self.image_token
        embedded_TND = embedded_TND.masked_scatter(visual_TN[..., None], feature_TSPND.to(embedded_TND.dtype))
        sight_TNN = sight_NN & ~padding_TN[:, None] | torch.eye(len(sight_NN), dtype=torch.bool)
        hidden_TND = self.language(
            inputs_embeds=embedded_TND,
            position_ids=torch.stack(positions, dim=1),
            attention_mask=torch.zeros(sight_TNN.shape).masked_fill(~sight_TNN, -1e9)[:, None],
            use_cache=False,
        ).last_hidden_state
        words = [self.judge.yes_ids[0], self.judge.no_ids[0]]
        logit_TQ2: Tensor = hidden_TND[:, ends] @ self.judge.model.lm_head.weight[words].T
        return (logit_TQ2[..., 0] - logit_TQ2[..., 1]).view(rows, sets, len(PAIRS))

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.judge.processor.tokenizer(text).input_ids)

    def _read(self, theme: str) -> tuple[Tensor, Tensor, int]:
        """Token ids and positions of question and panels, and the index of the first panel's first token."""
        panel = Image.new("RGB", (32, 32))
        prompt = self.judge.prompting.chat_prompt(Chat((same_theme(theme), *[panel] * 4)))
        (encoded,) = self.judge.prompting.encode([ChatPrompt(prompt.text.removesuffix(END), prompt.images)])
        _, (run,) = self.judge.prompting.featured([encoded], batch_tokens=self.judge.batch_tokens)
        id_N = torch.from_numpy(encoded.ids)
        return id_N, run.position_3N, int((id_N == self.image_token).nonzero()[0]) - 1

    def _sight(self, start: int, panel_tokens: int, sets: int) -> tuple[Tensor, Tensor]:
        """(N, N): which token sees which; and the last positions of the queries."""
        length = len(self.tails[0])
        size = panel_tokens + len(PAIRS) * length
        set_N, panel_N, pair_N = (torch.full((start + sets * size,), -1) for _ in range(3))
        for number in range(sets):
            first = start + number * size
            set_N[first : first + size] = number
            panel_N[first : first + panel_tokens] = torch.arange(4).repeat_interleave(panel_tokens // 4)
            pair_N[first + panel_tokens : first + size] = torch.arange(len(PAIRS)).repeat_interleave(length)

        # The question is seen by all, and everything else within its set only.
        causal_NN = torch.ones(len(set_N), len(set_N), dtype=torch.bool).tril()
        mine_NN = set_N[:, None] == set_N
        is_panel_N, is_query_N = panel_N >= 0, pair_N >= 0
        seen_NN = is_panel_N.expand(len(set_N), -1)
        if self.query == "masked":
            asked_N2 = torch.tensor([*PAIRS, (-1, -1)])[pair_N]
            seen_NN = is_panel_N & (~is_query_N[:, None] | (panel_N[None, :, None] == asked_N2[:, None]).any(-1))
        seen_NN = seen_NN | (is_query_N & (pair_N[:, None] == pair_N))
        return causal_NN & ((set_N < 0) | (mine_NN & seen_NN)), torch.arange(len(set_N))[is_query_N][
            length - 1 :: length
        ]


def teach(student: SetJudge, sets: Sets, options: argparse.Namespace) -> None:
    """Train the language model on the pair judge's answers, with the panels of each set in random order."""
    weights = list(student.language.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(weights, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.0)
    groups = [(sets.group_S == group).nonzero()[:, 0] for group in sets.group_S.unique()]
    started, losses = time.process_time(), []
    for step in range(options.steps):
        factor = min((step + 1) / 30, 0.02 + 0.49 * (1 + math.cos(math.pi * step / options.steps)))
        optimizer.param_groups[0]["lr"] = options.lr * factor

        chosen = [groups[group] for group in torch.randperm(len(groups))[:ROWS]]
        set_B = torch.cat([group[torch.randperm(len(group))[:SETS]] for group in chosen])
        order_BP = torch.stack([torch.randperm(4) for _ in set_B])
        at = set_B[:, None]
        logit_BPP = sets.logit_SPP[at[..., None], order_BP[:, :, None], order_BP[:, None]]
        target_B6 = torch.stack([logit_BPP[:, i, j] for i, j in PAIRS], dim=1).clamp(-CONFIDENT, CONFIDENT)
        feature_BPND = sets.feature_SPND[at, order_BP].float()
        themes = [sets.theme[int(group[0])] for group in chosen]
        logit_B6 = student(themes, feature_BPND.unflatten(0, (ROWS, SETS))).flatten(0, 1)

        loss = excess(logit_B6, target_B6)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            mean, seconds = sum(losses[-100:]) / 100, time.process_time() - started
            print(f"step {step + 1}: loss {mean:.3f}, {seconds:.0f} CPU s", file=sys.stderr, flush=True)
    student.language.requires_grad_(False)


def excess(logit_B6: Tensor, target_B6: Tensor) -> Tensor:
    """Kullback-Leibler divergence from the pair judge's answers, as they are and at the recipe's temperature."""
    loss = logit_B6.new_zeros(())
    for temperature in (1.0, TEMPERATURE):
        cross = F.binary_cross_entropy_with_logits
        p_yes = torch.sigmoid(target_B6 / temperature)
        loss = loss + temperature * (cross(logit_B6 / temperature, p_yes) - cross(target_B6 / temperature, p_yes))
    return loss


@torch.no_grad()
def answers(student: SetJudge, sets: Sets) -> Tensor:
    """(S, 6) logits of all sets, a group at a time."""
    logit_S6 = torch.zeros(len(sets.theme), len(PAIRS))
    for group in sets.group_S.unique():
        rows = (sets.group_S == group).nonzero()[:, 0]
        logit_S6[rows] = student([sets.theme[int(rows[0])]], sets.feature_SPND[rows].float()[None])[0]
    return logit_S6


# --- agreement and cost ----------------------------------------------------------------------------------------


def agreement(logit_S6: Tensor, sets: Sets) -> dict[str, dict[str, float]]:
    """Compare a judge with the pair judge, by policy."""
    expected_S6, equal_S6 = sets.pairs(), sets.equal()
    result = {}
    for name in dict.fromkeys(sets.policy):
        mine = torch.tensor([policy == name for policy in sets.policy])
        found, expected, equal = logit_S6[mine], expected_S6[mine], equal_S6[mine]
        row = {
            "accuracy": float(((found > 0) == equal).double().mean()),
            "pair_judge_accuracy": float(((expected > 0) == equal).double().mean()),
        }
        if name != "drawn":
            for key, both in {"panel_advantages": True, "of_consistency_alone": False}.items():
                mine_by = credit(found, sets.text_SP[mine], sets.group_S[mine], both=both)
                pair_by = credit(expected, sets.text_SP[mine], sets.group_S[mine], both=both)
                row[key] = pearson(mine_by, pair_by)
                row[f"{key}_low"], row[f"{key}_high"] = interval(mine_by, pair_by, sets.group_S[mine])
        result[name] = {key: round(value, 4) for key, value in row.items()}
    return result


def pearson(first_SP: Tensor, second_SP: Tensor) -> float:
    """Correlation over all panels."""
    return float(torch.corrcoef(torch.stack([first_SP.flatten(), second_SP.flatten()]))[0, 1])


def interval(first_SP: Tensor, second_SP: Tensor, group_S: Tensor, draws: int = 1000) -> list[float]:
    """95 % bootstrap interval of the correlation, over groups."""
    rows = [(group_S == group).nonzero()[:, 0] for group in group_S.unique()]
    drawn = []
    for number in torch.randint(len(rows), (draws, len(rows)), generator=torch.Generator().manual_seed(0)):
        chosen = torch.cat([rows[group] for group in number])
        drawn.append(pearson(first_SP[chosen], second_SP[chosen]))
    return torch.tensor(drawn).quantile(torch.tensor([0.025, 0.975])).tolist()


def credit(pair_S6: Tensor, text_SP: Tensor, group_S: Tensor, *, both: bool) -> Tensor:
    """(S, 4) panel advantages of the recipe, by both of its rewards or by consistency alone."""
    config = configs.load(PolicyConfig, recipe(), [])
    scores, parts = [], []
    for logit_SQ, keys in ((pair_S6, PAIRS), (text_SP, tuple((panel,) for panel in range(4)))):
        p_SQ = torch.sigmoid(logit_SQ.double() / TEMPERATURE)
        scores.append(p_SQ.mean(1))
        parts.append(torch.tensor([panel_shares(dict(zip(keys, p_Q, strict=True)), 4) for p_Q in p_SQ.tolist()]))
    names = [reward.key for reward in config.rewards][: 2 if both else 1]
    score_RS = torch.stack(scores[: len(names)])
    scored = RewardTable(
        tuple(names), score_RS, score_RS.isfinite(), group_S, torch.stack(parts[: len(names)]).double()
    )
    nodes = [group_S.tolist(), list(range(len(group_S)))]
    weights = [reward.weight for reward in config.rewards][: len(names)]
    found = advantages(scored, config.advantages, weights=weights, nodes=nodes).value_LBP
    assert found is not None
    return found[0]


def cost(judge: LocalJudge, student: SetJudge, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Arithmetic and CPU seconds of both judges about 12 sets of one prompt, images included; the quickest counts."""
    (prompt,) = prompts_from("tiny:test:1")
    drawn = characters.all_panels()[:: len(characters.all_panels()) // 48]
    sets = [[characters.draw(panel, 32) for panel in drawn[4 * n : 4 * n + 4]] for n in range(GROUP)]
    theme = shared_text(prompt.text)
    asked = [Question((panels[i], panels[j]), same_theme(theme)) for panels in sets for i, j in PAIRS]

    @torch.inference_mode()
    def by_set() -> None:
        student([theme], features(student.judge, sets)[None])

    def by_pairs() -> None:
        # A new judge: one that has just met the images would not look at them again.
        LocalJudge(judge.model, judge.processor).verdicts(asked)

    result = {}
    for name, ask in {"pair judge": by_pairs, "set judge": by_set}.items():
        ask()
        with FlopCounterMode(display=False) as counter:
            ask()
        seconds = []
        for _ in range(repeats):
            started = time.process_time()
            ask()
            seconds.append(time.process_time() - started)
        result[name] = {"gflop": counter.get_total_flops() / 1e9, "cpu_seconds": min(seconds)}
    return result


def table(result: dict[str, Any]) -> str:
    """Render the agreement and the cost."""
    lines = [
        "| judge | policy | panel advantages | of consistency alone | accuracy | of the pair judge |",
        "|---" * 6 + "|",
    ]
    for judge in ("set judge", "other order"):
        for policy, row in result[judge].items():
            correlations = [told(row, key) for key in ("panel_advantages", "of_consistency_alone")]
            right = [f"{row[key]:.3f}" for key in ("accuracy", "pair_judge_accuracy")]
            lines.append(f"| {judge} | {policy} | {' | '.join(correlations + right)} |")
    for judge, spent in result["cost"].items():
        lines.append(f"{judge}: {spent['gflop']:.2f} GFLOP and {1000 * spent['cpu_seconds']:.0f} ms about 12 sets")
    return "\n".join(lines)


def told(row: dict[str, float], key: str) -> str:
    """Render a correlation with its interval, if it has one."""
    return f"{row[key]:.3f} ({row[f'{key}_low']:.3f} to {row[f'{key}_high']:.3f})" if key in row else ""


if __name__ == "__main__":
    main()
