"""DALI on a GPU against the CPU loader. `make test-gpu` runs these on a machine that has one."""

import numpy as np
import pytest
import torch

from tests.loading.test_dali_loader import both_on, photographs, requests_of, undecodable  # noqa: F401
from tests.support.packed_pictures import with_damage
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.loading.augment import Geometry
from trainer.loading.dali_loader import DaliLoader
from trainer.loading.image_set import open_image_set
from trainer.loading.pixels import Normalise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("smooth", "mean", "most"),
    [(True, 0.5, 40), (False, 4.0, 128)],  # repeated chroma shows at sharp edges of colour
)
@pytest.mark.parametrize(("size", "resize"), [(75, 100), (227, 256), (64, None)])
def test_pixels_are_those_of_the_cpu_loader(photographs, size, resize, smooth, mean, most):  # noqa: F811
    """Gray levels of 255, mean over a batch and the worst single one."""
    geometry = Geometry(size, resize, 0, True, "zero", smooth)
    cpu, gpu = both_on(GPU, photographs, geometry, requests_of(photographs, geometry), resize is not None)
    for ours, theirs in zip(cpu, gpu, strict=True):
        assert theirs.images.device.type == "cuda"
        for field in ("ids", "weights"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field).cpu())
        difference = (ours.images - theirs.images.cpu()).abs()
        assert difference.mean() < mean
        assert difference.max() < most
        assert (ours.images - theirs.images.cpu().flip(3)).abs().mean() > 3 * difference.mean() + 1


def test_a_pass_gives_the_same_bits_again(photographs):  # noqa: F811
    geometry = Geometry(75, 100, 0, True, "zero")
    requests = requests_of(photographs, geometry)
    _, first = both_on(GPU, photographs, geometry, requests)
    _, again = both_on(GPU, photographs, geometry, requests)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.images, other.images)


@pytest.mark.parametrize("ids", [[5, 6, 29], list(range(30))])
def test_broken_images_cost_no_step(photographs, tmp_path, ids):  # noqa: F811
    geometry = Geometry(75, 100, 0, True, "zero")
    for broken in (
        undecodable(photographs, tmp_path / "undecodable", ids),
        with_damage(photographs, tmp_path / "changed", ids),
    ):
        cpu, gpu = both_on(GPU, broken, geometry, requests_of(broken, geometry))
        assert len(gpu) == len(cpu)
        for ours, theirs in zip(cpu, gpu, strict=True):
            assert torch.equal(ours.weights, theirs.weights.cpu())
            assert ours.unreadable == theirs.unreadable
        assert sorted(sample for batch in gpu[-4:] for sample in batch.unreadable) == ids


def test_batches_are_ready_on_the_stream_that_uses_them(photographs):  # noqa: F811
    """A consumer that lags behind on a stream of its own never sees a half-written or reused batch."""
    geometry = Geometry(75, 100, 0, True, "zero")
    requests = requests_of(photographs, geometry, batch=4, epochs=6)
    loader = DaliLoader(photographs, geometry, Normalise((0.0,) * 3, (1 / 255,) * 3, GPU), GPU, 2, scales=True)
    expected = [batch.images.cpu().double().sum().item() for batch in loader.batches(requests)]
    slow = torch.cuda.Stream(GPU)
    sums = []
    with torch.cuda.stream(slow):
        for batch in loader.batches(requests):
            torch.cuda._sleep(20_000_000)
            sums.append(batch.images.double().sum())
    slow.synchronize()
    loader.close()
    assert [one.item() for one in sums] == pytest.approx(expected, abs=1e-3)


def test_auto_takes_dali_on_a_gpu(photographs):  # noqa: F811
    ids, labels = photographs.usable_ids(), photographs.label.astype(np.int64)
    image = ImageConfig(size=75, resize=100)
    data = open_image_set(photographs, ids, labels, image, ExecutionConfig(), GPU, torch.bfloat16)
    assert isinstance(data.loader, DaliLoader)
    batch = next(iter(data.loader.batches(data.predict_requests(ids, 16))))
    assert batch.images.dtype == torch.bfloat16
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    data.close()
