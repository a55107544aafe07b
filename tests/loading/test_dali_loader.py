"""DALI against the CPU loader on photographs, and images that DALI cannot decode."""

import gc
import io
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from shards.errors import ConfigError
from shards.sample_index import SampleIndex
from shards.sources.source import RawSample
from tests.support.packed_pictures import Pictures, equal_pictures, packed, with_damage
from tests.support.requests import requests_of_plan
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.loading.augment import Geometry
from trainer.loading.cpu_loader import CpuLoader
from trainer.loading.dali_loader import DaliLoader
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.image_set import open_image_set
from trainer.loading.pixels import Normalise
from trainer.loading.requests import predict_requests
from trainer.loading.sample_order import derive_stream

CPU = torch.device("cpu")
GRAY_LEVELS = Normalise((0.0,) * 3, (1 / 255,) * 3, CPU)


def photograph(row: int) -> bytes:
    """A part of a real photograph: 4:2:0 and 4:4:4, colour and gray, sequential and progressive, many sizes."""
    image = Image.fromarray(load_sample_images().images[row % 2])
    left, top = 7 * row % 200, 5 * row % 150
    part = image.crop((left, top, left + 180 + 13 * (row % 11), top + 150 + 17 * (row % 7)))
    if row % 5 == 4:
        part = part.convert("L")
    stream = io.BytesIO()
    sampling = {} if part.mode == "L" else {"subsampling": 2 if row % 3 else 0}
    part.save(stream, "JPEG", quality=90, progressive=row % 4 == 3, **sampling)
    return stream.getvalue()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> SampleIndex:
    samples = tuple(RawSample(f"p{row}", row % 3, "jpg", photograph(row)) for row in range(30))
    source = Pictures(samples, ("a", "b", "c"))
    return packed(source, tmp_path_factory.mktemp("photographs") / "shards")


def requests_of(index, geometry, batch=8, epochs=2, candidates_from=1):
    ids = index.usable_ids()
    plan = StaticPlan(derive_stream(3, "standard"), ids[:20], batch, epochs, ids[20:], candidates_from)
    training = list(requests_of_plan(plan, index, geometry))
    return training + list(predict_requests(ids, batch, index, geometry))


def both_on(device, index, geometry, requests, scales=True):
    """The batches of the CPU loader, and DALI's on this device, in gray levels."""
    on_device = Normalise((0.0,) * 3, (1 / 255,) * 3, device)
    loaders = (
        CpuLoader(index, geometry, GRAY_LEVELS, CPU, 2),
        DaliLoader(index, geometry, on_device, device, 2, scales),
    )
    batches = tuple(list(loader.batches(requests)) for loader in loaders)
    for loader in loaders:
        loader.close()
    return batches


def both(index, geometry, requests, scales=True):
    return both_on(CPU, index, geometry, requests, scales)


@pytest.mark.parametrize(
    ("geometry", "mean", "most"),
    [
        (Geometry(75, 100, 0, True, "zero"), 0.3, 24.0),  # shrunk
        (Geometry(227, 256, 0, True, "zero"), 0.3, 24.0),  # enlarged
        (Geometry(64, None, 0, True, "zero"), 0.1, 48.0),  # cut as it is: only chroma at the rim of the box differs
    ],
)
def test_pixels_differ_from_the_cpu_loaders_by_less_than_is_visible(photographs, geometry, mean, most):
    """In gray levels of 255; the ids, the crops and the flips are the very same."""
    cpu, dali = both(photographs, geometry, requests_of(photographs, geometry), geometry.resize is not None)
    assert len(cpu) == len(dali)
    for ours, theirs in zip(cpu, dali, strict=True):
        for field in ("ids", "weights"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field))
        difference = (ours.images - theirs.images).abs()
        assert difference.mean() < mean
        assert difference.max() < most
        mirrored = (ours.images - theirs.images.flip(3)).abs()
        assert mirrored.mean() > 10 * difference.mean() + 1  # so the bound would notice a wrong flip


def test_pictures_are_channels_last_in_the_type_asked_for(photographs):
    geometry = Geometry(75, 100, 0, True, "zero")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        normalise = Normalise((0.5,) * 3, (0.5,) * 3, CPU, dtype)
        loader = DaliLoader(photographs, geometry, normalise, CPU, 2, scales=True)
        batch = next(iter(loader.batches(requests_of(photographs, geometry))))
        loader.close()
        assert batch.images.dtype == dtype
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


def undecodable(index: SampleIndex, folder, ids) -> SampleIndex:
    """Images that are what the index says they are, and no decoder takes."""
    damaged = with_damage(index, folder, [])
    crc32 = np.array(damaged.crc32)
    for sample in ids:
        with damaged.shard_path(int(damaged.shard[sample])).open("r+b") as file:
            file.seek(int(damaged.offset[sample]))
            nonsense = b"\xff\xd8\xff" + bytes(int(damaged.nbytes[sample]) - 3)
            file.write(nonsense)
            crc32[sample] = zlib.crc32(nonsense)
    return replace(damaged, crc32=crc32)


@pytest.mark.parametrize("ids", [[0], [5, 6, 29], list(range(30))])
def test_an_image_that_dali_cannot_decode_costs_no_step(photographs, tmp_path, ids):
    broken = undecodable(photographs, tmp_path / "shards", ids)
    geometry = Geometry(75, 100, 0, True, "zero")
    requests = requests_of(broken, geometry)
    cpu, dali = both(broken, geometry, requests)
    assert len(dali) == len(requests)
    for ours, theirs in zip(cpu, dali, strict=True):
        for field in ("ids", "weights"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field))
        assert ours.unreadable == theirs.unreadable
        assert (ours.images - theirs.images).abs().mean() < 0.3
    predicted = [sample for batch in dali[-4:] for sample in batch.unreadable]
    assert sorted(predicted) == ids


def test_steps_that_grow_get_a_larger_pipeline(photographs):
    """The rows of C join after the warm-up."""
    geometry = Geometry(75, 100, 0, True, "zero")
    rows = [request.rows for request in requests_of(photographs, geometry)]
    assert len(set(rows)) > 1
    cpu, dali = both(photographs, geometry, requests_of(photographs, geometry))
    assert [len(batch.ids) for batch in dali] == [len(batch.ids) for batch in cpu] == rows


def test_the_recipe_chooses_dali(photographs):
    execution = ExecutionConfig(loader="dali")
    data = open_image_set(
        photographs,
        photographs.usable_ids(),
        photographs.label.astype(np.int64),
        ImageConfig(size=75, resize=100),
        execution,
        CPU,
    )
    assert isinstance(data.loader, DaliLoader)
    assert len(list(data.loader.batches(data.predict_requests(data.ids, 16)))) == 2
    data.close()
    padded = ImageConfig(size=64, pad=4, fill="edge")
    with pytest.raises(ConfigError, match=r"dali.*image\.fill: edge"):
        open_image_set(
            photographs, photographs.usable_ids(), photographs.label.astype(np.int64), padded, execution, CPU
        )


def test_an_error_of_the_feed_reaches_the_consumer(photographs):
    """It must not be taken for an image that DALI cannot decode, which would end the data early."""
    geometry = Geometry(75, 100, 0, True, "zero")

    def broken():
        yield from requests_of(photographs, geometry)[:5]
        raise RuntimeError("can't start new thread")

    loader = DaliLoader(photographs, geometry, GRAY_LEVELS, CPU, 2, scales=True)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(loader.batches(broken()))
    loader.close()


def test_small_images_are_scaled_in_predict_passes_too(tmp_path):
    """In training the padding makes up for what they lack."""
    index = packed(equal_pictures(6, width=12, height=12, classes=2), tmp_path / "shards")
    image = ImageConfig(size=16, pad=2)
    data = open_image_set(
        index, index.usable_ids(), index.label.astype(np.int64), image, ExecutionConfig(loader="dali"), CPU
    )
    (batch,) = data.loader.batches(data.predict_requests(data.ids, 8))
    data.close()
    assert batch.images.shape == (6, 3, 16, 16)


def test_a_rank_without_rows_does_not_fall_back_to_slow_decoding(photographs, capfd):
    geometry = Geometry(75, 100, 0, True, "zero")
    plan = StaticPlan(1, photographs.usable_ids(), 9, 2)  # 30 = 9 + 9 + 9 + 3: rank 0 of 8 has none of the 3
    requests = list(requests_of_plan(plan, photographs, geometry, world=8))
    assert any(len(request.ids) > request.rows for request in requests)
    _, dali = both(photographs, geometry, requests)
    assert len(dali) == len(requests)
    assert "DALI could not decode" not in capfd.readouterr().err


def test_a_closed_loader_leaves_no_threads_behind(photographs):
    geometry = Geometry(75, 100, 0, True, "zero")

    def threads_after_a_pass() -> int:
        loader = DaliLoader(photographs, geometry, GRAY_LEVELS, CPU, 2, scales=True)
        list(loader.batches(requests_of(photographs, geometry)))
        begun = loader.batches(requests_of(photographs, geometry))
        next(begun)
        begun.close()
        loader.close()
        return len(list(Path("/proc/self/task").iterdir()))

    threads_after_a_pass()
    first = threads_after_a_pass()
    gc.disable()
    try:
        assert [threads_after_a_pass() for _ in range(3)] == [first] * 3
    finally:
        gc.enable()
