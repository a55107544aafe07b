"""Made-up photographs: textured shapes of any size, position and colour on textured backgrounds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SHAPES = ("disc", "square", "triangle", "star")
OTHER_SHAPES = ("ring", "cross", "hexagon", "crescent", "arrow", "heart", "bar", "pair")


def draw_shape(shape: str, rng: np.random.Generator) -> Image.Image:
    """Draw one image, 56 to 224 pixels on its shorter side."""
    side = int(rng.integers(56, 225))
    width, height = side, int(side * rng.uniform(1.0, 1.3))
    if rng.random() < 0.5:
        width, height = height, width
    mask = _mask(shape, rng).resize((side, side), Image.Resampling.BILINEAR)
    place = (int(rng.integers(0, width - side + 1)), int(rng.integers(0, height - side + 1)))
    image = _texture(width, height, rng)
    image.paste(_texture(side, side, rng), place, mask)
    pixels = np.asarray(image, np.float32) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_shapes(
    folder: Path, each: int, wrong: float, seed: int, shapes: Sequence[str] = SHAPES
) -> dict[str, tuple[str, str]]:
    """Write `each` images per class to folder/<given class>/; returns {path: (given, true)} relative to the folder.

    wrong: the share of images in another class's folder.
    """
    rng = np.random.default_rng(seed)
    true = np.repeat(np.arange(len(shapes)), each)
    given = true.copy()
    flipped = rng.permutation(len(true))[: round(wrong * len(true))]
    given[flipped] = (true[flipped] + rng.integers(1, len(shapes), len(flipped))) % len(shapes)
    labels = {}
    for number, (is_, said) in enumerate(zip(true, given, strict=True)):
        path = f"{shapes[said]}/{number:04d}.jpg"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        draw_shape(shapes[is_], rng).save(folder / path, quality=90)
        labels[path] = (shapes[said], shapes[is_])
    return labels


def _mask(shape: str, rng: np.random.Generator, size: int = 256) -> Image.Image:
    """Draw a white shape, rotated and scaled at random, on black."""
    mask = Image.new("L", (size, size))
    draw = ImageDraw.Draw(mask)
    centre, radius = size / 2, size * rng.uniform(0.25, 0.42)
    box = (centre - radius, centre - radius, centre + radius, centre + radius)
    corners = {"square": 4, "triangle": 3, "hexagon": 6}
    if shape in corners:
        draw.regular_polygon((centre, centre, radius), corners[shape], fill=255)
    elif shape == "star":
        draw.polygon(_polar(centre, [radius, radius * 0.42] * 5), fill=255)
    elif shape == "cross":
        arm = radius * 0.3
        draw.rectangle((centre - arm, box[1], centre + arm, box[3]), fill=255)
        draw.rectangle((box[0], centre - arm, box[2], centre + arm), fill=255)
    elif shape == "arrow":
        draw.polygon([(box[0], centre), (centre, box[1]), (centre, box[3])], fill=255)
        draw.rectangle((centre, centre - radius * 0.25, box[2], centre + radius * 0.25), fill=255)
    elif shape == "heart":
        half = radius * 0.55
        draw.ellipse((centre - 2 * half, centre - half, centre, centre + half), fill=255)
        draw.ellipse((centre, centre - half, centre + 2 * half, centre + half), fill=255)
        draw.polygon(
            [(centre - 1.9 * half, centre + half / 3), (centre + 1.9 * half, centre + half / 3), (centre, box[3])],
            255,
        )
    elif shape == "bar":
        draw.rectangle((box[0], centre - radius * 0.25, box[2], centre + radius * 0.25), fill=255)
    elif shape == "pair":
        half = radius / 2
        for middle in (centre - half, centre + half):
            draw.ellipse((middle - half * 0.8, centre - half, middle + half * 0.8, centre + half), fill=255)
    else:  # disc, ring, crescent
        draw.ellipse(box, fill=255)
        if shape == "ring":
            hole = radius * 0.55
            draw.ellipse((centre - hole, centre - hole, centre + hole, centre + hole), fill=0)
        if shape == "crescent":
            shift = radius * 0.6
            draw.ellipse((box[0] + shift, box[1], box[2] + shift, box[3]), fill=0)
    return mask.rotate(float(rng.uniform(0, 360)), Image.Resampling.BILINEAR)


def _polar(centre: float, radii: Sequence[float]) -> list[tuple[float, float]]:
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return [(centre + r * np.cos(a), centre + r * np.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _texture(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Return stripes, blotches or grain of two random colours."""
    first, second = rng.uniform(0, 255, (2, 3))
    kind = rng.integers(3)
    if kind == 0:
        angle, period = rng.uniform(0, np.pi), rng.uniform(6, 30)
        across, down = np.meshgrid(np.arange(width), np.arange(height))
        blend = 0.5 + 0.5 * np.sin((across * np.cos(angle) + down * np.sin(angle)) * 2 * np.pi / period)
    else:
        grain = Image.fromarray((rng.random((height, width)) * 255).astype(np.uint8))
        grain = grain.filter(ImageFilter.GaussianBlur(1 if kind == 1 else 6))
        blend = np.asarray(grain, np.float32)
        blend = (blend - blend.min()) / max(float(np.ptp(blend)), 1.0)
    strength = rng.uniform(0.2, 0.6)  # how far the second colour shows
    pixels = first + (second - first) * strength * blend[..., None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
