"""What a group carries and what an epoch costs, by the form of its tree and its way to the image.

Advantages compare a sample with its group, and training moves the stochastic steps. So of a group's variance

    V = Σ_ℓ σ²_ℓ·(1 − 1/n_ℓ)        over starts, stochastic steps and the judge,

with n_ℓ distinct draws of level ℓ in the group, only the part S of the stochastic steps is signal. S/V is what animal
breeding calls heritability, and what selecting by V gains in S is i·S/√V for a selection of intensity i (the breeder's
equation, Lush 1937; Falconer & Mackay, Quantitative Genetics, 1996, ch. 11). The gain of a form is S/√V, in units of
the reward. It counts what the samples of one group tell apart. That more starts also show the policy more latents is
not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pacorl.config.policy_run import PolicyConfig
from pacorl.core.sampling import Sampler, Suffix, Tree
from pacorl.core.solvers import SOLVERS
from pacorl.probe.measure import Clock
from pacorl.probe.variance import JUDGE, Estimate, Floats, Variances, estimate, ratio


@dataclass(frozen=True, slots=True)
class Signal:
    """How much of a group's variance training can act on."""

    share: Estimate
    """S/V."""
    snr: Estimate
    """S/(V − S), of one sample."""
    gain: Estimate
    """S/√V, in units of the reward."""
    gain_X: Floats
    """The estimate of the gain, then its draws."""
    accuracy_X: Floats
    """√(S/V), likewise: the correlation of an advantage with what the stochastic steps did."""


@dataclass(frozen=True, slots=True)
class Form:
    """One epoch's tree and suffix, what it teaches and what it costs."""

    tree: Tree
    suffix: Suffix
    is_configured: bool
    """Whether it is the config's."""
    signal: Signal
    forwards: int
    """In sampling, one per distinct latent."""
    trained: int
    """Forwards with a backward."""
    questions: int
    seconds: dict[str, float]
    """Of sampling, reward and update, one after the other."""

    @property
    def total(self) -> float:
        """Seconds of an epoch."""
        return sum(self.seconds.values())


def signal_of(variances: Variances, tree: Tree) -> Signal:
    """What groups of a tree carry, if levels vary as in the draws that were split."""
    counts = dict(zip(variances.within, nodes_of(tree), strict=False)) | {JUDGE: tree.group_size}
    weight_L = np.array([1 - 1 / counts[name] for name in variances.within])
    rows_XL = variances.rows()[:, 1:] * weight_L
    is_step_L = np.isin(variances.within, variances.steps)
    signal, whole = rows_XL[:, is_step_L].sum(1), rows_XL.sum(1)
    gain, share = ratio(signal, np.sqrt(whole)), ratio(signal, whole)
    # Without any noise the ratio of signal to noise has no bound; JSON has no infinity.
    noise = np.maximum(whole - signal, 1e-6 * whole)
    return Signal(estimate(share), estimate(ratio(signal, noise)), estimate(gain), gain, np.sqrt(share))


def compared(config: PolicyConfig, tree: Tree) -> Tree:
    """The samples that an advantage compares: the group, or those of one start (`advantages.among: siblings`)."""
    return replace(tree, seeds=1) if config.advantages.among == "siblings" else tree


def nodes_of(tree: Tree) -> list[int]:
    """Distinct draws per group: starts, then the noises of each stochastic step."""
    return [tree.group_size // tree.leaves(level) for level in range(len(tree.branches) + 1)]


def forms_of(config: PolicyConfig, configured: Sampler, variances: Variances, clock: Clock) -> list[Form]:
    """The config's form, and others of the same group: from own noise to one start, with the suffix at half."""
    forms = []
    for tree in _trees(config, configured):
        for suffix in _suffixes(configured):
            forms.append(_form(config, configured, clock, tree=tree, suffix=suffix, variances=variances))
    return forms


def _trees(config: PolicyConfig, configured: Sampler) -> Iterator[Tree]:
    size = config.group_size
    divisors = [count for count in range(1, size + 1) if size % count == 0]
    # Next to the root: about as many starts as children of each.
    middle = min(divisors, key=lambda count: abs(count - size**0.5))
    yield configured.tree
    for seeds in sorted({size, middle, 2 if size % 2 == 0 else 1, 1}, reverse=True):
        tree = Tree(seeds, (size // seeds, *[1] * (len(configured.sde_steps) - 1)))
        if (tree.seeds, tree.branches) != (configured.tree.seeds, configured.tree.branches):
            yield tree


def _suffixes(configured: Sampler) -> Iterator[Suffix]:
    yield configured.suffix
    left = configured.steps - configured.sde_steps[-1] - 1
    half = configured.suffix.model_copy(update={"solver": "ab2", "steps": max(1, left // 2)})
    if configured.suffix != half and left // 2 >= SOLVERS["ab2"].least_steps:
        yield half


def _form(
    config: PolicyConfig, configured: Sampler, clock: Clock, *, tree: Tree, suffix: Suffix, variances: Variances
) -> Form:
    images = config.group_size
    forwards, sampling = _sampling(config, configured, clock, tree, suffix)
    questions = config.prompts_per_epoch * images * clock.questions
    trained = [config.prompts_per_epoch * count * config.objective.inner_epochs for count in nodes_of(tree)[:-1]]
    batches = _node_batches(config, tree)
    update = sum(count * clock.trained(size) / size for count, size in zip(trained, batches, strict=True))
    if config.objective.kl_weight > 0:  # the base's own forward
        update += sum(count * clock.forward(size) / size for count, size in zip(trained, batches, strict=True))
    return Form(
        tree,
        suffix,
        is_configured=(tree, suffix) == (configured.tree, configured.suffix),
        signal=signal_of(variances, compared(config, tree)),
        forwards=forwards,
        trained=sum(trained),
        questions=round(questions),
        seconds={
            "sampling": sampling,
            "reward": questions * clock.question + config.prompts_per_epoch * images * clock.rewards,
            "update": update,
        },
    )


def _sampling(config: PolicyConfig, configured: Sampler, clock: Clock, tree: Tree, suffix: Suffix) -> tuple[int, float]:
    """Forwards and seconds of an epoch's groups of that tree, decoded."""
    nodes = [config.prompts_per_epoch * count for count in nodes_of(tree)]
    # Each level's nodes pass the steps from the one before to its own; leaves pass the suffix.
    starts = [-1, *configured.sde_steps]
    passed = [count * (step - before) for count, before, step in zip(nodes, starts, configured.sde_steps, strict=False)]
    seconds = sum(
        count * clock.forward(size) / size for count, size in zip(passed, _node_batches(config, tree), strict=True)
    )
    tail = len(suffix.grid(configured.sde_steps[-1] + 1, configured.steps)) - 1
    seconds += nodes[-1] * (tail * clock.forward(config.sampling.batch) / config.sampling.batch + clock.decode)
    return sum(passed) + nodes[-1] * tail, seconds


def _node_batches(config: PolicyConfig, tree: Tree) -> list[int]:
    """How many nodes of each stochastic step share a forward."""
    return [max(1, config.sampling.batch // tree.leaves(level)) for level in range(len(tree.branches))]
