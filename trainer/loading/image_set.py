"""`ImageSet`: the samples and labels of one packed split, with the loader that reads them."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from shards.errors import ConfigError
from shards.sample_index import SampleIndex
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.world import SINGLE_PROCESS, World
from trainer.loading.augment import Geometry
from trainer.loading.augmentations import NO_AUGMENTATIONS, Augmentations, build_augmentations
from trainer.loading.batch import Batches, BatchRequest, Loader
from trainer.loading.cpu_loader import CpuLoader
from trainer.loading.epoch_plan import EpochPlan, Schedule
from trainer.loading.pixels import Normalise
from trainer.loading.requests import predict_requests, training_requests
from trainer.loading.resident_loader import ResidentLoader, can_be_resident
from trainer.loading.sample_order import Ids, mix64


@dataclass(frozen=True)
class ImageSet:
    """The samples of one split, ready for training and predict passes."""

    index: SampleIndex
    ids: Ids
    """sample_ids of this run, ascending."""
    labels: npt.NDArray[np.int64]
    """Label of each sample, indexed by sample_id."""
    geometry: Geometry
    loader: Loader
    augmentations: Augmentations = NO_AUGMENTATIONS
    """Of training images, after the crop."""

    @property
    def classes(self) -> int:
        return self.index.num_classes

    @property
    def is_resident(self) -> bool:
        """Whether the decoded images stay on the device."""
        return isinstance(self.loader, ResidentLoader)

    def training_batches(
        self, schedule: Schedule, plans: Iterable[EpochPlan], first_step: int, world: World
    ) -> Batches:
        """Yield a batch for each step of the plans, from `first_step` of the job on."""
        requests = training_requests(
            schedule, plans, self.index, self.geometry, first_step, world.rank, world.size, self.augmentations
        )
        return self.loader.batches(requests)

    def predict_requests(self, ids: Ids, batch: int, world: World = SINGLE_PROCESS) -> list[BatchRequest]:
        return list(predict_requests(ids, batch, self.index, self.geometry, world.rank, world.size))

    def close(self) -> None:
        self.loader.close()


def open_image_set(
    index: SampleIndex,
    ids: Ids,
    labels: npt.NDArray[np.int64],
    image: ImageConfig,
    execution: ExecutionConfig,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> ImageSet:
    """Open the samples `ids` with a suitable loader. dtype: dtype of the images; window: see ShardReader."""
    geometry = build_geometry(image)
    normalise = Normalise(image.mean, image.std, device, dtype)
    kind = choose_loader(index, ids, image, execution, device)
    loader: Loader
    if kind == "resident":
        loader = ResidentLoader(index, ids, geometry, normalise, device)
    elif kind == "dali":
        from trainer.loading.dali_loader import DaliLoader  # deferred: DALI is an optional dependency

        sides = [geometry.side(index.width[ids], index.height[ids], pad) for pad in (geometry.pad, 0)]
        scales = geometry.random_resized_crop is not None or bool((np.stack(sides) != geometry.size).any())
        loader = DaliLoader(
            index, geometry, normalise, device, execution.workers, scales, window, execution.deterministic
        )
    else:
        loader = CpuLoader(index, geometry, normalise, device, execution.workers, window)
    return ImageSet(index, ids, labels, geometry, loader, build_augmentations(image))


def choose_loader(
    index: SampleIndex, ids: Ids, image: ImageConfig, execution: ExecutionConfig, device: torch.device
) -> str:
    """Return `resident`, `dali` or `cpu`. With execution.loader: auto, small sets are resident; others use DALI if
    there is a GPU and DALI is usable, else cpu."""
    check_loader(index, ids, image, execution)
    if execution.loader != "auto":
        return execution.loader
    if can_be_resident(index, ids, build_geometry(image)):
        return "resident"
    return "dali" if device.type == "cuda" and _dali_supports_padding(image) and _is_dali_installed() else "cpu"


def check_loader(index: SampleIndex, ids: Ids, image: ImageConfig, execution: ExecutionConfig) -> None:
    """Raise ConfigError if the loader named in the recipe cannot load these images."""
    if execution.loader == "resident" and not can_be_resident(index, ids, build_geometry(image)):
        raise ConfigError(
            "`execution.loader: resident` needs images of one size, no scaling (image.resize and "
            "image.random_resized_crop null), and at most 2 GiB of pixels: set execution.loader to auto or cpu"
        )
    if execution.loader == "dali" and not _dali_supports_padding(image):
        raise ConfigError(
            "execution.loader is dali, which does not support `image.fill: edge`: set execution.loader to auto, cpu "
            "or resident"
        )
    if execution.loader == "dali" and not _is_dali_installed():
        raise ConfigError("execution.loader is dali, but DALI is not installed: run pip install 'incv[dali]'")


def _dali_supports_padding(image: ImageConfig) -> bool:
    return image.pad == 0 or image.fill == "zero"


def _is_dali_installed() -> bool:
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def build_geometry(image: ImageConfig) -> Geometry:
    return Geometry(
        image.size,
        image.resize,
        image.pad,
        image.flip,
        image.fill,
        image.chroma == "smooth",
        image.random_resized_crop,
        image.cutout,
    )


def limit_ids(index: SampleIndex, limit: int | None) -> Ids:
    """Return the usable ids, or `limit` of them: spread evenly over the classes, in hash order within a class."""
    ids = index.usable_ids()
    if limit is None or limit >= len(ids):
        return ids
    scattered = ids[np.argsort(mix64(ids), kind="stable")]
    by_class = scattered[np.argsort(index.label[scattered], kind="stable")]
    first_of_class = np.searchsorted(index.label[by_class], index.label[by_class])
    rank_in_class = np.arange(len(by_class)) - first_of_class
    return np.sort(by_class[np.argsort(rank_in_class, kind="stable")][:limit])
