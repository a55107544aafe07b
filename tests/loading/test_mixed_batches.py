"""Batches with mixup: the same from every loader, on any number of ranks."""

from dataclasses import replace

import pytest
import torch

from tests.loading.test_augmented_batches import rows_by_sample
from tests.loading.test_loaders import (
    CPU,
    LOADS,
    MEAN,
    STD,
    assert_same,
    cpu_batches,
    dali_batches,
    geometry_of,
    plan_of,
    resident_batches,
)
from tests.support.packed_pictures import with_damage
from tests.support.requests import requests_of_plan
from trainer.loading.cpu_loader import CpuLoader
from trainer.loading.epoch_plan import Mixing
from trainer.loading.pixels import Normalise
from trainer.methods.targets import mix_images

GEOMETRY = geometry_of()


def requests_of(index, rank=0, world=1, mixup=0.5):
    plan = replace(plan_of(index.usable_ids()), mixing=Mixing(mixup) if mixup else None)
    return list(requests_of_plan(plan, index, GEOMETRY, rank=rank, world=world))


def mixed(batches):
    """The batches as a Task shows them to its network."""
    for batch in batches:
        inputs = {"images": batch.images, "partners": batch.mix.partners, "shares": batch.mix.shares}
        yield replace(batch, images=mix_images(inputs))


def expected_mix(request, unmixed, row):
    partner, share = request.mix.partners[row], request.mix.shares[row]
    return share * unmixed.images[row] + (1 - share) * unmixed.images[partner]


@pytest.mark.parametrize("load", LOADS)
def test_mixup_is_the_weighted_mean_of_two_rows(equal_index, load):
    requests = requests_of(equal_index)
    plain = load(equal_index, GEOMETRY, requests_of(equal_index, mixup=0.0))
    for request, batch, unmixed in zip(requests, mixed(load(equal_index, GEOMETRY, requests)), plain, strict=True):
        own = len(request.ids)
        assert batch.ids.tolist() == unmixed.ids.tolist()
        assert torch.equal(batch.weights, unmixed.weights)
        assert unmixed.mix is None
        for row in range(own):
            torch.testing.assert_close(batch.images[row], expected_mix(request, unmixed, row))
        assert batch.ids[batch.mix.partners[:own]].tolist() == request.ids[request.mix.partners].tolist()
        assert batch.mix.shares[:own].tolist() == request.mix.shares.tolist()
        assert batch.mix.shares.dtype == torch.float32
        for row in range(own, request.rows):  # fill rows show what they repeat, mixed
            assert torch.equal(batch.images[row], batch.images[row % own])


def test_mixed_rows_are_the_same_on_any_number_of_ranks_and_from_any_loader(equal_index):
    alone = rows_by_sample(mixed(resident_batches(equal_index, GEOMETRY, requests_of(equal_index))))
    for world in (2, 3, 8):
        ranks = {}
        for rank in range(world):
            requests = requests_of(equal_index, rank, world)
            batches = resident_batches(equal_index, GEOMETRY, requests)
            for load in (cpu_batches, dali_batches):
                assert_same(batches, load(equal_index, GEOMETRY, requests))
            for batch, shown in zip(batches, mixed(batches), strict=True):
                assert len(batch.weights) == len(shown.images) == batch.request.rows  # no row for a partner
                assert len({len(batch.images) - batch.request.rows for batch in batches}) <= 2  # S, then S and C
            ranks |= rows_by_sample(replace(shown, ids=shown.ids[: len(shown.images)]) for shown in mixed(batches))
        assert ranks.keys() == alone.keys()
        assert all(torch.equal(ranks[key], image) for key, image in alone.items())


@pytest.mark.parametrize("load", LOADS)
def test_a_row_whose_partner_is_unreadable_stays_as_it_is(equal_index, tmp_path, load):
    damaged = with_damage(equal_index, tmp_path / "shards", [3, 17])
    requests = requests_of(damaged)
    plain = load(equal_index, GEOMETRY, requests_of(equal_index, mixup=0.0))
    met = 0
    for request, batch, unmixed in zip(requests, mixed(load(damaged, GEOMETRY, requests)), plain, strict=True):
        partners = request.ids[request.mix.partners]
        for row, sample in enumerate(request.ids.tolist()):
            if sample in (3, 17):
                assert batch.weights[row] == 0
            elif partners[row] in (3, 17):
                met += 1
                assert batch.mix.shares[row] == 1
                assert torch.equal(batch.images[row], unmixed.images[row])
                assert batch.weights[row] == 1
            else:
                torch.testing.assert_close(batch.images[row], expected_mix(request, unmixed, row))
    assert met


def test_an_unreadable_partner_is_reported_by_the_rank_that_has_it(equal_index, tmp_path):
    damaged = with_damage(equal_index, tmp_path / "shards", [3])
    batches = [batch for rank in range(3) for batch in cpu_batches(damaged, GEOMETRY, requests_of(damaged, rank, 3))]
    assert [sample for batch in batches for sample in batch.unreadable] == [3, 3]  # once in each epoch


def test_images_are_mixed_in_float32(equal_index):
    requests = requests_of(equal_index)
    loader = CpuLoader(equal_index, GEOMETRY, Normalise(MEAN, STD, CPU, torch.bfloat16), CPU, 2)
    rough = list(loader.batches(requests))
    loader.close()
    for one, other in zip(mixed(cpu_batches(equal_index, GEOMETRY, requests)), mixed(rough), strict=True):
        assert other.images.dtype == torch.bfloat16
        assert (one.images - other.images.float()).abs().max() < 0.02


def test_all_tensors_of_a_batch_are_handed_over(equal_index):
    """Prefetching keeps the memory of these tensors until the GPU is done with them."""
    for mixup, count in ((0.0, 3), (0.5, 5)):
        (batch, *_) = cpu_batches(equal_index, GEOMETRY, requests_of(equal_index, mixup=mixup)[:1])
        assert len(batch.tensors()) == count
