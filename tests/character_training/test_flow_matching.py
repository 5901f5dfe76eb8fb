"""The loss of flow matching against a plain computation, and the noise levels that it is drawn at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_hero import hero_config, make_hero

from pacorl.character_training.character_trainer import CharacterTrainer
from pacorl.core.schedule import seed_of
from pacorl.models.adapters import adapter_state
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


def test_the_held_out_loss_is_the_average_s_in_a_plain_loop(trainer: CharacterTrainer) -> None:
    """In float64, a picture and a noise level at a time; the trained weights, three times as strong, have another."""
    trained = {name: weight for name, weight in trainer.lora.transformer.named_parameters() if ".lora_B." in name}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    trainer.lora.average.load(adapter_state(trainer.lora.transformer))
    for weight in trained.values():
        weight.data *= 3
    trainer.lora.average.follow(1)  # the first update: 0.1 of the copy, 0.9 of the trained weights
    measured = trainer.measure_held_out()
    doubled = copy.deepcopy(trainer.lora.transformer).double()
    for name, weight in trained.items():
        assert torch.equal(weight, 3 * before[name])  # put back
        weight.data = before[name]
    trainer.lora.average.load(adapter_state(trainer.lora.transformer))

    expected = plain_held_out(trainer, doubled, {name: 2.8 * weight.double() for name, weight in before.items()})
    assert measured == pytest.approx(expected, rel=1e-5)
    of_trained = plain_held_out(trainer, doubled, {name: 3 * weight.double() for name, weight in before.items()})
    assert abs(of_trained - expected) > 1e-3 * expected


@torch.no_grad()
def plain_held_out(trainer: CharacterTrainer, transformer: torch.nn.Module, adapter: dict[str, torch.Tensor]) -> float:
    transformer.load_state_dict(adapter, strict=False)
    rows, cols = trainer.policy.token_grid(trainer.size)
    losses = []
    for number, (prompt, latents) in enumerate(trainer.held_out):
        caption = trainer.cache.batch([prompt], trainer.size).tensors
        for level in range(8):
            sigma = trainer.sigmas[int((level + 0.5) / 8 * 1000)].double()
            noise = trainer.policy.noise([seed_of(42, "held out", number, level)], trainer.size).double()
            velocity = transformer(
                hidden_states=(1 - sigma) * latents.double() + sigma * noise,
                timestep=sigma[None],
                guidance=torch.tensor([3.5]).double(),
                pooled_projections=caption["pooled"].double(),
                encoder_hidden_states=caption["tokens"].double(),
                txt_ids=torch.zeros(caption["tokens"].shape[1], 3),
                img_ids=torch.tensor([[0, row, col] for row in range(rows) for col in range(cols)]).float(),
                return_dict=False,
            )[0]
            losses.append(float(((velocity - (noise - latents.double())) ** 2).mean()))
    assert len(losses) == 8 * len(trainer.pictures.held_out) > 0
    return sum(losses) / len(losses)


def test_latents_are_those_of_the_picture(trainer: CharacterTrainer) -> None:
    """Decoded, they are the autoencoder's own copy of the picture; it is of few weights, and blurs."""
    (image,) = trainer.policy.decode(trainer.train_examples[2][1], trainer.size)
    drawn = torch.tensor(np.asarray(trainer.pictures.train[2].open(trainer.size))).permute(2, 0, 1)
    vae = trainer.policy.pipeline.vae
    with torch.no_grad():
        copied = vae.decode(vae.encode(drawn[None] / 127.5 - 1).latent_dist.mode()).sample[0]
    expected = (copied.clamp(-1, 1) + 1) * 127.5
    assert (torch.tensor(np.asarray(image)).permute(2, 0, 1) - expected).abs().max() <= 1


def test_each_picture_is_drawn_once_a_turn_and_steps_take_rows_one_after_the_other(
    trainer: CharacterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def losses_at(rows: Any) -> torch.Tensor:
        drawn.extend(prompt.text for (prompt, _), _, _ in rows)
        weights = (weight.sum() for weight in trainer.lora.transformer.parameters() if weight.requires_grad)
        return sum(weights) * torch.zeros(len(rows))

    optimizer = trainer.config.optimizer.model_copy(update={"batch": 2, "micro_batch": 1})
    monkeypatch.setattr(trainer, "config", trainer.config.model_copy(update={"optimizer": optimizer}))
    monkeypatch.setattr(trainer, "losses_at", losses_at)
    monkeypatch.setattr(trainer.lora, "take_step", lambda: 1.0)
    for step in range(5):
        monkeypatch.setattr(trainer.lora, "step", step)
        trainer.train_step()
    trainer.lora.optimizer.zero_grad()
    captions = {picture.caption for picture in trainer.pictures.train}
    assert set(drawn[:5]) == set(drawn[5:]) == captions
    assert drawn[:5] != drawn[5:]


def test_the_lowest_held_out_loss_is_the_best_and_has_the_highest_score(
    trainer: CharacterTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: list[float | None] = []
    saved = SimpleNamespace(save=lambda state: scores.append(state["score"]), finish=lambda: None)
    monkeypatch.setattr(trainer, "checkpoints", saved, raising=False)
    monkeypatch.setattr(trainer, "identities", {}, raising=False)
    monkeypatch.setattr(trainer, "held_out_losses", {1: 0.5, 2: 0.25, 3: 0.5, 4: 0.25})
    for step in (1, 2, 9):
        monkeypatch.setattr(trainer.lora, "step", step)
        trainer.save()
    assert scores == [-0.5, -0.25, None]
    assert trainer.best_step == 4
    monkeypatch.setattr(trainer, "held_out_losses", dict.fromkeys(range(1, 5), 0.5) | {1: 0.25})
    assert trainer.finished, "three evaluations after the best"


@pytest.mark.parametrize(
    ("kind", "scale"), [("flux", "true_cfg_scale"), ("klein", "guidance_scale"), ("sd3", "guidance_scale")]
)
def test_training_is_not_guided(kind: str, scale: str) -> None:
    options = POLICIES[kind].options.model_validate({"kind": kind, scale: 4.0})
    assert options.negative_text is not None
    assert options.unguided.negative_text is None
    assert options.unguided.model_copy(update={scale: 4.0}) == options
