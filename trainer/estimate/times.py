"""How long the work of a recipe takes on so many GPUs, and what it asks of each of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.config.schema import Recipe
from trainer.estimate import figures
from trainer.estimate.network import NetworkCost
from trainer.estimate.work import Predicting, Training, Work
from trainer.loading.resident_loader import MAX_RESIDENT_BYTES
from trainer.methods.predict import WORTH_COMPILING
from trainer.methods.registry import methods_of

RESOURCES = ("arithmetic", "fixed part of steps", "all-reduce", "gather", "decoding", "storage")
_CHAIN = RESOURCES[:4]
"""One after the other; the gradients' all-reduce does not overlap with the backward. Loading overlaps with all."""


@dataclass(frozen=True)
class Speed:
    """Of one network on one GPU: a training step takes `fixed_s + rows * row_s`."""

    fixed_s: float
    row_s: float
    forward_share: float
    """Of a forward alone, in both parts."""


@dataclass(frozen=True)
class Speeds:
    """Of one network as it is written, and compiled."""

    written: Speed
    compiled: Speed
    reference: figures.MeasuredStep
    """The measured network that these were scaled from."""

    def of(self, compiled: bool) -> Speed:
        return self.compiled if compiled else self.written


def speeds_of(network: NetworkCost, pixels: int, precision: str) -> Speeds:
    """Rows scale with FLOPs, the fixed part with layers, from the measured network of the nearest picture size."""
    near = min(figures.MEASURED, key=lambda measured: abs(math.log(measured.pixels / pixels)))
    slower = figures.FP32_SLOWDOWN if precision == "fp32" else 1.0

    def scaled(rates: figures.Rates, forward_efficiency: float) -> Speed:
        return Speed(
            fixed_s=rates.fixed_s * network.layers / near.layers,
            row_s=rates.row_s * slower * network.step_flops / near.step_flops,
            forward_share=network.forward_flops / network.step_flops / forward_efficiency,
        )

    return Speeds(
        written=scaled(near.written, figures.FORWARD_EFFICIENCY),
        compiled=scaled(near.compiled, figures.COMPILED_FORWARD_EFFICIENCY),
        reference=near,
    )


@dataclass(frozen=True)
class Setting:
    """What does not change with the number of GPUs."""

    network: NetworkCost
    speeds: Speeds
    micro: int | None
    predict_batch: int
    number_bytes: int
    """Of an activation."""
    moments: int
    """Numbers the optimiser keeps for each parameter."""
    decoded: float | None
    """Images/s a GPU; None: the images stay decoded on it."""
    image_bytes: float


def setting_of(recipe: Recipe, network: NetworkCost, samples: int, image_bytes: float | None) -> Setting:
    """image_bytes: mean size of a packed image, where the shards are there."""
    sections = (recipe.incv, *(method.config(recipe) for method in methods_of(recipe)))
    adam = any(section.optimizer.kind == "adam" for section in sections if section is not None)
    loader, image = recipe.execution.loader, recipe.image
    small = image.resize is None and samples * 3 * image.size**2 <= MAX_RESIDENT_BYTES
    decoded: float | None = figures.DECODED_BY_GPU[image.chroma]
    if loader == "cpu":
        decoded = figures.DECODED_BY_WORKER * recipe.execution.workers
    elif loader == "resident" or (loader == "auto" and small):
        decoded = None
    return Setting(
        network=network,
        speeds=speeds_of(network, image.size, recipe.precision),
        micro=recipe.batch.micro,
        predict_batch=recipe.execution.predict_batch,
        number_bytes=4 if recipe.precision == "fp32" else 2,
        moments=2 if adam else 1,
        decoded=decoded,
        image_bytes=image_bytes or figures.PACKED_BYTES,
    )


def all_reduce_bytes(parameters: int, gpus: int) -> float:
    """What a ring makes each GPU send for one sum of fp32 gradients."""
    return 2 * (gpus - 1) / gpus * 4 * parameters


def all_reduce_seconds(parameters: int, gpus: int, small: int) -> float:
    """One flat sum of the gradients, and `small` sums of a few numbers a step."""
    if gpus == 1:
        return 0.0
    bandwidth = figures.NVLINK if gpus <= figures.GPUS_A_NODE else figures.NETWORK
    hops = 2 * math.log2(gpus) * (1 + small)
    return all_reduce_bytes(parameters, gpus) / bandwidth + hops * figures.HOP_S


@dataclass(frozen=True)
class Cost:
    """What one piece of work costs each GPU that takes part in it."""

    work: Work
    gpus: int
    rows: int
    """A GPU holds at once."""
    images: float
    flops: float
    chain: tuple[float, float, float, float]
    """Seconds of each of the resources that follow upon each other."""
    decoding_s: float
    storage_s: float
    sent_bytes: float = 0.0
    """A step."""
    memory_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return max(sum(self.chain), self.decoding_s, self.storage_s)

    def seconds_by_resource(self) -> dict[str, float]:
        """Who is to blame for each second: the loading, if all waits for it."""
        busy = dict.fromkeys(RESOURCES, 0.0)
        loading, name = max((self.decoding_s, "decoding"), (self.storage_s, "storage"))
        if loading > sum(self.chain):
            return busy | {name: loading}
        return busy | dict(zip(_CHAIN, self.chain, strict=True))


def training_cost(work: Training, gpus: int, setting: Setting) -> Cost:
    speed, network, pair = setting.speeds.of(work.compiled), setting.network, work.networks == 2
    rows = -(-work.rows // gpus) + -(-work.candidate_rows // gpus)
    trained = rows if gpus > 1 or not work.ranks_first else work.rows  # one GPU alone gathers the chosen rows
    forward = speed.forward_share if work.ranks_first else 0.0
    at_once = min(trained, setting.micro or trained)
    fixed = speed.fixed_s * (figures.PAIR_FIXED if pair else 1.0)
    parts, ranking_parts = -(-trained // at_once), -(-rows // at_once)
    exchange = all_reduce_seconds(network.parameters * work.networks, gpus, small=2 if pair else 1)
    chain = (
        work.steps * work.networks * speed.row_s * (trained + forward * rows),
        work.steps * fixed * (parts + forward * ranking_parts),
        work.steps * exchange,
        0.0,
    )
    held = network.parameters * work.networks * 4 * (2 + setting.moments)
    flops = network.step_flops * trained + (network.forward_flops * rows if work.ranks_first else 0.0)
    return replace(
        _loaded(work, gpus, work.steps * rows, setting),
        rows=rows,
        flops=flops * work.steps * work.networks,
        chain=chain,
        sent_bytes=all_reduce_bytes(network.parameters * work.networks, gpus),
        memory_bytes=held + at_once * work.networks * network.saved_numbers * setting.number_bytes,
    )


def predicting_cost(work: Predicting, gpus: int, setting: Setting) -> Cost:
    share = -(-work.samples // gpus)
    speed = setting.speeds.of(work.compiled and share >= WORTH_COMPILING)
    rows = min(setting.predict_batch, share)
    batches = -(-share // rows) * work.passes if share else 0
    forwards = batches * work.networks * speed.forward_share
    gather = 0.0
    if work.gathers and gpus > 1:
        gather = work.passes * (work.samples * figures.GATHERED_S + 2 * (gpus - 1) * figures.GATHER_HOP_S)
    return replace(
        _loaded(work, gpus, share * work.passes, setting),
        rows=rows,
        flops=setting.network.forward_flops * batches * rows * work.networks,
        chain=(forwards * rows * speed.row_s, forwards * speed.fixed_s, 0.0, gather),
    )


def _loaded(work: Work, gpus: int, images: float, setting: Setting) -> Cost:
    """What reading and decoding cost; images that stay on the GPU cost neither."""
    decoding = images / setting.decoded if setting.decoded else 0.0
    storage = images * setting.image_bytes / figures.STORAGE if setting.decoded else 0.0
    return Cost(work, gpus, 0, images, 0.0, (0.0, 0.0, 0.0, 0.0), decoding, storage)


@dataclass(frozen=True)
class Estimate:
    """A whole run on `gpus` GPUs."""

    gpus: int
    halves: bool
    """Whether half of the GPUs train each fold."""
    costs: tuple[Cost, ...]
    overlap: float = 1.0
    """What two folds on the same GPUs take, as a share of what they take in turn."""

    def seconds_of(self, cost: Cost) -> float:
        """Wall time; folds in turn take twice that of one."""
        return cost.seconds * self._waits(cost)

    def turns(self, cost: Cost) -> int:
        """How often a GPU does this work."""
        return 1 if self.halves else cost.work.folds

    def _waits(self, cost: Cost) -> float:
        turns = self.turns(cost)
        return turns if turns == 1 else turns * self.overlap

    def stages(self) -> dict[str, float]:
        """Seconds of each stage."""
        taken: dict[str, float] = {}
        for cost in self.costs:
            taken[cost.work.stage] = taken.get(cost.work.stage, 0.0) + self.seconds_of(cost)
        return taken

    @property
    def hours(self) -> float:
        return sum(self.stages().values()) / 3600

    def resources(self) -> dict[str, float]:
        """Share of the run's time that is spent on each resource."""
        busy = dict.fromkeys(RESOURCES, 0.0)
        for cost in self.costs:
            for name, seconds in cost.seconds_by_resource().items():
                busy[name] += seconds * self._waits(cost)
        total = sum(busy.values())
        return {name: seconds / total if total else 0.0 for name, seconds in busy.items()}

    def binds(self) -> str:
        shares = self.resources()
        return max(shares, key=lambda name: shares[name])

    def of_kind(self, kind: type[Training] | type[Predicting]) -> list[Cost]:
        return [cost for cost in self.costs if isinstance(cost.work, kind) and cost.seconds]


def estimate(work: Sequence[Work], gpus: int, halves: bool, setting: Setting, in_turn: bool = False) -> Estimate:
    """halves: whether each fold gets half of the GPUs; in_turn: whether folds on the same GPU may not overlap."""
    costs = []
    for one in work:
        own = gpus // 2 if halves and one.folds == 2 else gpus
        price = training_cost(one, own, setting) if isinstance(one, Training) else predicting_cost(one, own, setting)
        costs.append(price)
    small = gpus == 1 and setting.decoded is None  # those fill a GPU by themselves that have large images
    return Estimate(gpus, halves, tuple(costs), figures.SIDE_BY_SIDE if small and not in_turn else 1.0)
