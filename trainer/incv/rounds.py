"""Algorithm 2: run rounds of cross-validation, and write every round's predictions and selection."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shards.durable import read_json, write_array, write_json, write_parquet
from shards.errors import DataError
from trainer.config.fitting import count_steps, fit_section
from trainer.config.schema import IncvConfig, Recipe
from trainer.distributed.stop import Stopped
from trainer.examine.folds import stratified_group_folds
from trainer.incv.feature_judge import Examined, JudgedSamples, judge_samples, without_features
from trainer.incv.folds import FoldTask, folds_share_device, folds_side_by_side, split_parts
from trainer.incv.noise_estimates import (
    NoiseEstimates,
    estimate_noise,
    remove_ratio,
    uses_best_epoch,
)
from trainer.incv.predictions import OUTPUTS, Predictions, gather_predictions, merge_predictions
from trainer.incv.probability_table import build_probability_table
from trainer.incv.selection import apply_round, fill_classes
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.epoch_plan import Mixing, StaticPlan
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import Ids, build_windows, derive_stream
from trainer.methods.inputs import build_task_settings
from trainer.methods.losses import build_row_losses
from trainer.methods.networks import build_network, seed_rng
from trainer.models.weights import Weights
from trainer.passes.sample_pass import SamplePass
from trainer.records.pace import Later
from trainer.records.run_directory import RunDirectory
from trainer.records.unreadable import Location, UnreadableLog
from trainer.training.interleave import Steps, interleave
from trainer.training.loop import RunContext, TrainingJob, iterate_training


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold of a round: the samples its network trains on, and the held-out part it predicts."""

    round: int
    number: int
    trained_on: Ids
    held_out: Ids
    best: bool
    """Whether to predict with the epoch of best held-out agreement instead of the last epoch."""
    extra: Ids
    """Samples outside INCV that this fold predicts too, after training."""


class Incv:
    """Runs Algorithm 2 over the samples of a training set."""

    def __init__(
        self,
        recipe: Recipe,
        data: ImageSet,
        run: RunDirectory,
        ctx: RunContext,
        identity: str | None = None,
        weights: Weights | None = None,
        held_out: Ids | None = None,
        checked: Ids | None = None,
        examined: Examined | None = None,
    ) -> None:
        """identity: hash of the recipe keys that determine the folds' results. weights: where the folds start.

        held_out: samples that are not in `data.ids`, and that the folds predict without training on them. checked:
        samples whose label was checked by hand; the first round selects them, after predicting them. examined: the
        features to judge by, with `incv.judge: features`.
        """
        assert recipe.incv is not None
        self._recipe, self._config, self._weights = recipe, recipe.incv, weights
        self._data, self._run, self._ctx, self._identity = data, run, ctx, identity
        self._held_out = np.empty(0, np.int64) if held_out is None else held_out
        self._checked, self._examined = checked, examined

    def steps(self) -> Steps[None]:
        """Run the unfinished rounds, then write the final selection and `incv.json`."""
        judged = self._data.ids if self._config.halves == 2 else self._parts_of(self._data.ids, number=0)[1]
        index = SelectionIndex.of_candidates(len(self._data.index), judged, self._held_out)
        noise: NoiseEstimates | None = None
        records: list[dict[str, Any]] = []
        ended_early = None
        for number in range(self._config.rounds):
            candidates = index.ids(State.CANDIDATE)
            if len(candidates) < self._config.folds:
                ended_early = self._too_few(number, len(candidates))
                break
            best = uses_best_epoch(self._config, number, noise.of_rule(self._config) if noise else None)
            predictions = yield from self._predictions_of(number, index, best)
            of_candidates = predictions.rows(~np.isin(predictions.sample_id, self._held_out))
            noise = noise or self._estimate(of_candidates, self._judge_facts().get("uniform_flips"))
            ratio = remove_ratio(self._config, noise.of_rule(self._config))
            index = apply_round(index, predictions, number, ratio, self._checked)
            self._write(index, self._run.round_selection(number))
            records.append(_record(of_candidates, self._config.trained_folds, ratio, best))
        assert noise is not None
        self._finish(index, noise, records, ended_early)

    def _finish(
        self,
        index: SelectionIndex,
        noise: NoiseEstimates,
        records: list[dict[str, Any]],
        ended_early: str | None,
    ) -> None:
        index, filled = fill_classes(index, self._data.labels, self._data.classes, self._config.min_per_class)
        if not len(index.ids(State.SELECTED)):
            raise DataError(
                "INCV selected no samples: the networks agreed with none of the held-out labels. Train the folds "
                "longer (incv.epochs) or set incv.min_per_class"
            )
        checksum, judged_by = self._write(index, self._run.selection), self._judge_facts()
        if self._ctx.world.is_rank0:
            found = {
                "noise": noise.as_json(),
                "rounds": records,
                "ended_early": ended_early,
                "filled_classes": [asdict(one) | {"class": one.label} for one in filled],
                "selection_checksum": checksum,
            } | ({"judge": judged_by} if judged_by else {})
            write_json(self._run.incv, found)

    def _write(self, index: SelectionIndex, path: Path) -> str:
        """Check that all ranks hold the same index, and let rank 0 write it; return its checksum."""
        checksum = index.checksum()
        self._ctx.world.require_equal(checksum, "the selection")
        if self._ctx.world.is_rank0:
            index.write(path)
        return checksum

    def _too_few(self, number: int, candidates: int) -> str:
        if number == 0:
            raise DataError(
                f"the data set has {candidates} usable sample(s), but INCV with {self._config.folds} folds needs at "
                f"least {self._config.folds}"
            )
        return f"INCV ended after {number} of {self._config.rounds} rounds: too few candidates are left, {candidates}"

    def _predictions_of(self, number: int, index: SelectionIndex, best: bool) -> Steps[Predictions]:
        """Return a round's predictions on every rank: read from their file, or made by training the round's folds."""
        path, world = self._run.round_predictions(number), self._ctx.world
        candidates = index.ids(State.CANDIDATE)
        expected = np.concatenate([candidates, self._held_out])
        if world.broadcast_from_rank0(path.exists):
            return merge_predictions([Predictions.read(path)], expected)
        if self._config.judge == "features":
            predictions = self._judge(expected)
        else:
            predictions = yield from self._train_and_predict(self._folds(number, index, best), expected)
        self._refuse_unusable(predictions)
        if world.is_rank0:
            predictions.write(path)
        return predictions

    def _train_and_predict(self, folds: "list[Fold]", expected: Ids) -> Steps[Predictions]:
        """Train the folds, side by side or in turn, and return their predictions on every rank."""
        world = self._ctx.world
        if folds_side_by_side(self._config.trained_folds, self._ctx.execution, world):
            return (yield from self._in_halves(folds, expected))
        parts = [self._predict_fold(fold, self._ctx) for fold in folds]
        if folds_share_device(self._ctx.execution, world, self._data.is_resident):
            predicted = yield from interleave(parts, world.device)
        else:
            predicted = []
            for part in parts:
                predicted.append((yield from part))
        return merge_predictions(predicted, expected)

    def _judge(self, expected: Ids) -> Predictions:
        """Return the predictions from features on every rank, and write the facts and probabilities."""
        assert self._examined is not None
        examined, run = self._examined, self._run
        labels = self._data.labels[examined.ids]
        seed = derive_stream(self._recipe.seed, "incv.split")
        folds = np.zeros(len(labels), np.int64)
        if examined.probabilities is None:
            folds = stratified_group_folds(labels, examined.groups, self._config.folds, seed)
        samples = JudgedSamples(examined, labels, folds, ~np.isin(examined.ids, self._held_out))
        verdict = judge_samples(samples, self._data.classes, self._ctx.world, self._config.agree_top_k)
        if self._ctx.world.is_rank0:
            if verdict.probabilities is not None:
                index = self._data.index
                table = build_probability_table(index.keys(examined.ids), verdict.probabilities, index.class_names)
                write_array(run.probabilities, verdict.probabilities)
                write_parquet(run.probabilities_table, table)
            write_json(run.judge_facts, verdict.facts)
        lacking = np.setdiff1d(expected, examined.ids)
        return merge_predictions([verdict.predictions, without_features(lacking)], expected)

    def _judge_facts(self) -> dict[str, Any]:
        """Return what the judge by features found about the fit; empty for networks."""
        if self._config.judge == "networks":
            return {}
        facts: dict[str, Any] = self._ctx.world.broadcast_from_rank0(lambda: read_json(self._run.judge_facts))
        return facts

    def _folds(self, number: int, index: SelectionIndex, best: bool) -> "list[Fold]":
        candidates = index.ids(State.CANDIDATE)
        if self._config.halves == 1:
            return [Fold(number, 0, np.setdiff1d(self._data.ids, candidates), candidates, best, self._held_out)]
        count, selected, parts = self._config.folds, index.ids(State.SELECTED), self._parts_of(candidates, number)
        extra = split_parts(derive_stream(self._recipe.seed, "incv.held_out", number), self._held_out, count)
        folds = []
        for fold in range(count):
            judged = (fold + 1) % count
            trained_on = np.concatenate([selected, *parts[:judged], *parts[judged + 1 :]])
            folds.append(Fold(number, fold, trained_on, parts[judged], best, extra[fold]))
        return folds

    def _parts_of(self, candidates: Ids, number: int) -> list[Ids]:
        return split_parts(derive_stream(self._recipe.seed, "incv.split", number), candidates, self._config.folds)

    def _in_halves(self, folds: "list[Fold]", expected: Ids) -> Steps[Predictions]:
        """Run every second fold on each half of the ranks, wait for all to finish or stop, and gather the
        predictions."""
        ctx, world = self._ctx, self._ctx.world
        which, group = world.fold_group()
        mine: list[Predictions] = []
        stopped: Stopped | None = None
        try:
            for fold in folds[which::2]:
                mine.append((yield from self._predict_fold(fold, replace(ctx, world=group))))
        except Stopped as stop:
            stopped = stop
        ctx.heartbeat.update("waiting for the other fold", 0, 0)
        if world.barrier(stopped is not None):
            raise stopped or Stopped(f"incv/{folds[0].round}", 0, ctx.stop.wait_for_reason())
        return gather_predictions(world, mine if group.is_rank0 else [], expected)

    def _predict_fold(self, fold: "Fold", ctx: RunContext) -> Steps[Predictions]:
        """Return one fold's predictions on its held-out part, on every rank of `ctx.world`; train it if necessary."""
        done = self._run.fold(fold.round, fold.number) / "predictions.parquet"
        if ctx.world.broadcast_from_rank0(done.exists):
            return Predictions.read(done)
        network = yield from self._train_fold(fold, ctx)
        predictions = self._predict_samples(network, fold, ctx, np.concatenate([fold.held_out, fold.extra]))
        if ctx.world.is_rank0:
            predictions.write(done)
        return predictions

    def _train_fold(self, fold: "Fold", ctx: RunContext) -> Steps[nn.Module]:
        recipe, world, folds = self._recipe, ctx.world, self._config.trained_folds
        config = fit_section(self._config, count_steps(len(fold.trained_on), recipe.batch.rows))
        plan = StaticPlan(
            stream=derive_stream(recipe.seed, "incv", fold.round, fold.number),
            selected=np.sort(fold.trained_on),
            batch=recipe.batch.rows,
            epochs=config.epochs,
            windows=build_windows(recipe.order, self._data.index.shard),
            mixing=Mixing(config.mixup.alpha) if config.mixup.alpha else None,
        )
        training = TrainingJob(
            "incv",
            self._run.fold(fold.round, fold.number),
            fold.round,
            fold.number,
            self._identity,
            f"incv, round {fold.round + 1}/{self._config.rounds}, fold {fold.number + 1}/{folds}",
            self._later(fold, len(plan.selected) * plan.epochs),
        )
        seed_rng(plan.stream, world.rank)
        seed = initial_seed(recipe.seed, self._config, fold.round, fold.number)
        task = FoldTask(
            build_network(recipe, self._data.classes, seed, self._weights),
            build_task_settings(
                recipe,
                config,
                plan,
                torch.from_numpy(self._data.labels),
                world,
                steps=max(plan.total_steps, self._first_round_steps()),
            ),
            predict=(lambda network: self._predict_samples(network, fold, ctx, fold.held_out)) if fold.best else None,
            losses=build_row_losses(config),
        )
        data = self._watch_data(fold, "training", recipe.data.max_unreadable)
        yield from iterate_training(
            training, task, lambda plans, first: data.training_batches(plan.schedule, plans, first, world), ctx
        )
        return task.round_network()

    def _first_round_steps(self) -> int:
        """Steps of a fold of the first round. If they are worth compiling for, shorter rounds use the same blocks."""
        steps = count_steps(self._config.largest_fold(len(self._data.ids)), self._recipe.batch.rows)
        return steps * fit_section(self._config, steps).epochs

    def _later(self, fold: "Fold", images: int) -> Later:
        """The folds and stages after this fold, of which each fold is as long. images: that the fold trains on."""
        rounds, folds, number = self._config.rounds - fold.round - 1, self._config.trained_folds, fold.number
        if folds_side_by_side(folds, self._ctx.execution, self._ctx.world):
            folds, number = folds // 2, number // 2
        folds = folds * (rounds + 1) - 1 - number
        return Later(folds, self._ctx.work_after.get("incv", 0.0) / max(images, 1))

    def _watch_data(self, fold: "Fold", doing: str, most: float | None = None) -> ImageSet:
        log = UnreadableLog(self._run, self._ctx.world.rank)
        return log.watch(self._data, Location("train", "incv", doing, fold.round, fold.number), most)

    def _predict_samples(self, network: nn.Module, fold: "Fold", ctx: RunContext, ids: Ids) -> Predictions:
        """Predict each of the samples once, and return the predictions on every rank."""
        place = f"incv/{fold.round}/{fold.number} predict"
        samples = SamplePass(partial(self._watch_data, fold), self._recipe.precision, ctx, place)
        table = samples.run(network, ids, OUTPUTS, labels=self._data.labels, top_k=self._config.agree_top_k)
        return Predictions.of_table(table, fold.number)

    def _refuse_unusable(self, predictions: Predictions) -> None:
        share = 1.0 - float(predictions.usable().mean())
        if share > self._config.max_unusable:
            raise DataError(
                f"{share:.1%} of the held-out samples could not be read or had non-finite outputs, more than "
                f"incv.max_unusable = {self._config.max_unusable:.1%}: check the shards with `incv shards verify`"
            )

    def _estimate(self, predictions: Predictions, uniform_flips: float | None) -> NoiseEstimates:
        given = self._data.labels[predictions.sample_id]
        return estimate_noise(predictions, given, self._data.classes, self._config, uniform_flips)


def initial_seed(seed: int, config: IncvConfig, number: int, fold: int) -> int:
    """Return the seed of a fold's initial weights: the same for all folds (released code) or one per fold (paper).

    With given weights, it is the seed of the classifier.
    """
    if config.init == "same":
        return derive_stream(seed, "incv.init")
    return derive_stream(seed, "incv.init", number, fold + 1)


def _record(predictions: Predictions, folds: int, ratio: float, best: bool) -> dict[str, Any]:
    return {
        "agreement": predictions.agreement(),
        "agreement_each": [predictions.of_fold(fold).agreement() for fold in range(folds)],
        "remove_ratio": ratio,
        "network": "best" if best else "last",
        "predicted": len(predictions.sample_id),
        "unusable": int((~predictions.usable()).sum()),
    }
