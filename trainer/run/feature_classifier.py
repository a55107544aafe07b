"""The classifier of a judge by features: a logistic regression on the selected samples, for `incv predict`.

classifier/head.safetensors   mean [features], weight [features, classes] and bias [classes], calibrated
           config.json        the classes, the network, its input, and the checksum of its weights
"""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shards.durable import atomic_folder, read_json
from shards.errors import DataError, InputError
from trainer.config.schema import Recipe
from trainer.distributed.world import SINGLE_PROCESS
from trainer.examine.folds import stratified_group_folds
from trainer.incv.feature_judge import Examined, fit_flips
from trainer.incv.logistic import Fit, scale_rows
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.sample_order import derive_stream
from trainer.methods.networks import build_network
from trainer.models.weights import find_weights
from trainer.records.run_directory import RunDirectory
from trainer.run.examination import load_examined
from trainer.training.checkpoint import write_tensors

if TYPE_CHECKING:
    from trainer.run.stages import StageRunner

_MOST_ROWS_OF_ALL_FOLDS = 20_000
"""Samples up to which all folds are held out in turn to calibrate; of more, one fold is enough."""


@dataclass(frozen=True, eq=False)
class Head:
    """Maps features to logits: (features - mean), scaled to length 1, @ weight + bias."""

    mean: Tensor
    """float32 [features]"""
    weight: Tensor
    """float32 [features, classes]"""
    bias: Tensor
    """float32 [classes]"""


class FeatureClassifier(nn.Module):
    """A network and a head on its features; returns calibrated logits [rows, classes]."""

    def __init__(self, network: nn.Module, head: Head) -> None:
        super().__init__()
        self.network: Any = network
        for name in ("mean", "weight", "bias"):
            self.register_buffer(name, getattr(head, name))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.network.forward_features(images)
        features = self.network.forward_head(maps, pre_logits=True).flatten(1)
        rows = scale_rows(features.float(), self.get_buffer("mean"))
        return torch.addmm(self.get_buffer("bias"), rows, self.get_buffer("weight"))


def fit_classifier(stages: "StageRunner", name: str) -> None:
    """Run the stage, on rank 0: fit the head on the selected samples, and write it."""
    recipe, run, index = stages.recipe, stages.run, stages.data.train
    weights = stages.data.weights
    assert recipe.incv is not None
    assert weights is not None
    examined = load_examined(stages)
    labels = stages.labels_by_id()[examined.ids]
    selected = np.isin(examined.ids, SelectionIndex.read(run.selection).ids(State.SELECTED))
    seed = derive_stream(recipe.seed, "incv.split")
    folds = stratified_group_folds(labels, examined.groups, recipe.incv.folds, seed)
    penalty = read_json(run.incv)["judge"]["penalty"]
    head = fit_head(examined, labels, selected, folds, penalty, index.num_classes, stages.ctx.world.device)
    described = {
        "architecture": recipe.model.name,
        "model_args": recipe.model.options,
        "weights_checksum": weights.checksum,
        "label_names": list(index.class_names),
        "input": {each: getattr(recipe.image, each) for each in ("size", "resize", "mean", "std")},
        "samples": int(selected.sum()),
        "penalty": penalty,
    }
    with atomic_folder(run.classifier) as temporary:
        tensors = {each: getattr(head, each).cpu() for each in ("mean", "weight", "bias")}
        write_tensors(temporary / "head.safetensors", tensors)
        (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def fit_head(
    examined: Examined,
    labels: npt.NDArray[np.int64],
    selected: npt.NDArray[np.bool_],
    folds: npt.NDArray[np.int64],
    penalty: float,
    classes: int,
    device: torch.device,
) -> Head:
    """Fit a logistic regression on the selected samples, and calibrate it on all samples, each held out.

    The selected samples alone would make it overconfident, since they are those that a regression agrees with. All
    labels together are noisy, so the calibration assumes that a share of them is flipped at random.
    """
    features = examined.features.to(device)
    mean = features.mean(dim=0, dtype=torch.float32)
    fit = Fit(
        scale_rows(features, mean),
        torch.from_numpy(labels).to(device),
        classes,
        replace(SINGLE_PROCESS, device=device),
    )
    counts, fold_of = torch.from_numpy(selected).to(device).float(), torch.from_numpy(folds).to(device)
    found = fit.train(counts, penalty)
    number = int(folds.max()) + 1 if len(labels) <= _MOST_ROWS_OF_ALL_FOLDS else 1
    logits, given = [], []
    for fold in range(number):
        held_out = fold_of == fold
        apart = fit.train(counts * ~held_out, penalty, found)
        logits.append(apart.logits(fit.features[held_out]))
        given.append(fit.labels[held_out])
    factor = fit_flips(torch.cat(logits), torch.cat(given)).factor
    return Head(mean, found.weight * factor, found.bias * factor)


def load_feature_classifier(run: RunDirectory, recipe: Recipe) -> FeatureClassifier:
    """Load the classifier in eval mode, on the CPU; raises InputError if the weights of its network cannot be had."""
    described = read_json(run.classifier / "config.json")
    try:
        weights = find_weights(recipe.model, download=False)
    except InputError as error:
        raise DataError(f"the network of {run.root} needs its weights, which it did not copy: {error}") from None
    if weights is None:
        raise DataError(
            f"the network of {run.root} needs timm's weights of {recipe.model.name}, which are no longer in the "
            "cache of the Hugging Face hub: start the audit again, which downloads them, or copy the cache back"
        )
    if weights.checksum != described["weights_checksum"]:
        raise DataError(
            f"{weights.path} has changed since the run {run.root}: restore the file (SHA-256 "
            f"{described['weights_checksum']}), or start the audit again"
        )
    file = run.classifier / "head.safetensors"
    try:
        head = Head(**load_file(file))
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{file} is damaged ({error}): run the stage again with `--redo classifier`") from None
    network = build_network(recipe, len(described["label_names"]), recipe.seed, weights)
    return FeatureClassifier(network, head).eval()
