"""Requirements of a character's training before it starts: `pacorl train-character FOLDER --dry-run`.

Images and captions are read, steps and weights are counted, and memory is measured. No weights are loaded, and the
network is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import PictureSet, read_pictures, small_pictures
from pacorl.config.base import ConfigError
from pacorl.core.sampler import Sampler
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.passes import image_encoding_pass, shallow
from pacorl.plan.plan import Plan, card_shortage, device, disk_shortage, size_text
from pacorl.plan.rows import (
    ALL,
    FP32,
    Batch,
    Row,
    Training,
    adapter_rows,
    file_rows,
    host_row,
    in_phases,
    measure_generator,
    model_rows,
    pass_rows,
    training_rows,
)
from pacorl.runtime.logbook import check_trackers
from pacorl.types import Size

SHARED = 3
"""Images with one caption from which the plan advises files of captions."""


@dataclass(frozen=True, slots=True)
class CharacterPlan(Plan):
    """Requirements of a character's training."""

    images: int = 0
    """Images that are trained on."""
    held_out: int = 0
    """Images that measure overfitting."""
    captions: Mapping[str, str] = field(default_factory=dict)
    """File of each image → its caption."""
    steps: int = 0
    passes: float = 0.0
    """Times that each image is trained on."""
    trained_parameters: int = 0
    lora_bytes: int = 0
    """Size of the saved LoRA in one form."""

    def lines(self) -> Iterator[str]:
        """Describe images, captions, steps and the LoRA, a line each."""
        yield f"images: {self.images} to train on, {self.held_out} held out"
        for name, caption in self.captions.items():
            yield f"  {name}: {caption}"
        yield f"steps: {self.steps}, each image {self.passes:.3g} times"
        yield f"LoRA: {self.trained_parameters:,} parameters, {size_text(self.lora_bytes)} as a file"


def plan_character(config: CharacterConfig) -> CharacterPlan:
    """Check a config and its images, and measure the memory of the run.

    Raises:
        ConfigError: The size does not fit the generator, or the adapter's targets match no module.
        ValueError: There is no such character, or an image cannot be used.
    """
    # Images and config.
    check_trackers(config.trackers)
    pictures = read_pictures(config)
    config.generator.check_trainable(config.model.checkpoint)

    # The size.
    checkpoint = sources.generator_of(config.model, config.generator)
    policy = policy_on_meta(config.generator, config.model, shallow(checkpoint.configs))
    size = Size(*config.size)
    try:
        policy.check_size(size)
    except ValueError as error:
        raise ConfigError(f"size: {error}") from None

    # Memory. The loss is of the unguided velocity, and the gallery is guided.
    batches = [Batch(size, config.optimizer.micro_batch)]
    training = Training(config, Sampler(size=size, steps=config.gallery.steps), config.optimizer.micro_batch)
    spec, model = config.generator, config.model
    trained = measure_generator(
        spec, model.unguided, checkpoint.configs, images=None, batches=batches, training=training
    )
    guided = measure_generator(spec, model, checkpoint.configs, images=None, batches=batches)
    generator = dataclasses.replace(trained, samples=guided.samples)
    count = len(pictures.train) + len(pictures.held_out)
    rows = [
        *model_rows(model, generator, [], in_turns=False),
        *adapter_rows(generator),
        *pass_rows(generator, [dataclasses.replace(batches[0], beside=generator.adapter)], prompts=policy.encode_batch),
        *training_rows(generator, training),
        Row("encoding an image", image_encoding_pass(generator.inputs, size=size).peak, phases=("encode",)),
        host_row("latents of the images", count * policy.noise([0], size).numel() * FP32, ALL),
        *file_rows(config, generator.adapter),
    ]

    # Counts, and warnings that depend on the whole plan.
    plan = CharacterPlan(
        in_phases(rows, ("encode", "load", "sample", "decode", "train")),
        checkpoint.absences,
        (),
        *device(),
        images=len(pictures.train),
        held_out=len(pictures.held_out),
        captions={picture.path.name: picture.caption for picture in (*pictures.train, *pictures.held_out)},
        steps=config.steps,
        passes=config.steps * config.optimizer.batch / len(pictures.train),
        trained_parameters=generator.trained // FP32,
        lora_bytes=generator.trained,
    )
    warnings = [checkpoint.note, *_advice(config, pictures), card_shortage(plan), disk_shortage(config, plan)]
    return dataclasses.replace(plan, warnings=tuple(warning for warning in warnings if warning))


def _advice(config: CharacterConfig, pictures: PictureSet) -> Iterator[str]:
    """Yield notes on images and captions."""
    small = small_pictures([*pictures.train, *pictures.held_out], Size(*config.size))
    if small:
        yield f"{small[0].name} has fewer pixels than size {Size(*config.size)} ({len(small)} such): it is enlarged"
    # A caption names what may vary; what it leaves out becomes part of the character.
    captions = [picture.caption for picture in pictures.train]
    if captions.count(pictures.subject) >= SHARED:
        yield "images share the card's caption: what differs between them is told best in FILE.txt beside each image"
    if not pictures.held_out:
        yield "no image is held out, so that overfitting is not seen; give at least 5 images, and held_out above 0"
