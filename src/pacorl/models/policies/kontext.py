"""FLUX.1-Kontext-dev as a policy: one image edited by an instruction, or references stitched into that image.

The source follows the generated image in the sequence, at the same size, marked by its position ids. A config's
size is an area: the image takes the Kontext training shape nearest to the source's, scaled to that area. The source is
resized to the same shape, as in the pipeline; a source that no shape fits is refused. References, behind the source of
an edit if there is one, are stitched into one image of the generated size.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from pacorl.io.images import open_image, upright_size
from pacorl.models.policies.flux import DEV_LICENCE, DistilledOptions, FluxPolicy
from pacorl.models.policies.pipeline import stitch
from pacorl.models.policies.spec import PolicySpec
from pacorl.types import Prompt, Size

MAX_STRETCH = 1.1
"""Largest change of a source's aspect on its way to a training shape. Between two neighbouring shapes it changes by
at most 1.085; more means that the source is longer than any of them."""


class KontextOptions(DistilledOptions):
    """The generator FLUX.1-Kontext-dev, which edits one image."""

    kind: Literal["kontext"] = "kontext"
    checkpoint: str = "black-forest-labs/FLUX.1-Kontext-dev"
    """A diffusers folder, or a name on the hub."""


class KontextPolicy(FluxPolicy):
    """A `FluxKontextPipeline` behind the policy seam."""

    max_sources = 1
    max_references = 4  # in a 2×2 grid; smaller cells of 1024² show no face
    stitched = True

    def edit_size(self, sources: Sequence[Path], area: int) -> Size:
        """Return an area in the training shape that is nearest to the source's."""
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        (path,) = sources
        source, step = upright_size(path), self.token_pixels
        # The pipeline first cuts the source to whole tokens, and so may choose another shape than the exact aspect's.
        rows, cols = (max(1, side // step) for side in (source.height, source.width))
        _, width, height = min((abs(cols / rows - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        stretch = source.width / source.height * height / width
        if max(stretch, 1 / stretch) > MAX_STRETCH:
            raise ValueError(
                f"source {path} is {source}, and the nearest shape that FLUX.1-Kontext knows is {Size(height, width)}: "
                "it would be distorted; crop or pad it"
            )
        scale = math.sqrt(area / 1024**2)  # for which the pipeline's shapes are written
        return Size(*(max(1, round(side * scale / step)) * step for side in (height, width)))

    def encode_sources(self, prompt: Prompt, size: Size) -> dict[str, Tensor]:
        """Encode the source, or one stitched image of it and the references, as tokens (1, N, C)."""
        images = [open_image(path) for path in self.image_paths(prompt)]
        image = stitch(images, size) if prompt.references else images[0]
        return {"source": self.encode_image(image, size)}


KONTEXT = PolicySpec(
    options=KontextOptions,
    policy=KontextPolicy,
    pipeline="FluxKontextPipeline",
    hub_name="(flux.*)?kontext",
    architecture="flux.json",  # the same components as FLUX.1-dev's
    steps=28,
    parameters=11_901_408_320,
    licence=DEV_LICENCE,
    gated=True,
    tiny="pacorl.tiny.generators:KONTEXT",
)
