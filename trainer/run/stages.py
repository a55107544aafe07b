"""Implements the stages, which read and write files of the run directory."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
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
from trainer.methods.registry import get_method, methods_of
from trainer.methods.task import BaseTask
from trainer.passes.sample_pass import SamplePass
from trainer.records.pace import Later
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import Labels, read_labels, write_labels
from trainer.records.unreadable import Location, UnreadableLog
from trainer.report.labels_review import ReviewedSamples, build_review, write_review
from trainer.run.data_sets import find_key_root
from trainer.run.evaluation import HITS, PREDICTED, count_hits, count_label_hits, top1_accuracy
from trainer.run.export import export_network
from trainer.run.incv_takeover import copy_incv
from trainer.run.preflight import RunData
from trainer.run.run_report import write_run_report
from trainer.training.interleave import Steps
from trainer.training.loop import RunContext, TrainingJob, iterate_training

_log = logging.getLogger(__name__)


class StageRunner:
    """Runs the stages of one run; the training set is opened on first use."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        ctx: RunContext,
        data: RunData,
        identities: dict[str, str],
        incv_from: dict[str, Any] | None = None,
    ) -> None:
        """identities: the hash of the result keys of each stage, which identifies its checkpoints.

        incv_from: the manifest's note of a run whose INCV stage is taken over; None: INCV runs here.
        """
        self._recipe, self._run, self._ctx, self._data = recipe, run, ctx, data
        self._identities, self._incv_from = identities, incv_from
        self._opened: ImageSet | None = None

    def iterate(self, stage: str) -> Steps[None]:
        """Run a stage, yielding after every training step. Call it on all ranks; rank 0 writes the files."""
        self._ctx.heartbeat.update(stage, 0, 0)
        on_rank0 = {"labels": self._write_labels, "export": self._export, "report": self._report}
        if self._incv_from is not None:
            on_rank0["incv"] = partial(self._take_over_incv, self._incv_from)
        if stage in on_rank0:
            if self._ctx.world.is_rank0:
                on_rank0[stage]()
            else:
                self._ctx.heartbeat.update(f"waiting for {stage}", 0, 0)
        elif stage == "incv":
            identity, weights = self._identities[stage], self._data.weights
            data, labels = self._training_set(), self._data.labels
            checked = labels.checked if len(labels.checked) else None
            incv = Incv(
                self._recipe, data, self._run, self._ctx, identity, weights, held_out=labels.held_out, checked=checked
            )
            yield from incv.steps()
            if self._ctx.world.is_rank0:
                write_review(self._run, self._review())
        elif stage == "evaluate":
            self._evaluate()
        else:
            yield from self._train(get_method(stage))

    def _take_over_incv(self, note: dict[str, Any]) -> None:
        copy_incv(note, self._run)
        write_review(self._run, self._review())

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _training_set(self) -> ImageSet:
        if self._opened is None:
            index = self._data.train
            labels = read_labels(self._run.labels)  # with the held-out samples: INCV predicts them
            order = self._recipe.order
            window = order.window if order.kind == "windowed" else None
            opened = self._image_set(index, labels.ids, labels.by_id(len(index)), window)
            self._opened = replace(opened, ids=self._data.labels.trained)
        return self._opened

    def _evaluation_set(self, name: str) -> ImageSet:
        if name == HELD_OUT_SET:
            index = self._data.train
            labels = read_labels(self._run.labels).by_id(len(index))
            return self._image_set(index, self._data.labels.held_out, labels)
        index = self._data.eval[name]
        ids = limit_ids(index, self._recipe.data.eval[name].limit)
        return self._image_set(index, ids, index.label.astype(np.int64))

    def _image_set(self, index: SampleIndex, ids: Ids, labels: Labels, window: int | None = None) -> ImageSet:
        recipe, device = self._recipe, self._ctx.world.device
        dtype = image_type(recipe.precision)
        return open_image_set(index, ids, labels, recipe.image, recipe.execution, device, dtype, window)

    def _write_labels(self) -> None:
        labels = self._data.labels
        if labels.true is not None:
            write_labels(self._run.true_labels, labels.ids, labels.true)
        if self._recipe.labels.corrections is not None:
            counts = {
                "corrected": labels.corrected,
                "confirmed": labels.confirmed,
                "excluded": len(labels.excluded),
            }
            write_json(self._run.corrections, counts)
            _log.info("labels.corrections: %s", ", ".join(f"{count} {what}" for what, count in counts.items()))
        write_labels(self._run.labels, labels.ids, labels.given, labels.checked)

    def _review(self) -> pa.Table:
        """Build the list of labels to review from the last selection."""
        index, selection = self._data.train, SelectionIndex.read(self._run.selection)
        rejected = index.verdict != 0
        labels = read_labels(self._run.labels)
        samples = ReviewedSamples(
            keys=index.read_table(["key"])["key"],
            given=np.where(rejected, index.label, labels.by_id(len(index))),
            rejected=rejected,
            excluded=np.isin(index.sample_id, self._data.labels.excluded),
            checked=labels.checked_by_id(len(index)),
            class_names=index.class_names,
            root=find_key_root(self._recipe.data.train),
        )
        return build_review(selection, samples)

    def _train(self, method: Method) -> Steps[None]:
        name, world = method.name, self._ctx.world
        training = method.build(self._method_inputs(method))
        schedule, folder = training.task.schedule, self._run.method(name)
        facts = {"selected": len(schedule.samples), "candidates": 0} | {
            "steps": schedule.total_steps,
            "epochs": schedule.epochs,
        }
        facts |= training.facts
        if world.is_rank0:
            write_json(folder / "training.json", facts)
        seed_rng(schedule.stream, world.rank)
        log = UnreadableLog(self._run, world.rank)
        data = log.watch(self._training_set(), Location("train", name, "training"), self._recipe.data.max_unreadable)
        images = schedule.rows * schedule.total_steps
        later = Later(0.0, self._ctx.work_after.get(name, 0.0) / max(images * method.networks, 1))
        job = TrainingJob(name, folder, identity=self._identities[name], later=later)
        with self._evaluated(method, training) as task:
            yield from iterate_training(
                job, task, lambda plans, first: data.training_batches(schedule, plans, first, world), self._ctx
            )
            if isinstance(task, EvaluatedTask) and world.is_rank0:
                write_json(folder / "training.json", facts | {"best": asdict(task.best)})

    @contextmanager
    def _evaluated(self, method: Method, training: MethodTraining) -> Iterator[BaseTask | EvaluatedTask]:
        """Yield the task, evaluated every few epochs if the recipe asks for it; their data is closed at the end."""
        config = self._recipe.evaluation
        if not config.every:
            yield training.task
            return
        with ExitStack() as opened:
            sets = {
                name: opened.enter_context(closing(self._evaluation_set(name)))
                for name in self._recipe.data.evaluation_names()
            }

            labels = self._labels_by_kind() if config.training_labels else None

            def measure(networks: Sequence[nn.Module]) -> dict[str, Accuracy]:
                with self._ctx.time_phase("predict", method.name):
                    found = {
                        name: top1_accuracy(self._count(networks, method, name, data)) for name, data in sets.items()
                    }
                    return found if labels is None else found | self._fit_to_labels(networks, method, labels)

            yield EvaluatedTask(training.task, config, measure)

    def _method_inputs(self, method: Method) -> MethodInputs:
        recipe, data = self._recipe, self._training_set()
        return MethodInputs(
            method=method,
            recipe=recipe,
            classes=data.classes,
            samples=data.ids,
            labels=data.labels,
            shards=self._data.train.shard,
            world=self._ctx.world,
            folder=self._run.method(method.name),
            passes=self._passes(method.name),
            trained_networks=lambda name: self._trained_here(get_method(name), data.classes),
            weights=self._data.weights,
            found=self._incv_facts() if method.reads_incv(recipe) else None,
        )

    def _passes(self, stage: str) -> SamplePass:
        """Return the pass over training samples that a method runs by itself."""
        ctx, log = self._ctx, UnreadableLog(self._run, self._ctx.world.rank)

        def images(doing: str) -> ImageSet:
            location = Location("train", stage, doing)
            return log.watch(self._training_set(), location, self._recipe.data.max_unreadable)

        return SamplePass(images, self._recipe.precision, ctx, f"{stage}: {{doing}}", stage)

    def _incv_facts(self) -> IncvFacts:
        """Return what INCV found, from its files."""
        config, selection = self._recipe.incv, SelectionIndex.read(self._run.selection)
        assert config is not None
        estimates = NoiseEstimates.from_json(read_json(self._run.incv)["noise"])
        ratio = estimates.of_rule(config)
        noise = NoiseFacts(ratio, estimates.confident_of_selected, estimates.held_out_of_selected)
        return IncvFacts(selection.ids(State.SELECTED), selection.ids(State.CANDIDATE), noise)

    def _evaluate(self) -> None:
        """Evaluate every method on every set; save each finished pass, so that a stopped evaluation can resume."""
        partial, world = self._run.evaluation_progress, self._ctx.world
        counts: dict[str, dict[str, Any]] = world.broadcast_from_rank0(
            lambda: read_json(partial) if partial.exists() else {}
        )
        done = sum(len(methods) for methods in counts.values())
        if done and world.is_rank0:
            self._ctx.start_log.record_resume("evaluate", None, None, done)
        for name in self._recipe.data.evaluation_names():
            missing = [method for method in self._recipe.methods if method not in counts.get(name, {})]
            if not missing:
                continue
            with closing(self._evaluation_set(name)) as data:
                for method in missing:
                    try:
                        counted = self._evaluate_one(get_method(method), name, data)
                    except Stopped as stopped:
                        raise Stopped("evaluate", done, stopped.reason) from None
                    counts.setdefault(name, {})[method] = counted
                    if world.is_rank0:
                        write_json(partial, counts)
                    done += 1
        if world.is_rank0:
            write_json(self._run.evaluation, counts)
            partial.unlink(missing_ok=True)

    def _evaluate_one(self, method: Method, set_name: str, data: ImageSet) -> dict[str, Any]:
        return self._count(self._trained_here(method, data.classes), method, set_name, data)

    def _count(self, networks: Sequence[nn.Module], method: Method, set_name: str, data: ImageSet) -> dict[str, Any]:
        ctx = self._ctx
        location = Location(set_name, "evaluate", f"predicting with {method.name}")
        data = UnreadableLog(self._run, ctx.world.rank).watch(data, location)
        samples = SamplePass(lambda doing: data, self._recipe.precision, ctx, f"evaluate {method.name} on {set_name}")
        own = samples.run(networks, data.ids, (HITS,), labels=data.labels, gather=False)
        return count_hits(ctx.world, own, len(networks))

    def _labels_by_kind(self) -> dict[str, torch.Tensor]:
        """Return the given labels of the training set and, if known, the true ones: on the device, by sample_id."""
        data = self._training_set()
        kinds = {"train_given": data.labels}
        if self._data.labels.true is not None:
            kinds["train_true"] = read_labels(self._run.true_labels).by_id(len(data.index))
        return {kind: torch.from_numpy(labels).to(self._ctx.world.device) for kind, labels in kinds.items()}

    def _fit_to_labels(
        self, networks: Sequence[nn.Module], method: Method, labels: dict[str, torch.Tensor]
    ) -> dict[str, Accuracy]:
        """Return the accuracy on the training images against each kind of label."""
        data, ctx = self._training_set(), self._ctx
        place = f"evaluate {method.name} on the training set"
        own = SamplePass(lambda doing: data, self._recipe.precision, ctx, place).run(
            networks, data.ids, (PREDICTED,), gather=False
        )
        return count_label_hits(ctx.world, own, labels, len(networks))

    def _trained(self, method: Method, classes: int) -> list[nn.Module]:
        folder = self._run.method(method.name)
        return load_trained_networks(self._recipe, method.name, method.networks, folder, classes)

    def _trained_here(self, method: Method, classes: int) -> list[nn.Module]:
        """Load the trained networks of a method to this rank's device."""
        return [to_device(network, self._ctx.world.device) for network in self._trained(method, classes)]

    def _export(self) -> None:
        index = self._data.train
        for method in methods_of(self._recipe):
            for letter, network in zip("ab", self._trained(method, index.num_classes), strict=False):
                folder = self._run.export(method.name) / f"model_{letter}"
                export_network(network, self._recipe, index.class_names, folder)

    def _report(self) -> None:
        index = self._data.train
        listed = self._run.labels_review_csv.exists() and self._run.labels_review_parquet.exists()
        if self._recipe.incv is not None and not listed:  # the run began with an earlier version
            write_review(self._run, self._review(), keep_existing=True)
        write_run_report(self._run, self._recipe, index)
