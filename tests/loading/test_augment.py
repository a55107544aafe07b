"""Crop boxes: inside the padding, all offsets equally likely, a function of the sample alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from trainer.config.augmentation import RandomResizedCropConfig
from trainer.loading.augment import Geometry, centre_boxes, resized_boxes, training_boxes
from trainer.loading.sample_order import derive_stream

quick = settings(max_examples=50, deadline=None)
STREAM = derive_stream(0, "standard")

geometries = st.one_of(
    st.builds(
        Geometry,
        size=st.integers(1, 40),
        resize=st.none(),
        pad=st.integers(0, 6),
        flip=st.booleans(),
        fill=st.sampled_from(["zero", "edge"]),
    ),
    st.integers(1, 40).flatmap(
        lambda size: st.builds(
            Geometry,
            size=st.just(size),
            resize=st.integers(size, 60),
            pad=st.just(0),
            flip=st.booleans(),
            fill=st.just("zero"),
        )
    ),
)
sides = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=30)


def columns(shapes):
    return (np.array([shape[axis] for shape in shapes], np.int32) for axis in (0, 1))


@given(geometries, sides, st.integers(0, 200))
@quick
def test_boxes_are_squares_within_the_padding(geometry, shapes, epoch):
    widths, heights = columns(shapes)
    boxes, flips = training_boxes(geometry, STREAM, epoch, np.arange(len(shapes)), widths, heights)
    assert boxes.dtype == np.int32
    left, top, width, height = boxes.T
    assert (width == height).all()
    assert (width >= 1).all()
    assert (left >= -geometry.pad).all()
    assert (top >= -geometry.pad).all()
    assert (left + width <= widths + geometry.pad).all()
    assert (top + height <= heights + geometry.pad).all()
    if not geometry.flip:
        assert not flips.any()


@given(geometries, sides)
@quick
def test_the_centre_box_is_inside_and_in_the_middle(geometry, shapes):
    widths, heights = columns(shapes)
    left, top, width, height = centre_boxes(geometry, widths, heights).T
    assert (width == height).all()
    for before, size, total in ((left, width, widths), (top, height, heights)):
        after = total - before - size
        assert (before >= 0).all()
        assert (after >= 0).all()
        assert (np.abs(after - before) <= 1).all()


def test_unscaled_boxes_have_the_size_of_the_input():
    geometry = Geometry(size=28, resize=None, pad=4, flip=True, fill="zero")
    widths, heights = np.full(5, 32, np.int32), np.full(5, 30, np.int32)
    assert (training_boxes(geometry, STREAM, 0, np.arange(5), widths, heights)[0][:, 2:] == 28).all()
    assert centre_boxes(geometry, widths, heights).tolist() == [[2, 1, 28, 28]] * 5


def test_every_offset_is_reached_about_equally_often():
    geometry = Geometry(size=8, resize=None, pad=1, flip=True, fill="zero")
    count = 9_000
    widths, heights = np.full(count, 8, np.int32), np.full(count, 8, np.int32)
    boxes, flips = training_boxes(geometry, STREAM, 2, np.arange(count), widths, heights)
    places, often = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert places.tolist() == [[left, top] for left in (-1, 0, 1) for top in (-1, 0, 1)]
    assert np.abs(often - 1000).max() < 150  # five standard deviations
    assert 4250 < flips.sum() < 4750
    # left, top and flip are independent draws: flipped images are spread over the same places
    flipped = np.unique(boxes[flips, :2], axis=0, return_counts=True)[1]
    assert np.abs(flipped - flips.sum() / 9).max() < 110


def test_a_wide_image_is_cut_along_its_length():
    geometry = Geometry(size=16, resize=20, pad=0, flip=False, fill="zero")
    count = 4_000
    widths, heights = np.full(count, 30, np.int32), np.full(count, 20, np.int32)
    boxes, _ = training_boxes(geometry, STREAM, 0, np.arange(count), widths, heights)
    assert set(boxes[:, 0]) == set(range(15))
    assert set(boxes[:, 1]) == set(range(5))


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True), st.integers(0, 100), st.data())
@quick
def test_the_draws_of_a_sample_do_not_depend_on_its_batch(ids, epoch, data):
    geometry = Geometry(size=24, resize=None, pad=4, flip=True, fill="zero")
    ids = np.array(ids)
    widths, heights = (32 + ids % 9).astype(np.int32), (32 + ids % 7).astype(np.int32)
    boxes, flips = training_boxes(geometry, STREAM, epoch, ids, widths, heights)
    part = np.array(data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10)))
    again, flips_again = training_boxes(geometry, STREAM, epoch, ids[part], widths[part], heights[part])
    assert again.tolist() == boxes[part].tolist()
    assert flips_again.tolist() == flips[part].tolist()


@pytest.mark.parametrize(("stream", "epoch"), [(STREAM, 1), (derive_stream(1, "standard"), 0)])
def test_another_epoch_or_stream_draws_anew(stream, epoch):
    geometry = Geometry(size=8, resize=None, pad=3, flip=True, fill="zero")
    widths = np.full(200, 8, np.int32)
    first = training_boxes(geometry, STREAM, 0, np.arange(200), widths, widths)
    other = training_boxes(geometry, stream, epoch, np.arange(200), widths, widths)
    assert 0 < (first[0][:, 0] == other[0][:, 0]).mean() < 0.4
    assert 0.3 < (first[1] == other[1]).mean() < 0.7


@pytest.mark.parametrize(
    ("width", "height", "side"),
    [(500, 375, 328), (256, 256, 224), (64, 128, 56), (3, 900, 3), (1, 1, 1), (2000, 1500, 1312)],
)
def test_with_resize_the_box_is_the_crop_in_stored_pixels(width, height, side):
    """Crop 224 of a shorter side resized to 256 is 7/8 of the stored shorter side, in whole pixels."""
    geometry = Geometry(size=224, resize=256, pad=0, flip=True, fill="zero")
    widths, heights = np.array([width], np.int32), np.array([height], np.int32)
    for boxes in (
        centre_boxes(geometry, widths, heights),
        training_boxes(geometry, STREAM, 0, np.array([4]), widths, heights)[0],
    ):
        assert boxes[0, 2:].tolist() == [side, side]


def test_an_image_smaller_than_the_input_is_taken_whole():
    geometry = Geometry(size=32, resize=None, pad=0, flip=False, fill="zero")
    assert centre_boxes(geometry, np.array([20], np.int32), np.array([24], np.int32)).tolist() == [[0, 2, 20, 20]]


def increasing(low, high):
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


crops = st.builds(RandomResizedCropConfig, scale=increasing(0.01, 1.0), ratio=increasing(0.2, 5.0))


@given(crops, sides, st.integers(0, 200))
@quick
def test_a_resized_crop_is_inside_the_image(config, shapes, epoch):
    widths, heights = columns(shapes)
    boxes = resized_boxes(config, STREAM, epoch, np.arange(len(shapes)), widths, heights)
    assert boxes.dtype == np.int32
    left, top, width, height = boxes.T
    assert (width >= 1).all()
    assert (height >= 1).all()
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= widths).all()
    assert (top + height <= heights).all()


@given(crops, st.integers(300, 900), st.integers(300, 900))
@quick
def test_a_resized_crop_has_an_area_and_a_shape_within_the_limits(config, width, height):
    """Up to rounding to whole pixels, unless no such crop fits: then it is as large as its shape allows."""
    widths, heights = np.full(50, width, np.int32), np.full(50, height, np.int32)
    boxes = resized_boxes(config, STREAM, 0, np.arange(50), widths, heights)
    wide, high = boxes[:, 2].astype(float), boxes[:, 3].astype(float)
    shares, shapes = wide * high / (width * height), wide / high
    slack = 1 / wide + 1 / high
    fallback = (wide == width) | (high == height)
    assert ((shares >= config.scale[0] * (1 - slack)) | fallback).all()
    assert ((shares <= config.scale[1] * (1 + slack)) | fallback).all()
    assert (shapes >= config.ratio[0] * (1 - slack)).all()
    assert (shapes <= config.ratio[1] * (1 + slack)).all()


@pytest.mark.parametrize(("width", "height"), [(500, 375), (120, 400)])
def test_resized_crops_are_distributed_as_torchvisions(width, height):
    config, count = RandomResizedCropConfig(scale=(0.08, 1.0)), 4_000
    widths, heights = np.full(count, width, np.int32), np.full(count, height, np.int32)
    boxes = resized_boxes(config, STREAM, 0, np.arange(count), widths, heights)
    torch.manual_seed(0)
    picture = torch.zeros(1, height, width)
    drawn = [RandomResizedCrop.get_params(picture, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]
    theirs = np.array([[left, top, wide, high] for top, left, high, wide in drawn])
    for column in range(4):
        levels = np.unique(theirs[:, column])
        below = [(sample[:, column, None] <= levels).mean(axis=0) for sample in (boxes, theirs)]
        assert np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(2 / count)  # Kolmogorov-Smirnov, 0.1 %


def test_an_image_into_which_no_crop_fits_is_cut_in_the_middle():
    config = RandomResizedCropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    boxes = resized_boxes(config, STREAM, 0, np.array([4]), np.array([30], np.int32), np.array([200], np.int32))
    assert boxes.tolist() == [[0, 85, 30, 30]]


def test_resized_crops_replace_the_others_in_training_only():
    plain = Geometry(size=24, resize=32, pad=0, flip=True, fill="zero")
    resized = Geometry(24, 32, 0, True, "zero", random_resized_crop=RandomResizedCropConfig(scale=(0.2, 1.0)))
    ids, widths, heights = np.arange(20), np.full(20, 60, np.int32), np.full(20, 50, np.int32)
    boxes, flips = training_boxes(resized, STREAM, 0, ids, widths, heights)
    assert len({tuple(box) for box in boxes[:, 2:].tolist()}) > 15
    assert flips.tolist() == training_boxes(plain, STREAM, 0, ids, widths, heights)[1].tolist()
    assert centre_boxes(resized, widths, heights).tolist() == centre_boxes(plain, widths, heights).tolist()


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True), st.integers(0, 100), st.data())
@quick
def test_the_resized_crop_of_a_sample_does_not_depend_on_its_batch(ids, epoch, data):
    config, ids = RandomResizedCropConfig(scale=(0.3, 0.9)), np.array(ids)
    widths, heights = (32 + ids % 9).astype(np.int32), (32 + ids % 90).astype(np.int32)
    boxes = resized_boxes(config, STREAM, epoch, ids, widths, heights)
    part = np.array(data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10)))
    again = resized_boxes(config, STREAM, epoch, ids[part], widths[part], heights[part])
    assert again.tolist() == boxes[part].tolist()


def test_golden_resized_crops():
    """The results of existing recipes depend on these values."""
    widths, heights = np.array([500, 64, 30], np.int32), np.array([375, 64, 200], np.int32)
    config, stream = RandomResizedCropConfig(scale=(0.08, 1.0)), derive_stream(7, "incv", 1, 1)
    boxes = resized_boxes(config, stream, 4, np.array([0, 1, 12345]), widths, heights)
    assert boxes.tolist() == [[13, 57, 354, 308], [9, 5, 52, 57], [0, 80, 30, 40]]
