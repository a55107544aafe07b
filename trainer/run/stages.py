"""What each stage does: a function from files of the run directory to files of the run directory."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from shards.durable import read_json, write_json
from shards.image_check import decode_rgb
from shards.sample_index import SampleIndex
from trainer.config.schema import Recipe, TrainingConfig
from trainer.distributed.stop import Stopped
from trainer.incv.noise_estimates import NoiseEstimates, forget_rate, noise_of_selected, warmup_epochs
from trainer.incv.rounds import Incv
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.image_set import ImageSet, limit_ids, open_image_set
from trainer.loading.sample_order import Ids, TrainingPlan, build_windows, derive_stream
from trainer.loading.shard_reader import ShardReader
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.networks import build_module, load_trained_networks, seed_rng, to_device
from trainer.methods.predict import predict
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings, build_task_settings, image_type
from trainer.models.twin import TwinModel
from trainer.records.run_directory import RunDirectory
from trainer.records.unreadable import Location, UnreadableLog
from trainer.report import write_report
from trainer.run.evaluation import count_hits, reduce_counts
from trainer.run.export import export_network
from trainer.run.labels import Labels, read_labels, write_labels
from trainer.run.preflight import RunLabels
from trainer.training.interleave import Steps
from trainer.training.loop import RunContext, Task, TrainingJob, iterate_training


class StageRunner:
    """Bound to one run; data sets are opened when the first stage needs them."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        ctx: RunContext,
        index: SampleIndex,
        eval_indices: Mapping[str, SampleIndex],
        labels: RunLabels,
        identities: Mapping[str, str],
    ) -> None:
        """identities: for each stage the hash of the result keys it reads."""
        self._recipe, self._run, self._ctx = recipe, run, ctx
        self._index, self._eval_indices, self._run_labels = index, eval_indices, labels
        self._identities = identities
        self._opened: ImageSet | None = None

    def steps(self, stage: str) -> Steps[None]:
        """A stage; all ranks call it; what only writes files is for the first."""
        self._ctx.heartbeat.update(stage, 0, 0)
        alone = {"labels": self._labels, "export": self._export, "report": self._report}
        if stage in alone:
            if self._ctx.world.is_rank0:
                alone[stage]()
            else:
                self._ctx.heartbeat.update(f"waiting for {stage}", 0, 0)
            return
        if stage == "evaluate":
            self._evaluate()
            return
        together = {
            "incv": self._incv,
            "standard": self._standard,
            "coteaching": self._coteaching,
            "coteaching_incv": self._coteaching_incv,
        }
        yield from together[stage]()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _training_set(self) -> ImageSet:
        if self._opened is None:
            ids, labels = read_labels(self._run.labels, len(self._index))
            order = self._recipe.order
            window = order.window if order.kind == "windowed" else None
            self._opened = self._image_set(self._index, ids, labels, window)
        return self._opened

    def _evaluation_set(self, name: str, index: SampleIndex) -> ImageSet:
        ids = limit_ids(index, self._recipe.data.eval[name].limit)
        return self._image_set(index, ids, index.label.astype(np.int64))

    def _image_set(self, index: SampleIndex, ids: Ids, labels: Labels, window: int | None = None) -> ImageSet:
        recipe, device = self._recipe, self._ctx.world.device
        dtype = image_type(recipe.precision)
        return open_image_set(index, ids, labels, recipe.image, recipe.execution, device, dtype, window)

    def _labels(self) -> None:
        labels = self._run_labels
        if labels.true is not None:
            write_labels(self._run.true_labels, labels.ids, labels.true)
        write_labels(self._run.labels, labels.ids, labels.given)

    def _incv(self) -> Steps[None]:
        incv = Incv(self._recipe, self._training_set(), self._run, self._ctx, self._identities["incv"])
        return incv.steps()

    def _standard(self) -> Steps[None]:
        config, data = self._recipe.standard, self._training_set()
        assert config is not None
        plan = self._plan("standard", config, data.ids)
        module = build_module(self._recipe, "standard", data.classes)
        task = StandardTask(module, self._setting("standard", config, plan))
        return self._train("standard", task, plan, {})

    def _coteaching(self) -> Steps[None]:
        config = self._recipe.coteaching
        assert config is not None
        estimates = self._estimates() if config.forget_rate == "estimate" else None
        rate = forget_rate(config, self._recipe.incv, estimates)
        plan = self._plan("coteaching", config, self._training_set().ids)
        return self._train_pair("coteaching", plan, rate)

    def _coteaching_incv(self) -> Steps[None]:
        config, incv = self._recipe.coteaching, self._recipe.incv
        assert config is not None
        assert incv is not None
        estimates = self._estimates()
        selection = SelectionIndex.read(self._run.selection)
        plan = replace(
            self._plan("coteaching_incv", config, selection.ids(State.SELECTED)),
            candidates=selection.ids(State.CANDIDATE),
            candidates_from=warmup_epochs(config, incv, estimates.of_rule(incv)),
        )
        return self._train_pair("coteaching_incv", plan, noise_of_selected(config, incv, estimates))

    def _plan(self, method: str, config: TrainingConfig, selected: Ids) -> TrainingPlan:
        return TrainingPlan(
            stream=derive_stream(self._recipe.seed, method),
            selected=selected,
            batch=self._recipe.batch.global_,
            epochs=config.epochs,
            windows=build_windows(self._recipe.order, self._index.shard),
        )

    def _setting(self, method: str, config: TrainingConfig, plan: TrainingPlan) -> TaskSettings:
        ctx, timer = self._ctx, self._ctx.watch(method)
        return build_task_settings(
            self._recipe, config.optimizer, plan, ctx.world, allow_accelerate=True, timer=timer
        )

    def _train_pair(self, method: str, plan: TrainingPlan, rate: float) -> Steps[None]:
        config = self._recipe.coteaching
        assert config is not None
        module = build_module(self._recipe, method, self._training_set().classes)
        assert isinstance(module, TwinModel)
        setting = self._setting(method, config, plan)
        task = CoteachingTask(module, setting, ForgetSchedule(plan.batch, rate, config.ramp_epochs), config.rank)
        return self._train(method, task, plan, {"forget_rate": rate, "warmup_epochs": plan.candidates_from})

    def _train(self, method: str, task: Task, plan: TrainingPlan, facts: dict[str, Any]) -> Steps[None]:
        folder, world = self._run.method(method), self._ctx.world
        facts |= {"selected": len(plan.selected), "candidates": len(plan.candidates)}
        if world.is_rank0:
            write_json(folder / "training.json", facts | {"steps": plan.total_steps, "epochs": plan.epochs})
        seed_rng(plan.stream, world.rank)
        log = UnreadableLog(self._run, world.rank)
        data = log.watch(
            self._training_set(), Location("train", method, "training"), self._recipe.data.max_unreadable
        )
        yield from iterate_training(
            TrainingJob(method, folder, identity=self._identities[method]),
            task,
            plan,
            lambda first: data.training_batches(plan, first, world),
            self._ctx,
        )

    def _estimates(self) -> NoiseEstimates:
        return NoiseEstimates.from_json(read_json(self._run.incv)["noise"])

    def _evaluate(self) -> None:
        """Every method on every set; finished passes are kept, so a stopped evaluation goes on."""
        partial, world = self._run.evaluation_progress, self._ctx.world
        counts: dict[str, dict[str, Any]] = world.broadcast_from_rank0(
            lambda: read_json(partial) if partial.exists() else {}
        )
        done = sum(len(methods) for methods in counts.values())
        if done and world.is_rank0:
            self._ctx.start_log.record_resume("evaluate", None, None, done)
        for name, index in self._eval_indices.items():
            missing = [method for method in self._recipe.methods if method not in counts.get(name, {})]
            if not missing:
                continue
            with closing(self._evaluation_set(name, index)) as data:
                for method in missing:
                    try:
                        counted = self._evaluate_one(method, name, data)
                    except Stopped as stopped:
                        raise Stopped("evaluate", done, stopped.reason) from None
                    counts.setdefault(name, {})[method] = counted
                    if world.is_rank0:
                        write_json(partial, counts)
                    done += 1
        if world.is_rank0:
            write_json(self._run.evaluation, counts)
            partial.unlink(missing_ok=True)

    def _evaluate_one(self, method: str, name: str, data: ImageSet) -> dict[str, Any]:
        ctx = self._ctx
        place = Location(name, "evaluate", f"predicting with {method}")
        data = UnreadableLog(self._run, ctx.world.rank).watch(data, place)
        networks = [
            to_device(network, ctx.world.device)
            for network in load_trained_networks(self._recipe, method, self._run.method(method), data.classes)
        ]
        own = predict(
            networks, data, data.ids, self._recipe.precision, ctx, f"evaluate {method} on {name}", count_hits
        )
        return reduce_counts(ctx.world, own, len(networks))

    def _export(self) -> None:
        for method in self._recipe.methods:
            networks = load_trained_networks(self._recipe, method, self._run.method(method), self._index.num_classes)
            for letter, network in zip("ab", networks, strict=False):
                folder = self._run.export(method) / f"model_{letter}"
                export_network(network, self._recipe, self._index.class_names, folder)

    def _report(self) -> None:
        reader = ShardReader(self._index)
        write_report(
            self._run.root,
            image_of=lambda sample_id: Image.fromarray(decode_rgb(reader.read(sample_id))),
            keys_of=lambda ids: self._index.keys(np.asarray(ids, np.int64)),
        )
        reader.close()
