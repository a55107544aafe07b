"""Reference loaders: PyTorch's DataLoader and DALI's own reader, each used as documented.

Each yields what training needs: resized to 256, a random crop of 227, a random flip, normalised floats.
Nothing from `trainer` is imported here.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

RESIZE, SIZE = 256, 227
Pass = Callable[[], Iterator[int]]
"""Goes over all images once and yields how many each batch held."""


class JpegFiles(Dataset[torch.Tensor]):
    """torchvision's decoder and transforms (v2) over loose files."""

    def __init__(self, files: Sequence[Path]) -> None:
        from torchvision.transforms import v2

        self._files = files
        self._transform = v2.Compose(
            [
                v2.Resize(RESIZE, antialias=True),
                v2.RandomCrop(SIZE),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.5] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> torch.Tensor:
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = decode_jpeg(read_file(str(self._files[row])), mode=ImageReadMode.RGB)
        result: torch.Tensor = self._transform(image)
        return result


def torchvision_loader(files: Sequence[Path], batch: int, workers: int) -> Pass:
    loader = DataLoader(
        JpegFiles(files), batch, shuffle=True, num_workers=workers, persistent_workers=True, prefetch_factor=4
    )

    def epoch() -> Iterator[int]:
        for images in loader:
            yield len(images)

    return epoch


def plain_dali(files: Sequence[Path], batch: int, threads: int, gpu: bool, smooth: bool = False) -> Pass:
    """fn.readers.file, everything inside DALI."""
    from nvidia.dali import fn

    def read() -> object:
        return fn.readers.file(files=[str(file) for file in files], random_shuffle=True, name="reader")[0]

    return _dali(read, batch, threads, gpu, smooth)


def dali_webdataset(
    tars: Sequence[Path], indices: Sequence[Path], batch: int, threads: int, gpu: bool, shuffled_over: int = 4096
) -> Pass:
    """fn.readers.webdataset over index files that name the wanted samples only; its shuffle is a reservoir."""
    from nvidia.dali import fn

    def read() -> object:
        return fn.readers.webdataset(
            paths=[str(tar) for tar in tars],
            index_paths=[str(index) for index in indices],
            ext=["jpg"],
            random_shuffle=True,
            initial_fill=shuffled_over,
            pad_last_batch=True,
            name="reader",
        )

    return _dali(read, batch, threads, gpu)


def _dali(read: Callable[[], object], batch: int, threads: int, gpu: bool, smooth: bool = False) -> Pass:
    """Decoding on the GPU where there is one, then the transforms on the same device."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=batch, num_threads=threads, device_id=0 if gpu else None, prefetch_queue_depth=3)
    def pipeline() -> object:
        share = 0.7 if smooth else 0.9  # of the hardware decoder
        load = {"device": "mixed", "hw_decoder_load": share, "jpeg_fancy_upsampling": smooth} if gpu else {}
        images = fn.decoders.image(read(), output_type=types.RGB, **load)
        images = fn.resize(images, resize_shorter=RESIZE)
        return fn.crop_mirror_normalize(
            images,
            crop=(SIZE, SIZE),
            crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
            crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
            mirror=fn.random.coin_flip(),
            mean=[127.5] * 3,
            std=[127.5] * 3,
            dtype=types.FLOAT16 if gpu else types.FLOAT,
            output_layout="HWC",
        )

    iterator = DALIGenericIterator(
        pipeline(), ["images"], reader_name="reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
    )

    def epoch() -> Iterator[int]:
        for given in iterator:
            yield len(given[0]["images"])

    return epoch
