"""A LoRA of one character, trained on a person's own images.

    pacorl train-character characters/hero --config character/flux_24gb

Supervised flow matching on the generator's own forward, as in diffusers' DreamBooth scripts: the target of the velocity
is noise − latents, at noise levels of the checkpoint's own training shift. Checkpoints, log and page are those of
PaCo-GRPO, which can go on from the LoRA (`adapter.start`). An epoch of the log is `evaluate_every` steps.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from pacorl.character_training.character_config import PROGRESS, CharacterConfig
from pacorl.character_training.flow_matching import LEVELS, draw_time, flow_matching_loss
from pacorl.character_training.pictures import Picture, fitted_image, gallery_prompts, read_pictures
from pacorl.config.base import described, dump
from pacorl.core.batches import in_batches
from pacorl.core.devices import check_card_used
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.core.transfer import to_device
from pacorl.grpo import checkpoint as checkpoints
from pacorl.grpo.builders import adapted_policy, adapter_targets, check_adapter
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.evaluate import EvaluatedSample, keep_samples, noise_seed
from pacorl.grpo.lora_training import BadGradientsError, LoraTraining
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.start import SUMMARY, Resume, named_start, step_of
from pacorl.io.documents import dump_json, read_jsonl, write_json
from pacorl.io.files import PRIVATE, check_writable, disk_errors, own_folder, text_digest, write_atomic
from pacorl.io.images import open_image, png_bytes, png_texts
from pacorl.models.adapters import adapter_off
from pacorl.report.folder import numbers
from pacorl.report.page import write_page
from pacorl.runtime.logbook import Logbook, ProgressBars, TrainResult, check_trackers
from pacorl.runtime.processes import Runtime
from pacorl.runtime.stopping import Interrupted
from pacorl.types import Prompt, Size

logger = logging.getLogger(__name__)

HELD_OUT_TIMES = tuple((level + 0.5) / 8 for level in range(8))
"""Positions in the training schedule at which held-out images are measured, each with a noise of its own."""
HELD_OUT_LOSS = "held_out_loss"
BEST = "best"
"""Folder of the LoRA with the lowest held-out loss."""


@dataclass(frozen=True, slots=True)
class Example:
    """One image to train on or to measure."""

    prompt: Prompt
    """Its caption."""
    latents: Tensor
    """(1, N, C) in fp32, on the CPU."""


class CharacterTrainer:
    """Training of a character's LoRA, from its images to the saved adapter.

    Example:
        from pacorl import CharacterConfig, CharacterTrainer

        config = CharacterConfig.from_yaml("character/tiny", "character=characters/hero", "steps=20")
        result = CharacterTrainer(config).train()
        print(result.adapter, result.metrics["held_out_loss"])
    """

    def __init__(self, config: CharacterConfig, *, resume: Resume = False, allow_changes: bool = False) -> None:
        """Check a run before its weights are loaded.

        Args:
            config: the run.
            resume: False for a new run, True or "auto" to continue from the newest checkpoint, or a checkpoint folder.
            allow_changes: whether a resumed run may change its config or images.

        Raises:
            ValueError: if the images, the model or the folder do not allow the run; one line with the fix.
        """
        # The config and its images.
        self.config = config
        self.resume = resume
        self.allow_changes = allow_changes
        self.size = Size(*config.size)
        """Size of the training pictures."""
        self.pictures = read_pictures(config)
        """Images and captions."""
        # The folder and the trackers.
        check_trackers(config.trackers)
        check_writable(config.out, folder=True)
        named_start(config.out, resume)
        # Cheap checks first: an impossible run fails before weights load.
        config.generator.check_trainable(config.model.checkpoint)
        config.generator.check_source(config.model.checkpoint, adapter=config.adapter.start, size=self.size)

        self.runtime = Runtime()
        """This process, which trains alone."""
        if self.runtime.world > 1:
            raise ValueError(
                f"train-character runs in one process, and the launcher started {self.runtime.world}; start it alone"
            )
        check_card_used(config.model.dtype, self.runtime.device)
        # The newest evaluation, and losses for the next line of the log.
        self.evaluated = -1
        """Step of the newest evaluation; −1 before the first."""
        self.held_out_loss: float | None = None
        """Of the newest evaluation; None without held-out images."""
        self.losses: list[float] = []
        """Losses since the last line of the log."""

    def train(self) -> TrainResult:
        """Train to the last step.

        Returns:
            The run's folder, the best LoRA (without held-out images the last), the last evaluation, and the page.

        Raises:
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
            ValueError: if training cannot go on.
        """
        out = self.config.out
        with own_folder(out), disk_errors(out), self.runtime.signals:
            # The checkpoint is chosen under the folder's lock, or another process could add one.
            start = checkpoints.starting_point(self.config, self.resume)
            self.build()
            self._open_records(start)
            try:
                with self.bars:
                    self._train_steps()
            # The state of a whole step, so that the resumed run repeats none.
            except Interrupted:
                self.save()
                raise Interrupted(f"stopped after step {self.lora.step}, and saved; go on with --resume auto") from None
            except BadGradientsError:
                self.save()
                raise
            finally:
                self.logbook.close()
            return self._finish()

    def _train_steps(self) -> None:
        """Train, evaluate and save, beginning with the evaluation that a stop cut short."""
        every, last = self.config.evaluate_every, self.config.steps
        self.bars.epoch(self.epoch, note="")
        began, first = monotonic(), self.lora.step
        self._note_progress()
        if first % every == 0 or first == last:
            self._evaluate_once()

        while self.lora.step < last:
            before = self.lora.step
            self.train_step()
            step = self.lora.step
            # A step may be repeated after a stop; only a finished step is evaluated.
            if step > before:
                self._note_progress((monotonic() - began) / (step - first))
            if step > before and (step % every == 0 or step == last):
                mean = sum(self.losses) / len(self.losses)
                self.logbook.write("epoch", epoch=self.epoch, step=step, values={"loss": mean})
                self.losses = []
                self.bars.epoch(self.epoch, note=f"step {step}, loss {mean:.4f}")
                self._evaluate_once()
            self.runtime.check_stop()

    # --- building ----------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Load the models, and encode captions and images."""
        config = self.config
        device = self.runtime.device

        # 1. Policy; captions and images are encoded once.
        self.policy = adapted_policy(config, sizes=[self.size], device=device)
        self.cache = ConditioningCache(self.policy)
        self.gallery = gallery_prompts(config, self.pictures.subject)
        class_prompts = [Prompt(id=0, text=text) for text in config.prior.prompts]
        captions = [picture.prompt for picture in (*self.pictures.train, *self.pictures.held_out)]
        self.cache.prepare([*captions, *self.gallery, *class_prompts], self.size)
        self.train_examples = [self._example(picture) for picture in self.pictures.train]
        self.held_out = [self._example(picture) for picture in self.pictures.held_out]

        # 2. Transformer, after the text encoders are freed: both together may not fit on the device.
        self.policy.free_encoders()
        torch.cuda.empty_cache()
        self.policy.place_transformer(device)
        torch.cuda.empty_cache()  # buffers of packing and casting
        first = self.cache.batch(captions[:1], self.size)
        check_adapter(self.policy, first, self.size, targets=adapter_targets(config, self.policy))
        self.sigmas = self.policy.training_sigmas(LEVELS, self.size)

        # 3. Class images by the base.
        self.class_examples = self._class_examples(class_prompts) if config.prior.weight else []

        # 4. Optimizer and average.
        self.policy.options = config.model.unguided
        self.lora = LoraTraining(self.policy, config.optimizer, runtime=self.runtime, total_steps=config.steps)

    @torch.no_grad()
    def _example(self, picture: Picture) -> Example:
        image = picture.open(self.size, self.config.fit)
        return Example(picture.prompt, self.policy.encode_image(image, self.size).float())

    @torch.no_grad()
    def _class_examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Generate the class images that the run's folder lacks, and encode all of them."""
        config = self.config
        class_prompts = [prompts[number % len(prompts)] for number in range(config.prior.images)]
        # Kept in the run's folder, so that a resumed run trains on the same images.
        paths = [config.out / "class" / f"{number:04d}.png" for number in range(config.prior.images)]
        # Whole batches, even for one absent image: its last bits depend on its batch.
        for batch in in_batches(range(len(paths)), config.optimizer.micro_batch):
            absent = []
            for number in batch:
                if png_texts(paths[number]).get("prompt") != class_prompts[number].text:
                    absent.append(number)
            if not absent:
                continue
            seeds = [seed_of(config.seed, "class image", number) for number in batch]
            with adapter_off(self.policy.transformer):
                images = self._sample([class_prompts[number] for number in batch], seeds)
            for number, image in zip(batch, images, strict=True):
                if number in absent:
                    write_atomic(paths[number], png_bytes(image, {"prompt": class_prompts[number].text}))

        examples = []
        for prompt, path in zip(class_prompts, paths, strict=True):
            image = fitted_image(open_image(path), self.size, "crop")
            examples.append(Example(prompt, self.policy.encode_image(image, self.size).float()))
        return examples

    def _open_records(self, start: Path | None) -> None:
        """Open the log, and restore a checkpoint's state."""
        config = self.config
        settings = config.model_dump(mode="json")
        # Changes are refused before any state is restored.
        changes: dict[str, list[Any]] = {}
        log_lines = 0
        if start:
            changes = checkpoints.changes_since(start, config, identities=self.identities, allowed=self.allow_changes)
            state = checkpoints.restore(self.lora, start, seed=config.seed)
            self.evaluated = state["evaluated"]
            self.held_out_loss = state[HELD_OUT_LOSS]
            self.losses = state["losses"]
            log_lines = state["log_lines"]

        # The log ends where the checkpoint was written; later lines are made again.
        self.logbook = Logbook(config.out, trackers=config.trackers, axis="step", settings=settings)
        self.logbook.truncate(log_lines)
        self.logbook.note_changes(changes, epoch=self.epoch, step=self.lora.step)
        for change in described(changes):
            logger.warning("resumed with another setting: %s", change)
        write_atomic(config.out / "config.yaml", dump(config), mode=PRIVATE)
        self.bars = ProgressBars(epochs=math.ceil(config.steps / config.evaluate_every), shown=True)

    @property
    def identities(self) -> dict[str, str]:
        """What a resumed run must find again. Images may be moved, but not exchanged: their content is compared."""
        return {"images and captions": text_digest(dump_json(self.pictures.identity))}

    # --- training ----------------------------------------------------------------------------------------------

    def train_step(self) -> None:
        """Take one optimizer step on images of the character and of its class."""
        options = self.config.optimizer
        self.lora.set_learning_rate()
        # Prior preservation: class images keep the base's idea of the class.
        sources = [("image", self.train_examples, 1.0)]
        if self.class_examples:
            sources.append(("class", self.class_examples, self.config.prior.weight))

        first = self.lora.step * options.batch
        total = 0.0
        for name, examples, weight in sources:
            for rows in in_batches(range(first, first + options.batch), options.micro_batch):
                loss = weight * self.losses_of(name, examples, rows).sum() / options.batch
                self.runtime.backward(loss)
                total += float(loss.detach())

        if math.isfinite(self.lora.take_step()):
            self.losses.append(total)

    def losses_of(self, name: str, examples: Sequence[Example], rows: Sequence[int]) -> Tensor:
        """Compute the (B,) losses of global rows, whose example, time and noise follow from the seed and the row."""
        seed = self.config.seed
        drawn = []
        for row in rows:
            # All images once per turn, in an order of its own.
            turn, position = divmod(row, len(examples))
            order = random.Random(seed_of(seed, name, "order", turn)).sample(range(len(examples)), len(examples))
            drawn.append(examples[order[position]])
        times = [draw_time(seed_of(seed, name, "time", row), self.config.times) for row in rows]
        return self._losses_at(drawn, times, [seed_of(seed, name, "noise", row) for row in rows])

    def _losses_at(self, examples: Sequence[Example], times: Sequence[float], seeds: Sequence[int]) -> Tensor:
        device = self.runtime.device
        sigma_B = torch.stack([self.sigmas[min(int(time * LEVELS), LEVELS - 1)] for time in times])
        return flow_matching_loss(
            self.policy,
            to_device(torch.cat([example.latents for example in examples]), device),
            self.policy.noise(seeds, self.size),
            to_device(sigma_B, device),
            self.cache.batch([example.prompt for example in examples], self.size),
            size=self.size,
        )

    # --- evaluation --------------------------------------------------------------------------------------------

    def _evaluate_once(self) -> None:
        """Evaluate unless this step is evaluated, and save after the first step; build the page."""
        if self.evaluated == self.lora.step:
            return
        metrics = {}
        if self.held_out:
            metrics[HELD_OUT_LOSS] = self.held_out_loss = self.measure_held_out()
        if self.lora.step in (0, self.config.steps):
            self._draw_gallery()
        self.logbook.write("evaluation", epoch=self.epoch, step=self.lora.step, values=metrics)
        self.evaluated = self.lora.step
        if self.lora.step:
            self.save()
        write_page(self.config.out)

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Average the loss of the averaged adapter over the held-out images, at fixed noise levels and noises."""
        # Fixed times and noises: the loss differs between steps by the weights alone.
        rows = []
        for number, example in enumerate(self.held_out):
            for level, time in enumerate(HELD_OUT_TIMES):
                rows.append((example, time, seed_of(self.config.seed, "held out", number, level)))

        total = 0.0
        with self.lora.average.swapped_in():
            for batch in in_batches(rows, self.config.optimizer.micro_batch):
                examples, times, seeds = zip(*batch, strict=True)
                total += float(self._losses_at(examples, times, seeds).sum())
                self.runtime.check_stop()
        return total / len(rows)

    def _draw_gallery(self) -> None:
        """Generate the page's images, by the base before the first step and by the averaged adapter after the last."""
        # The same prompts and seeds before and after, so that the page compares pairs.
        jobs = [(prompt, index) for prompt in self.gallery for index in range(self.config.gallery.seeds)]
        prompts = [prompt for prompt, _ in jobs]
        seeds = [noise_seed(self.config.seed, job) for job in jobs]
        weights = self.lora.average.swapped_in() if self.lora.step else adapter_off(self.lora.transformer)
        with weights, self.bars.phase("gallery", total=len(jobs), stage=True) as advance:
            images = self._sample(prompts, seeds, advance)
        samples = [EvaluatedSample(*job, image) for job, image in zip(jobs, images, strict=True)]
        keep_samples(self.logbook, samples, epoch=self.epoch)

    def _sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], advance: Callable[[int], None] = lambda count: None
    ) -> list[Any]:
        """Generate one image per prompt and seed, with the guidance of the config."""
        config = self.config
        # Training is unguided, the gallery is as the config samples.
        training_options = self.policy.options

        def count_batch(size: int) -> None:
            advance(size)
            self.runtime.check_stop()

        self.policy.options = config.model
        try:
            return sample_images(
                self.policy,
                prompts,
                sampler=Sampler(size=self.size, steps=config.gallery.steps),
                cache=self.cache,
                seeds=seeds,
                batch=config.optimizer.micro_batch,
                progress=count_batch,
            )
        finally:
            self.policy.options = training_options

    # --- files -------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint, the averaged adapter as `adapter`, and the best of the checkpoints as `best`.

        Raises:
            OSError: if the disk is full.
        """
        # A checkpoint without an evaluation of its own cannot be the best.
        is_evaluated = self.evaluated == self.lora.step and self.held_out_loss is not None
        state = {
            "epoch": self.epoch,
            "seed": self.config.seed,
            "evaluated": self.evaluated,
            HELD_OUT_LOSS: self.held_out_loss,
            "score": -self.held_out_loss if is_evaluated and self.held_out_loss is not None else None,
            "best_by": f"-{HELD_OUT_LOSS}",
            "losses": self.losses,
            "log_lines": self.logbook.count_lines(),
            "identities": self.identities,
        }
        checkpoint = checkpoints.save(self.lora, self.config, state)
        best = checkpoints.best_checkpoint(checkpoint.parent)
        if best:
            checkpoints.publish(checkpoint.parent / best["checkpoint"], self.config.out / BEST)
        return checkpoint

    def _note_progress(self, seconds_per_step: float | None = None) -> None:
        """Write how far the run is, for a page that watches it."""
        progress = {"step": self.lora.step, "seconds_per_step": seconds_per_step}
        # At every step, so it does not wait for the disk.
        write_atomic(self.config.out / PROGRESS, dump_json(progress), flush=False)

    def _finish(self) -> TrainResult:
        """Write summary.json and the last page."""
        out = self.config.out
        # From the log: a resumed run has not seen the first evaluation.
        evaluations = [line for line in read_jsonl(out / "metrics.jsonl") if line["kind"] == "evaluation"]
        summary: dict[str, Any] = {"seed": self.config.seed, "steps": self.lora.step}
        for side, line in (("before", evaluations[0]), ("after", evaluations[-1])):
            summary[side] = {name: value for name, value in numbers(line).items() if name not in ("epoch", "step")}
        best = checkpoints.best_checkpoint(out / "checkpoints")
        if best:
            best_step = step_of(Path(best["checkpoint"]))
            verdict = f"The held-out loss is lowest after step {best_step} of {self.lora.step}, at {-best['score']:.4f}"
            if best_step < self.lora.step:
                verdict += f"; later steps overfit. That LoRA is in {BEST}/."
            else:
                verdict += "; more steps may lower it."
            summary |= {"best_step": best_step, "verdict": [verdict]}
        write_json(out / SUMMARY, summary)
        write_page(self.config.out)
        adapter = out / BEST if best else out / "adapter"
        return TrainResult.of(out, adapter=adapter)

    # --- derived from the state --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Begun intervals of `evaluate_every` steps."""
        return math.ceil(self.lora.step / self.config.evaluate_every)
