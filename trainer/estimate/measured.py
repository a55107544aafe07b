"""The measured, nominal and assumed constants of the estimate; docs/scaling.md explains them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRates:
    """A training step with r rows takes `fixed_s + r * row_s` seconds."""

    row_s: float
    fixed_s: float
    """Seconds independent of the number of rows: kernels too small to fill the GPU, and the optimiser."""
    forward_efficiency: float
    """FLOP/s of a forward pass alone, relative to those of a training step."""


def fit_rates(rows: tuple[int, int], seconds: tuple[float, float], forward_efficiency: float = 1.0) -> StepRates:
    """Draw a line through the times of steps with few and with many rows; neither part of it becomes negative."""
    (few, many), (quick, slow) = rows, seconds
    if few == many:  # no fixed part can be told apart
        return StepRates(slow / many, 0.0, forward_efficiency)
    quick = max(min(quick, slow * 0.999), slow * few / many)  # noise of the measurement
    row_s = (slow - quick) / (many - few)
    return StepRates(row_s, slow - many * row_s, forward_efficiency)


@dataclass(frozen=True)
class MeasuredNetwork:
    """The step times of a network on one GPU: an H200, with data on the GPU and the step in one CUDA graph; or this
    machine, as probed."""

    name: str
    pixels: int
    eager: StepRates
    compiled: StepRates
    step_flops: float
    """Per row, forward and backward, as counted by `count_network`."""
    layers: int
    machine: str = "H200"
    on_gpu: bool = True


# --- measured on one H200: bf16 --------------------------------------------------------------------------------

# Forward pass alone of Inception-ResNet-v2 with 512 rows: 8,757 images/s eager, 15,887 compiled.
INCEPTION = MeasuredNetwork(
    "inception_resnet_v2",
    227,
    eager=fit_rates((128, 512), (128 / 2_345, 512 / 2_997), forward_efficiency=0.97),
    compiled=fit_rates((128, 512), (128 / 3_678, 512 / 4_745), forward_efficiency=1.12),
    step_flops=39.61e9,
    layers=245,
)
# Compiled, only 128 rows were measured; the same speed-up is assumed for 1,024 rows and for forward passes.
RESNET32 = MeasuredNetwork(
    "cifar_resnet32",
    32,
    eager=fit_rates((128, 1024), (128 / 34_000, 1024 / 74_000), forward_efficiency=0.97),
    compiled=fit_rates((128, 1024), (128 / 47_814, 1024 / 74_000 * 34_000 / 47_814), forward_efficiency=1.12),
    step_flops=0.4139e9,
    layers=34,
)
NETWORKS = (INCEPTION, RESNET32)

# Two compiled networks on two streams train at 2,159 images/s with 128 rows, each image through both. Their time per
# row is twice that of one network, but their fixed times overlap: together they take PAIR_FIXED times one network's.
PAIR_FIXED = (128 / 2_159 - 2 * 128 * INCEPTION.compiled.row_s) / INCEPTION.compiled.fixed_s
# Two trainings of ResNet-32 at once on one GPU: 52,000 images/s in total; one alone: 35,000 (eager).
FOLDS_AT_ONCE = 35_000 / 52_000
FP32_SLOWDOWN = 1_217 / 541  # images/s of bf16 and of fp32, eager, 128 rows
DALI_IMAGES_PER_S = {"fast": 19_100.0, "smooth": 17_500.0}  # per GPU, by image.chroma, for JPEGs of 110 KB
WORKER_IMAGES_PER_S = 2_722 / 16  # PIL, one of 16 worker processes
GPU_BYTES = 139 * 2**30
BYTES_PER_PARAMETER = 16  # calculated: fp32 weights, gradients and Adam's two moments; SGD has only one

# --- nominal, times an assumed efficiency --------------------------------------------------------------------

GPUS_PER_NODE = 8
NVLINK_BYTES_PER_S = 450e9 * 0.7  # per GPU and direction (NVLink 4), inside a node
# Between nodes: one 400 Gbit/s adapter per GPU. A ring uses all eight of a node; assumed efficiency: a quarter.
NETWORK_BYTES_PER_S = GPUS_PER_NODE * 400e9 / 8 * 0.25

# --- assumed --------------------------------------------------------------------------------------------------

HOP_S = 10e-6  # latency of a message between two GPUs; a collective has 2 log2(GPUs) hops
COLLECTIVES_PER_STEP = 3  # the gradient all-reduce, and up to two small ones
AGREEMENT = 0.6  # share of held-out labels that the predictions agree with in each INCV round
DOLLARS_PER_GPU_HOUR = 4.0
