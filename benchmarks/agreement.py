"""Does training with CUDA graphs and bf16 reach the result of eager training in fp32? One JSON line.

    python benchmarks/agreement.py --root CIFAR10_FOLDER [--seeds 4] [--epochs 10] [--compile]
    python benchmarks/agreement.py --small                       smoke test: a few digits, no graphs

Trains the `standard` stage of recipes/cifar10_sym50.yaml in both modes, with the same images, noisy labels, network,
optimiser, order and crops, all seeds side by side in one process. `value` is the relative difference of the last
epoch's mean training losses. `details` has the losses and test accuracies of both modes by seed, and whether they
agree: losses within 1 %, accuracies of the last 3 epochs within 2 standard errors.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from our_steps import surroundings
from record import publish, record

from shards.errors import ConfigError, InputError
from shards.sample_index import SampleIndex
from trainer.acceleration.precision import image_type
from trainer.config.schema import Recipe
from trainer.distributed.devices import count_visible_gpus
from trainer.distributed.process_group import join_world
from trainer.distributed.stop import StopRequest
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.image_set import ImageSet, limit_ids, open_image_set
from trainer.loading.sample_order import build_windows, derive_stream
from trainer.methods.inputs import build_task_settings
from trainer.methods.networks import build_module, seed_rng
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.passes.sample_pass import SamplePass
from trainer.run.data_sets import open_splits
from trainer.run.evaluation import HITS, count_hits
from trainer.run.labels import make_labels
from trainer.run.recipe import load_recipe
from trainer.training.interleave import Steps, interleave, run_to_end
from trainer.training.loop import TrainingJob, iterate_training

NAME = "graphs_bf16_agree"
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
JUDGED = 3
"""Epochs, the last ones, whose test accuracies are averaged."""
LOSS_WITHIN, ERRORS_WITHIN = 0.01, 2.0


@dataclass(frozen=True)
class Way:
    """How the trainings run: what is said of it, and the keys of the recipe that make it."""

    said: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What is trained both ways."""

    recipe: Path
    keys: tuple[str, ...]
    """Data, epochs and threads."""
    seeds: range
    epochs: int
    ways: dict[str, Way]

    def recipe_of(self, way: str, seed: int) -> Recipe:
        return load_recipe(self.recipe, [*self.keys, *self.ways[way].keys, f"seed={seed}"])


@dataclass(frozen=True)
class Outcome:
    """Of one training."""

    loss: float
    """Mean over the steps of the last epoch."""
    accuracies: tuple[float, ...]
    """On the test set, after each of the last epochs."""


class JudgedTask(StandardTask):
    """Standard training whose network is tried on the test set after the last epochs."""

    def __init__(
        self,
        module: torch.nn.Module,
        setting: TaskSettings,
        first_judged: int,
        judge: Callable[[torch.nn.Module], float],
    ) -> None:
        super().__init__(module, setting)
        self._first_judged, self._judge = first_judged, judge
        self.accuracies: list[float] = []

    def after_epoch(self, epoch: int) -> list[Callable[[], None]]:
        judging = [self._judge_network] if epoch >= self._first_judged else []
        return [*super().after_epoch(epoch), *judging]

    def _judge_network(self) -> None:
        self.accuracies.append(self._judge(self.module))


class Bench:
    """The packed splits, and trainings of a plan over them."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self._plan, self._scratch = plan, scratch
        recipe = plan.recipe_of("eager_fp32", plan.seeds[0])
        self._train_index, tests = open_splits(recipe, StopRequest())
        self._test_index = tests["test"]
        self.samples = len(limit_ids(self._train_index, recipe.data.train.limit))
        self._world = join_world(recipe.execution)
        self._opened = {way: self._open(plan.recipe_of(way, plan.seeds[0])) for way in plan.ways}

    def _open(self, recipe: Recipe) -> tuple[ImageSet, ImageSet]:
        """Images of both splits as a way loads them; their pixels are decoded once for all ways and seeds."""
        config = recipe.data
        return (
            self._image_set(recipe, self._train_index, config.train.limit),
            self._image_set(recipe, self._test_index, config.eval["test"].limit),
        )

    def _image_set(self, recipe: Recipe, index: SampleIndex, limit: int | None) -> ImageSet:
        ids, labels = limit_ids(index, limit), index.label.astype(np.int64)
        device, dtype = self._world.device, image_type(recipe.precision)
        return open_image_set(index, ids, labels, recipe.image, recipe.execution, device, dtype)

    def outcomes(self, way: str) -> tuple[list[Outcome], float]:
        """All seeds, side by side; and the seconds they took."""
        began = time.monotonic()
        trainings = [self._trained(way, seed) for seed in self._plan.seeds]
        found = run_to_end(interleave(trainings, self._world.device))
        for opened in self._opened.pop(way):
            opened.close()
        return found, time.monotonic() - began

    def _trained(self, way: str, seed: int) -> Steps[Outcome]:
        """As the stage `standard` of a run does it."""
        recipe, (images, test), world = self._plan.recipe_of(way, seed), self._opened[way], self._world
        assert recipe.standard is not None
        plan = StaticPlan(
            stream=derive_stream(recipe.seed, "standard"),
            selected=images.ids,
            batch=recipe.batch.rows,
            epochs=recipe.standard.epochs,
            windows=build_windows(recipe.order, images.index.shard),
        )
        # A line of metrics an epoch: its loss is then the mean of exactly that epoch's steps.
        execution = recipe.execution.model_copy(update={"log_every": plan.steps_per_epoch})
        root = self._scratch / way / f"seed-{seed}"
        ctx = surroundings(root, world, execution)
        said = f"{self._plan.ways[way].said}, seed {seed}"

        def judge(network: torch.nn.Module) -> float:
            samples = SamplePass(lambda doing: test, recipe.precision, ctx, f"{said}: test")
            own = samples.run([network], test.ids, (HITS,), labels=test.labels, gather=False)
            counted = count_hits(world, own, 1)
            accuracy: float = counted["networks"][0]["top1"] / counted["count"]
            print(f"{said}: test accuracy {accuracy:.2%}", file=sys.stderr, flush=True)
            return accuracy

        seed_rng(plan.stream, world.rank)
        module = build_module(recipe, "standard", 1, images.classes)
        noisy = _with_noisy_labels(images, recipe)
        setting = build_task_settings(recipe, recipe.standard, plan, torch.from_numpy(noisy.labels), world)
        task = JudgedTask(module, setting, plan.epochs - JUDGED, judge)
        training = TrainingJob(said, root / "standard")
        yield from iterate_training(
            training, task, lambda plans, first: noisy.training_batches(plan.schedule, plans, first, world), ctx
        )
        return Outcome(_last_loss(training.folder / "metrics.jsonl", plan), tuple(task.accuracies))

    def close(self) -> None:
        self._world.watchdog.stop()


def _with_noisy_labels(images: ImageSet, recipe: Recipe) -> ImageSet:
    dense = np.full(len(images.index), -1, np.int64)
    dense[images.ids] = make_labels(recipe.labels, recipe.seed, images.index, images.ids)[0]
    return replace(images, labels=dense)


def _last_loss(metrics: Path, plan: StaticPlan) -> float:
    line = json.loads(metrics.read_text().splitlines()[-1])
    assert line["step"] == plan.total_steps
    loss: float = line["loss"]
    return loss


def compared(fast: Sequence[Outcome], eager: Sequence[Outcome]) -> dict[str, Any]:
    """The two ways side by side, seed by seed, and whether they agree. At least two seeds of each."""
    ways = {"graphs_bf16": fast, "eager_fp32": eager}
    losses = {way: [one.loss for one in found] for way, found in ways.items()}
    accuracies = {way: [mean(one.accuracies) for one in found] for way, found in ways.items()}
    of_seeds = [ours / theirs - 1 for ours, theirs in zip(*losses.values(), strict=True)]
    relative = mean(losses["graphs_bf16"]) / mean(losses["eager_fp32"]) - 1
    apart = [ours - theirs for ours, theirs in zip(*accuracies.values(), strict=True)]
    error = math.sqrt(sum(stdev(each) ** 2 / len(each) for each in accuracies.values()))
    loss_agrees = abs(relative) <= LOSS_WITHIN
    accuracy_agrees = abs(mean(apart)) <= ERRORS_WITHIN * error
    return {
        "loss": {way: {"mean": mean(each), "seeds": each} for way, each in losses.items()}
        | {"relative_difference": relative, "of_seeds": of_seeds, "within_1_percent": loss_agrees},
        "test_accuracy": {
            way: {"mean": mean(each), "seeds": each, "epochs": [list(one.accuracies) for one in ways[way]]}
            for way, each in accuracies.items()
        }
        | {
            "difference": mean(apart),
            "standard_error": error,
            "standard_error_paired": stdev(apart) / math.sqrt(len(apart)),
            "within_2_standard_errors": accuracy_agrees,
        },
        "agree": loss_agrees and accuracy_agrees,
    }


def line_of(plan: Plan, details: dict[str, Any], samples: int) -> dict[str, Any]:
    loss, accuracy = details["loss"], details["test_accuracy"]
    fast, eager = ("graphs_bf16", "eager_fp32")
    note = (
        f"standard stage of {plan.recipe.stem}, {samples:,} samples, {plan.epochs} epochs, {len(plan.seeds)} seeds "
        f"side by side; {plan.ways[fast].said} against {plan.ways[eager].said}: loss of the last epoch "
        f"{loss[fast]['mean']:.4f} against {loss[eager]['mean']:.4f} ({loss['relative_difference']:+.2%}); test "
        f"accuracy of the last {JUDGED} epochs {accuracy[fast]['mean']:.2%} against {accuracy[eager]['mean']:.2%}, "
        f"difference {100 * accuracy['difference']:+.2f} points, standard error "
        f"{100 * accuracy['standard_error']:.2f} (paired {100 * accuracy['standard_error_paired']:.2f}); "
        + ("they agree" if details["agree"] else "they do NOT agree")
    )
    print(note, file=sys.stderr, flush=True)
    of_seeds = loss["of_seeds"]
    line = record(
        NAME,
        abs(loss["relative_difference"]),
        runs=len(plan.seeds),
        spread=max(of_seeds) - min(of_seeds),
        unit="relative difference of losses",
        note=note,
    )
    return line | {"details": _rounded(details)}


def _rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _rounded(each) for name, each in found.items()}
    if isinstance(found, list):
        return [_rounded(each) for each in found]
    return round(found, 6) if isinstance(found, float) else found


def plan_of(given: argparse.Namespace, scratch: Path) -> Plan:
    """The trainings that the command line asks for; shards go to the scratch folder."""
    small, graphs = given.small, "execution.graphs=false" if given.small else "execution.graphs=true"
    usual_seeds, usual_epochs = (2, 3) if small else (4, 10)
    seeds = usual_seeds if given.seeds is None else given.seeds
    epochs = usual_epochs if given.epochs is None else given.epochs
    if seeds < 2 or epochs < JUDGED:
        raise ConfigError(
            f"a standard error needs --seeds 2 or more, and {JUDGED} epochs are judged: --epochs 3 or more"
        )
    if not small and given.root is None:
        raise ConfigError("say where CIFAR-10 lies (--root FOLDER), or --small to try the script on digits")
    if not small and count_visible_gpus() == 0:
        raise ConfigError("there is no GPU to capture CUDA graphs on: --small tries the script without one")
    roots = [] if small else [f"data.train.root={given.root}", f"data.eval.test.root={given.root}"]
    keys = (
        *roots,
        f"data.train.shards={scratch / 'train'}",
        f"data.eval.test.shards={scratch / 'test'}",
        f"standard.epochs={epochs}",
        f"execution.workers={len(os.sched_getaffinity(0))}",
        "execution.predict_batch=1000",
    )
    fast = ", ".join([*([] if small else ["graphs"]), *(["compiled"] if given.compile else []), "bf16"])
    compile_ = f"execution.compile={str(given.compile).lower()}"
    ways = {
        "graphs_bf16": Way(fast, ("precision=bf16", graphs, compile_)),
        "eager_fp32": Way("eager fp32", ("precision=fp32", "execution.graphs=false", "execution.compile=false")),
    }
    recipe = RECIPES / ("tiny.yaml" if small else "cifar10_sym50.yaml")
    return Plan(recipe, keys, range(seeds), epochs, ways)


def figure(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    plan, began = plan_of(given, scratch), time.monotonic()
    bench = Bench(plan, scratch)
    seconds = {"packing and decoding": time.monotonic() - began}
    outcomes = {}
    try:
        # fp32 first: a CPU without bf16 makes torch give up oneDNN for the rest of the process, which changes sums.
        for way in reversed(plan.ways):
            outcomes[way], seconds[way] = bench.outcomes(way)
            print(f"{plan.ways[way].said}: {seconds[way]:.0f} s", file=sys.stderr, flush=True)
    finally:
        bench.close()
    details = compared(outcomes["graphs_bf16"], outcomes["eager_fp32"])
    return line_of(plan, details | {"seconds": seconds}, bench.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the official CIFAR-10, as the recipe reads it")
    parser.add_argument("--seeds", type=int, help="trainings each way; default: 4")
    parser.add_argument("--epochs", type=int, help="of each training; default: 10")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the networks with graphs, too")
    parser.add_argument("--small", action="store_true", help="digits, 2 seeds, 3 epochs, no graphs: on any machine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agreement-") as scratch:
        try:
            publish([figure(given, Path(scratch))])
        except InputError as error:
            parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
