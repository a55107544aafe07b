"""Formats the estimate as text: the assumptions, then a column for each number of GPUs."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shards.errors import ConfigError, InputError
from trainer.config.fitting import count_trained, resolve_batch
from trainer.config.schema import Recipe
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import select_device
from trainer.estimate import measured
from trainer.estimate.cost import CostModel, PhaseCost
from trainer.estimate.probe import NetworkCost, count_network, probe_machine
from trainer.report.text import format_duration
from trainer.run.preflight import check_rows

_GPU_ROWS = ("GPU hours", "dollars", "all-reduce, ms per step", "memory, GB per GPU")
_SHORT_PROBE_SECONDS = 0.3
_SHORT_PROBE_FLOPS = 1e11  # of a step; one or two seconds on a CPU with few cores
_CLASSES = 1000  # used if unknown; it affects only the last layer, a small part of a network


@dataclass(frozen=True)
class SplitSize:
    samples: int
    classes: int
    origin: str
    """Where the number of samples comes from, such as `packed`."""


@dataclass(frozen=True)
class EstimateOptions:
    gpus: tuple[int, ...] = ()
    """Numbers of GPUs to estimate for; empty: `execution.world`, else the number of processes of the launcher. For
    one process on a machine without a GPU, the estimate is for its CPU."""
    price: float = measured.DOLLARS_PER_GPU_HOUR
    samples: int | None = None
    """Number of training samples to assume; None: the packed, listed or published number."""
    probe: bool = False
    """Whether to measure this machine with a few steps, instead of estimating for H200 GPUs."""
    takes_incv_over: bool = False
    """Whether the INCV stage is taken over from another run, so that this one does not pay for it."""


def estimate_text(recipe: Recipe, splits: Mapping[str, SplitSize | None], options: EstimateOptions) -> str:
    """Return the estimate, or why there is none. splits: sizes of `train` and each evaluation set; None: unknown."""
    train = splits["train"]
    if options.samples is not None:
        classes = train.classes if train else recipe.data.train.classes or _CLASSES
        train = SplitSize(options.samples, classes, "from --samples")
    if recipe.execution.device == "cpu" and options.gpus:
        return "no estimate: execution.device is cpu, but --gpus asks for GPUs; leave out one of them"
    if train is None:
        return "no estimate: the number of training samples is unknown until they are packed; add --samples N"
    if options.takes_incv_over and not recipe.methods:
        return "no estimate: INCV is taken over, and no method is trained"
    if recipe.model.is_none:
        return "no estimate: no network is run, which leaves minutes"
    trained = count_trained(recipe, train.samples)
    recipe = resolve_batch(recipe, trained)
    try:
        settings = recipe.model
        network = count_network(settings.name, train.classes, recipe.image.size, settings.options, settings.trainable)
        probed = None
        if options.probe:
            probed = probe_machine(recipe, train.classes, network, select_device(recipe.execution))
        elif would_run_on_cpu(recipe, options):
            probed = _probe_cpu(recipe, train.classes, network)
    except InputError as error:
        return f"no estimate: {error}"
    evaluated = {name: size for name, size in splits.items() if name != "train"}
    known = tuple(size.samples for size in evaluated.values() if size is not None)
    known += (train.samples - trained,) if recipe.data.eval_fraction else ()
    model = CostModel(recipe, network, trained, train.classes, known, probed)
    columns, notes = [], []
    for gpus in options.gpus or (1 if probed else recipe.execution.world or detect_launch().size,):
        try:
            phases = [phase for phase in model.cost_run(gpus) if phase.stage != "incv" or not options.takes_incv_over]
        except ConfigError as error:
            notes.append(f"{_gpus(gpus)} would be refused: {error}")
            continue
        columns.append(_column(gpus, phases, options.price, probed is not None))
        notes += _advise_on_memory(recipe, gpus, phases) if probed is None else []
    where = "H200 GPUs; docs/scaling.md says what is measured and what is assumed"
    where = f"this machine ({probed.machine})" if probed else where
    lines = [f"estimate for {'what follows INCV' if options.takes_incv_over else 'the whole recipe'} on {where}"]
    lines += [f"  {premise}" for premise in _premises(model, train.origin, options.price)]
    if columns:
        lines.append("")
        lines += [f"  {row:<30}" + "".join(f"{column[row]:>14}" for column in columns) for row in columns[0]]
    unknown = [name for name, size in evaluated.items() if size is None]
    notes += [f"not counted: {name}, whose size is unknown until it is packed" for name in unknown]
    if probed is not None and not options.probe:
        notes.append("measured for a moment: --probe measures longer, and --gpus 1,8 estimates for H200 GPUs")
    return "\n".join(lines + notes)


def would_run_on_cpu(recipe: Recipe, options: EstimateOptions) -> bool:
    """Whether the run would be alone on this CPU, so that the estimate is for it and not for GPUs."""
    execution = recipe.execution
    if execution.device == "cpu":
        return True
    alone = not options.gpus and (execution.world or detect_launch().size) == 1
    return alone and execution.device == "auto" and select_device(execution).type == "cpu"


def _premises(model: CostModel, origin: str, price: float) -> list[str]:
    recipe, network, near = model.recipe, model.network, model.reference
    rates = f"scaled by FLOPs and layers from {near.name} at {near.pixels} pixels; may be off by several times"
    if (near.name, near.pixels) == (recipe.model.name, recipe.image.size):
        rates = "measured with this network"
    if recipe.precision == "fp32" and model.probed is None:
        rates += f"; fp32 takes {measured.FP32_SLOWDOWN:.2g} times as long as bf16"
    lines = [
        f"{model.samples:,} training samples ({origin}), {model.classes:,} classes",
        f"{recipe.model.name}: {network.parameters / 1e6:,.1f} M parameters, {network.step_flops / 1e9:.3g} GFLOP "
        f"per row and training step, {network.forward_flops / 1e9:.3g} per forward",
        f"rates: {rates}",
    ]
    if recipe.incv is not None:
        selected, candidates = model.expect_rounds()[-1]
        lines.append(
            f"assumed: {measured.AGREEMENT:.0%} of the labels agree in each round (noise {model.noise:.2f}): "
            f"{selected:,} selected, {candidates:,} candidates after the last round"
        )
    if model.probed is None:
        lines.append(f"assumed: {price:,.2f} dollars per GPU hour")
    return [
        *lines,
        "not counted: packing, compilation (80 s per cold start), storage, gathers, checkpoints, restarts",
    ]


def _column(gpus: int, phases: Sequence[PhaseCost], price: float, probed: bool) -> dict[str, str]:
    """Return the cells of one column (a number of GPUs, or this machine), by row name."""
    stages: dict[str, float] = defaultdict(float)
    spent: dict[str, float] = defaultdict(float)
    for phase in phases:
        for resource, seconds in phase.seconds_by.items():
            stages[phase.stage] += seconds
            spent[resource] += seconds
    total = sum(stages.values())
    gpu_hours = gpus * total / 3600
    trainings = [phase for phase in phases if phase.rows_at_once]
    passes = [phase for phase in phases if not phase.rows_at_once]
    column = {
        "": "this machine" if probed else _gpus(gpus),
        **{f"time of {stage}": format_duration(seconds) for stage, seconds in stages.items()},
        "total time": format_duration(total),
        "GPU hours": _short(gpu_hours),
        "dollars": _short(gpu_hours * price),
    }
    if trainings:  # none in an audit by features
        column["training, images/s per GPU"] = _short(max(phase.images_per_s for phase in trainings))
    column["predicting, images/s per GPU"] = _short(max((phase.images_per_s for phase in passes), default=0))
    if trainings:
        column["all-reduce, ms per step"] = _short(1e3 * max(phase.compute_s["all-reduce"] for phase in trainings))
        column["memory, GB per GPU"] = _short(max(phase.memory_bytes for phase in trainings) / 1e9)
    column["bottleneck"] = max(spent, key=lambda name: spent[name])
    return {row: cell for row, cell in column.items() if not (probed and row in _GPU_ROWS)}


def _advise_on_memory(recipe: Recipe, gpus: int, phases: Sequence[PhaseCost]) -> list[str]:
    """Suggest a batch.micro if the rows of a step do not fit in GPU memory."""
    largest = max(phases, key=lambda phase: phase.memory_bytes)
    needs = largest.memory_bytes
    if needs <= measured.GPU_BYTES:
        return []
    micro = 2 ** int(math.log2(max(largest.rows_at_once * 0.8 * measured.GPU_BYTES / needs, 1)))
    of = f"{needs / 1e9:,.0f} GB of {measured.GPU_BYTES / 1e9:,.0f}"
    advice = f"{_gpus(gpus)}: a step of {largest.stage} needs {of}: set batch.micro={micro}"
    batch = recipe.batch.model_copy(update={"micro": micro})
    try:
        check_rows(recipe.model_copy(update={"batch": batch}), gpus)
    except ConfigError as error:
        advice += f"; that setting alone would be refused: {error}"
    return [advice]


def _gpus(number: int) -> str:
    return f"{number:,} GPU{'s' if number > 1 else ''}"


def _short(number: float) -> str:
    """Format with three significant digits, or as an integer from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def estimate_cpu_seconds(recipe: Recipe, samples: int, classes: int) -> float:
    """Return about how long the training and predicting of a run take on this CPU.

    It takes a few steps.
    """
    samples = min(samples, recipe.data.train.limit or samples)
    recipe = resolve_batch(recipe, samples)
    model = recipe.model
    if recipe.incv is not None and recipe.incv.judge == "features" and not recipe.methods:
        model = model.model_copy(update={"trainable": "classifier"})  # nothing is trained: measure the forward alone
        recipe = recipe.model_copy(update={"model": model})
    cost = count_network(model.name, classes, recipe.image.size, model.options, model.trainable)
    probed = _probe_cpu(recipe, classes, cost)
    return sum(phase.seconds for phase in CostModel(recipe, cost, samples, classes, probed=probed).cost_run(1))


def _probe_cpu(recipe: Recipe, classes: int, cost: NetworkCost) -> measured.MeasuredNetwork:
    """Measure this CPU with a few steps, which change neither the random state nor the number of threads."""
    threads, rows = torch.get_num_threads(), max(2, int(_SHORT_PROBE_FLOPS / cost.step_flops))
    torch.set_num_threads(recipe.execution.threads or threads)
    try:
        with torch.random.fork_rng(devices=[]):
            return probe_machine(recipe, classes, cost, torch.device("cpu"), _SHORT_PROBE_SECONDS, rows)
    finally:
        torch.set_num_threads(threads)


def describe_time(seconds: float) -> str:
    """Return the time in words, no more exact than the estimate: `about 12 minutes`."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return "less than a minute"
    if minutes >= 90:
        return f"about {round(seconds / 3600)} hours"
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"
