"""Drawing of the tiny world's layers: `python -m research.tiny.drawing` writes artwork.png."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw

from pacorl.tiny.world import ARTWORK, LAYERS, TILE, VALUES

Colour = tuple[int, int, int]

CANVAS = 384
"""Side of the canvas that a layer is drawn on before it shrinks: a multiple of every size of a panel."""
GROUND = 262
"""Top of the ground on the canvas."""
INK: Colour = (46, 36, 54)
WHITE: Colour = (255, 255, 255)
SHADE = 0.80
"""Brightness of a shape's shaded side."""

COLOURS: dict[str, Colour] = {
    "red": (226, 62, 56),
    "yellow": (250, 208, 56),
    "green": (58, 166, 84),
    "blue": (52, 108, 226),
    "purple": (150, 82, 190),
    "white": (248, 244, 236),
}


class Palette(NamedTuple):
    """Colours of a time of day."""

    sky: Colour
    horizon: Colour
    far: Colour
    ground: Colour
    near: Colour
    light: Colour


PALETTES = {
    "day": Palette((104, 186, 246), (206, 236, 252), (124, 190, 132), (146, 206, 96), (116, 180, 78), (255, 240, 150)),
    "night": Palette((26, 30, 84), (68, 74, 142), (44, 54, 104), (40, 72, 92), (32, 56, 78), (244, 242, 222)),
    "sunset": Palette((232, 96, 92), (255, 190, 110), (168, 82, 108), (134, 76, 96), (110, 60, 84), (255, 232, 150)),
    "candy": Palette(
        (246, 176, 220), (255, 226, 238), (206, 176, 236), (170, 228, 212), (142, 206, 192), (255, 255, 255)
    ),
}


# --- layers ----------------------------------------------------------------------------------------------------


Drawing = Callable[[ImageDraw.ImageDraw], object]


class Layer:
    """An RGBA canvas on which outlined and shaded shapes are drawn."""

    def __init__(self) -> None:
        self.image = Image.new("RGBA", (CANVAS, CANVAS), (*INK, 0))

    def shape(self, draw: Drawing, fill: Colour, *, line: int = 9, shaded: bool = True) -> None:
        """Paint what `draw` marks on a mask: outline, fill and a shaded lower right side."""
        mask, corner = _marked(draw, margin=line)
        self.image.paste((*INK, 255), corner, mask=dilated(mask, line // 2))
        self.image.paste((*fill, 255), corner, mask=mask)
        if shaded:
            lit = ImageChops.offset(mask, -14, -12)
            self.image.paste((*shaded_of(fill), 255), corner, mask=ImageChops.subtract(mask, lit))

    def plain(self, draw: Drawing, fill: Colour, *, alpha: int = 255) -> None:
        """Paint what `draw` marks without outline or shade, blended by `alpha` of 255."""
        mask, corner = _marked(draw, margin=0)
        if alpha == 255:
            self.image.paste((*fill, 255), corner, mask=mask)
            return
        over = Image.new("RGBA", mask.size, (*fill, 0))
        over.putalpha(mask.point(lambda value: value * alpha // 255))
        self.image.alpha_composite(over, corner)


def _marked(draw: Drawing, *, margin: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return the mask that `draw` marks, cut to its content and a margin, and its left upper corner."""
    mask = Image.new("L", (CANVAS, CANVAS))
    draw(ImageDraw.Draw(mask))
    left, top, right, bottom = mask.getbbox() or (0, 0, 1, 1)
    # The shade is the difference to a shifted mask, which must not wrap around.
    box = (
        max(0, left - margin - 1),
        max(0, top - margin - 1),
        min(CANVAS, right + margin + 15),
        min(CANVAS, bottom + margin + 15),
    )
    return mask.crop(box), (box[0], box[1])


def dilated(mask: Image.Image, radius: int) -> Image.Image:
    """Grow a mask by `radius` pixels on each side."""
    pixels = np.asarray(mask)
    # A square's maximum is the maximum of its rows, then of its columns.
    for axis in (0, 1):
        width = [(radius, radius) if side == axis else (0, 0) for side in (0, 1)]
        padded = np.pad(pixels, width)
        pixels = np.lib.stride_tricks.sliding_window_view(padded, 2 * radius + 1, axis=axis).max(-1)
    return Image.fromarray(pixels)


def shaded_of(colour: Colour, share: float = SHADE) -> Colour:
    """Darken a colour."""
    return tuple(round(value * share) for value in colour)  # type: ignore[return-value]


def shrunk(image: Image.Image, size: int) -> NDArray[np.float32]:
    """Shrink an RGBA canvas with premultiplied alpha: (size, size, 4) in 0..1."""
    pixels = np.asarray(image, dtype=np.float32) / np.float32(255)
    pixels[..., :3] *= pixels[..., 3:]
    step = CANVAS // size
    if size * step != CANVAS:
        raise ValueError(f"a panel of {size} px; a side divides {CANVAS}, such as 16, 24, 32, 48, 64 or 96")
    small: NDArray[np.float32] = pixels.reshape(size, step, size, step, 4).mean((1, 3))
    return small


# --- backgrounds -----------------------------------------------------------------------------------------------


@cache
def background(palette: str, place: str) -> Image.Image:
    """Draw sky, light, the place's skyline and the ground."""
    colours = PALETTES[palette]
    # The sky is a gradient, painted row by row.
    layer = Layer()
    pen = ImageDraw.Draw(layer.image)
    for y in range(GROUND + 40):
        share = min(1.0, y / GROUND)
        row = tuple(round(a + (b - a) * share) for a, b in zip(colours.sky, colours.horizon, strict=True))
        pen.line((0, y, CANVAS, y), fill=(*row, 255))
    _light(layer, palette, colours)

    pen = ImageDraw.Draw(layer.image)
    pen.rectangle((0, GROUND, CANVAS, CANVAS), fill=(*colours.ground, 255))
    PLACES[place](layer, colours)
    return layer.image


def _light(layer: Layer, palette: str, colours: Palette) -> None:
    if palette == "night":
        moon = Image.new("L", (CANVAS, CANVAS))
        ImageDraw.Draw(moon).ellipse((300, 22, 362, 84), fill=255)
        ImageDraw.Draw(moon).ellipse((284, 12, 340, 68), fill=0)
        layer.image.paste((*colours.light, 255), mask=moon)
        for x, y in ((34, 40), (112, 24), (206, 48), (262, 22), (250, 104), (30, 132)):
            layer.plain(lambda pen, x=x, y=y: pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=255), colours.light)  # type: ignore[misc]
        return
    layer.plain(lambda pen: pen.ellipse((284, 6, 378, 100), fill=255), colours.light, alpha=90)
    layer.plain(lambda pen: pen.ellipse((298, 20, 364, 86), fill=255), colours.light)


def _meadow(layer: Layer, colours: Palette) -> None:
    layer.plain(lambda pen: pen.ellipse((-120, GROUND - 76, 210, GROUND + 140), fill=255), colours.far)
    layer.plain(lambda pen: pen.ellipse((150, GROUND - 56, 480, GROUND + 140), fill=255), colours.far)
    layer.plain(lambda pen: pen.rectangle((0, GROUND + 2, CANVAS, CANVAS), fill=255), colours.ground)
    layer.plain(lambda pen: pen.ellipse((-160, 318, 420, 520), fill=255), colours.near)


def _beach(layer: Layer, colours: Palette) -> None:
    sea = _mixed(colours.sky, (24, 96, 168), 0.45)
    sand = _mixed(colours.ground, (250, 226, 170), 0.72)
    layer.plain(lambda pen: pen.rectangle((0, GROUND - 62, CANVAS, CANVAS), fill=255), sea)
    for y, left in ((GROUND - 44, 20), (GROUND - 24, 210), (GROUND - 8, 70)):
        layer.plain(
            lambda pen, y=y, left=left: pen.rounded_rectangle((left, y, left + 92, y + 7), 3, fill=255),  # type: ignore[misc]
            WHITE,
            alpha=140,
        )
    layer.plain(lambda pen: pen.ellipse((-90, GROUND + 4, CANVAS + 90, CANVAS + 180), fill=255), sand)
    layer.plain(lambda pen: pen.ellipse((-160, 330, 330, 520), fill=255), shaded_of(sand, 0.92))


BUILDINGS = ((-6, 128, 58), (62, 176, 122), (126, 96, 186), (190, 156, 250), (254, 118, 316), (320, 168, 392))
"""Left, top and right of the town's houses."""


def _town(layer: Layer, colours: Palette) -> None:
    walls = colours.far
    windows = _mixed(colours.light, walls, 0.25)

    def houses(pen: ImageDraw.ImageDraw) -> None:
        for left, top, right in BUILDINGS:
            pen.rectangle((left, top, right, GROUND + 6), fill=255)

    layer.plain(houses, walls)

    def lit(pen: ImageDraw.ImageDraw) -> None:
        for left, top, right in BUILDINGS:
            for x, y in product(range(left + 12, right - 16, 24), range(top + 16, GROUND - 20, 30)):
                pen.rectangle((x, y, x + 10, y + 14), fill=255)

    layer.plain(lit, windows)
    street = _mixed(colours.ground, (150, 146, 156), 0.7)
    layer.plain(lambda pen: pen.rectangle((0, GROUND + 4, CANVAS, CANVAS), fill=255), street)
    layer.plain(lambda pen: pen.rectangle((0, 340, CANVAS, CANVAS), fill=255), shaded_of(street, 0.88))


def _mountains(layer: Layer, colours: Palette) -> None:
    snow = _mixed(colours.horizon, (255, 255, 255), 0.75)
    for x, top, half in ((78, 92, 128), (232, 60, 150), (360, 112, 110)):
        layer.plain(
            lambda pen, x=x, top=top, half=half: pen.polygon(  # type: ignore[misc]
                [(x - half, GROUND + 8), (x, top), (x + half, GROUND + 8)], fill=255
            ),
            colours.far,
        )
        cap = [
            (x, top),
            (x - half * 0.3, top + 52),
            (x - half * 0.1, top + 40),
            (x + half * 0.1, top + 58),
            (x + half * 0.3, top + 52),
        ]
        layer.plain(lambda pen, cap=cap: pen.polygon(cap, fill=255), snow)  # type: ignore[misc]
    ground = _mixed(colours.ground, snow, 0.68)
    layer.plain(lambda pen: pen.rectangle((0, GROUND + 2, CANVAS, CANVAS), fill=255), ground)
    layer.plain(lambda pen: pen.ellipse((-160, 322, 420, 520), fill=255), shaded_of(ground, 0.93))


def _mixed(first: Colour, second: Colour, share: float) -> Colour:
    return tuple(round(a + (b - a) * share) for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


PLACES: dict[str, Callable[[Layer, Palette], None]] = {
    "meadow": _meadow,
    "beach": _beach,
    "town": _town,
    "mountains": _mountains,
}


# --- props -----------------------------------------------------------------------------------------------------


@cache
def prop(name: str) -> Image.Image:
    """Draw a prop at the right of the panel, from x = 262."""
    layer = Layer()
    layer.plain(lambda pen: pen.ellipse((272, 316, 376, 340), fill=255), (20, 16, 40), alpha=70)
    PROPS[name](layer)
    return layer.image


def _tree(layer: Layer) -> None:
    layer.shape(lambda pen: pen.rectangle((314, 220, 334, 328), fill=255), (134, 88, 54))
    layer.shape(lambda pen: pen.ellipse((270, 104, 378, 250), fill=255), (40, 132, 72))


def _house(layer: Layer) -> None:
    layer.shape(lambda pen: pen.rectangle((276, 222, 370, 328), fill=255), (250, 232, 202))
    layer.shape(lambda pen: pen.polygon([(268, 224), (323, 148), (378, 224)], fill=255), (206, 78, 62))
    layer.shape(lambda pen: pen.rectangle((308, 268, 338, 328), fill=255), (130, 84, 58), line=7)


def _ball(layer: Layer) -> None:
    box = (276, 236, 372, 332)
    layer.shape(lambda pen: pen.ellipse(box, fill=255), WHITE)
    for start in (30, 150, 270):
        layer.plain(lambda pen, start=start: pen.pieslice(box, start, start + 60, fill=255), (236, 74, 140))  # type: ignore[misc]


def _flag(layer: Layer) -> None:
    layer.shape(lambda pen: pen.rectangle((284, 92, 294, 330), fill=255), (190, 180, 170), line=7, shaded=False)
    layer.shape(lambda pen: pen.polygon([(298, 96), (376, 134), (298, 176)], fill=255), (246, 120, 36))


def _lamp(layer: Layer) -> None:
    layer.plain(lambda pen: pen.ellipse((266, 84, 380, 198), fill=255), (255, 246, 170), alpha=110)
    layer.shape(lambda pen: pen.rectangle((317, 172, 329, 330), fill=255), (96, 92, 112), line=7, shaded=False)
    layer.shape(lambda pen: pen.ellipse((288, 106, 358, 176), fill=255), (255, 240, 130))


def _boat(layer: Layer) -> None:
    layer.shape(lambda pen: pen.rectangle((317, 150, 325, 284), fill=255), (120, 84, 56), line=5, shaded=False)
    layer.shape(lambda pen: pen.polygon([(330, 152), (330, 268), (376, 268)], fill=255), WHITE)
    layer.shape(lambda pen: pen.polygon([(268, 282), (378, 282), (352, 332), (294, 332)], fill=255), (172, 106, 60))


PROPS: dict[str, Callable[[Layer], None]] = {
    "tree": _tree,
    "house": _house,
    "ball": _ball,
    "flag": _flag,
    "lamp": _lamp,
    "boat": _boat,
}


# --- heroes ----------------------------------------------------------------------------------------------------

MIDDLE = 136
"""Centre of the hero on the canvas; nothing of it reaches beyond x = 258."""
HALF_WIDTHS = {"round": 82, "square": 60, "pointed": 88, "tall": 40}
TOPS = {"round": 178, "square": 158, "pointed": 148, "tall": 124}
BRIMS = {"round": 14, "square": 10, "pointed": 38, "tall": 16}
"""Brim of a hat below the top of its hero."""
BOTTOM = 302
LIFT = 46
"""Height of a jump."""


@cache
def hero(colour: str, shape: str, pose: str) -> Image.Image:
    """Draw a bare hero with its shadow."""
    layer = Layer()
    fill = COLOURS[colour]
    lift = LIFT if pose == "jumping" else 0
    half, top, bottom = HALF_WIDTHS[shape], TOPS[shape] - lift, BOTTOM - lift
    shadow = 44 if lift else 70
    layer.plain(lambda pen: pen.ellipse((MIDDLE - shadow, 326, MIDDLE + shadow, 352), fill=255), (20, 16, 40), alpha=90)
    _limbs(layer, fill, pose=pose, shape=shape, half=half, top=top, bottom=bottom)
    _body(layer, fill, shape=shape, half=half, top=top, bottom=bottom)
    # A pointed body is narrow above: its face is lower, and its hat is pulled down.
    face = (top + bottom) // 2 + {"pointed": 34, "tall": -14}.get(shape, 2)
    _face(layer, face, apart=20 if shape in ("tall", "pointed") else 27)
    return layer.image


@cache
def hat(name: str, shape: str, pose: str) -> Image.Image:
    """Draw a hat where a hero of this shape and pose wears it."""
    layer = Layer()
    lift = LIFT if pose == "jumping" else 0
    HATS[name](layer, TOPS[shape] + BRIMS[shape] - lift)
    return layer.image


def _limbs(layer: Layer, fill: Colour, *, pose: str, shape: str, half: int, top: int, bottom: int) -> None:
    for side in (-1, 1):
        hip = MIDDLE + side * (22 if shape == "tall" else 30)
        foot = bottom + (22 if pose == "jumping" else 30)
        layer.shape(
            lambda pen, hip=hip, foot=foot: pen.rounded_rectangle((hip - 10, bottom - 20, hip + 10, foot), 8, fill=255),  # type: ignore[misc]
            fill,
        )
        shoe = hip + side * 6
        layer.shape(
            lambda pen, shoe=shoe, foot=foot: pen.ellipse((shoe - 20, foot - 12, shoe + 20, foot + 12), fill=255),  # type: ignore[misc]
            (92, 66, 60),
            line=7,
        )

        raised = pose == "jumping" or (pose == "waving" and side == 1)
        level = (top + bottom) // 2 + (22 if shape == "pointed" else 8)
        shoulder = MIDDLE + side * (half - (34 if shape == "pointed" else 10))
        reach = min(34, 104 - abs(shoulder - MIDDLE))
        hand = (shoulder + side * reach, level - 72) if raised else (shoulder + side * reach, level + 48)
        layer.shape(
            lambda pen, shoulder=shoulder, level=level, hand=hand: (  # type: ignore[misc]
                pen.line((shoulder, level, *hand), fill=255, width=24),
                pen.ellipse((hand[0] - 17, hand[1] - 17, hand[0] + 17, hand[1] + 17), fill=255),
            )[0],
            fill,
        )


def _body(layer: Layer, fill: Colour, *, shape: str, half: int, top: int, bottom: int) -> None:
    left, right = MIDDLE - half, MIDDLE + half
    match shape:
        case "round":
            layer.shape(lambda pen: pen.ellipse((left, top, right, bottom), fill=255), fill, line=11)
        case "square":
            layer.shape(lambda pen: pen.rounded_rectangle((left, top, right, bottom), 10, fill=255), fill, line=11)
        case "pointed":
            corners = [(left, bottom), (MIDDLE - 16, top), (MIDDLE + 16, top), (right, bottom)]
            layer.shape(lambda pen: pen.polygon(corners, fill=255), fill, line=11)
        case "tall":
            layer.shape(lambda pen: pen.rounded_rectangle((left, top, right, bottom), 40, fill=255), fill, line=11)
    # A soft light from above left.
    glow = (MIDDLE - half * 0.55, top + 50, MIDDLE - half * 0.1, top + 84)
    if shape != "pointed":
        layer.plain(lambda pen: pen.ellipse(glow, fill=255), WHITE, alpha=60)


def _face(layer: Layer, y: int, *, apart: int) -> None:
    for side in (-1, 1):
        eye = MIDDLE + side * apart
        layer.plain(lambda pen, eye=eye: pen.ellipse((eye - 11, y - 15, eye + 11, y + 13), fill=255), INK)  # type: ignore[misc]
        layer.plain(lambda pen, eye=eye: pen.ellipse((eye - 7, y - 11, eye + 1, y - 2), fill=255), WHITE)  # type: ignore[misc]
        cheek = MIDDLE + side * (apart + 15)
        layer.plain(
            lambda pen, cheek=cheek: pen.ellipse((cheek - 11, y + 13, cheek + 11, y + 27), fill=255),
            (255, 120, 130),
            alpha=120,
        )  # type: ignore[misc]
    layer.plain(lambda pen: pen.arc((MIDDLE - 15, y + 4, MIDDLE + 15, y + 30), 15, 165, fill=255, width=7), INK)


def _cap(layer: Layer, brim: int) -> None:
    teal: Colour = (0, 168, 176)
    layer.shape(lambda pen: pen.pieslice((MIDDLE - 60, brim - 74, MIDDLE + 60, brim + 74), 180, 360, fill=255), teal)
    layer.shape(
        lambda pen: pen.rounded_rectangle((MIDDLE - 104, brim - 12, MIDDLE + 22, brim + 10), 10, fill=255),
        (0, 122, 136),
    )
    layer.shape(
        lambda pen: pen.ellipse((MIDDLE - 10, brim - 84, MIDDLE + 10, brim - 66), fill=255), (0, 122, 136), line=7
    )


def _crown(layer: Layer, brim: int) -> None:
    spikes = [(-58, 10), (-66, -70), (-34, -34), (0, -84), (34, -34), (66, -70), (58, 10)]
    corners = [(MIDDLE + x, brim + y) for x, y in spikes]
    layer.shape(lambda pen: pen.polygon(corners, fill=255), (255, 200, 30))
    for x, colour in ((-34, (226, 62, 90)), (0, (70, 130, 230)), (34, (226, 62, 90))):
        layer.plain(
            lambda pen, x=x: pen.ellipse((MIDDLE + x - 9, brim - 16, MIDDLE + x + 9, brim + 2), fill=255),  # type: ignore[misc]
            colour,
        )


def _top_hat(layer: Layer, brim: int) -> None:
    black: Colour = (52, 48, 62)
    layer.shape(lambda pen: pen.rectangle((MIDDLE - 46, brim - 92, MIDDLE + 46, brim), fill=255), black)
    layer.plain(lambda pen: pen.rectangle((MIDDLE - 46, brim - 32, MIDDLE + 46, brim - 8), fill=255), (216, 44, 70))
    layer.shape(lambda pen: pen.rounded_rectangle((MIDDLE - 80, brim - 8, MIDDLE + 80, brim + 10), 8, fill=255), black)


def _bow(layer: Layer, brim: int) -> None:
    pink: Colour = (255, 108, 176)
    for side in (-1, 1):
        corners = [(MIDDLE, brim - 24), (MIDDLE + side * 76, brim - 70), (MIDDLE + side * 76, brim + 14)]
        layer.shape(lambda pen, corners=corners: pen.polygon(corners, fill=255), pink)  # type: ignore[misc]
    layer.shape(lambda pen: pen.ellipse((MIDDLE - 20, brim - 46, MIDDLE + 20, brim - 6), fill=255), (226, 62, 140))


HATS: dict[str, Callable[[Layer, int], None]] = {"cap": _cap, "crown": _crown, "top-hat": _top_hat, "bow": _bow}


def artwork() -> Image.Image:
    """Join all layers, in the order in which pacorl.tiny.world reads them."""
    makers = {"background": background, "prop": prop, "hero": hero, "hat": hat}
    layers = []
    for kind, names in LAYERS.items():
        layers += [makers[kind](*values) for values in product(*(VALUES[name] for name in names))]
    columns = 12
    sheet = Image.new("RGBA", (columns * TILE, -(-len(layers) // columns) * TILE))
    for number, layer in enumerate(layers):
        pixels = shrunk(layer, TILE)
        pixels[..., :3] /= np.maximum(pixels[..., 3:], 1e-6)
        tile = Image.fromarray((pixels * 255 + 0.5).astype(np.uint8), "RGBA")
        sheet.paste(tile, (number % columns * TILE, number // columns * TILE))
    return sheet


if __name__ == "__main__":
    artwork().save(ARTWORK, optimize=True)
