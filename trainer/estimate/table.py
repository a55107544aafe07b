"""An estimate as text: what it assumes, then a column for each number of GPUs."""

from collections.abc import Callable, Mapping, Sequence

from trainer.config.schema import Recipe
from trainer.estimate import figures
from trainer.estimate.times import RESOURCES, Cost, Estimate, Setting
from trainer.estimate.work import Predicting, Samples, Training, assumed_noise, rounds_of, work_of

_LEAST_SHARE = 0.005
_LABEL, _CELL = 34, 12


def estimate_text(
    recipe: Recipe,
    samples: Samples,
    origin: str,
    setting: Setting,
    estimates: Sequence[Estimate],
    refusals: Mapping[int, str],
    price: float,
) -> str:
    """origin: where the number of samples comes from; refusals: why a number of GPUs has no estimate."""
    lines = [
        "estimate for the whole recipe on H200 GPUs; docs/scaling.md says what is measured, calculated and assumed"
    ]
    lines += [f"  {line}" for line in _premises(recipe, samples, origin, setting, price)]
    if estimates:
        lines += ["", *_table(setting, estimates, price)]
    lines += [f"{_gpus(number)} would be refused: {why}" for number, why in refusals.items()]
    lines += [warning for one in estimates for warning in _too_large(recipe, setting, one)]
    return "\n".join(lines)


def _premises(recipe: Recipe, samples: Samples, origin: str, setting: Setting, price: float) -> list[str]:
    network, near = setting.network, setting.speeds.reference
    lines = [
        f"{samples.train:,} training samples ({origin}), {samples.classes:,} classes",
        f"{recipe.model.name}: {network.parameters / 1e6:,.1f} M parameters, {_flops(network.step_flops)} a row and "
        f"training step, {_flops(network.forward_flops)} a forward",
    ]
    if (near.network, near.pixels) != (recipe.model.name, recipe.image.size):
        lines.append(
            f"not measured with this network: scaled from {near.network} at {near.pixels} pixels by FLOPs and "
            "layers, and may be wrong several times over"
        )
    if recipe.precision == "fp32":
        lines.append(f"precision: fp32 is taken to be {figures.FP32_SLOWDOWN:.2g} times slower than bf16")
    if recipe.incv is not None:
        rounds, selected, candidates = rounds_of(recipe.incv, samples)
        passes = [str(number + 1) for number, one in enumerate(rounds) if one.best]
        lines.append(
            f"assumed: every round agrees with {samples.agreement:.0%} of the labels, which estimates a noise of "
            f"{assumed_noise(recipe.incv, samples):.2f};"
        )
        lines.append(f"then {selected:,} are selected in the end and {candidates:,} stay candidates")
        if passes:
            lines.append(f"a predict pass after every epoch of round {', '.join(passes)}: incv.round_network")
    lines.append(f"assumed: {price:,.2f} dollars a GPU hour")
    trainings = [one for one in work_of(recipe, samples) if isinstance(one, Training)]
    as_written = dict.fromkeys(one.stage for one in trainings if not one.compiled)
    if as_written:
        lines.append(f"not compiled, which execution.compile decides: trainings of {', '.join(as_written)}")
    cold = " a cold compilation (80 seconds a start)," if any(one.compiled for one in trainings) else ""
    lines.append(f"not counted: packing,{cold} checkpoints, restarts")
    return lines


def _table(setting: Setting, estimates: Sequence[Estimate], price: float) -> list[str]:
    Cells = Callable[[Estimate], str]
    rows: dict[str, Cells] = {"": lambda one: _gpus(one.gpus), "rows a GPU: folds / others": _rows}
    for stage in estimates[0].stages():
        rows[f"time of {stage}"] = lambda one, stage=stage: _time(one.stages()[stage])  # type: ignore[misc]
    rows |= {
        "time of all": lambda one: _time(one.hours * 3600),
        "GPU hours": lambda one: _short(one.hours * one.gpus),
        "dollars": lambda one: _short(one.hours * one.gpus * price),
        "PFLOP a GPU": lambda one: _short(sum(cost.flops * one.turns(cost) for cost in one.costs) / 1e15),
        "training, images/s a GPU": lambda one: _short(_fastest(one.of_kind(Training))),
        "predicting, images/s a GPU": lambda one: _short(_fastest(one.of_kind(Predicting))),
    }
    if setting.decoded is not None:
        decoded, size = setting.decoded, setting.image_bytes
        rows |= {
            "decoder busy, at most": lambda one: f"{_fastest(one.costs) / decoded:.0%}",
            "GB read a GPU": lambda one: _short(sum(c.images * one.turns(c) for c in one.costs) * size / 1e9),
            "storage, MB/s a GPU, at most": lambda one: _short(_fastest(one.costs) * size / 1e6),
            "storage, GB/s in all, at most": lambda one: _short(_fastest(one.costs) * size * one.gpus / 1e9),
        }
    rows |= {
        "all-reduce, MB a GPU and step": lambda one: _short(_exchange(one).sent_bytes / 1e6),
        "all-reduce, ms a step": lambda one: _short(_exchange(one).chain[2] / _steps(_exchange(one)) * 1e3),
        "memory, GB a GPU": lambda one: _short(_largest(one).memory_bytes / 1e9),
    }
    for name in RESOURCES:
        if any(one.resources()[name] >= _LEAST_SHARE for one in estimates):
            rows[f"time on {name}"] = lambda one, name=name: f"{one.resources()[name]:.0%}"  # type: ignore[misc]
    rows["binds first"] = lambda one: one.binds().removesuffix(" of steps")
    return [
        f"  {label:<{_LABEL}}" + "".join(f"{cell(one):>{_CELL}}" for one in estimates) for label, cell in rows.items()
    ]


def _too_large(recipe: Recipe, setting: Setting, one: Estimate) -> list[str]:
    """What to do where a step's rows do not fit into a GPU."""
    largest = _largest(one)
    if largest.memory_bytes <= figures.GPU_BYTES:
        return []
    networks = largest.work.networks
    a_row = setting.network.saved_numbers * setting.number_bytes * networks
    held = setting.network.parameters * networks * 4 * (2 + setting.moments)
    room = int(max(figures.GPU_BYTES * 0.8 - held, a_row) / a_row)
    micro = 1 << (room.bit_length() - 1)
    assert isinstance(largest.work, Training)
    split = "" if networks == 1 or largest.work.ranks_first else f" {largest.work.stage}.rank=eval_first"
    return [
        f"{_gpus(one.gpus)}: a step of {largest.work.stage} wants {largest.memory_bytes / 1e9:,.0f} GB, more than "
        f"the {figures.GPU_BYTES / 1e9:,.0f} of a GPU: set batch.micro={micro}{split}"
    ]


def _rows(one: Estimate) -> str:
    """Of the folds, then of the largest other training."""
    folds = {cost.rows for cost in one.of_kind(Training) if cost.work.folds == 2}
    others = {cost.rows for cost in one.of_kind(Training) if cost.work.folds == 1}
    return " / ".join(str(max(rows)) for rows in (folds, others) if rows)


def _fastest(costs: Sequence[Cost]) -> float:
    """Images/s that a GPU is to be given, at most."""
    return max((cost.images / cost.seconds for cost in costs if cost.seconds), default=0.0)


def _largest(one: Estimate) -> Cost:
    return max(one.of_kind(Training), key=lambda cost: cost.memory_bytes)


def _exchange(one: Estimate) -> Cost:
    return max(one.of_kind(Training), key=lambda cost: cost.sent_bytes)


def _steps(cost: Cost) -> int:
    assert isinstance(cost.work, Training)
    return cost.work.steps


def _gpus(number: int) -> str:
    return f"{number:,} GPU{'s' if number > 1 else ''}"


def _flops(flops: float) -> str:
    return f"{flops / 1e9:,.1f} GFLOP" if flops >= 1e8 else f"{flops / 1e6:,.2f} MFLOP"


def _time(seconds: float) -> str:
    if seconds >= 360:
        return f"{_short(seconds / 3600)} h"
    return f"{_short(seconds / 60)} min" if seconds >= 60 else f"{_short(seconds)} s"


def _short(number: float) -> str:
    """Three digits, or all before the point; a figure like these knows no more."""
    if number == 0:
        return "0"
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2g}" if number < 1 else f"{number:.2f}"
