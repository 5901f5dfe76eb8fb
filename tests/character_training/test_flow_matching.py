"""The loss of flow matching against a plain computation, and the noise levels that it is drawn at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny_hero import hero_config, make_hero

from pacorl.character_training import character_trainer
from pacorl.character_training.character_trainer import CharacterTrainer
from pacorl.character_training.flow_matching import draw_time
from pacorl.core.schedule import seed_of
from pacorl.models.policies import POLICIES


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CharacterTrainer]:
    """A trainer of the hero, built and not yet trained, with B matrices that are not zero."""
    folder = tmp_path_factory.mktemp("flow")
    trainer = CharacterTrainer(hero_config(make_hero(folder / "zorp"), folder / "run"))
    trainer.build()
    for name, weight in trainer.lora.transformer.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(len(name)))
    return trainer


def test_the_loss_is_that_of_a_plain_computation(trainer: CharacterTrainer) -> None:
    (loss,) = trainer.losses_of("image", trainer.train_examples[:1], [7])

    # The example is the only one; its time and noise follow from the seed and the row.
    time = draw_time(seed_of(42, "image", "time", 7), "uniform")
    config = trainer.policy.pipeline.scheduler.config
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    rows, cols = trainer.policy.token_grid(trainer.size)
    mu = config.base_shift + slope * (rows * cols - config.base_image_seq_len)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 1000, 1000).tolist(), mu=mu)
    sigma = scheduler.sigmas[int(time * 1000)]
    noise = trainer.policy.noise([seed_of(42, "image", "noise", 7)], trainer.size)
    latents = trainer.train_examples[0].latents
    caption = trainer.cache.batch([trainer.train_examples[0].prompt], trainer.size).tensors
    ids = torch.tensor([[0, row, col] for row in range(rows) for col in range(cols)]).float()
    velocity = trainer.transformer(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        timestep=sigma[None],
        guidance=torch.tensor([3.5]),
        pooled_projections=caption["pooled"],
        encoder_hidden_states=caption["tokens"],
        txt_ids=torch.zeros(caption["tokens"].shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    expected = torch.nn.functional.mse_loss(velocity, noise - latents)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_held_out_loss_is_the_average_s_in_a_plain_loop(trainer: CharacterTrainer) -> None:
    """In float64, a picture and a noise level at a time; the trained weights, three times as strong, have another."""
    trained = {name: weight for name, weight in trainer.lora.transformer.named_parameters() if ".lora_B." in name}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    trainer.begin_average()
    for weight in trained.values():
        weight.data *= 3
    trainer.lora.average.follow(
        trainer.lora.average.interval
    )  # the first update: 0.1 of the copy, 0.9 of the trained weights
    measured = trainer.measure_held_out()
    doubled = copy.deepcopy(trainer.lora.transformer).double()
    for name, weight in trained.items():
        assert torch.equal(weight, 3 * before[name])  # put back
        weight.data = before[name]
    trainer.begin_average()

    expected = plain_held_out(trainer, doubled, {name: 2.8 * weight.double() for name, weight in before.items()})
    assert measured == pytest.approx(expected, rel=1e-5)
    of_trained = plain_held_out(trainer, doubled, {name: 3 * weight.double() for name, weight in before.items()})
    assert abs(of_trained - expected) > 1e-3 * expected


@torch.no_grad()
def plain_held_out(trainer: CharacterTrainer, transformer: torch.nn.Module, adapter: dict[str, torch.Tensor]) -> float:
    transformer.load_state_dict(adapter, strict=False)
    rows, cols = trainer.policy.token_grid(trainer.size)
    losses = []
    for number, example in enumerate(trainer.held_out):
        caption = trainer.cache.batch([example.prompt], trainer.size).tensors
        for level in range(8):
            sigma = trainer.sigmas[int((level + 0.5) / 8 * 1000)].double()
            noise = trainer.policy.noise([seed_of(42, "held out", number, level)], trainer.size).double()
            velocity = transformer(
                hidden_states=(1 - sigma) * example.latents.double() + sigma * noise,
                timestep=sigma[None],
                guidance=torch.tensor([3.5]).double(),
                pooled_projections=caption["pooled"].double(),
                encoder_hidden_states=caption["tokens"].double(),
                txt_ids=torch.zeros(caption["tokens"].shape[1], 3),
                img_ids=torch.tensor([[0, row, col] for row in range(rows) for col in range(cols)]).float(),
                return_dict=False,
            )[0]
            losses.append(float(((velocity - (noise - example.latents.double())) ** 2).mean()))
    assert len(losses) == 8 * len(trainer.pictures.held_out) > 0
    return sum(losses) / len(losses)


def test_latents_are_those_of_the_picture(trainer: CharacterTrainer) -> None:
    (image,) = trainer.policy.decode(trainer.train_examples[2].latents, trainer.size)
    drawn = trainer.pictures.train[2].open(trainer.size, "crop")
    difference = torch.tensor(list(image.tobytes())).float() - torch.tensor(list(drawn.tobytes())).float()
    assert difference.abs().mean() < 12


def test_each_picture_is_drawn_once_a_turn(trainer: CharacterTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        trainer, "_losses_at", lambda examples, times, seeds: drawn.extend(e.prompt.text for e in examples)
    )
    trainer.losses_of("image", trainer.train_examples, range(10))
    captions = {picture.caption for picture in trainer.pictures.train}
    assert set(drawn[:5]) == set(drawn[5:]) == captions
    assert drawn[:5] != drawn[5:]


def test_the_class_is_weighted(trainer: CharacterTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's gradient is that of the mean loss of the images, and of the class's times its weight."""
    prior = trainer.config.prior.model_copy(update={"weight": 0.5})
    optimizer = trainer.config.optimizer.model_copy(update={"batch": 2, "micro_batch": 1})
    config = trainer.config.model_copy(update={"prior": prior, "optimizer": optimizer})
    monkeypatch.setattr(trainer, "config", config)
    monkeypatch.setattr(trainer, "class_examples", trainer.held_out)
    monkeypatch.setattr(trainer, "step_optimizer", lambda: 1.0)
    monkeypatch.setattr(trainer, "losses", [])
    trainer.train_step()
    taken = [weight.grad.clone() for weight in trainer.parameters if weight.grad is not None]
    trainer.lora.optimizer.zero_grad()

    images = trainer.losses_of("image", trainer.train_examples, [0, 1]).mean()
    of_class = trainer.losses_of("class", trainer.held_out, [0, 1]).mean()
    expected = images + 0.5 * of_class
    expected.backward()
    assert trainer.losses == [pytest.approx(expected.item(), rel=1e-5)]
    for gradient, weight in zip(taken, trainer.parameters, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-3, atol=1e-6)
    trainer.lora.optimizer.zero_grad()


def test_steps_take_rows_one_after_the_other(trainer: CharacterTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trainer.config.optimizer.model_copy(update={"batch": 4, "micro_batch": 2})
    monkeypatch.setattr(trainer, "config", trainer.config.model_copy(update={"optimizer": optimizer}))
    monkeypatch.setattr(trainer, "step_optimizer", lambda: 1.0)
    monkeypatch.setattr(trainer, "losses", [])
    taken: list[int] = []

    def losses_of(name: str, examples: Any, rows: range) -> torch.Tensor:
        taken.extend(rows)
        return sum(weight.sum() for weight in trainer.parameters) * torch.zeros(len(rows))

    monkeypatch.setattr(trainer, "losses_of", losses_of)
    for step in range(3):
        monkeypatch.setattr(trainer, "step", step)
        trainer.train_step()
    trainer.lora.optimizer.zero_grad()
    assert taken == [*range(12)]


def test_the_lowest_held_out_loss_has_the_highest_score(
    trainer: CharacterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "logbook", SimpleNamespace(count_lines=lambda: 0), raising=False)
    monkeypatch.setattr(trainer, "average", None)
    monkeypatch.setattr(trainer, "evaluated", trainer.lora.step)
    monkeypatch.setattr(character_trainer, "best_checkpoint", lambda folder: None)
    states: list[dict[str, Any]] = []

    def save_run(run: Any, state: dict[str, Any], **targets: Any) -> Any:
        states.append(state)
        return trainer.config.out / "checkpoints" / "step"

    monkeypatch.setattr(character_trainer, "save_run", save_run)
    for loss in (0.5, 0.25, None):
        monkeypatch.setattr(trainer, "held_out_loss", loss)
        trainer.save()
    assert [state["score"] for state in states] == [-0.5, -0.25, None]


def test_densities_of_the_times() -> None:
    uniform = torch.tensor([draw_time(seed, "uniform") for seed in range(2000)])
    peaked = torch.tensor([draw_time(seed, "logit_normal") for seed in range(2000)])
    for times in (uniform, peaked):
        assert 0 < times.min() < times.max() < 1
        assert times.mean().item() == pytest.approx(0.5, abs=0.03)
    middle = [((times > 0.25) & (times < 0.75)).float().mean().item() for times in (uniform, peaked)]
    assert middle == [pytest.approx(0.5, abs=0.04), pytest.approx(0.728, abs=0.04)]  # logit-normal: P(|z| < ln 3)


@pytest.mark.parametrize(
    ("kind", "scale"), [("flux", "true_cfg_scale"), ("klein", "guidance_scale"), ("sd3", "guidance_scale")]
)
def test_training_is_not_guided(kind: str, scale: str) -> None:
    options = POLICIES[kind].options.model_validate({"kind": kind, scale: 4.0})
    assert options.negative_text is not None
    assert options.unguided.negative_text is None
    assert options.unguided.model_copy(update={scale: 4.0}) == options
