"""Memory, steps and absent files of a character's training: `pacorl train-character FOLDER --dry-run`."""

from __future__ import annotations

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import read_pictures
from pacorl.core.sampler import Sampler
from pacorl.io.documents import blamed_on
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.memory import FP32, memory_of
from pacorl.plan.passes import Batch, Training, measure_generator, shallow
from pacorl.plan.plan import Plan
from pacorl.types import Size


def plan_character(config: CharacterConfig) -> Plan:
    """Check a config and its images, and measure the memory of the run.

    Raises:
        ValueError: There is no such character, an image cannot be used, the size does not fit the generator, or the
            adapter's targets match no module.
    """
    pictures = read_pictures(config)
    spec, model, size = config.generator, config.model, Size(*config.size)
    spec.check_trainable(model.checkpoint)
    checkpoint = sources.generator_of(model, spec)
    policy = policy_on_meta(spec, model, shallow(checkpoint.configs))
    with blamed_on("size"):
        policy.check_size(size)

    # The loss is of the unguided velocity.
    batch = config.optimizer.micro_batch
    training = Training(config, Sampler(size=size, steps=config.gallery.steps), batch)
    generator = measure_generator(
        spec, model.unguided, checkpoint.configs, images=None, batches=[Batch(size, batch)], training=training
    )
    images = len(pictures.train) + len(pictures.held_out)
    memory = memory_of(
        model,
        generator,
        prompts=policy.encode_batch,
        encodes_images=True,
        sampling=generator.figures.adapter,  # the gallery is of the average, and sets the adapter aside
        encoded=images * policy.noise([0], size).numel() * FP32,
    )
    facts = {
        "images": {"trained": len(pictures.train), "held_out": len(pictures.held_out)},
        "steps": config.steps,
        "times_seen": round(config.steps * config.optimizer.batch / len(pictures.train), 1),
        "trained_parameters": round(generator.figures.trained) // FP32,
    }
    return Plan(checkpoint.absences, memory=memory, facts=facts)
