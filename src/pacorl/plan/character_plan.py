"""Requirements of a character's training before it starts: `pacorl train-character FOLDER --dry-run`.

Images and captions are read, steps and weights are counted, and memory is measured. No weights are loaded, and the
network is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import PictureSet, read_pictures, small_pictures
from pacorl.config.base import ConfigError
from pacorl.core.sampler import Sampler
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.memory import ALL, FP32, Row, memory_rows
from pacorl.plan.passes import Batch, Training, image_encoding_pass, measure_generator, shallow
from pacorl.plan.plan import Plan, disk_bytes, shortages
from pacorl.runtime.logbook import check_trackers
from pacorl.types import Size


def plan_character(config: CharacterConfig) -> Plan:
    """Check a config and its images, and measure the memory of the run.

    Raises:
        ConfigError: The size does not fit the generator, or the adapter's targets match no module.
        ValueError: There is no such character, or an image cannot be used.
    """
    # Images and config.
    check_trackers(config.trackers)
    pictures = read_pictures(config)
    spec, model, size = config.generator, config.model, Size(*config.size)
    spec.check_trainable(model.checkpoint)

    # The size.
    checkpoint = sources.generator_of(model, spec)
    policy = policy_on_meta(spec, model, shallow(checkpoint.configs))
    try:
        policy.check_size(size)
    except ValueError as error:
        raise ConfigError(f"size: {error}") from None

    # Memory. The loss is of the unguided velocity, and the gallery is guided.
    batches = [Batch(size, config.optimizer.micro_batch)]
    training = Training(config, Sampler(size=size, steps=config.gallery.steps), config.optimizer.micro_batch)
    trained = measure_generator(
        spec, model.unguided, checkpoint.configs, images=None, batches=batches, training=training
    )
    guided = measure_generator(spec, model, checkpoint.configs, images=None, batches=batches)
    generator = dataclasses.replace(trained, samples=guided.samples)
    count = len(pictures.train) + len(pictures.held_out)
    rows = [
        *memory_rows(model, generator, prompts=policy.encode_batch, overlap=(generator.adapter,)),
        Row("encoding an image", image_encoding_pass(generator.inputs, size=size).peak, ("encode",)),
        Row("latents of the images", count * policy.noise([0], size).numel() * FP32, ALL, "host"),
    ]
    captions = {each.path.name: each.caption for each in (*pictures.train, *pictures.held_out)}
    plan = Plan(
        checkpoint.absences,
        rows=tuple(rows),
        command_phases=("encode", "load", "sample", "decode", "train"),
        disk_bytes=disk_bytes(generator.adapter, keep=config.keep_checkpoints),
        facts={
            "images": {"trained": len(pictures.train), "held out": len(pictures.held_out)},
            "captions": captions,
            "steps": config.steps,
            "each_image_seen": round(config.steps * config.optimizer.batch / len(pictures.train), 1),
            "trained_parameters": generator.trained // FP32,
        },
    )
    return plan.with_notes(checkpoint.note, *_advice(config, pictures), *shortages(config, plan))


def _advice(config: CharacterConfig, pictures: PictureSet) -> Iterator[str]:
    """Yield notes on images and captions."""
    small = small_pictures([*pictures.train, *pictures.held_out], Size(*config.size))
    if small:
        yield f"{small[0].name} has fewer pixels than size {Size(*config.size)} ({len(small)} such): it is enlarged"
    # A caption names what may vary; what it leaves out becomes part of the character.
    if [picture.caption for picture in pictures.train].count(pictures.subject) >= 3:
        yield "images share the card's caption: what differs between them is told best in FILE.txt beside each image"
    if not pictures.held_out:
        yield "no image is held out, so that overfitting is not seen; give at least 5 images, and held_out above 0"
