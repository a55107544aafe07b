"""The operations of augmentations against Pillow: the same pixels, except for the hue."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms.v2 import functional as TF

from trainer.loading.augment import Draws, apply
from trainer.loading.operations import OPERATIONS

ENHANCE = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}
FACTORS, SHARES = (0.0, 0.1, 0.73, 1.0, 1.27, 1.9), (-0.3, -0.136, -0.01, 0.0, 0.136, 0.453)
STRENGTHS = {
    **dict.fromkeys(ENHANCE, FACTORS),
    **dict.fromkeys(("shear_x", "shear_y", "translate_x", "translate_y"), SHARES),
    "rotate": (-30.0, -9.0, 0.0, 3.0, 15.0, 30.0, 90.0),
    "posterize": (8.0, 7.0, 6.0, 4.0),
    "solarize": (0.0, 100.5, 178.5, 204.0, 255.0),
}
TURNS = (-0.5, -0.2, -0.07, 0.0, 0.1, 0.3, 0.5)


def pictures():
    for height, width in ((32, 32), (37, 29), (3, 5), (2, 9), (90, 224)):
        random = np.random.default_rng(height)
        yield random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        down, across = np.mgrid[0:height, 0:width]
        yield np.stack([40 + 3 * down, 200 - across // 2, 60 + down + 2 * across], axis=2).astype(np.uint8)
        yield np.array(Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((width, height)))
        yield np.full((height, width, 3), 77, np.uint8)


def as_planes(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def with_pillow(name, image, strength):
    width, height = image.size
    if name in ENHANCE:
        return ENHANCE[name](image).enhance(strength)
    across, down = (int(np.float32(strength) * np.float32(side)) for side in (width, height))
    affine = {
        "shear_x": (1, strength, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, strength, 1, 0),
        "translate_x": (1, 0, -across, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, -down),
    }
    if name in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[name])
    others = {
        "identity": lambda: image,
        "rotate": lambda: image.rotate(strength),
        "posterize": lambda: ImageOps.posterize(image, int(strength)),
        "solarize": lambda: ImageOps.solarize(image, strength),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
    }
    return others[name]()


def ours(name, planes, strength):
    (result,) = OPERATIONS[name](planes[None], torch.tensor([strength], dtype=torch.float32))
    assert result.dtype == torch.uint8
    return result


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "hue"])
def test_an_operation_is_pillows(name):
    for picture in pictures():
        for value in STRENGTHS.get(name, (0.0,)):
            strength = float(np.float32(value))
            expected = as_planes(with_pillow(name, Image.fromarray(picture), strength))
            assert torch.equal(ours(name, as_planes(picture), strength), expected), (picture.shape, value)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 10**6), st.sampled_from(sorted(STRENGTHS)), st.data())
@settings(max_examples=150, deadline=None)
def test_an_operation_is_pillows_at_any_strength_and_size(height, width, seed, name, data):
    low, high = (float(np.float32(limit(STRENGTHS[name]))) for limit in (min, max))
    strength = data.draw(st.floats(low, high, width=32) if name != "posterize" else st.integers(4, 8).map(float))
    picture = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = as_planes(with_pillow(name, Image.fromarray(picture), strength))
    assert torch.equal(ours(name, as_planes(picture), strength), expected)


def test_the_hue_is_torchvisions_and_about_pillows():
    """Pillow rounds HSV to 8 bits before it converts back, which costs up to 16 grey levels."""
    for picture in pictures():
        for turn in TURNS:
            result = ours("hue", as_planes(picture), turn).int()
            expected = TF.adjust_hue(as_planes(picture), turn).int()
            assert (result - expected).abs().max() <= 1
            hsv = np.array(Image.fromarray(picture).convert("HSV"))
            hsv[..., 0] += np.uint8(int(turn * 255) % 256)
            rounded = as_planes(Image.fromarray(hsv, "HSV").convert("RGB")).int()
            assert (result - rounded).abs().max() <= 16
            assert (result - rounded).abs().float().mean() <= 3


def draws_of(codes, strengths):
    rows = len(codes)
    return Draws(
        np.zeros((rows, 4), np.int32), np.zeros(rows, bool), None, np.array(codes, np.int8), strengths, OPERATIONS
    )


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_row_gets_its_operations_in_order_whatever_the_other_rows_get(rows, columns, seed):
    random = np.random.default_rng(seed)
    images = torch.from_numpy(random.integers(0, 256, (rows, 3, 7, 6), dtype=np.uint8))
    codes = random.integers(-1, len(OPERATIONS), (rows, columns))
    names = [[list(OPERATIONS)[code] if code >= 0 else None for code in of_row] for of_row in codes]
    values = [[random.choice(STRENGTHS.get(name, (0.1,))) for name in of_row] for of_row in names]
    result = apply(images, draws_of(codes, np.array(values, np.float32)))
    for row in range(rows):
        expected = images[row]
        for name, value in zip(names[row], values[row], strict=True):
            expected = expected if name is None else ours(name, expected, value)
        assert torch.equal(result[row], expected)


def test_without_operations_nothing_is_copied():
    images = torch.zeros((2, 3, 4, 4), dtype=torch.uint8)
    assert apply(images, Draws(np.zeros((2, 4), np.int32), np.zeros(2, bool))) is images
    none = draws_of(np.full((2, 3), -1), np.zeros((2, 3), np.float32))
    assert torch.equal(apply(images, none), images)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_pixels_without_a_sync():
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (512, 3, 32, 32), dtype=np.uint8))
    codes = random.integers(-1, len(OPERATIONS), (512, 2))
    values = [[random.choice(STRENGTHS.get(list(OPERATIONS)[code], (0.1,))) for code in of_row] for of_row in codes]
    draws = draws_of(codes, np.array(values, np.float32))
    on_gpu = images.cuda()
    apply(on_gpu, draws)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = apply(on_gpu, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    different = (result.cpu().int() - apply(images, draws).int()).abs()
    hues = (codes == list(OPERATIONS).index("hue")).any(axis=1)
    assert not different[~hues].any()
    assert (different[hues] > 2).float().mean() < 0.001
