"""Runs a stage of a run; implements those that train or evaluate networks."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from shards.durable import read_json, write_json
from shards.sample_index import SampleIndex
from trainer.acceleration.precision import image_type
from trainer.config.data import HELD_OUT_SET
from trainer.config.schema import Recipe
from trainer.distributed.stop import Stopped
from trainer.incv.noise_estimates import NoiseEstimates
from trainer.incv.rounds import Incv
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.image_set import ImageSet, limit_ids, open_image_set
from trainer.loading.sample_order import Ids
from trainer.methods.epoch_evaluation import Accuracy, EvaluatedTask
from trainer.methods.inputs import IncvFacts, MethodInputs, MethodTraining, NoiseFacts
from trainer.methods.method import Method
from trainer.methods.networks import load_trained_networks, seed_rng, to_device
from trainer.methods.registry import get_method
from trainer.methods.task import BaseTask
from trainer.passes.sample_pass import SamplePass
from trainer.records.pace import Later
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import Labels, read_labels
from trainer.records.unreadable import Location, UnreadableLog
from trainer.report.labels_review import write_review
from trainer.run.evaluation import HITS, PREDICTED, count_hits, count_label_hits, top1_accuracy
from trainer.run.examination import load_examined
from trainer.run.incv_takeover import copy_incv
from trainer.run.plan import RunStart
from trainer.run.preflight import RunData
from trainer.run.run_report import list_reviewed_labels
from trainer.run.stage_graph import find_stage
from trainer.training.interleave import Steps
from trainer.training.loop import RunContext, TrainingJob, iterate_training


class StageRunner:
    """Runs the stages of one run; the training set is opened on first use."""

    def __init__(self, recipe: Recipe, run: RunDirectory, ctx: RunContext, data: RunData, start: RunStart) -> None:
        self.recipe, self.run, self.ctx, self.data, self.start = recipe, run, ctx, data, start
        self._opened: ImageSet | None = None

    def iterate(self, name: str) -> Steps[None]:
        """Run a stage, yielding after every training step. Call it on all ranks; rank 0 writes the files."""
        stage = find_stage(name)
        self.ctx.heartbeat.update(name, 0, 0)
        if stage.on_rank0 and not self.ctx.world.is_rank0:
            self.ctx.heartbeat.update(f"waiting for {name}", 0, 0)
            return
        assert stage.run is not None
        steps = resolve_name(stage.run)(self, name)
        if isinstance(steps, Generator):
            yield from steps

    def run_incv(self, name: str) -> Steps[None]:
        """Run INCV, or take it over from another run, and list the labels to review."""
        world, labels = self.ctx.world, self.data.labels
        if self.start.incv_from is None:
            identity, weights = self.start.identities[name], self.data.weights
            checked = labels.checked if len(labels.checked) else None
            data = self._training_set()
            assert self.recipe.incv is not None
            examined = load_examined(self) if self.recipe.incv.judge == "features" else None
            incv = Incv(self.recipe, data, self.run, self.ctx, identity, weights, labels.held_out, checked, examined)
            yield from incv.steps()
        elif world.is_rank0:
            copy_incv(self.start.incv_from, self.run)
        else:
            self.ctx.heartbeat.update(f"waiting for {name}", 0, 0)
        if world.is_rank0:
            write_review(self.run, list_reviewed_labels(self))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _training_set(self) -> ImageSet:
        if self._opened is None:
            index = self.data.train
            labels = read_labels(self.run.labels)  # with the held-out samples: INCV predicts them
            order = self.recipe.order
            window = order.window if order.kind == "windowed" else None
            opened = self._image_set(index, labels.ids, labels.by_id(len(index)), window)
            self._opened = replace(opened, ids=self.data.labels.trained)
        return self._opened

    def labels_by_id(self) -> npt.NDArray[np.int64]:
        """Return the given labels, by sample_id."""
        return self._training_set().labels

    def evaluation_set(self, name: str) -> ImageSet:
        """Open the samples of an evaluation set."""
        if name == HELD_OUT_SET:
            index = self.data.train
            labels = read_labels(self.run.labels).by_id(len(index))
            return self._image_set(index, self.data.labels.held_out, labels)
        index = self.data.eval[name]
        ids = limit_ids(index, self.recipe.data.eval[name].limit)
        return self._image_set(index, ids, index.label.astype(np.int64))

    def _image_set(self, index: SampleIndex, ids: Ids, labels: Labels, window: int | None = None) -> ImageSet:
        recipe, device = self.recipe, self.ctx.world.device
        dtype = image_type(recipe.precision)
        return open_image_set(index, ids, labels, recipe.image, recipe.execution, device, dtype, window)

    def train(self, name: str) -> Steps[None]:
        """Train the networks of a method."""
        method, world = get_method(name), self.ctx.world
        training = method.build(self._method_inputs(method))
        schedule, folder = training.task.schedule, self.run.method(name)
        sizes = {"selected": len(schedule.samples), "candidates": 0}
        facts = sizes | {"steps": schedule.total_steps, "epochs": schedule.epochs} | training.facts
        if world.is_rank0:
            write_json(folder / "training.json", facts)
        seed_rng(schedule.stream, world.rank)
        log = UnreadableLog(self.run, world.rank)
        data = log.watch(self._training_set(), Location("train", name, "training"), self.recipe.data.max_unreadable)
        images = schedule.rows * schedule.total_steps
        later = Later(0.0, self.ctx.work_after.get(name, 0.0) / max(images * method.networks, 1))
        job = TrainingJob(name, folder, identity=self.start.identities[name], later=later)
        with self._evaluated(method, training) as task:
            yield from iterate_training(
                job, task, lambda plans, first: data.training_batches(schedule, plans, first, world), self.ctx
            )
            if isinstance(task, EvaluatedTask) and world.is_rank0:
                write_json(folder / "training.json", facts | {"best": asdict(task.best)})

    @contextmanager
    def _evaluated(self, method: Method, training: MethodTraining) -> Iterator[BaseTask | EvaluatedTask]:
        """Yield the task, evaluated every few epochs if the recipe asks for it; their data is closed at the end."""
        config = self.recipe.evaluation
        if not config.every:
            yield training.task
            return
        with ExitStack() as opened:
            sets = {
                name: opened.enter_context(closing(self.evaluation_set(name)))
                for name in self.recipe.data.evaluation_names()
            }

            labels = self._labels_by_kind() if config.training_labels else None

            def measure(networks: Sequence[nn.Module]) -> dict[str, Accuracy]:
                found = {
                    name: top1_accuracy(self._count(networks, method, name, data)) for name, data in sets.items()
                }
                return found if labels is None else found | self._fit_to_labels(networks, method, labels)

            yield EvaluatedTask(training.task, config, measure)

    def _method_inputs(self, method: Method) -> MethodInputs:
        recipe, data = self.recipe, self._training_set()
        return MethodInputs(
            method=method,
            recipe=recipe,
            classes=data.classes,
            samples=data.ids,
            labels=data.labels,
            shards=self.data.train.shard,
            world=self.ctx.world,
            folder=self.run.method(method.name),
            passes=self.passes(method.name),
            trained_networks=lambda name: self._trained_here(get_method(name), data.classes),
            weights=self.data.weights,
            found=self._incv_facts() if method.reads_incv(recipe) else None,
        )

    def passes(self, stage: str, name: str = "train", data: ImageSet | None = None) -> SamplePass:
        """Return the pass over training samples that a stage runs by itself, or over the evaluation set `name`."""
        ctx, log = self.ctx, UnreadableLog(self.run, self.ctx.world.rank)

        def images(doing: str) -> ImageSet:
            location = Location(name, stage, doing)
            return log.watch(data or self._training_set(), location, self.recipe.data.max_unreadable)

        return SamplePass(images, self.recipe.precision, ctx, f"{stage}: {{doing}}")

    def _incv_facts(self) -> IncvFacts:
        """Return what INCV found, from its files."""
        config, selection = self.recipe.incv, SelectionIndex.read(self.run.selection)
        assert config is not None
        estimates = NoiseEstimates.from_json(read_json(self.run.incv)["noise"])
        ratio = estimates.of_rule(config)
        noise = NoiseFacts(ratio, estimates.confident_of_selected, estimates.held_out_of_selected)
        return IncvFacts(selection.ids(State.SELECTED), selection.ids(State.CANDIDATE), noise)

    def evaluate(self, name: str) -> None:
        """Evaluate every method on every set; save each finished pass, so that a stopped evaluation can resume."""
        progress, world = self.run.evaluation_progress, self.ctx.world
        counts: dict[str, dict[str, Any]] = world.broadcast_from_rank0(
            lambda: read_json(progress) if progress.exists() else {}
        )
        done = sum(len(methods) for methods in counts.values())
        if done and world.is_rank0:
            self.ctx.start_log.record_resume(name, None, None, done)
        for set_name in self.recipe.data.evaluation_names():
            missing = [method for method in self.recipe.methods if method not in counts.get(set_name, {})]
            if not missing:
                continue
            with closing(self.evaluation_set(set_name)) as data:
                for method in missing:
                    try:
                        counted = self._evaluate_one(get_method(method), set_name, data)
                    except Stopped as stopped:
                        raise Stopped(name, done, stopped.reason) from None
                    counts.setdefault(set_name, {})[method] = counted
                    if world.is_rank0:
                        write_json(progress, counts)
                    done += 1
        if world.is_rank0:
            write_json(self.run.evaluation, counts)
            progress.unlink(missing_ok=True)

    def _evaluate_one(self, method: Method, set_name: str, data: ImageSet) -> dict[str, Any]:
        return self._count(self._trained_here(method, data.classes), method, set_name, data)

    def _count(self, networks: Sequence[nn.Module], method: Method, set_name: str, data: ImageSet) -> dict[str, Any]:
        ctx = self.ctx
        location = Location(set_name, "evaluate", f"predicting with {method.name}")
        data = UnreadableLog(self.run, ctx.world.rank).watch(data, location)
        samples = SamplePass(lambda doing: data, self.recipe.precision, ctx, f"evaluate {method.name} on {set_name}")
        own = samples.run(networks, data.ids, (HITS,), labels=data.labels, gather=False)
        return count_hits(ctx.world, own, len(networks))

    def _labels_by_kind(self) -> dict[str, torch.Tensor]:
        """Return the given labels of the training set and, if known, the true ones: on the device, by sample_id."""
        data = self._training_set()
        kinds = {"train_given": data.labels}
        if self.data.labels.true is not None:
            kinds["train_true"] = read_labels(self.run.true_labels).by_id(len(data.index))
        return {kind: torch.from_numpy(labels).to(self.ctx.world.device) for kind, labels in kinds.items()}

    def _fit_to_labels(
        self, networks: Sequence[nn.Module], method: Method, labels: dict[str, torch.Tensor]
    ) -> dict[str, Accuracy]:
        """Return the accuracy on the training images against each kind of label."""
        data, ctx = self._training_set(), self.ctx
        place = f"evaluate {method.name} on the training set"
        own = SamplePass(lambda doing: data, self.recipe.precision, ctx, place).run(
            networks, data.ids, (PREDICTED,), gather=False
        )
        return count_label_hits(ctx.world, own, labels, len(networks))

    def load_trained(self, method: Method, classes: int) -> list[nn.Module]:
        """Load the trained networks of a method, on the CPU."""
        folder = self.run.method(method.name)
        return load_trained_networks(self.recipe, method.name, method.networks, folder, classes)

    def _trained_here(self, method: Method, classes: int) -> list[nn.Module]:
        """Load the trained networks of a method to this rank's device."""
        return [to_device(network, self.ctx.world.device) for network in self.load_trained(method, classes)]
