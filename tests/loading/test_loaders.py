"""All loaders give the same bits in order, with short batches padded and damaged images marked.

(From lossless pictures cut as they are; test_dali_loader.py holds scaled JPEGs against each other.)
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shards.errors import ConfigError, DataError
from shards.image_check import decode_rgb
from tests.support import RECIPES
from tests.support.packed_pictures import noise, with_damage
from tests.support.requests import requests_of_plan
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.world import World
from trainer.loading.augment import Draws, Geometry
from trainer.loading.batch import BatchRequest
from trainer.loading.cpu_loader import CpuLoader
from trainer.loading.dali_loader import DaliLoader
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.image_set import limit_ids, open_image_set
from trainer.loading.pixels import Normalise
from trainer.loading.requests import predict_requests
from trainer.loading.resident_loader import ResidentLoader, can_be_resident
from trainer.loading.sample_order import derive_stream
from trainer.run.preflight import preflight_evaluation
from trainer.run.recipe import load_recipe

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
NORMALISE = Normalise(MEAN, STD, CPU)
NONE = np.empty(0, np.int64)


def geometry_of(pad=2, flip=True, fill="zero", size=8, resize=None):
    return Geometry(size, resize, pad, flip, fill)


def labels_of(index):
    return index.label.astype(np.int64)


def plan_of(ids, batch=8, epochs=2, candidates=NONE):
    return StaticPlan(derive_stream(0, "standard"), ids, batch, epochs, candidates, candidates_from=1)


def training_of(index, geometry, ids, rank=0, world=1, candidates=NONE):
    return list(requests_of_plan(plan_of(ids, candidates=candidates), index, geometry, rank=rank, world=world))


def predicting_of(index, geometry, ids, batch=8):
    return list(predict_requests(ids, batch, index, geometry))


def resident_batches(index, geometry, requests, ids=None):
    """Batches made one by one; those made several at once, in groups of any size, are bit for bit the same."""
    ids, image = index.usable_ids() if ids is None else ids, geometry.size**2 * 3 * 4
    found = []
    for rows_at_once in (0, 20, 1000):
        loader = ResidentLoader(index, ids, geometry, NORMALISE, CPU, rows_at_once * image)
        found.append(list(loader.batches(requests)))
        loader.close()
    alone, *grouped = found
    for batches in grouped:
        assert_same(alone, batches)
    return alone


def cpu_batches(index, geometry, requests, workers=2):
    loader = CpuLoader(index, geometry, NORMALISE, CPU, workers)
    batches = list(loader.batches(requests))
    loader.close()
    return batches


def dali_batches(index, geometry, requests, workers=2, scales=False):
    loader = DaliLoader(index, geometry, NORMALISE, CPU, workers, scales)
    batches = list(loader.batches(requests))
    loader.close()
    return batches


LOADS = [resident_batches, cpu_batches, dali_batches]


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        for field in ("ids", "images", "weights"):
            ours, theirs = getattr(batch, field), getattr(other, field)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), field
        assert batch.unreadable == other.unreadable
        assert all(torch.equal(*pair) for pair in zip(batch.tensors(), other.tensors(), strict=True))


def unreadable_in(batches):
    return [sample for batch in batches for sample in batch.unreadable]


def shown(pixels, box, flip, fill):
    """One normalised input, the slow way: float64 [3, size, size]."""
    ctx = ((20, 20), (20, 20), (0, 0))
    padded = np.pad(pixels, ctx, mode="edge" if fill == "edge" else "constant")
    left, top, width, height = box
    piece = padded[top + 20 : top + 20 + height, left + 20 : left + 20 + width]
    piece = piece[:, ::-1] if flip else piece
    return ((piece / 255.0 - MEAN) / STD).transpose(2, 0, 1)


@pytest.mark.parametrize("fill", ["zero", "edge"])
@pytest.mark.parametrize(("pad", "flip"), [(0, False), (2, True), (3, False)])
def test_all_loaders_give_the_same_bits(equal_index, fill, pad, flip):
    geometry = geometry_of(pad, flip, fill)
    ids = equal_index.usable_ids()
    requests = training_of(equal_index, geometry, ids[:29], candidates=ids[29:]) + predicting_of(
        equal_index, geometry, ids
    )
    resident = resident_batches(equal_index, geometry, requests)
    assert_same(resident, cpu_batches(equal_index, geometry, requests))
    if fill == "zero" or pad == 0:  # DALI cannot pad with edges
        assert_same(resident, dali_batches(equal_index, geometry, requests))
    for request, batch in zip(requests, resident, strict=True):
        n = len(request.ids)
        assert batch.images.shape == (request.rows, 3, 8, 8)
        assert batch.images.dtype == torch.float32
        assert batch.ids.tolist() == request.ids.tolist() + [-1] * (request.rows - n)
        assert batch.weights.tolist() == [1.0] * n + [0.0] * (request.rows - n)
        for row, sample in enumerate(request.ids):
            expected = shown(noise(int(sample), 12, 10), request.draws.boxes[row], request.draws.flips[row], fill)
            np.testing.assert_allclose(batch.images[row].numpy(), expected, atol=1e-5)


def test_the_epoch_shows_both_mirrored_and_plain_images(equal_index):
    flips = np.concatenate(
        [request.draws.flips for request in training_of(equal_index, geometry_of(), np.arange(37))]
    )
    assert 0 < flips.sum() < len(flips)


@pytest.mark.parametrize("world", [2, 3])
def test_all_loaders_agree_on_every_rank(equal_index, world):
    geometry, ids = geometry_of(), equal_index.usable_ids()
    for rank in range(world):
        requests = training_of(equal_index, geometry, ids, rank, world)
        resident = resident_batches(equal_index, geometry, requests)
        assert_same(resident, cpu_batches(equal_index, geometry, requests))
        assert_same(resident, dali_batches(equal_index, geometry, requests))


@pytest.mark.parametrize("resize", [None, 20])
def test_the_number_of_workers_changes_nothing(mixed_index, resize):
    geometry, ids = geometry_of(pad=0, size=16, resize=resize), mixed_index.usable_ids()
    requests = training_of(mixed_index, geometry, ids) + predicting_of(mixed_index, geometry, ids, batch=7)
    one, two, four = (cpu_batches(mixed_index, geometry, requests, workers) for workers in (1, 2, 4))
    assert_same(one, two)
    assert_same(one, four)
    for request, batch in zip(requests, one, strict=True):
        assert batch.ids[: len(request.ids)].tolist() == request.ids.tolist()  # the order of the requests is kept
        assert batch.unreadable == []
        assert bool(torch.isfinite(batch.images).all())
    assert len({batch.images[0].sum().item() for batch in one}) > 5  # they do show different images


def test_a_sample_looks_the_same_in_any_batch(mixed_index):
    geometry, ids = geometry_of(pad=0, size=16, resize=20), mixed_index.usable_ids()
    by_id = {}
    for batch_size in (7, 40):
        for batch in cpu_batches(mixed_index, geometry, predicting_of(mixed_index, geometry, ids, batch_size)):
            for row, sample in enumerate(batch.ids.tolist()):
                if sample >= 0:
                    by_id.setdefault(sample, []).append(batch.images[row])
    assert sorted(by_id) == ids.tolist()
    assert all(torch.equal(first, second) for first, second in by_id.values())


def test_training_fills_with_its_own_rows_at_weight_0(equal_index):
    geometry = geometry_of()
    requests = training_of(equal_index, geometry, np.arange(19))  # 8 + 8 + 3
    short = resident_batches(equal_index, geometry, requests)[2]
    assert short.ids.tolist() == [*requests[2].ids.tolist(), -1, -1, -1, -1, -1]
    assert short.weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    for row in range(3, 8):
        assert torch.equal(short.images[row], short.images[row % 3])
    assert not torch.equal(short.images[0], short.images[1])


def test_a_predict_pass_fills_with_zeros(equal_index):
    geometry = geometry_of()
    requests = predicting_of(equal_index, geometry, np.arange(11))
    for batches in (load(equal_index, geometry, requests) for load in LOADS):
        assert batches[1].ids.tolist() == [*requests[1].ids.tolist(), -1, -1, -1, -1, -1]
        assert batches[1].weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
        assert not batches[1].images[3:].any()
        assert batches[1].images[:3].any(dim=(1, 2, 3)).all()


def test_a_rank_without_work_shows_the_steps_images_at_weight_0(equal_index):
    geometry = geometry_of()
    whole = training_of(equal_index, geometry, np.arange(10))[1]  # two rows, dealt to ranks 1 and 3 of 4
    idle = training_of(equal_index, geometry, np.arange(10), rank=0, world=4)[1]
    for load in LOADS:
        batch = load(equal_index, geometry, [idle])[0]
        step = load(equal_index, geometry, [whole])[0]
        assert batch.ids.tolist() == [-1, -1]
        assert batch.weights.tolist() == [0, 0]
        assert torch.equal(batch.images, step.images[:2])


@pytest.fixture
def damaged(equal_index, tmp_path):
    return with_damage(equal_index, tmp_path / "shards", [3, 17])


@pytest.mark.parametrize("load", LOADS)
def test_a_damaged_image_is_returned_once_as_unreadable(damaged, load):
    geometry, ids = geometry_of(), damaged.usable_ids()
    batches = load(damaged, geometry, predicting_of(damaged, geometry, ids))
    returned = torch.cat([batch.ids[batch.ids >= 0] for batch in batches]).tolist()
    assert sorted(returned) == ids.tolist()
    assert sorted(unreadable_in(batches)) == [3, 17]
    for batch in batches:
        for row, sample in enumerate(batch.ids.tolist()):
            assert batch.weights[row] == (sample >= 0 and sample not in (3, 17))


def test_training_shows_a_readable_image_in_its_place(damaged, equal_index):
    geometry, ids = geometry_of(), damaged.usable_ids()
    requests = training_of(damaged, geometry, ids)
    resident = resident_batches(damaged, geometry, requests)
    assert_same(resident, cpu_batches(damaged, geometry, requests))
    assert_same(resident, dali_batches(damaged, geometry, requests))
    whole = resident_batches(equal_index, geometry, requests)
    for batch, request, undamaged in zip(resident, requests, whole, strict=True):
        lost = [row for row, sample in enumerate(request.ids.tolist()) if sample in (3, 17)]
        assert sorted(batch.unreadable) == sorted(request.ids[lost].tolist())
        readable = [row for row in range(len(request.ids)) if row not in lost]
        for row in range(request.rows):
            sources = [row] if row in readable else readable
            matches = [other for other in sources if torch.equal(batch.images[row], undamaged.images[other])]
            assert matches
            assert batch.weights[row] == (row in readable)
    per_epoch = len(requests) // 2
    for epoch in (0, 1):
        of_epoch = resident[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(unreadable_in(of_epoch)) == [3, 17]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_of_damaged_images_alone_still_comes(damaged, load, training):
    request = BatchRequest(
        ids=np.array([3, 17]),
        draws=Draws(np.array([[0, 0, 8, 8]] * 2, np.int32), np.zeros(2, bool)),
        rows=4,
        fill_with_images=training,
    )
    batch = load(damaged, geometry_of(), [request])[0]
    assert batch.unreadable == [3, 17]
    assert batch.ids.tolist() == [3, 17, -1, -1]
    assert not batch.weights.any()
    assert bool(torch.isfinite(batch.images).all())


def test_an_image_that_decodes_but_is_not_what_was_packed_is_unreadable(mixed_index, tmp_path):
    changed = with_damage(mixed_index, tmp_path / "shards", [4], at=0.9)
    with changed.shard_path(int(changed.shard[4])).open("rb") as file:
        file.seek(int(changed.offset[4]))
        data = file.read(int(changed.nbytes[4]))
    assert decode_rgb(data).shape == (changed.height[4], changed.width[4], 3)  # a JPEG takes it without a word
    geometry = geometry_of(pad=0, size=16)
    (batch,) = cpu_batches(changed, geometry, predicting_of(changed, geometry, np.arange(8)))
    assert batch.unreadable == [4]
    assert batch.weights.tolist() == [float(sample != 4) for sample in batch.ids.tolist()]


@pytest.mark.parametrize("load", LOADS)
def test_a_missing_shard_is_an_error_that_names_it(equal_index, tmp_path, load):
    broken = with_damage(equal_index, tmp_path / "shards", [])
    broken.shard_path(1).unlink()
    with pytest.raises(DataError, match=r"shard-000001\.tar.*incv shards verify"):
        load(broken, geometry_of(), predicting_of(broken, geometry_of(), np.arange(37)))


@pytest.mark.parametrize("load", LOADS)
def test_a_truncated_shard_loses_its_last_images_only(equal_index, tmp_path, load):
    store_unreachable = with_damage(equal_index, tmp_path / "shards", [])
    path = store_unreachable.shard_path(int(store_unreachable.shard[33]))
    path.write_bytes(path.read_bytes()[: int(store_unreachable.offset[33]) + 5])
    behind = [sample for sample in range(33, 37) if store_unreachable.shard[sample] == store_unreachable.shard[33]]
    batches = load(store_unreachable, geometry_of(), predicting_of(store_unreachable, geometry_of(), np.arange(37)))
    assert sorted(unreadable_in(batches)) == behind


def decoding_loader(kind, index, geometry):
    if kind == "cpu":
        return CpuLoader(index, geometry, NORMALISE, CPU, 2)
    return DaliLoader(index, geometry, NORMALISE, CPU, 2, scales=True)


@pytest.mark.parametrize("kind", ["cpu", "dali"])
def test_an_abandoned_epoch_leaves_the_loader_usable(mixed_index, kind):
    geometry = geometry_of(pad=0, size=16)
    requests = predicting_of(mixed_index, geometry, mixed_index.usable_ids(), batch=4)
    uninterrupted = decoding_loader(kind, mixed_index, geometry)
    expected = list(uninterrupted.batches(requests))
    uninterrupted.close()
    loader = decoding_loader(kind, mixed_index, geometry)
    begun = loader.batches(iter(requests))
    next(begun)
    begun.close()
    again = list(loader.batches(requests))
    loader.close()
    assert_same(again, expected)


@pytest.mark.parametrize("kind", ["cpu", "dali"])
def test_a_predict_pass_may_run_while_a_training_waits_half_way(mixed_index, kind):
    """INCV judges the held-out half at the end of an epoch, between two steps of the training."""
    geometry, ids = geometry_of(pad=0, size=16), mixed_index.usable_ids()
    training, predicting = training_of(mixed_index, geometry, ids), predicting_of(mixed_index, geometry, ids, batch=5)
    loader = decoding_loader(kind, mixed_index, geometry)
    alone = list(loader.batches(training)), list(loader.batches(predicting))
    begun = loader.batches(iter(training))
    first = [next(begun) for _ in range(3)]
    judged = list(loader.batches(predicting))
    assert_same(first + list(begun), alone[0])
    assert_same(judged, alone[1])
    loader.close()


@pytest.mark.parametrize("kind", ["cpu", "dali"])
def test_requests_are_not_all_taken_at_once(mixed_index, kind):
    """An epoch of a million steps must not be laid out before its first batch."""
    geometry, taken = geometry_of(pad=0, size=16), []

    def endless():
        while True:
            taken.append(1)
            yield from predicting_of(mixed_index, geometry, mixed_index.usable_ids()[:4], batch=4)

    loader = decoding_loader(kind, mixed_index, geometry)
    batches = loader.batches(endless())
    for _ in range(5):
        next(batches)
    batches.close()
    loader.close()
    assert len(taken) < 20


def test_which_sets_can_be_resident(equal_index, mixed_index):
    ids = equal_index.usable_ids()
    assert can_be_resident(equal_index, ids, geometry_of(size=10))
    assert not can_be_resident(equal_index, ids, geometry_of(size=11))  # would have to be scaled up
    assert not can_be_resident(equal_index, ids, geometry_of(pad=0, resize=9))
    assert not can_be_resident(mixed_index, mixed_index.usable_ids(), geometry_of())
    assert not can_be_resident(equal_index, NONE, geometry_of())


def image_set(index, loader="auto", workers=2):
    image = ImageConfig(size=8, pad=2, mean=MEAN, std=STD)
    execution = ExecutionConfig(loader=loader, workers=workers)
    return open_image_set(index, index.usable_ids(), labels_of(index), image, execution, CPU)


def test_an_image_set_trains_the_same_through_either_loader(equal_index):
    plan, world = plan_of(equal_index.usable_ids()), World(0, 1, CPU, 1)
    sets = [image_set(equal_index, loader) for loader in ("auto", "cpu")]
    assert [type(data.loader) for data in sets] == [ResidentLoader, CpuLoader]
    resident, cpu = (list(data.training_batches(plan.schedule, plan.plans(3), 3, world)) for data in sets)
    assert len(resident) == plan.total_steps - 3
    assert_same(resident, cpu)
    assert sets[0].classes == 3
    for data in sets:
        data.close()


def test_images_of_many_sizes_go_through_the_decoding_loader(mixed_index):
    data = image_set(mixed_index)
    assert isinstance(data.loader, CpuLoader)
    data.close()
    with pytest.raises(ConfigError, match=r"resident. needs images of one size"):
        image_set(mixed_index, "resident")


def test_the_loader_must_fit_the_evaluation_sets_too(equal_index, mixed_index):
    """Found at the start, not after days of training."""
    tiny = RECIPES / "tiny.yaml"
    recipe = load_recipe(tiny, ["execution.loader=resident"])
    preflight_evaluation(recipe, {"test": equal_index})
    with pytest.raises(ConfigError, match=r"resident. needs images of one size"):
        preflight_evaluation(recipe, {"test": mixed_index})


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20, 36])
def test_a_limit_is_spread_evenly_over_the_classes(equal_index, limit):
    ids = limit_ids(equal_index, limit)
    assert len(ids) == limit
    assert ids.tolist() == sorted(set(ids.tolist()))
    counts = np.bincount(equal_index.label[ids], minlength=3)
    assert counts.max() - counts.min() <= 1
    assert set(ids) <= set(limit_ids(equal_index, limit + 1))


def test_a_limit_is_no_prefix_and_none_means_all(equal_index):
    assert limit_ids(equal_index, 12).tolist() != list(range(12))
    for limit in (None, 37, 1000):
        assert limit_ids(equal_index, limit).tolist() == list(range(37))


def test_a_class_too_small_for_its_share_is_taken_whole():
    label = np.repeat([0, 1, 2], [50, 2, 30]).astype(np.int32)
    index = SimpleNamespace(usable_ids=lambda: np.arange(82), label=label)
    assert np.bincount(label[limit_ids(index, 22)]).tolist() == [10, 2, 10]
