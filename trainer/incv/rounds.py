"""Algorithm 2: rounds of two folds, each leaving predictions and a selection behind; files in, files out."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from shards.durable import write_json
from shards.errors import DataError
from trainer.config import IncvConfig, Recipe
from trainer.incv.folds import FoldTask, split_halves
from trainer.incv.noise_estimates import (
    NoiseEstimates,
    estimate_noise,
    judged_by_best_epoch,
    remove_ratio,
)
from trainer.incv.predictions import Predictions, collect, merged
from trainer.incv.selection import after_round, fill_classes
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import Ids, TrainingPlan, stream_of, windows_of
from trainer.models import create_model
from trainer.predicting import forward_pass
from trainer.run_directory import RunDirectory
from trainer.train_loop import Surroundings, Training, train
from trainer.unreadable import Place, UnreadableLog


class Incv:
    """One run of Algorithm 2 over the samples of a training set."""

    def __init__(self, recipe: Recipe, data: ImageSet, run: RunDirectory, around: Surroundings) -> None:
        assert recipe.incv is not None
        self._recipe, self._config = recipe, recipe.incv
        self._data, self._run, self._around = data, run, around

    def run(self) -> None:
        """All rounds that are not done yet, then the final selection and `incv.json`."""
        index = SelectionIndex.of_candidates(len(self._data.index), self._data.ids)
        noise: NoiseEstimates | None = None
        records: list[dict[str, Any]] = []
        ended_early = None
        for number in range(self._config.rounds):
            candidates = index.ids(State.CANDIDATE)
            if len(candidates) < 2:
                ended_early = self._too_few(number, len(candidates))
                break
            best = judged_by_best_epoch(self._config, number, noise.chosen(self._config) if noise else None)
            predictions = self._predictions_of(number, index, best)
            noise = noise or self._estimate(predictions)
            ratio = remove_ratio(self._config, noise.chosen(self._config))
            index = after_round(index, predictions, number, ratio)
            index.write(self._run.round_selection(number))
            records.append(_record(predictions, ratio, best))
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
                "INCV selected no sample: no network agreed with any held-out label. Train the folds longer "
                "(incv.epochs) or set incv.min_per_class"
            )
        index.write(self._run.selection)
        write_json(
            self._run.incv,
            {
                "noise": noise.as_json(),
                "rounds": records,
                "ended_early": ended_early,
                "filled_classes": [asdict(one) | {"class": one.label} for one in filled],
                "selection_checksum": index.checksum(),
            },
        )

    def _too_few(self, number: int, candidates: int) -> str:
        if number == 0:
            raise DataError(
                f"the data set has {candidates} usable sample(s): a half would be empty. INCV needs at least 2"
            )
        return f"INCV ended after {number} of {self._config.rounds} rounds: {candidates} candidate(s) left to judge"

    def _predictions_of(self, number: int, index: SelectionIndex, best: bool) -> Predictions:
        """A round's predictions: read where the round is done, else by training its folds."""
        path = self._run.round_predictions(number)
        candidates = index.ids(State.CANDIDATE)
        if path.exists():
            return merged([Predictions.read(path)], candidates)
        halves = split_halves(stream_of(self._recipe.seed, "incv.split", number), candidates)
        parts = []
        for fold in (0, 1):
            trained_on = np.concatenate([index.ids(State.SELECTED), halves[fold]])
            parts.append(self._fold(number, fold, trained_on, halves[1 - fold], best))
        predictions = merged(parts, candidates)
        self._refuse_unusable(predictions)
        predictions.write(path)
        return predictions

    def _fold(self, number: int, fold: int, trained_on: Ids, held_out: Ids, best: bool) -> Predictions:
        folder = self._run.fold(number, fold)
        done = folder / "predictions.parquet"
        if done.exists():
            return Predictions.read(done)
        recipe, world = self._recipe, self._around.world
        plan = TrainingPlan(
            stream=stream_of(recipe.seed, "incv", number, fold),
            selected=np.sort(trained_on),
            batch=recipe.batch.global_,
            epochs=self._config.epochs,
            windows=windows_of(recipe.order, self._data.index.shard),
        )
        torch.manual_seed(plan.stream)
        task = FoldTask(
            create_model(
                recipe.model.name,
                self._data.classes,
                initial_seed(recipe.seed, self._config, number, fold),
                **recipe.model.options,
            ),
            self._config.optimizer,
            plan.steps_per_epoch,
            world.device,
            recipe.precision,
            judge=(lambda network: self._judge(network, held_out, number, fold)) if best else None,
            micro=recipe.batch.micro,
        )
        data = self._watched(number, fold, "training", recipe.data.max_unreadable)
        train(
            Training("incv", folder, number, fold),
            task,
            plan,
            lambda first: data.training_batches(plan, first, world),
            self._around,
        )
        predictions = self._judge(task.round_network(), held_out, number, fold)
        predictions.write(done)
        return predictions

    def _watched(self, number: int, fold: int, doing: str, most: float | None = None) -> ImageSet:
        log = UnreadableLog(self._run, self._around.world.rank)
        return log.watch(self._data, Place("train", "incv", doing, number, fold), most)

    def _judge(self, network: nn.Module, held_out: Ids, number: int, fold: int) -> Predictions:
        """A predict pass over the held-out half, each id once."""
        data = self._watched(number, fold, "predicting")
        passes = forward_pass(
            [network],
            data.loader,
            data.predict_requests(np.sort(held_out), self._around.execution.predict_batch),
            self._around.world.device,
            self._recipe.precision,
            self._around.stop,
            f"incv predict fold {fold}",
        )
        return collect(passes, fold, self._config.agree_top_k)

    def _refuse_unusable(self, predictions: Predictions) -> None:
        share = 1.0 - float(predictions.usable().mean())
        if share > self._config.max_unusable:
            raise DataError(
                f"{share:.1%} of the held-out samples could not be read or gave non-finite outputs, more than "
                f"incv.max_unusable = {self._config.max_unusable:.1%}: run `incv shards verify` on the shards"
            )

    def _estimate(self, predictions: Predictions) -> NoiseEstimates:
        given = self._data.labels[predictions.sample_id]
        return estimate_noise(predictions, given, self._data.classes, self._config)


def initial_seed(seed: int, config: IncvConfig, number: int, fold: int) -> int:
    """Seed of a fold's first weights: one for all folds (released code), or each its own (paper)."""
    if config.init == "same":
        return stream_of(seed, "incv.init")
    return stream_of(seed, "incv.init", number, fold + 1)


def _record(predictions: Predictions, ratio: float, best: bool) -> dict[str, Any]:
    return {
        "agreement": predictions.agreement(),
        "agreement_each": [predictions.of_fold(fold).agreement() for fold in (0, 1)],
        "remove_ratio": ratio,
        "network": "best" if best else "last",
        "predicted": len(predictions.sample_id),
        "unusable": int((~predictions.usable()).sum()),
    }
