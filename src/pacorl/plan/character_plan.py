"""Requirements of a character's training before it starts: `pacorl train-character FOLDER --dry-run`.

Images and captions are read, steps and weights are counted, and memory is measured. No weights are loaded, and the
network is not used.
"""

from __future__ import annotations

import dataclasses

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import read_pictures, small_pictures
from pacorl.config.base import ConfigError
from pacorl.core.sampler import Sampler
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.memory import FP32, memory_of
from pacorl.plan.passes import Batch, Training, measure_generator, shallow
from pacorl.plan.plan import Plan
from pacorl.types import Size


def plan_character(config: CharacterConfig) -> Plan:
    """Check a config and its images, and measure the memory of the run.

    Raises:
        ConfigError: The size does not fit the generator, or the adapter's targets match no module.
        ValueError: There is no such character, or an image cannot be used.
    """
    pictures = read_pictures(config)
    images = [*pictures.train, *pictures.held_out]
    spec, model, size = config.generator, config.model, Size(*config.size)
    spec.check_trainable(model.checkpoint)
    checkpoint = sources.generator_of(model, spec)
    policy = policy_on_meta(spec, model, shallow(checkpoint.configs))
    try:
        policy.check_size(size)
    except ValueError as error:
        raise ConfigError(f"size: {error}") from None

    # The loss is of the unguided velocity, and the gallery is guided.
    batch = config.optimizer.micro_batch
    batches = [Batch(size, batch)]
    training = Training(config, Sampler(size=size, steps=config.gallery.steps), batch)
    generator = measure_generator(
        spec, model.unguided, checkpoint.configs, images=None, batches=batches, training=training
    )
    guided = measure_generator(spec, model, checkpoint.configs, images=None, batches=batches)
    figures = generator.figures._replace(sample=guided.figures.sample)
    memory = memory_of(
        model,
        dataclasses.replace(generator, figures=figures),
        prompts=policy.encode_batch,
        encodes_images=True,
        overlap=(round(figures.adapter),),
        encoded=len(images) * policy.noise([0], size).numel() * FP32,
    )
    plan = Plan(
        checkpoint.absences,
        memory=memory,
        facts={
            "images": {"trained": len(pictures.train), "held out": len(pictures.held_out)},
            "captions": {picture.path.name: picture.caption for picture in images},
            "steps": config.steps,
            "each image seen": round(config.steps * config.optimizer.batch / len(pictures.train), 1),
            "trained parameters": round(figures.trained) // FP32,
        },
    )
    small = small_pictures(images, size)
    return plan.with_notes(
        f"{small[0].name} has fewer pixels than size {size} ({len(small)} such): it is enlarged" if small else "",
        "" if pictures.held_out else "no image is held out, so that overfitting is not seen; give at least 5 images",
    )
