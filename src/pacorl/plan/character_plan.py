"""Memory, steps and absent files of a character's training: `pacorl train-character FOLDER --dry-run`."""

from __future__ import annotations

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import read_pictures
from pacorl.core.sampler import Sampler
from pacorl.plan import sources
from pacorl.plan.peaks import FP32, Batch, Job, Training, measure
from pacorl.plan.plan import Plan
from pacorl.types import Size


def plan_character(config: CharacterConfig) -> Plan:
    """Check a config and its images, and measure the memory of the run.

    Raises:
        ValueError: There is no such character, an image cannot be used, the size does not fit the generator, or the
            adapter's targets match no module.
    """
    pictures = read_pictures(config)
    spec = config.generator
    model = config.model
    size = Size(*config.size)
    spec.check_trainable(model.checkpoint)
    checkpoint = sources.generator_of(model, spec)
    count = config.optimizer.micro_batch
    job = Job(
        spec=spec,
        options=model.unguided,  # as the loss is
        configs=checkpoint.configs,
        batches=[Batch(size, "size", count, averaged=True)],  # the gallery's
        training=Training(config, Sampler(size=size, steps=config.gallery.steps), count),
        encodes_images=True,
    )
    memory = measure(job)
    facts = {
        "images": {"trained": len(pictures.train), "held_out": len(pictures.held_out)},
        "steps": config.steps,
        "times_seen": round(config.steps * config.optimizer.batch / len(pictures.train), 1),
        "trained_parameters": memory.adapter // FP32,
    }
    return Plan(checkpoint.absences, memory=memory, facts=facts)
