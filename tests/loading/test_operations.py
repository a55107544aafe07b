"""RandAugment and colour jitter: drawn for the sample alone, applied as torchvision applies them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from trainer.config.augmentation import ColorJitterConfig, RandAugmentConfig
from trainer.loading.operations import (
    NO_AUGMENTATION,
    RAND_AUGMENT,
    Augmentation,
    Operation,
    draw_jitter,
    draw_rand_augment,
    rand_augment_operation,
)
from trainer.loading.pixels import apply_operations
from trainer.loading.sample_order import derive_stream

STREAM = derive_stream(0, "standard")
JITTER = ColorJitterConfig(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1)
# Our names of the operations, which are those of the function that is called, and torchvision's.
TORCHVISIONS = {name: name.title().replace("_", "") for name in RAND_AUGMENT} | {
    "saturation": "Color",
    "autocontrast": "AutoContrast",
}


def picture(seed=0, height=37, width=29):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth_picture(height=37, width=29):
    """Gradients of limited range: histograms and neighbours that operations can tell apart from noise."""
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([40 + 3 * down, 200 - 4 * across, 60 + down + 2 * across], axis=2).astype(np.uint8)


def as_planes(image):
    return torch.from_numpy(image).permute(2, 0, 1).contiguous()


def magnitudes_of(name, height, width):
    values, signed = v2.RandAugment._AUGMENTATION_SPACE[TORCHVISIONS[name]]
    return values(31, height, width), signed


@pytest.mark.parametrize("name", RAND_AUGMENT)
@pytest.mark.parametrize("magnitude", [0, 1, 9, 14, 30])
def test_an_operation_of_rand_augment_is_torchvisions(name, magnitude):
    reference = v2.RandAugment()
    for image, negative in itertools.product((picture(), smooth_picture()), (False, True)):
        values, signed = magnitudes_of(name, *image.shape[:2])
        value = 0.0 if values is None else float(values[magnitude])
        expected = reference._apply_image_or_video_transform(
            as_planes(image), TORCHVISIONS[name], -value if signed and negative else value, "nearest", {}
        )
        ours = apply_operations(image, (rand_augment_operation(name, magnitude, negative),))
        assert ours.dtype == np.uint8
        different = as_planes(ours).int() - expected.int()
        # torchvision holds the magnitudes in float32: a value may round to the neighbouring grey level
        assert different.abs().max() <= (1 if name in ("brightness", "saturation", "contrast", "sharpness") else 0)


def test_rand_augment_has_all_operations_of_torchvision():
    assert set(TORCHVISIONS.values()) == set(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_jitter_is_torchvisions(order):
    names, strengths = ("brightness", "contrast", "saturation", "hue"), (1.3, 0.8, 1.1, -0.07)
    params = {f"{name}_factor": strength for name, strength in zip(names, strengths, strict=True)}
    expected = v2.ColorJitter(0.4, 0.3, 0.2, 0.1).transform(as_planes(picture()), {"fn_idx": order, **params})
    ours = apply_operations(picture(), tuple(Operation(names[which], strengths[which]) for which in order))
    assert torch.equal(as_planes(ours), expected)


def test_the_order_of_operations_matters_and_is_kept():
    bright, few = Operation("brightness", 1.8), Operation("posterize", 2)
    one, other = (apply_operations(picture(), pair) for pair in ((bright, few), (few, bright)))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, apply_operations(apply_operations(picture(), (bright,)), (few,)))


def test_no_operation_leaves_the_very_image():
    image = picture()[:, ::-1]  # a flipped view
    assert apply_operations(image, ()) is image
    assert np.array_equal(apply_operations(image, (Operation("identity", 0.0),)), image)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30, unique=True), st.integers(0, 100), st.data())
@settings(max_examples=40, deadline=None)
def test_the_draws_of_a_sample_do_not_depend_on_its_batch(ids, epoch, data):
    augmentation = Augmentation(RandAugmentConfig(operations=2), JITTER)
    drawn = augmentation.draw(STREAM, epoch, np.array(ids))
    part = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10))
    assert augmentation.draw(STREAM, epoch, np.array(ids)[part]) == [drawn[row] for row in part]
    assert all(len(operations) == 6 for operations in drawn)
    assert all(one.name in RAND_AUGMENT for operations in drawn for one in operations[:2])


@given(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3), st.floats(0, 0.5), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_jitter_stays_within_its_limits(brightness, contrast, saturation, hue, sample):
    config = ColorJitterConfig(brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
    if not config.is_on:
        return
    (operations,) = draw_jitter(config, STREAM, 0, np.array([sample]))
    strengths = {one.name: one.strength for one in operations}
    assert set(strengths) == {
        name for name in ("brightness", "contrast", "saturation", "hue") if getattr(config, name)
    }
    for name, strength in strengths.items():
        spread = getattr(config, name)
        low, high = (-spread, spread) if name == "hue" else (max(0.0, 1 - spread), 1 + spread)
        assert low <= strength <= high


def test_jitter_draws_every_strength_and_order_about_equally_often():
    drawn = draw_jitter(JITTER, STREAM, 3, np.arange(6_000))
    orders = {}
    for operations in drawn:
        names = tuple(one.name for one in operations)
        orders[names] = orders.get(names, 0) + 1
    assert len(orders) == 24
    assert max(abs(count - 250) for count in orders.values()) < 80  # five standard deviations
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.7, 1.3),
        ("saturation", 0.8, 1.2),
        ("hue", -0.1, 0.1),
    ):
        values = [one.strength for operations in drawn for one in operations if one.name == name]
        counts, _ = np.histogram(values, bins=6, range=(low, high))
        assert counts.sum() == 6_000
        assert np.abs(counts - 1_000).max() < 150


def test_rand_augment_draws_every_operation_and_sign_about_equally_often():
    drawn = draw_rand_augment(RandAugmentConfig(operations=2, magnitude=15), STREAM, 0, np.arange(7_000))
    for place in (0, 1):
        names = [operations[place].name for operations in drawn]
        counts = np.array([names.count(name) for name in RAND_AUGMENT])
        assert counts.sum() == 7_000
        assert np.abs(counts - 500).max() < 110
        turns = np.array([operations[place].strength for operations in drawn if operations[place].name == "rotate"])
        assert set(turns) == {-15.0, 15.0}
        assert 0.35 < (turns > 0).mean() < 0.65
    same = sum(operations[0].name == operations[1].name for operations in drawn)
    assert 390 < same < 610  # the two draws are independent


def test_another_epoch_or_stream_draws_anew():
    config, ids = RandAugmentConfig(operations=1), np.arange(300)
    first = draw_rand_augment(config, STREAM, 0, ids)
    for stream, epoch in ((STREAM, 1), (derive_stream(1, "standard"), 0)):
        other = draw_rand_augment(config, stream, epoch, ids)
        assert sum(one == two for one, two in zip(first, other, strict=True)) < 60


def test_without_keys_nothing_is_drawn():
    assert NO_AUGMENTATION.draw(STREAM, 0, np.arange(5)) == []
    assert Augmentation(RandAugmentConfig(magnitude=20), ColorJitterConfig()).draw(STREAM, 0, np.arange(5)) == []


def test_golden_draws():
    """The results of existing recipes depend on these values."""
    augmentation = Augmentation(RandAugmentConfig(operations=2), ColorJitterConfig(hue=0.5))
    drawn = augmentation.draw(derive_stream(7, "incv", 1, 1), 4, np.array([0, 12345]))
    found = [[(one.name, round(one.strength, 9)) for one in operations] for operations in drawn]
    assert found == GOLDEN


GOLDEN = [
    [("shear_y", 0.09), ("saturation", 1.27), ("hue", -0.175291156)],
    [("identity", 0.0), ("shear_y", 0.09), ("hue", -0.259209796)],
]
