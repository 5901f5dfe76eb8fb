"""A LoRA of one character, trained on a person's own images.

    pacorl train-character characters/hero --config character/flux_24gb

Supervised flow matching on the generator's own forward, as in diffusers' DreamBooth scripts: the target of the velocity
is noise − latents, at noise levels of the checkpoint's own training shift. LoRA, checkpoints and log have the
format of PaCo-GRPO, which can start from the LoRA (`adapter.start`). An epoch of the log is `evaluate_every` steps.
"""

import math
import random
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.pictures import gallery_prompts, read_pictures
from pacorl.core.batches import in_batches
from pacorl.core.devices import to_device
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo import checkpoint as checkpoints
from pacorl.grpo.builders import build_adapted_policy, place_transformer
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.evaluate import EvaluatedSample, keep_samples, noise_seed
from pacorl.grpo.lora_training import LoraTraining
from pacorl.grpo.rollout import sample_images
from pacorl.grpo.start import SUMMARY
from pacorl.io.documents import write_json
from pacorl.io.files import disk_errors, own_folder
from pacorl.models.adapters import AdapterCopy, adapter_off
from pacorl.models.lora import read_lora
from pacorl.report.page import write_page
from pacorl.runtime.logbook import Logbook, Progress, TrainResult, log_lines
from pacorl.runtime.processes import Runtime
from pacorl.runtime.stopping import Interrupted
from pacorl.types import Prompt, Size

LEVELS = 1000
"""Noise levels of the training schedule, as in diffusers' scripts."""
HELD_OUT_LEVELS = range(62, LEVELS, 125)
"""Eight of them, at which held-out images are measured, each with a noise of its own."""
HELD_OUT_LOSS = "held_out_loss"
PATIENCE = 3
"""Evaluations without a lower held-out loss after which training ends."""


Example = tuple[Prompt, Tensor]
"""One image: its caption, and (1, N, C) latents in fp32, on the CPU."""
NoisedExample = tuple[Example, int, int]
"""An example, the index of its noise level in the training schedule, from noise to image, and its noise's seed."""


class CharacterTrainer:
    """Training of a character's LoRA, from its images to the saved adapter.

    Example:
        from pacorl import CharacterConfig, CharacterTrainer

        config = CharacterConfig.from_yaml("character/tiny", "character=characters/hero", "steps=20")
        result = CharacterTrainer(config).train()
        print(result.adapter, result.metrics["held_out_loss"])
    """

    def __init__(self, config: CharacterConfig, *, resume: bool = False) -> None:
        """Check a run before its weights are loaded; same arguments as `PolicyTrainer`.

        Raises:
            ValueError: if the images, the model or the folder do not allow the run; one line with the fix.
        """
        self.config = config
        self.resume = resume
        self.size = Size(*config.size)
        self.pictures = read_pictures(config)
        config.generator.check_trainable(config.model.checkpoint)
        config.generator.check_source(config.model.checkpoint, adapters=[config.adapter.start], size=self.size)
        self.runtime = Runtime()
        if self.runtime.world > 1:
            raise ValueError(
                f"train-character runs in one process, and the launcher started {self.runtime.world}; start it alone"
            )

        # Progress, which a checkpoint and the log restore.
        self.evaluated = -1
        """Step of the newest evaluation; −1 before the first."""
        self.held_out_losses: dict[int, float] = {}
        """Step → loss, of the evaluations after the first step; empty without held-out images."""
        self.losses: list[float] = []
        """Losses since the last line of the log."""

    def train(self) -> TrainResult:
        """Train until the held-out loss falls no more, or to the last step.

        Returns:
            The run's folder, the best LoRA (without held-out images the last), and the evaluations.

        Raises:
            Interrupted: after a SIGTERM or SIGINT, when the state is saved.
            ValueError: if training cannot go on.
        """
        out = self.config.out
        with own_folder(out), disk_errors(out), self.runtime.signals:
            # The checkpoint is chosen under the folder's lock, or another process could add one.
            start = checkpoints.starting_point(self.config, resume=self.resume)
            # Changes are refused before weights are loaded. Images may be moved, but not exchanged.
            self.identities = {"images and captions": self.pictures.identity}
            if start:
                checkpoints.check_changes_since(start, self.config, identities=self.identities)
            self.build()
            if start:
                self.losses = checkpoints.restore(self.lora, start)["losses"]
            self.logbook = Logbook(self.config, step=self.lora.step if start else -1, epoch=self.epoch)
            for line in log_lines(out):
                if line["kind"] == "evaluation":
                    self._count_evaluation(line["step"], line.get(HELD_OUT_LOSS))
            self.progress = Progress(epochs=math.ceil(self.config.steps / self.config.evaluate_every), shown=True)
            self.checkpoints = checkpoints.CheckpointWriter(self.lora, self.config, progress=self.progress)
            try:
                self.progress.epoch(self.epoch)
                self._evaluate_if_due()  # before the first step, or cut short by a stop
                while not self.finished:
                    self.train_step()
                    # A step skipped for its gradients keeps its number, and is not evaluated twice.
                    self._evaluate_if_due()
                    self.runtime.check_stop()
                self._finish()
            except Interrupted:
                # The state of a whole step, so that the resumed run repeats none.
                self.save()
                raise Interrupted(f"stopped after step {self.lora.step}, and saved; go on with --resume auto") from None
            finally:
                self.checkpoints.close()
                self.logbook.close()
        return TrainResult.of(out)

    @property
    def epoch(self) -> int:
        """Begun intervals of `evaluate_every` steps."""
        return math.ceil(self.lora.step / self.config.evaluate_every)

    @property
    def best_step(self) -> int | None:
        """Step with the lowest held-out loss, the later of equals; None without held-out images."""
        return min(reversed(self.held_out_losses), key=self.held_out_losses.__getitem__, default=None)

    @property
    def finished(self) -> bool:
        """Whether the last step is taken, or the last evaluations have not lowered the held-out loss."""
        after_best = sum(step > (self.best_step or 0) for step in self.held_out_losses)
        return self.lora.step >= self.config.steps or after_best >= PATIENCE

    # --- building ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def build(self) -> None:
        """Load the models, and encode captions and images."""
        config = self.config
        # 1. Policy; captions and images are encoded once.
        self.policy = build_adapted_policy(config, sizes=[self.size], device=self.runtime.device)
        self.cache = ConditioningCache(self.policy)
        self.gallery = gallery_prompts(config, self.pictures.subject)
        examples = []
        for picture in (*self.pictures.train, *self.pictures.held_out):
            latents = self.policy.encode_image(picture.open(self.size), self.size).float()
            examples.append((picture.prompt, latents))
        self.cache.prepare([*(prompt for prompt, _ in examples), *self.gallery], self.size)
        self.train_examples = examples[: len(self.pictures.train)]
        self.held_out = examples[len(self.pictures.train) :]

        # 2. Transformer, after the text encoders are freed: both together may not fit on the device.
        self.policy.free_encoders()
        torch.cuda.empty_cache()
        place_transformer(config, self.policy, device=self.runtime.device)
        self.sigmas = self.policy.training_sigmas(LEVELS, self.size)
        # Captions differ, and some generators take one prompt per forward.
        self.micro_batch = 1 if self.policy.forward_per == "prompt" else config.optimizer.micro_batch

        # 3. Optimizer and average. Training is not guided.
        self.policy.options = config.model.unguided
        self.lora = LoraTraining(self.policy, config.optimizer, runtime=self.runtime)

    # --- training ----------------------------------------------------------------------------------------------

    def train_step(self) -> None:
        """Take one optimizer step."""
        size = self.config.optimizer.batch
        first = self.lora.step * size
        rows = [self._drawn(row) for row in range(first, first + size)]
        total = 0.0
        for batch in in_batches(rows, self.micro_batch):
            loss = self.losses_at(batch).sum() / size
            loss.backward()
            total += float(loss.detach())
        if math.isfinite(self.lora.take_step()):
            self.losses.append(total)

    def _drawn(self, row: int) -> NoisedExample:
        """Draw example, noise level and noise of a global row, which follow from the seed and the row."""
        seed = self.config.seed
        count = len(self.train_examples)
        # All images once per turn, in an order of its own.
        turn, position = divmod(row, count)
        order = random.Random(seed_of(seed, "image", "order", turn)).sample(range(count), count)
        level = int(LEVELS * random.Random(seed_of(seed, "image", "time", row)).random())
        return self.train_examples[order[position]], level, seed_of(seed, "image", "noise", row)

    def losses_at(self, rows: Sequence[NoisedExample]) -> Tensor:
        """Compute (B,) ‖v(x_σ) − (ε − x0)‖² at x_σ = (1−σ)·x0 + σ·ε, as a mean over dimensions."""
        device = self.runtime.device
        examples, levels, seeds = zip(*rows, strict=True)
        sigma_B = to_device(self.sigmas[list(levels)], device)
        clean_BNC = to_device(torch.cat([latents for _, latents in examples]), device)
        noise_BNC = self.policy.noise(seeds, self.size)
        sigma_B11 = sigma_B[:, None, None]
        noisy_BNC = (1 - sigma_B11) * clean_BNC + sigma_B11 * noise_BNC
        conditioning = self.cache.batch([prompt for prompt, _ in examples], self.size)
        velocity_BNC = self.policy.velocity(noisy_BNC, sigma_B, conditioning, self.size)
        return ((velocity_BNC - (noise_BNC - clean_BNC)) ** 2).mean((1, 2))

    # --- evaluation and files ----------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        """Log, evaluate and save at every interval's end, and once before the first step."""
        step, epoch = self.lora.step, self.epoch
        due = step % self.config.evaluate_every == 0 or step == self.config.steps
        if not due or self.evaluated == step:
            return
        if self.losses:
            mean = sum(self.losses) / len(self.losses)
            self.logbook.write("epoch", epoch=epoch, step=step, values={"loss": mean})
            self.losses = []
            self.progress.epoch(epoch, note=f"step {step}, loss {mean:.4f}")
        metrics = {}
        if self.held_out:
            metrics[HELD_OUT_LOSS] = self.measure_held_out()
        if not step or self.config.gallery.each:
            # The base model draws at step 0, for a comparison of the same noise.
            with self.lora.average.swapped_in() if step else adapter_off(self.lora.transformer):
                self._draw_gallery()
        self.logbook.write("evaluation", epoch=epoch, step=step, values=metrics)
        # Before the save, whose checkpoint stores the score.
        self._count_evaluation(step, metrics.get(HELD_OUT_LOSS))
        if step:
            self.save()
        write_page(self.config.out)

    def _count_evaluation(self, step: int, loss: float | None) -> None:
        """Note the evaluation of a step, of this process or in the log."""
        self.evaluated = step
        if step and loss is not None:
            self.held_out_losses[step] = loss

    @torch.no_grad()
    def measure_held_out(self) -> float:
        """Average the loss of the averaged adapter over the held-out images, at fixed noise levels and noises."""
        # Fixed levels and noises: the loss differs between steps by the weights alone.
        rows = []
        for number, example in enumerate(self.held_out):
            for draw, level in enumerate(HELD_OUT_LEVELS):
                rows.append((example, level, seed_of(self.config.seed, "held out", number, draw)))

        total = 0.0
        with self.lora.average.swapped_in():
            for batch in in_batches(rows, self.micro_batch):
                total += float(self.losses_at(batch).sum())
                self.runtime.check_stop()
        return total / len(rows)

    def _draw_gallery(self) -> None:
        """Generate the page's images with the weights of now, under the guidance of the config."""
        config = self.config
        jobs = list(product(self.gallery, range(config.gallery.seeds)))
        self.policy.options = config.model
        self.progress.say(f"gallery: {len(jobs)}")
        images = sample_images(
            self.policy,
            [prompt for prompt, _ in jobs],
            sampler=Sampler(size=self.size, steps=config.gallery.steps),
            cache=self.cache,
            # The same prompts and seeds before and after, so that the page compares pairs.
            seeds=[noise_seed(config.seed, job) for job in jobs],
            batch=config.optimizer.micro_batch,
            progress=lambda size: self.runtime.check_stop(),
        )
        self.policy.options = config.model.unguided
        samples = [EvaluatedSample(*job, image) for job, image in zip(jobs, images, strict=True)]
        keep_samples(self.logbook, samples, epoch=self.epoch)

    def save(self) -> None:
        """Write a checkpoint, and the best of the checkpoints as `adapter`."""
        loss = self.held_out_losses.get(self.lora.step)
        state = {
            "epoch": self.epoch,
            # A checkpoint without an evaluation of its own cannot be the best.
            "score": None if loss is None else -loss,
            "losses": self.losses,
            "identities": self.identities,
        }
        self.checkpoints.save(state)
        self.checkpoints.finish()

    def _finish(self) -> None:
        """Draw the gallery with the LoRA in `adapter`, and write summary.json and the page."""
        out = self.config.out
        # Not by the average, which a stop during the gallery saves.
        best = AdapterCopy(self.lora.transformer)
        best.load(read_lora(out / "adapter").state)
        with best.swapped_in():
            self._draw_gallery()

        # From the log: a resumed run has not seen the first evaluation.
        result = TrainResult.of(out)
        summary = {"steps": self.lora.step, "before": result.before, "after": result.metrics}
        if self.best_step is not None:
            verdict = f"The held-out loss is lowest after step {self.best_step}, whose LoRA is kept."
            summary |= {"best_step": self.best_step, "verdict": [verdict]}
        write_json(out / SUMMARY, summary)
        write_page(out)
