"""Cutout: a square of each training image is blanked out, the same by every loader and on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.loading.test_augmented_batches import rows_by_sample
from tests.loading.test_loaders import LOADS, cpu_batches, geometry_of, plan_of
from tests.loading.test_mixed_batches import mixed
from tests.support.requests import requests_of_plan
from trainer.config.schema import ImageConfig
from trainer.loading.augment import draw_holes
from trainer.loading.epoch_plan import Mixing
from trainer.loading.requests import predict_requests

PLAIN = geometry_of()
CUT = replace(PLAIN, cutout=5)
many_ids = st.lists(st.integers(0, 10**9), min_size=1, max_size=50, unique=True)


def requests_of(index, geometry, rank=0, world=1, mixup=0.0):
    plan = replace(plan_of(index.usable_ids()), mixing=Mixing(mixup) if mixup else None)
    return list(requests_of_plan(plan, index, geometry, rank=rank, world=world))


@settings(deadline=None)
@given(many_ids, st.integers(1, 40), st.data())
def test_a_hole_is_a_square_around_a_pixel_and_depends_on_its_sample_alone(ids, size, data):
    side = data.draw(st.integers(1, size))
    geometry = replace(geometry_of(size=size), cutout=side)
    holes = draw_holes(geometry, 7, 3, np.array(ids))
    assert holes.dtype == np.int32
    left, top, right, bottom = holes.T
    assert (right - left == side).all()
    assert (bottom - top == side).all()
    for edge in (left, top):
        assert (edge + side // 2 >= 0).all()
        assert (edge + side // 2 < size).all()
    alone = [draw_holes(geometry, 7, 3, np.array([sample]))[0] for sample in ids]
    np.testing.assert_array_equal(holes, alone)


def test_centres_are_spread_evenly():
    holes = draw_holes(replace(geometry_of(size=4), cutout=1), 7, 0, np.arange(40_000))
    counts = np.bincount(holes[:, 0] * 4 + holes[:, 1], minlength=16)
    assert counts.min() > 2300
    assert counts.max() < 2700


@pytest.mark.parametrize("load", LOADS)
def test_the_pixels_of_the_hole_are_the_mean_and_no_others_change(equal_index, load):
    requests = requests_of(equal_index, CUT)
    whole = load(equal_index, PLAIN, requests_of(equal_index, PLAIN))
    for request, batch, plain in zip(requests, load(equal_index, CUT, requests), whole, strict=True):
        for row in range(len(request.ids)):
            expected = plain.images[row].clone()
            left, top, right, bottom = (max(0, int(edge)) for edge in request.draws.holes[row])
            expected[:, top:bottom, left:right] = 0.0
            assert torch.equal(batch.images[row], expected)
        for row in range(len(request.ids), request.rows):
            assert torch.equal(batch.images[row], batch.images[row % len(request.ids)])


def test_each_of_two_mixed_images_has_its_own_hole(equal_index):
    requests = requests_of(equal_index, CUT, mixup=0.5)
    cut = cpu_batches(equal_index, CUT, requests_of(equal_index, CUT))
    for request, batch, unmixed in zip(requests, mixed(cpu_batches(equal_index, CUT, requests)), cut, strict=True):
        for row in range(len(request.ids)):
            share = request.mix.shares[row]
            expected = share * unmixed.images[row] + (1 - share) * unmixed.images[request.mix.partners[row]]
            torch.testing.assert_close(batch.images[row], expected)


def test_the_number_of_ranks_changes_no_pixel(equal_index):
    alone = rows_by_sample(cpu_batches(equal_index, CUT, requests_of(equal_index, CUT)))
    ranks = {}
    for rank in range(3):
        ranks |= rows_by_sample(cpu_batches(equal_index, CUT, requests_of(equal_index, CUT, rank, 3)))
    assert alone.keys() == ranks.keys()
    assert all(torch.equal(image, ranks[key]) for key, image in alone.items())


def test_predict_passes_have_no_holes(equal_index):
    for request in predict_requests(equal_index.usable_ids(), 8, equal_index, CUT):
        assert request.draws.holes is None


def test_a_hole_larger_than_the_image_is_refused():
    with pytest.raises(ValidationError, match=r"image\.cutout is larger than image\.size"):
        ImageConfig(size=8, cutout=9)
