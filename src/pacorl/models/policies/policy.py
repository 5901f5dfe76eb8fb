"""The seam of a generator: what a loop may ask of one (`Policy`), and what every other room may (`PolicySpec`).

Guidance, packing, reference latents and norm rules stay inside `velocity`; loops see tokens and sigmas. A config
names one size; `size_of` says at which size each prompt's image is generated then, and that is the `size` of every
other method. A batch has one.

To add a generator, write one file with its options, its policy and its spec, and one line of `policies.POLICIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, model_validator

from pacorl.config.base import Section, validated
from pacorl.core.devices import check_dtype
from pacorl.io.documents import read_object
from pacorl.io.quiet import quiet
from pacorl.models.quantize import NONE, Quantization
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from pacorl.models.policies.pipeline import PipelinePolicy
    from pacorl.types import Conditioning

Parts = Mapping[str, Mapping[str, Any]]
"""Component of a checkpoint → its config.json."""
WITHOUT_WEIGHTS = frozenset({"scheduler", "processor"})
"""Components of a pipeline that have a config and no weights."""
CLASS_KEYS = ("_class_name", "architectures", "model_type")
"""What says in a config.json of which class the component is."""


class Policy(Protocol):
    """A flow-matching generator with one trainable transformer.

    Example:
        policy = FLUX.from_pretrained("tiny", max_sequence_length=48)
        conditioning = policy.collate(policy.encode(prompts, size))
        x_BNC = policy.noise(seeds, size)
        velocity_BNC = policy.velocity(x_BNC, sigma_B, conditioning, size)
        images = policy.decode(x_BNC, size)
    """

    transformer: nn.Module
    """What is trained, by an adapter, and asked for velocities."""
    lora_targets: tuple[str, ...]
    """Suffixes of the modules that an adapter is added to by default."""

    @property
    def idle_layers(self) -> frozenset[str]:
        """Names of the transformer's linear layers that no image depends on, whatever their weights."""

    def check_size(self, size: Size) -> None:
        """Check that the config's `size` can be generated.

        Raises:
            ValueError: If it cannot; the message names the nearest size.
        """

    def size_of(self, prompt: Prompt, size: Size) -> Size:
        """The size of a prompt's image if the config says `size`.

        Returns:
            For sets `size` itself, for edits the area of `size` in the shape of the source.

        Raises:
            ValueError: A source is missing, is one too many or has no such shape; the message names the prompt.
        """

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """One conditioning per prompt, on the CPU; edits encode their sources here, and they alone look at `size`."""

    def free_encoders(self) -> None:
        """Drop the text encoders, after which nothing can be encoded."""

    def place_transformer(self, device: str | torch.device) -> None:
        """Move the transformer to a device, its frozen weights packed as `model.quantize` says."""

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """One batch, on the device."""

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32, from 1 down to 0, shifted as the pipeline shifts them."""

    def training_sigmas(self, num_steps: int, size: Size) -> Tensor:
        """(T+1,) fp32, as `sigmas`, but shifted as in the checkpoint's own training, where objectives noise endpoints.

        The same sigmas if a kind's training shift is that of inference, or is not published.
        """

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """(B, N, C) fp32, one seed per row, drawn on the CPU so that every machine starts alike."""

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """The model's velocity in fp32, or fp64 of an fp64 model: (B, N, C) at one sigma per row."""

    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Endpoints → RGB images."""


class PolicyOptions(Section):
    """The generator: what every kind takes. Each kind adds what it alone reads."""

    kind: str
    """Its name in `POLICIES`."""
    checkpoint: str
    """A diffusers folder, a hub name, or `tiny` for a committed checkpoint; else the published one of `kind`."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Of the frozen weights; latents, log-probabilities and adapters are fp32 (fp64 with float64, which is for
    comparing machines to the last digits)."""
    quantize: Quantization = NONE
    """Whether the frozen weights of the transformer's blocks are kept in 8 or 4 bits, in sampling and in training
    alike: `int8`, `fp8`, or `nf4`, which needs `pip install 'pacorl[nf4]'`."""
    stream: bool = False
    """Whether the weights of the blocks of transformer and text encoders stay in main memory: each is sent to the
    device when its layer computes. Two layers' are there at a time, and a forward sends all of them once."""
    gradient_checkpointing: bool | Literal["auto"] = True
    """Whether activations are computed again in the backward: less memory for a third more work in training. `auto` is
    off if the plan of `--dry-run` fits this machine's card without, and on in runs that no command plans."""

    compile: Literal["none", "blocks"] = "none"
    """Whether the transformer's repeated blocks are compiled by torch, for sampling and training alike; the first epoch
    takes minutes more. In bf16 compiled graphs round otherwise with gradients than without, so the SDE steps are
    sampled with gradients too, and the ratio before the first update stays exactly 1."""

    @property
    def negative_text(self) -> str | None:
        """The prompt that a second forward reads for classifier-free guidance; None without it."""
        return None

    @property
    def warning(self) -> str:
        """Advice about these options before anything is sampled; empty for most."""
        return ""

    @model_validator(mode="after")
    def _eager_stream(self) -> PolicyOptions:
        if self.stream and self.compile != "none":
            raise ValueError(
                f"stream and compile {self.compile}: compiled code cannot decide what is sent next; leave one out"
            )
        return self


class TrueGuidance(PolicyOptions):
    """Options of kinds that diffusers guides by `true_cfg_scale`."""

    true_cfg_scale: float = Field(1.0, ge=1)
    """Scale of classifier-free guidance against `negative_prompt`, at twice the forwards; 1 is without."""
    negative_prompt: str = " "
    """What guidance leads away from."""

    @property
    def negative_text(self) -> str | None:
        """`negative_prompt` if the scale is above 1."""
        return self.negative_prompt if self.true_cfg_scale > 1 else None


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """A committed checkpoint that `tiny` names: it knows one world of drawn characters (docs/tiny.md)."""

    folder: Path
    """In the layout of a diffusers checkpoint."""
    size: Size
    """What it was trained at, and what it generates unless another size is asked for."""
    check: Callable[[Prompt], None]
    """Raises ValueError if a prompt asks for what its world does not have."""
    compose: Callable[[str, Sequence[str], Grid, int], Prompt] | None = None
    """(theme, panels, grid, id) → the prompt in the one form that it reads; None for edits."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it was trained with, if that is not its kind's default."""
    steps: int = 10
    """Denoising steps unless another number is asked for."""
    batch: int = 4
    """Most images of one forward."""
    note: str = (
        "Generated by the embedded tiny model, which knows the tiny world of drawn characters only. Name a real one "
        "with --model, e.g. black-forest-labs/FLUX.1-dev."
    )
    """What a reader of its images has to know."""


@dataclass(frozen=True, kw_only=True)
class TrainingShift:
    """The shift of the noise levels in a published checkpoint's own training."""

    rule: Literal["inference", "linear"]
    """inference: that of sampling. linear: mu grows with the number of tokens between the scheduler's bounds, as
    FLUX.1's does, whatever mu sampling takes."""
    source: str
    """Where it is published, or that it is not, so that inference's is taken."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """All that other rooms may ask about a kind of generator, without its weights."""

    options: type[PolicyOptions]
    """The section `model:` of this kind. The default of `checkpoint` is the published one."""
    policy: type[PipelinePolicy]
    """The class behind the seam."""
    pipeline: str
    """The diffusers class, as a checkpoint's model_index.json names it."""
    hub_name: str
    """Pattern in the lower-case name of its checkpoints; of several kinds the longest match decides."""
    architecture: str
    """JSON file in `policies/architectures`: the config of each component as published, by the pipeline's names."""
    twin: Callable[[Sequence[str]], Any]
    """Texts → its pipeline in small with random weights, whose tokenizers know the words of the texts."""
    steps: int
    """Denoising steps if nobody says how many: those of the published checkpoint's own example."""
    parameters: int
    """Of the published transformer, as counted in its checkpoint: what the architecture is held to."""
    training_shift: TrainingShift
    """Of objectives that noise endpoints to levels of their own."""
    steps_source: str = ""
    """Where `steps` are from, if they are not the pipeline's default."""
    licence: tuple[str, str] = ("", "")
    """The published checkpoint's: the hub's identifier and, if that is "other", its name."""
    gated: bool = False
    """Whether the published checkpoint is fetched only after its licence was accepted."""
    tiny: TinyCheckpoint | None = None
    """Its committed checkpoint, if it has one."""
    distilled: Mapping[str, str] = field(default_factory=dict)
    """Published checkpoints that are distilled to few steps, by their last name, and the base to train instead."""
    edit_data: str = "GEdit-Bench/data"
    """For edits: the records that its recipe is trained on."""
    vae_levels: str = "block_out_channels"
    """The list in the VAE's config.json with an entry for each of its levels."""

    def token_pixels(self, vae: Mapping[str, Any]) -> int:
        """Side of a token in pixels, from the VAE's config.json."""
        # Each level of the VAE but the first halves the sides, and so does a token.
        return int(2 ** len(vae[self.vae_levels]))

    @property
    def kind(self) -> str:
        """Its name in `POLICIES` and in configs."""
        return str(self.options.model_fields["kind"].default)

    @property
    def pipeline_type(self) -> Any:
        """The diffusers class, whose first mention imports thousands of modules."""
        import diffusers

        with quiet("transformers.utils.import_utils"):  # torchvision is not missed
            return getattr(diffusers, self.pipeline)

    @property
    def published(self) -> str:
        """Hub name of the released checkpoint."""
        return str(self.options.model_fields["checkpoint"].default)

    @property
    def edits(self) -> bool:
        """Whether it edits sources."""
        return self.policy.references > 0

    @property
    def sets(self) -> bool:
        """Whether it makes sets from words alone."""
        return not self.edits or self.policy.source_optional

    @cached_property
    def parts(self) -> Parts:
        """The published architecture."""
        return read_object(Path(__file__).parent / "architectures" / self.architecture)

    def options_for(
        self, checkpoint: str, *, dtype: str, quantize: str = NONE, stream: bool = False, **options: Any
    ) -> PolicyOptions:
        """Options from values of which None means the default: the tiny checkpoint's, or the kind's.

        Raises:
            ValueError: This kind has no such option, no tiny checkpoint, or a value is out of range.
        """
        settings = {name: value for name, value in options.items() if value is not None}
        if checkpoint == TINY:
            settings = {**self.committed.options, **settings}
        accepted = [name for name in self.options.model_fields if name not in PolicyOptions.model_fields]
        # Checked before pydantic does: its message would list `dtype` and others that no caller of this can name.
        if unknown := [name for name in settings if name not in accepted]:
            raise ValueError(
                f"a generator of kind {self.kind} takes no {' and no '.join(unknown)}; leave it out "
                f"(it takes {', '.join(accepted) or 'none of its own'})"
            )
        common = {"checkpoint": checkpoint, "dtype": dtype, "quantize": quantize, "stream": stream}
        return validated(self.options, {**common, **settings})

    @property
    def committed(self) -> TinyCheckpoint:
        """The tiny checkpoint, or a ValueError if there is none of this kind."""
        if self.tiny is None:
            raise ValueError(f"checkpoint tiny: there is none of kind {self.kind}; name a folder or a hub name")
        return self.tiny

    def load(
        self,
        options: PolicyOptions,
        *,
        device: str | torch.device = "cpu",
        record_sizes: bool = False,
        staged: bool = False,
    ) -> PipelinePolicy:
        """Load the weights that `options` name.

        Args:
            options: Of this kind.
            device: Where the weights are put.
            record_sizes: Whether sets are generated at their records' own sizes; edits take the shape of their source.
            staged: Whether the transformer waits for `place_transformer`, so that it and the text encoders never lie on
                the device together. Until then its weights are pages of the checkpoint's files, which the processes of
                a machine share.

        Raises:
            ValueError: The checkpoint is another pipeline, or what `quantize` needs is not installed.
            OSError: There is no checkpoint.
        """
        import torch

        from pacorl.io.pretrained import pretrained
        from pacorl.models.quantize.linear import check_quantization

        check_quantization(options.quantize)
        for key in ("dtype", "quantize"):
            check_dtype(getattr(options, key), device, key=f"model.{key}")
        source = self.check_source(options.checkpoint)
        components = self.policy.components_from(source)
        # diffusers would note that a component of ours is of another class than its index says.
        with quiet(*(["diffusers.pipelines.pipeline_utils"] if components else [])):
            pipeline = pretrained(self.pipeline_type, source, dtype=getattr(torch, options.dtype), **components)
        policy = self.policy(pipeline, options, record_sizes=record_sizes)
        policy.place_encoders(device)
        if not staged:
            policy.place_transformer(device)
        return policy

    def check_source(self, checkpoint: str, *, adapter: str = "", size: Size | None = None) -> str:
        """Check what can be known of a checkpoint before diffusers is imported, which takes seconds.

        Args:
            checkpoint: A folder, a hub name or `tiny`.
            adapter: A LoRA that is to be put on it; empty for none.
            size: Of the images that are to be generated; None for one that surely fits.

        Returns:
            The folder or hub name.

        Raises:
            ValueError: There is none, it is another pipeline, the adapter does not fit it, or the size does not.
        """
        from pacorl.io.hub import check_checkpoint, local_file

        source = str(self.committed.folder) if checkpoint == TINY else checkpoint
        check_checkpoint(source, "model_index.json")
        if index := local_file(source, "model_index.json"):
            pipeline_class = read_object(index).get("_class_name")
        else:
            import diffusers

            pipeline_class = diffusers.DiffusionPipeline.load_config(source).get("_class_name")
        # FLUX.1-Kontext and FLUX.1-dev have one architecture, so the wrong weights would load without a word.
        if pipeline_class != self.pipeline:
            raise ValueError(
                f"model.checkpoint {source} is a {pipeline_class}, and this model.kind needs a {self.pipeline} such as "
                f"{self.published}"
            )
        if adapter:
            from pacorl.models.lora.formats import check_layers

            check_layers(adapter, source, component="transformer")
        if size:
            config = local_file(source, "vae/config.json")
            vae = {**self.parts["vae"], **(read_object(config) if config else {})}
            self.policy.check_sides(size, step=self.token_pixels(vae))
        return source

    def check_trainable(self, checkpoint: str) -> None:
        """Raise ValueError if a checkpoint is distilled to few steps; the message names the base to train instead.

        Such a checkpoint is no flow-matching model any more: trained on, it blurs.
        """
        from pacorl.io.hub import local_file

        base = self.distilled.get(Path(checkpoint).name)
        index = None if checkpoint == TINY else local_file(checkpoint, "model_index.json")
        if base or (index and read_object(index).get("is_distilled")):
            raise ValueError(
                f"model.checkpoint {checkpoint} is distilled to few steps and would blur if it were trained; train "
                f"{base or self.published}, whose adapter then fits it"
            )

    def from_pretrained(
        self,
        checkpoint: str | Path = TINY,
        *,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> PipelinePolicy:
        """Load a diffusers folder, a hub name or "tiny" with this kind's options by name; see `load`."""
        return self.load(
            self.options.model_validate({"checkpoint": str(checkpoint), "dtype": dtype, **options}), device=device
        )

    def over(self, pipeline: Any, *, record_sizes: bool = False, **options: Any) -> PipelinePolicy:
        """The policy over a pipeline that is in memory already."""
        return self.policy(pipeline, self.options.model_validate(options), record_sizes=record_sizes)

    def on_meta(
        self, options: PolicyOptions, configs: Parts | None = None, *, record_sizes: bool = False
    ) -> PipelinePolicy:
        """The policy without weights or tokenizers, on the meta device; `configs` are the published ones by default."""
        import torch

        from pacorl.models.twins import META, model_of, model_on_meta

        configs = configs or self.parts
        components: dict[str, Any] = {"scheduler": model_of(self.parts["scheduler"])}
        for name in configs.keys() - WITHOUT_WEIGHTS:
            # The published class: a checkpoint's config.json may leave its own out.
            classes = {key: self.parts[name][key] for key in CLASS_KEYS if key in self.parts[name]}
            components[name] = model_on_meta({**configs[name], **classes}, dtype=getattr(torch, options.dtype))
        components |= self.policy.components_on_meta(configs)
        pipeline = self.pipeline_type
        absent = [name for name in inspect.signature(pipeline).parameters if name not in components]
        policy = self.policy(pipeline(**components, **dict.fromkeys(absent)), options, record_sizes=record_sizes)
        policy.place_encoders(META)
        policy.place_transformer(META)
        return policy
