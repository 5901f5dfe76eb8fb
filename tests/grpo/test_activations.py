"""`model.gradient_checkpointing: auto`: what a backward would keep is counted, and compared with the free memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_run

from pacorl.grpo import activations
from pacorl.grpo.activations import FREE_MARGIN, activation_bytes
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.types import Conditioning, Size

SIZE = Size(32, 32)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyTrainer]:
    out = tmp_path_factory.mktemp("activations") / "run"
    made = PolicyTrainer(tiny_run([f"out={out}", "sampling.size=[32,32]", "model.gradient_checkpointing=auto"]))
    yield made
    made.close()


def conditioning(training: PolicyTrainer, count: int) -> Conditioning:
    return training.cache.batch([training.train_prompts[0]] * count, SIZE)


def kept_bytes(training: PolicyTrainer, batch: Conditioning) -> int:
    """Bytes of distinct storages that a real forward keeps for its backward, the weights aside."""
    policy = training.policy
    weights = {weight.untyped_storage().data_ptr() for weight in policy.transformer.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x = policy.noise([0] * len(batch), SIZE)
        policy.velocity(x, torch.full((len(x),), 0.5), batch, SIZE)
    return sum(size for size, _ in kept.values())


@pytest.mark.slow
def test_without_a_card_nothing_is_computed_twice(training: PolicyTrainer) -> None:
    assert not training.transformer.is_gradient_checkpointing


@pytest.mark.slow
def test_the_count_is_no_less_than_what_a_backward_keeps(training: PolicyTrainer) -> None:
    one, two = conditioning(training, 1), conditioning(training, 2)

    kept, counted = kept_bytes(training, one), activation_bytes(training.policy, one, SIZE)

    assert kept <= counted < 3 * kept
    assert 1.5 * counted < activation_bytes(training.policy, two, SIZE) <= 2 * counted


@pytest.mark.parametrize(("missing", "on"), [(0, False), (1, True)])
def test_it_is_off_where_the_activations_of_a_batch_fit(
    training: PolicyTrainer, monkeypatch: pytest.MonkeyPatch, missing: int, on: bool
) -> None:
    batch, count = conditioning(training, 1), 3
    needed = count * activation_bytes(training.policy, batch, SIZE) + FREE_MARGIN
    needed += 4 * sum(weight.nbytes for weight in training.transformer.parameters() if weight.requires_grad)
    monkeypatch.setattr(activations, "free_bytes", lambda device: needed - missing)

    decided = activations.decide_checkpointing(
        training.config, training.policy, batch, SIZE, batch=count, runtime=training.runtime
    )

    assert decided == training.transformer.is_gradient_checkpointing == on


def test_models_that_take_turns_keep_it(training: PolicyTrainer, tmp_path: Path) -> None:
    batch = conditioning(training, 1)
    low = training.config.model_copy(update={"memory": "low"})
    training.transformer.enable_gradient_checkpointing()

    assert activations.decide_checkpointing(low, training.policy, batch, SIZE, batch=1, runtime=training.runtime)
    assert training.transformer.is_gradient_checkpointing
