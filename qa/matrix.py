"""Every generator in small, as set, as edit and with references: `make matrix` writes the table of docs/policies.md.

Each cell has four measurements on a twin with random weights. Its latents are compared with those of its diffusers
pipeline. Two images with one prefix, of kinds that compute text and images once per prompt, are compared with the same
images alone. An adapter that PEFT made is written in every form of the zoo and read again. One epoch is trained, whose
importance ratio must be exactly 1 before the update.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from edit_twins import drawn, edit, settings_of, source_image
from forms import FORMS, Adapter
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import nn
from toy_world import toy_config

from pacorl.core.objectives import RATIO_DEVIATION
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_jsonl
from pacorl.io.files import write_atomic
from pacorl.models.lora.adapters import load_lora
from pacorl.models.lora.formats import read_lora
from pacorl.models.policies import POLICIES
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.testing.policies import endpoints, run_pipeline
from pacorl.tiny.characters import character_prompts, vocabulary
from pacorl.types import Prompt, Size

PAGE = Path("docs/policies.md")
BEGIN, END = "<!-- matrix: `make matrix` writes this table -->\n\n", "\n<!-- end of the matrix -->\n"
HEAD = """| Generator | Of | Latents, from the pipeline's | Prefix shared | Adapters, 8 forms | Ratio − 1 | Trained |
|---|---|---|---|---|---|---|
"""
SIZE = Size(96, 96)
RANK, ALPHA = 4, 8
SCALED = {"scaling_factor": 0.36, "shift_factor": 0.12}
"""Of a VAE, as published ones have them."""


@dataclass(frozen=True)
class Cell:
    """A generator and what it generates from."""

    kind: str
    form: str
    """`set`, `edit` or `references`."""

    def record(self, folder: Path) -> dict[str, Any]:
        """Write the images of a prompt, and return its record."""
        if self.form == "edit":
            source = source_image(folder / "source.png", height=96, width=96)
            return {"image": str(source), "instruction": edit(source).text}
        (prompt,) = character_prompts("dev", 1)
        if self.form == "set":
            return {"prompt": prompt.text}
        references = [source_image(folder / f"{n}.png", height=96, width=96, seed=n) for n in range(2)]
        return {"prompt": prompt.text, "references": [path.name for path in references]}

    def prompt(self, folder: Path) -> Prompt:
        """Return the prompt of the record."""
        record = self.record(folder)
        if self.form == "edit":
            return edit(Path(record["image"]))
        return Prompt(0, record["prompt"], references=tuple(folder / name for name in record.get("references", ())))


@dataclass(frozen=True)
class Row:
    """Measurements of a cell."""

    cell: Cell
    latents: float
    """Largest difference from the pipeline's latents."""
    prefix: float | None
    """Largest difference of a velocity with a shared prefix; None for kinds without one."""
    adapters: float
    """Largest difference of a velocity, over the forms of an adapter."""
    ratio: float
    """Largest deviation of the importance ratio from 1 before an update."""
    trained: bool
    """Whether the epoch changed the adapter."""
    seconds: float

    @property
    def fine(self) -> bool:
        """Whether all measurements are as they should be."""
        if max(self.latents, self.prefix or 0.0) > 1e-5:
            return False
        return self.adapters == 0.0 and self.ratio == 0.0 and self.trained

    def line(self) -> str:
        """Return the row of the table."""
        trained = "yes" if self.trained else "no"
        prefix = "none" if self.prefix is None else f"{self.prefix:.0e}"
        figures = f"{self.latents:.0e} | {prefix} | {self.adapters:.0e} | {self.ratio:.0e}".replace("0e+00", "0")
        return f"| `{self.cell.kind}` | {self.cell.form} | {figures} | {trained} |\n"


def cells(only: str = "") -> Iterator[Cell]:
    """List the cells of all generators, or of one kind."""
    for kind, spec in POLICIES.items():
        forms = {"set": spec.sets, "edit": spec.edits, "references": spec.policy.max_references > 0}
        for form, exists in forms.items():
            if exists and only in ("", kind):
                yield Cell(kind, form)


def measure(cell: Cell) -> Row:
    """Measure a cell."""
    since = time.monotonic()
    with TemporaryDirectory() as folder:
        prompt = cell.prompt(Path(folder))
        latents = pipeline_difference(twin(cell.kind), prompt)
        prefix = prefix_difference(twin(cell.kind), prompt)
        adapters = adapter_difference(twin(cell.kind), prompt, Path(folder))
        ratio, trained = one_epoch(cell, Path(folder))
    return Row(cell, latents, prefix, adapters, ratio, trained, time.monotonic() - since)


@cache
def twin(kind: str) -> PipelinePolicy:
    """Build a generator in small, with drawn weights."""
    torch.manual_seed(0)
    pipeline = drawn(POLICIES[kind].twin(vocabulary()))
    if "scaling_factor" in pipeline.vae.config:
        pipeline.vae.register_to_config(**SCALED)
    return POLICIES[kind].over(pipeline, dtype="float32", **settings_of(POLICIES[kind]))


def pipeline_difference(policy: PipelinePolicy, prompt: Prompt) -> float:
    """Return the largest difference between the latents of a generator and of its pipeline."""
    expected, _ = run_pipeline(policy, prompt, SIZE, output_type="latent")
    return float((endpoints(policy, [prompt], SIZE) - expected).abs().max())


@torch.no_grad()
def prefix_difference(policy: PipelinePolicy, prompt: Prompt) -> float | None:
    """Return the largest difference between velocities of two images with one prefix, and of each image alone."""
    size = policy.size_of(prompt, SIZE)
    noise = policy.noise([0, 1], size)
    both = policy.collate_alike(policy.encode([prompt, prompt], size))
    shared = policy.with_prefix(both, size)
    if shared is both:
        return None

    together = policy.velocity(noise, torch.tensor([0.6, 0.6]), shared, size)
    alone = policy.collate(policy.encode([prompt], size))
    differences = []
    for row in range(2):
        velocity = policy.velocity(noise[row : row + 1], torch.tensor([0.6]), alone, size)
        differences.append(float((together[row] - velocity[0]).abs().max()))
    return max(differences)


@torch.no_grad()
def adapter_difference(policy: PipelinePolicy, prompt: Prompt, folder: Path) -> float:
    """Return the largest difference of a velocity between PEFT's own adapter and what each form of it is read as."""
    policy = copy.copy(policy)
    base = policy.transformer
    size = policy.size_of(prompt, SIZE)
    conditioning = policy.collate(policy.encode([prompt], size))

    def velocity(transformer: Any) -> torch.Tensor:
        policy.transformer = transformer
        return policy.velocity(policy.noise([0], size), torch.tensor([0.6]), conditioning, size)

    # diffusers cuts the single blocks of these forms at FLUX.1's published width alone.
    whole = drawn_adapter(policy)
    double = drawn_adapter(policy, blocks="transformer_blocks") if whole.is_flux else whole
    differences = []
    for form, write in FORMS.items():
        adapter = double if form in ("kohya", "diffusion_model") else whole
        truth = velocity(adapter.model.base_model.model)
        assert (velocity(base) - truth).abs().max() > 1e-3, "the adapter changes nothing, so nothing is compared"

        fresh = copy.deepcopy(base)
        load_lora(fresh, write(adapter, folder / form))
        differences.append(float((velocity(fresh) - truth).abs().max()))
    return max(differences)


def drawn_adapter(policy: PipelinePolicy, *, blocks: str = "") -> Adapter:
    """Make an adapter by PEFT, of which all weights are drawn, on the layers whose names begin with `blocks`."""
    names = []
    for name, module in policy.transformer.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(blocks) and name.endswith(policy.lora_targets):
            names.append(name)

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names)
    torch.manual_seed(1)
    model = get_peft_model(copy.deepcopy(policy.transformer), config)
    model.add_adapter("old", copy.deepcopy(config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return Adapter(model, policy.pipeline, RANK, ALPHA, policy.lora_targets)


def one_epoch(cell: Cell, folder: Path) -> tuple[float, bool]:
    """Train an epoch. Returns the ratio's deviation from 1 before the update, and whether the adapter changed."""

    def redness(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        return [np.asarray(image)[..., 0].mean() / 255 for image in images]

    # The twin and its prompts, on disk as a user has them.
    twin(cell.kind).pipeline.save_pretrained(folder / "checkpoint")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps(cell.record(folder)) + "\n")
    model = {"kind": cell.kind, "checkpoint": str(folder / "checkpoint"), **settings_of(POLICIES[cell.kind])}
    settings = [f"model.{name}={value}" for name, value in model.items()]
    settings += [f"prompts.train={prompts}", f"prompts.evaluation={prompts}", "prompts.leaks=off"]
    settings += ["sampling.size=[96, 96]", "evaluation.size=[96, 96]", "evaluation.steps=2", "evaluation.every=0"]
    settings += ["epochs=1", "prompts_per_epoch=1", "judge=none", "rewards=[{name: redness}]"]

    run = PolicyTrainer(toy_config(folder / "run", *settings), rewards={"redness": redness}).train().folder
    (epoch,) = (record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "epoch")
    deviations = [value for name, value in epoch.items() if name.startswith(RATIO_DEVIATION)]
    # PEFT starts B at zero.
    state = read_lora(run / "adapter").state
    trained = any(bool(value.any()) for name, value in state.items() if ".lora_B." in name)
    return max(deviations), trained


def main(
    only: Annotated[str, typer.Option(help="One kind of generator.")] = "",
    write: Annotated[bool, typer.Option(help="Write the table into docs/policies.md.")] = False,
) -> None:
    """Measure all cells."""
    torch.set_num_threads(1)
    rows = []
    for cell in cells(only):
        rows.append(measure(cell))
        print(rows[-1].line().rstrip(), f"{rows[-1].seconds:.0f} s", flush=True)

    if write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        table = HEAD + "".join(row.line() for row in rows)
        write_atomic(PAGE, f"{before}{BEGIN}{table}{END}{after}".encode())
    raise typer.Exit(0 if all(row.fine for row in rows) else 1)


if __name__ == "__main__":
    typer.run(main)
