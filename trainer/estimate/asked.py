"""From a recipe and what is known of its data to the estimate that was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shards.errors import ConfigError, InputError
from shards.sample_index import SampleIndex
from shards.sources import Source
from trainer.config.schema import DataConfig, Recipe
from trainer.distributed.launch import detect_launch
from trainer.distributed.world import SINGLE_PROCESS
from trainer.estimate import figures
from trainer.estimate.network import network_cost
from trainer.estimate.table import estimate_text
from trainer.estimate.times import Estimate, estimate, setting_of
from trainer.estimate.work import Samples, work_of
from trainer.incv.rounds import folds_side_by_side
from trainer.loading.image_set import limit_ids
from trainer.run.preflight import check_rows

_CLASSES = 1000  # where nobody knows yet: the last layer is a small part of a network


@dataclass(frozen=True)
class Asked:
    """What the command line says of the estimate."""

    gpus: tuple[int, ...] = ()
    """Empty: the world the recipe promises, or the launcher has started."""
    price: float = figures.GPU_HOUR
    samples: int | None = None
    """Training samples; None: as many as are packed, listed or published."""


@dataclass(frozen=True)
class Counted:
    """What is known of a split before it is read."""

    samples: int
    classes: int
    origin: str
    image_bytes: float | None = None


def counted_split(config: DataConfig, index: SampleIndex | None, source: Source | None) -> Counted | None:
    """From the packed index, else the source's list, else the published size; None: nobody knows."""
    if index is not None:
        ids = limit_ids(index, config.limit)
        size = float(index.nbytes[ids].mean()) if len(ids) else None
        return Counted(len(ids), index.num_classes, "packed", size)
    if source is not None:
        return _limited(config, Counted(len(source), len(source.class_names), "in the source's list"))
    name = (config.source, config.split, config.subset or "all")
    if name not in figures.PUBLISHED:
        return None
    samples, classes = figures.PUBLISHED[name]
    if config.classes is not None and config.classes < classes:
        evenly = samples * config.classes // classes
        samples, classes = figures.PUBLISHED_PARTS.get((*name, config.classes), evenly), config.classes
    return _limited(config, Counted(samples, classes, "published size"))


def _limited(config: DataConfig, counted: Counted) -> Counted:
    return replace(counted, samples=min(counted.samples, config.limit or counted.samples))


def estimated(recipe: Recipe, splits: Mapping[str, Counted | None], asked: Asked) -> str:
    """The estimate as text, or why none is made. splits: `train`, and the evaluation sets by their names."""
    train = splits["train"]
    if asked.samples is not None:
        known = train or Counted(0, recipe.data.train.classes or _CLASSES, "")
        train = replace(known, samples=asked.samples, origin="as asked")
    if recipe.execution.device == "cpu":
        return "no estimate: execution.device is cpu, and what was measured are GPUs"
    if train is None:
        return "no estimate: how many training samples there are is known when they are packed; say --samples N"
    sizes = {name: known.samples for name, known in splits.items() if name != "train" and known is not None}
    samples = Samples(train.samples, train.classes, sizes)
    try:
        network = network_cost(recipe.model.name, train.classes, recipe.image.size, recipe.model.options)
    except InputError as error:
        return f"no estimate: {error}"
    setting = setting_of(recipe, network, train.samples, train.image_bytes)
    work, in_turn = work_of(recipe, samples), recipe.execution.folds == "in_turn"
    estimates: list[Estimate] = []
    refusals: dict[int, str] = {}
    for gpus in asked.gpus or (recipe.execution.world or detect_launch().size,):
        try:
            estimates.append(estimate(work, gpus, _halves(recipe, gpus), setting, in_turn))
        except ConfigError as error:
            refusals[gpus] = str(error)
    text = estimate_text(recipe, samples, train.origin, setting, estimates, refusals, asked.price)
    unknown = [name for name, known in splits.items() if name != "train" and known is None]
    return "\n".join([text, *(f"not counted: {name}, whose size is known when it is packed" for name in unknown)])


def _halves(recipe: Recipe, gpus: int) -> bool:
    """Whether each fold gets half of the GPUs; raises where a run on so many would be refused."""
    if gpus > recipe.batch.global_:
        raise ConfigError(f"batch.global = {recipe.batch.global_} rows leave some without any")
    check_rows(recipe, gpus)
    return gpus > 1 and folds_side_by_side(recipe.execution, replace(SINGLE_PROCESS, size=gpus))
