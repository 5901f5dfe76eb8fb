"""Sets whose panels are images of their own: their prompts and seeds, and a policy that samples and trains them.

The tokens of a set lie as those of its grid image would. So loops, panel credit, rewards and files see one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from einops import rearrange

from pacorl.core.grid import join
from pacorl.records.characters import characters_of, in_turn
from pacorl.tiny.words import tiny_scene
from pacorl.types import TINY, Conditioning, Grid, Prompt, SetSize, Size

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from pacorl.models.policies.pipeline import PipelinePolicy

OWN = ("of_panels", "panels", "grid")
"""Attributes of `SeparatePanels` itself; all others are its generator's."""
SEEDS = 2**63
"""Seeds of a set's panels are below it, as torch needs them."""


class SeparatePanels:
    """A generator of single images as a `Policy` of sets, each panel with its own text, references and noise.

    Its sizes are `SetSize`, derived from a panel's. Everything else is the generator's.
    """

    def __init__(self, policy: PipelinePolicy, panels: Callable[[Prompt], list[Prompt]]) -> None:
        """
        Args:
            policy: The generator of panels.
            panels: Prompt of a set → the prompts of its panels.
        """
        self.of_panels = policy
        self.panels = panels
        self.grid = Grid(1, 1)
        """Layout of the sets in the memory plan."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_panels, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.of_panels, name, value)

    # --- prompts -------------------------------------------------------------------------------------------------

    def size_of(self, prompt: Prompt, size: Size) -> SetSize:
        """Return the size of a set, whose panels have `size`."""
        panels = {self.of_panels.size_of(panel, size) for panel in self.panels(prompt)}
        assert len(panels) == 1, "the panels of a set have no sources"
        return SetSize.of(panels.pop(), prompt.grid)

    def nearest_size(self, size: Size) -> SetSize:
        return SetSize.of(self.of_panels.nearest_size(size), self.grid)

    def encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """Encode sets, with the tensors of panel p as `p.NAME`."""
        panels = [self.panels(prompt) for prompt in prompts]
        encoded = iter(self.of_panels.encode(list(chain(*panels)), size.panel))
        conditionings = []
        for of_set in panels:
            tensors: dict[str, Tensor] = {}
            for number in range(len(of_set)):
                # Copies: all texts share one negative prompt, and files of tensors must not.
                tensors |= {f"{number}.{name}": tensor.clone() for name, tensor in next(encoded).tensors.items()}
            conditionings.append(Conditioning(tensors))
        return conditionings

    def collate(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Collate sets to one batch of their panels, set by set."""
        # The rows of a prompt are one object, and so are those of its panels.
        panels = {id(conditioning): _panels_of(conditioning) for conditioning in conditionings}
        return self.of_panels.collate([*chain(*(panels[id(conditioning)] for conditioning in conditionings))])

    def with_prefix(self, conditioning: Conditioning, size: Size) -> Conditioning:
        return self.of_panels.with_prefix(conditioning, size.panel)

    def conditioning_on_meta(self, size: Size, *, batch: int) -> Conditioning:
        return self.of_panels.conditioning_on_meta(size.panel, batch=batch * _grid(size).count)

    # --- images --------------------------------------------------------------------------------------------------

    def sigmas(self, num_steps: int, size: Size) -> Tensor:
        return self.of_panels.sigmas(num_steps, size.panel)

    def training_sigmas(self, num_steps: int, size: Size) -> Tensor:
        return self.of_panels.training_sigmas(num_steps, size.panel)

    def token_grid(self, size: Size) -> tuple[int, int]:
        rows, cols = self.of_panels.token_grid(size.panel)
        return rows * _grid(size).rows, cols * _grid(size).cols

    def noise(self, seeds: Sequence[int], size: Size) -> Tensor:
        """Draw the noise of sets: of each panel that of the image which its prompt makes alone."""
        of_panels = [panel_seeds(seed, _grid(size).count) for seed in seeds]
        return self._joined(self.of_panels.noise(list(chain(*of_panels)), size.panel), size)

    def velocity(self, x_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        sigma_of_panels = sigma_B.repeat_interleave(_grid(size).count)
        velocity = self.of_panels.velocity(self._apart(x_BNC, size), sigma_of_panels, conditioning, size.panel)
        return self._joined(velocity, size)

    def decode(self, x_BNC: Tensor, size: Size) -> list[Image]:
        """Decode each panel alone, and join them to grid images."""
        grid = _grid(size)
        panels = self.of_panels.decode(self._apart(x_BNC, size), size.panel)
        return [join(panels[first : first + grid.count], grid) for first in range(0, len(panels), grid.count)]

    def _joined(self, x_PNC: Tensor, size: Size) -> Tensor:
        """Arrange the tokens of panels, set by set, as those of their grid images."""
        grid = _grid(size)
        rows, _ = self.of_panels.token_grid(size.panel)
        return rearrange(x_PNC, "(b r k) (h w) c -> b (r h k w) c", r=grid.rows, k=grid.cols, h=rows)

    def _apart(self, x_BNC: Tensor, size: Size) -> Tensor:
        """Invert `_joined`."""
        grid = _grid(size)
        rows, _ = self.of_panels.token_grid(size.panel)
        return rearrange(x_BNC, "b (r h k w) c -> (b r k) (h w) c", r=grid.rows, k=grid.cols, h=rows)


def _grid(size: Size) -> Grid:
    assert isinstance(size, SetSize), "from `size_of`"
    return size.grid


def _panels_of(conditioning: Conditioning) -> list[Conditioning]:
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, tensor in conditioning.tensors.items():
        number, _, own_name = name.partition(".")
        tensors.setdefault(int(number), {})[own_name] = tensor
    return [Conditioning(tensors[number]) for number in sorted(tensors)]


def panel_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of a set's `count` panels: `seed · count + p`."""
    return [(seed * count + position) % SEEDS for position in range(count)]


def panel_prompts(prompt: Prompt, model: str, max_references: int, *, previous: bool = False) -> list[Prompt]:
    """Compose the prompt of each panel: the set's theme and the panel's text, with the references of its characters.

    Args:
        prompt: Prompt of a set.
        model: Name of the generator.
        max_references: Maximum number of reference images that the generator takes.
        previous: Whether one of them is the panel before.

    Returns:
        One prompt per panel; a single image's own.

    Raises:
        ValueError: if there is not one text per panel, or the references leave no room.
    """
    if prompt.grid.count == 1 and not prompt.panels:
        return [prompt]
    if len(prompt.panels) != prompt.grid.count:
        raise ValueError(
            f"separate panels need a text each, and prompt {prompt.id} has {len(prompt.panels)} for a {prompt.grid} "
            "grid; describe every panel"
        )
    if model == TINY and not max_references:
        raise ValueError(
            "the tiny generator draws whole sets; leave out separate, or take the kind kontext, which draws a "
            "character from its images"
        )
    # One place is the panel before.
    limit = max_references - previous
    if limit < 0:
        raise ValueError(f"{model} takes no reference images, so none can be the panel before; leave out previous")

    # A panel's share of the set's size.
    size = prompt.size and Size(prompt.size.height // prompt.grid.rows, prompt.size.width // prompt.grid.cols)
    characters = characters_of(prompt)
    composed = []
    # Compose the panels.
    for text, shown in zip(prompt.panels, characters, strict=True):
        references = prompt.references
        if references and any(characters):
            references = in_turn([character.images for character in shown])
        # The cut to `limit` below must leave each character at least one image.
        if limit < min(len(references), len(shown)):
            raise ValueError(
                f"panel {text[:60]!r} shows {len(shown)} characters with images, and {model} takes {limit} of them; "
                "name fewer, or leave out previous"
            )
        # Not the set's own text, which asks for a grid.
        whole = f"{prompt.theme.rstrip('.')}. {text}" if prompt.theme else text
        composed.append(
            Prompt(
                id=prompt.id,
                text=tiny_scene(text) if model == TINY else whole,
                theme=prompt.theme,
                characters=tuple(shown),
                references=references[:limit],
                size=size,
            )
        )
    return composed
