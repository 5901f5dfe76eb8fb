"""Rows of an epoch: their order, and how they are dealt to updates, processes and batches."""

from functools import partial
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from pacorl.core.sampler import Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import Row, assign_rows, divide, epoch_rows, forward_batches
from pacorl.tiny.world import set_prompts
from pacorl.types import Prompt, Size

PROMPTS = set_prompts("train", 4)


def apart(prompt: Prompt) -> object:
    """A key that no other prompt has: no forward is shared."""
    return object()


def test_epochs_use_every_prompt_before_one_comes_again() -> None:
    prompts = set_prompts("train", 6)
    drawn = [
        row.prompt.id for epoch in range(3) for row in epoch_rows(prompts, epoch=epoch, count=2, group_size=3, seed=0)
    ]
    assert sorted(drawn) == sorted(3 * list(range(6)))
    assert [row.number for row in epoch_rows(prompts, epoch=1, count=2, group_size=3, seed=0)] == list(range(6))


def test_the_samples_of_a_prompt_are_consecutive_rows() -> None:
    rows = epoch_rows(PROMPTS, epoch=0, count=4, group_size=3, seed=0)
    ids = [row.prompt.id for row in rows]
    assert ids == [group for group in ids[::3] for _ in range(3)]
    assert len(set(ids)) == 4


def test_prompts_are_shuffled_anew_each_time_and_for_each_seed() -> None:
    prompts = set_prompts("train", 12)
    orders = {
        tuple(row.prompt.id for row in epoch_rows(prompts, epoch=turn, count=12, group_size=1, seed=seed))
        for seed, turn in product((0, 1), range(4))
    }
    assert len(orders) == 8
    assert all(sorted(order) == list(range(12)) for order in orders)


def test_batches_do_not_depend_on_the_number_of_processes() -> None:
    numbered = [Row(PROMPTS[0], number) for number in range(24)]
    cut = partial(assign_rows, numbered, tree=Tree(24, (1,)), batch=3, updates=2, kind=apart)
    alone = cut(world=1, rank=0)
    for update in range(2):
        dealt = [
            assign_rows(numbered, tree=Tree(24, (1,)), batch=3, updates=2, world=2, rank=rank, kind=apart)[update]
            for rank in range(2)
        ]
        together = sorted([[row.number for row in batch] for part in dealt for batch in part])
        assert together == sorted([row.number for row in batch] for batch in alone[update])


@given(
    st.tuples(st.integers(1, 12), st.integers(2, 12), st.integers(1, 9)),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_every_epoch_is_divided(
    sizes: tuple[int, int, int], updates: int, world: int, sharded: bool, whole: bool
) -> None:
    """Into as many whole batches on each rank in each update, with the batch that was asked for if it divides."""
    prompts, group, batch = sizes
    rewards = [{"name": "consistency", "args": {"contrast": float(whole)}}]
    sections = {"sampling": {"batch": batch}, "optimizer": {"updates_per_epoch": updates}, "rewards": rewards}
    config = PolicyConfig.model_validate({"prompts_per_epoch": prompts, "group_size": group, **sections})
    division = divide(config, world=world, sharded=sharded)
    assert prompts <= division.prompts < prompts + updates * world
    assert 1 <= division.batch <= batch
    rows = [Row(PROMPTS[0], number) for number in range(division.prompts * group)]
    tree = config.sampling.tree.resolve(group, steps=1)
    cut = partial(assign_rows, rows, tree=tree, batch=division.batch, updates=updates, whole_groups=whole, kind=apart)
    dealt = [cut(world=world, rank=rank, sharded=sharded) for rank in range(world)]
    assert sorted(row.number for rank in dealt for update in rank for unit in update for row in unit) == list(
        range(len(rows))
    )
    counts = {sum(map(len, update)) for rank in dealt for update in rank}
    assert len(counts) == 1
    assert counts.pop() % division.batch == 0
    if whole:
        of_ranks = [{row.number // group for update in rank for unit in update for row in unit} for rank in dealt]
        assert sum(map(len, of_ranks)) == division.prompts, "a group is on two ranks"
        for update, units in enumerate(cut(world=1, rank=0)):
            together = [row.number for rank in dealt for unit in rank[update] for row in unit]
            assert sorted(together) == sorted(row.number for unit in units for row in unit)
    elif prompts * group % (batch * updates * world) == 0:
        assert not division.differences(config)
    elif division.batch < batch:
        assert f"sampling.batch {division.batch}" in division.differences(config)


def test_nodes_of_several_prompts_share_a_forward_if_their_kind_is_one() -> None:
    """Two seeds of three samples for each of four prompts, one of another size and one with images of another."""
    rows = epoch_rows(PROMPTS, epoch=0, count=4, group_size=6, seed=0)
    kinds = dict(zip(dict.fromkeys(row.prompt.id for row in rows), ["wide", "wide", "tall", "pair"], strict=True))
    cut = partial(assign_rows, rows, tree=Tree(2, (3,)), batch=3, updates=1, world=1, rank=0)
    assert [len(unit) for unit in cut(kind=apart)[0]] == [3] * 8
    (units,) = cut(kind=lambda prompt: kinds[prompt.id])
    assert [len(unit) for unit in units] == [9, 3, 6, 6]
    assert [row.number for unit in units for row in unit] == list(range(24))


def test_a_batch_stays_within_a_group_if_prompts_share_no_forward() -> None:
    config = PolicyConfig(prompts_per_epoch=4, group_size=6, sampling={"batch": 4}, optimizer={"updates_per_epoch": 1})
    assert divide(config).batch == 4
    assert divide(config, mixed=True).batch == 3


class TwoSizes:
    """A policy whose prompts are painted at sizes of their own."""

    def __init__(self, sizes: list[Size]) -> None:
        self._sizes = {prompt.id: size for prompt, size in zip(PROMPTS, sizes, strict=True)}

    def forward_key(self, prompt: Prompt, size: Size) -> Size:
        return self._sizes[prompt.id]


def test_batches_hold_prompts_that_share_a_forward() -> None:
    wide, tall = Size(32, 64), Size(64, 32)
    mixed = TwoSizes([wide, tall, wide, wide])
    assert forward_batches(mixed, PROMPTS, size=Size(64, 64), batch=2) == [[0, 2], [3], [1]]


def test_processes_deal_whole_subtrees_if_these_divide() -> None:
    """If not, a node whose samples lie on several processes is one unit on each; updates have the same rows anyway."""
    numbered = [Row(PROMPTS[0], number) for number in range(24)]
    cut = partial(assign_rows, numbered, tree=Tree(2, (3, 2)), batch=2, updates=2, kind=apart)
    assert [[len(unit) for unit in update] for update in cut(world=1, rank=0)] == [[6, 6], [6, 6]]
    assert [[row.number for row in unit] for unit in cut(world=2, rank=1)[0]] == [[12, 13, 14, 15, 16, 17]]
    thirds = [cut(world=3, rank=rank)[1] for rank in range(3)]
    assert [[[row.number for row in unit] for unit in units] for units in thirds] == [
        [[6, 7], [18, 19]],
        [[8, 9], [20, 21]],
        [[10, 11], [22, 23]],
    ]
    joined = partial(assign_rows, numbered, tree=Tree(1, (12, 1)), batch=2, updates=1, world=3, rank=0, kind=apart)
    assert [len(unit) for unit in joined()[0]] == [4, 4]
    assert [len(unit) for unit in joined(sharded=True)[0]] == [2, 2, 2, 2]
