"""Requirements of a character's training: `pacorl train-character FOLDER --config RECIPE --dry-run`."""

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import read_pictures
from pacorl.plan import sources
from pacorl.plan.hours import hours_of
from pacorl.plan.peaks import Batch, Job, Training, measure
from pacorl.plan.plan import Plan, machine
from pacorl.types import Size


def plan_character(config: CharacterConfig, *, card: int = 0) -> Plan:
    """Read a character's images, and measure the memory of its training, and its hours with every step.

    Args:
        card: gigabytes of the card that the run is for; 0 for this machine's.

    Raises:
        ValueError: The images, the model or a size do not allow the run.
    """
    spec, options, gallery = config.generator, config.optimizer, config.gallery
    spec.check_trainable(config.model.checkpoint)
    pictures = read_pictures(config)
    configs, absences = sources.generator_of(config.model)

    # Images of the gallery: by the base, by the best adapter, and perhaps between. A guided step is two forwards.
    galleries = 2 + gallery.each * (config.steps // config.evaluate_every)
    drawn = galleries * len(gallery.prompts) * gallery.seeds
    forwards = gallery.steps * (1 if config.model.negative_text is None else 2)

    # The held-out images add a few forwards in a hundred, which are not counted.
    micro_batch = 1 if spec.policy.forward_per == "prompt" else options.micro_batch
    job = Job(
        # The loss is on the model's own velocity; the gallery's guidance is in `forwards`.
        options=config.model.unguided,
        configs=configs,
        batches=[Batch(Size(*config.size), "size", options.micro_batch, drawn, forwards)],
        training=Training(
            config,
            micro_batch,
            copies=5,  # the best adapter as well, which draws the last gallery
            steps=config.steps * options.batch / micro_batch,
            encodes_images=True,
        ),
        encoded=len(pictures.train) + len(pictures.held_out) + len(gallery.prompts),
    )
    memory = measure(job)
    facts = {
        "training_images": len(pictures.train),
        "held_out_images": len(pictures.held_out),
        "steps": f"{config.steps} at most, of {options.batch} images each",
    }
    absences += sources.absent_lora(config.adapter.start)
    return Plan(memory, absences, facts, hours_of(memory.flops, memory=config.memory), **machine(card))
