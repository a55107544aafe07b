"""Every figure an estimate rests on: measured, nominal or assumed. New measurements go here and nowhere else."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """Of training steps at two numbers of rows: a step takes `fixed_s + rows * row_s`."""

    rows: tuple[int, int]
    images_a_second: tuple[float, float]

    @property
    def row_s(self) -> float:
        few, many = (rows / rate for rows, rate in zip(self.rows, self.images_a_second, strict=True))
        return (many - few) / (self.rows[1] - self.rows[0])

    @property
    def fixed_s(self) -> float:
        """What a step takes however few its rows: kernels too small to fill the chip, and the optimiser."""
        return self.rows[0] / self.images_a_second[0] - self.rows[0] * self.row_s


@dataclass(frozen=True)
class MeasuredStep:
    """Training of one network on one H200, bf16, data already on the GPU, the whole step in one CUDA graph."""

    network: str
    pixels: int
    written: Rates
    """Of the network as it is written."""
    compiled: Rates
    """Of the network compiled by block."""
    step_flops: float
    """Of one row, forward and backward; counted as in network.py, held by a test."""
    layers: int
    """Convolutions and linear layers; counted likewise."""


# --- measured on one H200 -----------------------------------------------------------------------------------

# 50 classes.
INCEPTION = MeasuredStep(
    "inception_resnet_v2",
    227,
    written=Rates((128, 512), (2_345, 2_997)),
    compiled=Rates((128, 512), (3_678, 4_745)),
    step_flops=39.61e9,
    layers=245,
)
# 10 classes, one run alone on the GPU. Compiled, 128 rows alone were measured; 1,024 are assumed to gain as much.
RESNET32 = MeasuredStep(
    "cifar_resnet32",
    32,
    written=Rates((128, 1024), (34_000, 74_000)),
    compiled=Rates((128, 1024), (47_814, 74_000 * 47_814 / 34_000)),
    step_flops=0.4139e9,
    layers=34,
)
MEASURED = (INCEPTION, RESNET32)

# Co-teaching one_pass, compiled, two networks on two streams: images/s, each image through both.
PAIR_ROWS, PAIR_IMAGES_A_SECOND = 128, 2_159
# The rows of a pair cost twice those of one network; its fixed parts overlap, and this is what is left of them.
PAIR_FIXED = (
    PAIR_ROWS / PAIR_IMAGES_A_SECOND - 2 * PAIR_ROWS * INCEPTION.compiled.row_s
) / INCEPTION.compiled.fixed_s

# ResNet-32 as written, two trainings side by side on one GPU against one alone: 52,000 and 35,000 images/s. So two
# take this share of the time they take in turn; compiled ones are assumed to gain as much.
SIDE_BY_SIDE = 35_000 / 52_000

# A forward alone against a third of a step, both as written or both compiled: 8,757 and 15,887 images/s through
# Inception-ResNet-v2, 512 rows.
FORWARD_EFFICIENCY, COMPILED_FORWARD_EFFICIENCY = 0.97, 1.12

# Eager, batch 128: 1,217 images/s in bf16 and channels last, 541 in fp32.
FP32_SLOWDOWN = 1_217 / 541

# DALI, images/s a GPU, JPEGs of 110 KB; by image.chroma. Packed images are smaller and decode no slower.
DECODED_BY_GPU = {"fast": 19_100.0, "smooth": 17_500.0}
# PIL in 16 worker processes decoded 2,722 images/s.
DECODED_BY_WORKER = 2_722 / 16

# Seconds a sample to bring a pass's predictions together: 2.4 million of them on two CPU ranks took 0.34 s.
GATHERED_S = 0.34 / 2.4e6

PACKED_BYTES = 30_000  # a JPEG with a shorter side of 256; read from the index where the shards are there
GPU_BYTES = 139 * GIB

# --- nominal figures of the vendor, times an assumed share that is reached ------------------------------------

GPUS_A_NODE = 8
NVLINK = 450e9 * 0.7  # bytes/s a GPU and direction (NVLink 4: 900 GB/s in both), inside a node
# A node with a 400 Gbit/s adapter a GPU (NDR): a ring uses all eight, 400 GB/s a node and direction. A quarter,
# since gradients are a few hundred MB and few clusters reach the nominal rate with so little.
NETWORK = GPUS_A_NODE * 400e9 / 8 * 0.25
STORAGE = 7e9 * 4 * 0.5 / GPUS_A_NODE  # bytes/s a GPU: four NVMe drives of 7 GB/s a node, or its page cache

# --- assumed --------------------------------------------------------------------------------------------------

HOP_S = 10e-6  # seconds a small message takes from GPU to GPU; a collective has 2 log2(GPUs) of them
GATHER_HOP_S = 100e-6  # the same between CPUs, where a gather goes round all ranks
AGREEMENT = 0.6  # share of the held-out labels that the networks of every round agree with
GPU_HOUR = 4.0  # US dollars; prices differ several times over, so give your own

# Training and validation images by source, split and subset: all classes, and how many these are.
PUBLISHED = {
    ("webvision", "train", "google"): (980_000, 1000),
    ("webvision", "train", "flickr"): (1_460_000, 1000),
    ("webvision", "train", "all"): (2_440_000, 1000),
    ("webvision", "val", "all"): (50_000, 1000),
    ("ilsvrc12", "val", "all"): (50_000, 1000),
    ("cifar10", "train", "all"): (50_000, 10),
    ("cifar10", "test", "all"): (10_000, 10),
}
# Classes differ in size: the first 50 of WebVision's Google images hold more than a twentieth of them.
PUBLISHED_PARTS = {("webvision", "train", "google", 50): 66_000}
