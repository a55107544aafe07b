"""Augmented batches: the same pixels on any number of ranks and workers; and by any loader."""

import numpy as np
import pytest
import torch

from shards.errors import ConfigError
from tests.loading.test_loaders import (
    CPU,
    LOADS,
    MEAN,
    STD,
    assert_same,
    cpu_batches,
    dali_batches,
    geometry_of,
    labels_of,
    plan_of,
    resident_batches,
)
from tests.support.packed_pictures import noise
from tests.support.requests import requests_of_plan
from trainer.config.augmentation import ColorJitterConfig, RandAugmentConfig, RandomResizedCropConfig
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.world import World
from trainer.loading import image_set as image_set_module
from trainer.loading.augment import Geometry
from trainer.loading.augmentations import NO_AUGMENTATIONS, build_augmentations
from trainer.loading.image_set import choose_loader, open_image_set
from trainer.loading.pixels import augment, crop

GPU = torch.device("cuda")
RESIZED = RandomResizedCropConfig(scale=(0.3, 1.0))
OPERATIONS = {
    "auto_augment": "cifar10",
    "rand_augment": RandAugmentConfig(operations=2),
    "color_jitter": ColorJitterConfig(hue=0.2),
}


def requests_of(index, geometry, augmentations):
    plan = plan_of(index.usable_ids())
    return list(requests_of_plan(plan, index, geometry, augmentations=augmentations))


@pytest.mark.parametrize("load", LOADS)
def test_operations_follow_the_crop(equal_index, load):
    geometry = geometry_of(pad=2)
    requests = requests_of(equal_index, geometry, build_augmentations(ImageConfig(size=8, **OPERATIONS)))
    for request, batch in zip(requests, load(equal_index, geometry, requests), strict=True):
        assert request.draws.operations.shape == (len(request.ids), 5)
        for row, sample in enumerate(request.ids):
            cut = crop(noise(int(sample), 12, 10), request.draws.boxes[row], request.draws.flips[row], 8, "zero")
            expected = (augment(cut, request.draws[row : row + 1]) / 255.0 - MEAN) / STD
            np.testing.assert_allclose(batch.images[row].numpy(), expected.transpose(2, 0, 1), atol=1e-5)


def augmented_set(index, loader="cpu", workers=2, **image):
    config = ImageConfig(size=16, mean=MEAN, std=STD, **image)
    execution = ExecutionConfig(loader=loader, workers=workers)
    return open_image_set(index, index.usable_ids(), labels_of(index), config, execution, CPU)


def batches_of(index, rank=0, world=1, **options):
    data = augmented_set(index, **options)
    plan = plan_of(index.usable_ids())
    batches = list(data.training_batches(plan.schedule, plan.plans(), 0, World(rank, world, CPU, 1)))
    data.close()
    return batches


def rows_by_sample(batches):
    """The image of each row that counts, by sample and epoch."""
    return {
        (int(sample), batch.step.epoch): image
        for batch in batches
        for sample, image in zip(batch.ids, batch.images, strict=True)
        if sample >= 0
    }


def test_neither_workers_nor_ranks_change_a_pixel(mixed_index):
    everything = {"random_resized_crop": RESIZED, **OPERATIONS}
    alone = batches_of(mixed_index, **everything)
    assert_same(alone, batches_of(mixed_index, workers=4, **everything))
    shown, ranks = rows_by_sample(alone), {}
    for rank in range(3):
        ranks |= rows_by_sample(batches_of(mixed_index, rank, 3, **everything))
    assert shown.keys() == ranks.keys()
    assert all(torch.equal(image, ranks[key]) for key, image in shown.items())
    plain = rows_by_sample(batches_of(mixed_index))
    assert sum(torch.equal(image, plain[key]) for key, image in shown.items()) < 3


def test_predict_passes_are_not_augmented(mixed_index):
    sets = augmented_set(mixed_index), augmented_set(mixed_index, random_resized_crop=RESIZED, **OPERATIONS)
    ids = mixed_index.usable_ids()
    assert_same(*(list(data.loader.batches(data.predict_requests(ids, 8))) for data in sets))


def test_dali_cuts_resized_crops_too(mixed_index):
    geometry = Geometry(16, None, 0, True, "zero", random_resized_crop=RESIZED)
    requests = requests_of(mixed_index, geometry, NO_AUGMENTATIONS)
    ours = cpu_batches(mixed_index, geometry, requests)
    theirs = dali_batches(mixed_index, geometry, requests, scales=True)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.ids, other.ids)
        # the two scale with slightly different filters, which noise shows most
        assert (one.images - other.images).abs().mean() < 0.1 * one.images.abs().mean()


@pytest.mark.parametrize(
    ("image", "without_gpu", "with_gpu"),
    [
        ({}, "resident", "resident"),
        ({"random_resized_crop": RESIZED}, "cpu", "dali"),
        (OPERATIONS, "resident", "resident"),
    ],
)
def test_auto_chooses_a_loader_that_can(equal_index, monkeypatch, image, without_gpu, with_gpu):
    monkeypatch.setattr(image_set_module, "_is_dali_installed", lambda: True)
    config, execution = ImageConfig(size=8, **image), ExecutionConfig()
    for device, expected in ((CPU, without_gpu), (GPU, with_gpu)):
        assert choose_loader(equal_index, equal_index.usable_ids(), config, execution, device) == expected


def test_the_resident_loader_refuses_resized_crops(equal_index):
    with pytest.raises(ConfigError, match=r"loader: resident.*image\.random_resized_crop.*auto or cpu"):
        augmented_set(equal_index, "resident", random_resized_crop=RESIZED)


def test_loaders_agree_bitwise_where_they_decode_alike(equal_index):
    """The resident loader augments whole batches on the device, the CPU loader image by image."""
    geometry = geometry_of(pad=2)
    requests = requests_of(equal_index, geometry, build_augmentations(ImageConfig(size=8, **OPERATIONS)))
    assert_same(*(load(equal_index, geometry, requests) for load in (cpu_batches, resident_batches)))
