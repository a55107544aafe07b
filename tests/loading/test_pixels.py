"""Crops against a slow pixel-by-pixel reference, scaling against a gradient, normalisation by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loading.pixels import Normalise, crop


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def slow_cut(image, box, flip, fill):
    left, top, width, height = box
    rows, columns = image.shape[:2]
    piece = np.zeros((height, width, 3), np.uint8)
    for y in range(height):
        for x in range(width):
            row, column = top + y, left + (width - 1 - x if flip else x)
            if fill == "edge":
                row, column = min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)
            if 0 <= row < rows and 0 <= column < columns:
                piece[y, x] = image[row, column]
    return piece


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 14),
    st.integers(-5, 12),
    st.integers(-5, 12),
    st.booleans(),
    st.sampled_from(["zero", "edge"]),
)
@settings(max_examples=60, deadline=None)
def test_cuts_are_those_of_the_slow_reference(height, width, size, left, top, flip, fill):
    image = noise(height, width)
    box = np.array([left, top, size, size], np.int32)
    piece = crop(image, box, flip, size, fill)
    np.testing.assert_array_equal(piece, slow_cut(image, (left, top, size, size), flip, fill))
    np.testing.assert_array_equal(image, noise(height, width))  # the stored pixels are not touched


@pytest.mark.parametrize("size", [6, 12])
def test_a_flip_mirrors_left_to_right(size):
    image, box = noise(10, 12), np.array([1, 2, 6, 6], np.int32)
    plain, mirrored = (crop(image, box, flip, size, "zero") for flip in (False, True))
    np.testing.assert_array_equal(mirrored, plain[:, ::-1])
    assert (mirrored != plain).any()


@pytest.mark.parametrize(("side", "size"), [(40, 20), (40, 10), (20, 40), (30, 20)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scaled_box_keeps_the_geometry(side, size, axis):
    """A picture that grows by 2 a pixel, sampled at the centres of `size` equal parts of the box."""
    ramp = np.repeat((2 * np.arange(80, dtype=np.uint8))[None, :, None], 80, axis=0).repeat(3, axis=2)
    image = ramp if axis == 1 else ramp.transpose(1, 0, 2).copy()
    left, top = (17, 5) if axis == 1 else (5, 17)
    piece = crop(image, np.array([left, top, side, side], np.int32), False, size, "zero")
    assert piece.shape == (size, size, 3)
    centres = 17 + (np.arange(size) + 0.5) * side / size
    expected = np.broadcast_to(2 * (centres - 0.5), (size, size))
    shown = piece[:, :, 0] if axis == 1 else piece[:, :, 0].T
    assert np.abs(shown - expected).max() <= 1


def test_padding_is_scaled_with_the_image():
    image = np.full((8, 8, 3), 200, np.uint8)
    box = np.array([-4, -4, 16, 16], np.int32)
    assert (crop(image, box, False, 32, "edge") == 200).all()
    zero = crop(image, box, False, 32, "zero")
    assert (zero[12:20, 12:20] == 200).all()
    assert not zero[:6].any()


def test_normalise_by_hand():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.125)
    pixels = torch.from_numpy(noise(4, 4)[None])
    normalised = Normalise(mean, std, torch.device("cpu"))(pixels)
    assert normalised.shape == (1, 3, 4, 4)
    assert normalised.dtype == torch.float32
    for channel in range(3):
        expected = (pixels[0, :, :, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(normalised[0, channel].double(), expected, rtol=0, atol=1e-5)
