"""AutoAugment, RandAugment and colour jitter: drawn for the row alone, as torchvision draws them."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, v2

from trainer.config.augmentation import ColorJitterConfig, RandAugmentConfig
from trainer.config.schema import ImageConfig
from trainer.loading.augment import Geometry, draw_rows, join_draws
from trainer.loading.augmentations import (
    NO_AUGMENTATIONS,
    POLICIES,
    RAND_AUGMENT,
    build_augmentations,
    draw_auto_augment,
    draw_jitter,
    draw_rand_augment,
    strengths_at,
)
from trainer.loading.operations import OPERATIONS
from trainer.loading.sample_order import derive_stream, draw_uniforms

NAMES = list(OPERATIONS)
STREAM = derive_stream(0, "standard")
JITTER = ColorJitterConfig(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1)
GEOMETRY = Geometry(size=8, resize=None, pad=2, flip=True, fill="zero", cutout=3)
# Our names of the operations, and torchvision's.
TORCHVISIONS = {name: name.title().replace("_", "") for name in NAMES} | {
    "saturation": "Color",
    "autocontrast": "AutoContrast",
}


def augmentations_of(**image):
    return build_augmentations(ImageConfig(size=8, **image))


EVERYTHING = augmentations_of(
    auto_augment="imagenet", rand_augment=RandAugmentConfig(operations=2), color_jitter=JITTER
)


def rows_of(ids, views=0, augmentations=EVERYTHING, epoch=0, looks=None):
    sides = np.full(len(ids), 10, np.int32)
    return draw_rows(GEOMETRY, augmentations, STREAM, epoch, np.asarray(ids), views, sides, sides, looks)


def assert_same(one, other):
    for field in ("boxes", "flips", "holes", "operations", "strengths"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def uniform_of(ids, epoch=0, stream=STREAM):
    return partial(draw_uniforms, stream, epoch, np.asarray(ids))


@pytest.mark.parametrize("magnitude", [0, 1, 9, 14, 30])
def test_the_strengths_of_rand_augment_are_torchvisions(magnitude):
    codes = np.arange(len(RAND_AUGMENT), dtype=np.int8)
    space = v2.RandAugment._AUGMENTATION_SPACE
    assert {TORCHVISIONS[name] for name in RAND_AUGMENT} == set(space)
    for sign, drawn in ((-1, 0.2), (1, 0.7)):
        found = strengths_at(codes, np.float64(magnitude / 30), np.full(len(codes), drawn))
        assert found.dtype == np.float32
        for name, strength in zip(RAND_AUGMENT, found, strict=True):
            values, signed = space[TORCHVISIONS[name]]
            steps = values(31, 1, 1)
            value = 0.0 if steps is None else float(steps[magnitude]) * (sign if signed else 1)
            base = 1.0 if name in ("brightness", "saturation", "contrast", "sharpness") else 0.0
            value *= 255 if name == "solarize" else 1  # torchvision's is a share of the largest value
            assert strength == pytest.approx(base + value, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("policy", list(AutoAugmentPolicy)[:2])
def test_the_policies_are_torchvisions(policy):
    pairs = [
        tuple((name, float(chance), int(level)) for name, chance, level in (part.split() for part in line.split(",")))
        for line in POLICIES[policy.value].strip().splitlines()
    ]
    assert pairs == [
        tuple((ours_of(name), chance, level or 0) for name, chance, level in pair)
        for pair in AutoAugment(policy).policies
    ]


def ours_of(name):
    return next(own for own, other in TORCHVISIONS.items() if other == name)


@pytest.mark.parametrize("policy", ["cifar10", "imagenet"])
def test_auto_augment_draws_a_pair_its_chances_and_torchvisions_strengths(policy):
    space = AutoAugment()._augmentation_space(10, (1, 1))
    reference = AutoAugment(AutoAugmentPolicy(policy)).policies
    uniform = uniform_of(np.arange(30_000))
    codes, strengths = draw_auto_augment(policy, uniform)
    which = (uniform("policy") * len(reference)).astype(int)
    assert np.abs(np.bincount(which) - 1200).max() < 180
    for number, pair in enumerate(reference):
        rows = which == number
        for place, (name, chance, level) in enumerate(pair):
            own, applied = NAMES.index(ours_of(name)), codes[rows, place] >= 0
            assert applied.mean() == pytest.approx(chance, abs=0.075)
            assert set(codes[rows, place]) <= {own, -1}
            magnitudes, signed = space[name]
            value = 0.0 if level is None else float(magnitudes[level])
            base = 1.0 if name in ("Brightness", "Color", "Contrast", "Sharpness") else 0.0
            found = np.unique(strengths[rows, place][applied])
            expected = sorted({base - value, base + value}) if signed else [value]
            if len(found):
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        assert not strengths[codes < 0].any()


many_ids = st.lists(st.integers(0, 10**6), min_size=1, max_size=30, unique=True)


@given(many_ids, st.integers(0, 100), st.data())
@settings(max_examples=40, deadline=None)
def test_the_draws_of_a_row_do_not_depend_on_its_batch(ids, epoch, data):
    views = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids))))
    drawn = rows_of(ids, views, epoch=epoch)
    part = np.array(data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=10)))
    assert_same(rows_of(np.array(ids)[part], views[part], epoch=epoch), drawn[part])
    assert_same(join_draws([drawn[:1], drawn[1:]]), drawn)
    assert drawn.operations.shape == drawn.strengths.shape == (len(ids), 8)
    assert (drawn.operations[:, 2:4] < len(RAND_AUGMENT)).all()


def test_a_view_of_its_own_is_drawn_anew_and_view_0_is_the_plain_one():
    ids = np.arange(50)
    plain, other = rows_of(ids), rows_of(ids, 1)
    both = rows_of(np.concatenate([ids, ids]), np.repeat([0, 1], 50))
    assert_same(join_draws([plain, other]), both)
    assert (plain.strengths != other.strengths).any(axis=1).mean() > 0.9
    assert (plain.boxes != other.boxes).any(axis=1).mean() > 0.9


def test_a_weak_row_is_cropped_and_flipped_alone_and_a_centred_one_is_that_of_a_predict_pass():
    ids = np.arange(60)
    looks = np.repeat(np.array([0, 1, 2], np.int8), 20)
    plain, drawn = rows_of(ids), rows_of(ids, looks=looks)
    assert_same(drawn[:20], plain[:20])
    np.testing.assert_array_equal(drawn.boxes[:40], plain.boxes[:40])
    np.testing.assert_array_equal(drawn.flips[:40], plain.flips[:40])
    assert (drawn.operations[20:] == -1).all()
    assert not drawn.holes[20:].any()
    assert (drawn.boxes[40:] == [1, 1, 8, 8]).all()
    assert not drawn.flips[40:].any()


@given(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3), st.floats(0, 0.5), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_jitter_stays_within_its_limits(brightness, contrast, saturation, hue, sample):
    config = ColorJitterConfig(brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
    codes, strengths = draw_jitter(config, uniform_of([sample]))
    if not max(config.brightness, config.contrast, config.saturation, config.hue):
        assert not codes.size
        return
    found = {NAMES[code]: strength for code, strength in zip(codes[0], strengths[0], strict=True)}
    properties = ("brightness", "contrast", "saturation", "hue")
    assert set(found) == {name for name in properties if getattr(config, name)}
    for name, strength in found.items():
        spread = getattr(config, name)
        low, high = (-spread, spread) if name == "hue" else (max(0.0, 1 - spread), 1 + spread)
        assert np.float32(low) <= strength <= np.float32(high)


def test_jitter_draws_every_strength_and_order_about_equally_often():
    codes, strengths = draw_jitter(JITTER, uniform_of(np.arange(6_000), epoch=3))
    _, counts = np.unique(codes, axis=0, return_counts=True)
    assert len(counts) == 24
    assert np.abs(counts - 250).max() < 80  # five standard deviations
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.7, 1.3),
        ("saturation", 0.8, 1.2),
        ("hue", -0.1, 0.1),
    ):
        counts, _ = np.histogram(strengths[codes == NAMES.index(name)], bins=6, range=(low - 1e-7, high + 1e-7))
        assert counts.sum() == 6_000
        assert np.abs(counts - 1_000).max() < 150


def test_rand_augment_draws_every_operation_and_sign_about_equally_often():
    config = RandAugmentConfig(operations=2, magnitude=15)
    codes, strengths = draw_rand_augment(config, uniform_of(np.arange(7_000)))
    for place in (0, 1):
        counts = np.bincount(codes[:, place], minlength=14)
        assert counts.sum() == 7_000
        assert np.abs(counts - 500).max() < 110
        turns = strengths[codes[:, place] == NAMES.index("rotate"), place]
        assert set(turns) == {-15.0, 15.0}
        assert 0.35 < (turns > 0).mean() < 0.65
    assert 390 < (codes[:, 0] == codes[:, 1]).sum() < 610  # the two draws are independent


def test_another_epoch_or_stream_draws_anew():
    config, ids = RandAugmentConfig(operations=1), np.arange(300)
    first = draw_rand_augment(config, uniform_of(ids))
    for stream, epoch in ((STREAM, 1), (derive_stream(1, "standard"), 0)):
        other = draw_rand_augment(config, uniform_of(ids, epoch, stream))
        assert ((first[0] == other[0]) & (first[1] == other[1])).sum() < 60


def test_without_keys_nothing_is_drawn():
    for augmentations in (NO_AUGMENTATIONS, augmentations_of(rand_augment=RandAugmentConfig(magnitude=20))):
        assert augmentations.draw(STREAM, 0, np.arange(5))[0].shape == (5, 0)


def test_golden_draws():
    """The results of existing recipes depend on these values."""
    drawn = draw_rows(
        GEOMETRY,
        augmentations_of(rand_augment=RandAugmentConfig(operations=2), color_jitter=ColorJitterConfig(hue=0.5)),
        derive_stream(7, "incv", 1, 1),
        4,
        np.array([0, 12345]),
        0,
        np.full(2, 10, np.int32),
        np.full(2, 10, np.int32),
    )
    assert [[(name, round(strength, 6)) for name, strength in row] for row in drawn.names()] == GOLDEN


GOLDEN = [
    [("shear_y", 0.09), ("saturation", 1.27), ("hue", -0.175291)],
    [("identity", 0.0), ("shear_y", 0.09), ("hue", -0.25921)],
]
