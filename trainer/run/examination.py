"""The stage `features`: one pass over the images, their neighbours, and what is wrong besides their labels.

examination.parquet   one row for each sample that has features
examination.json      thresholds and counts
neighbours.npy        int32 [rows, k]: the rows of the most similar samples
"""

import hashlib
import json
import logging
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shards.durable import read_parquet, write_array, write_json, write_parquet
from shards.errors import DataError
from trainer.config.schema import Recipe
from trainer.examine.duplicates import checksum_groups, connect_groups, find_leaks, find_near_duplicates, group_pairs
from trainer.examine.image_checks import check_images
from trainer.examine.neighbours import nearest
from trainer.examine.off_topic import OffTopic, find_off_topic
from trainer.incv.feature_judge import NEIGHBOURS, Examined, rank_share
from trainer.loading.image_set import limit_ids
from trainer.loading.sample_order import Ids
from trainer.methods.networks import build_network, to_device
from trainer.passes.feature_store import FeatureStore, Keys, content_keys
from trainer.passes.table import SampleTable, gather_table
from trainer.run.given_arrays import read_features, read_predictions

if TYPE_CHECKING:
    from trainer.run.stages import StageRunner

_log = logging.getLogger(__name__)
SIDE = 32
"""Of the grey thumbnails that are kept behind the features."""
_NETWORK, _THUMBNAILS, _NOTHING = slice(None, -SIDE * SIDE), slice(-SIDE * SIDE, None), slice(0, 0)
"""The columns of the store."""


class NoNetwork(nn.Module):
    """Gives no features, at no cost."""

    def forward_features(self, images: Tensor) -> Tensor:
        return images.new_zeros(len(images), 1)

    def forward_head(self, maps: Tensor, pre_logits: bool = False) -> Tensor:
        return maps[:, :0] if pre_logits else maps


class WithThumbnails(nn.Module):
    """A network whose features end with a grey thumbnail of the image, so that one pass gives both."""

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network: Any = network
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def forward_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        grey = (images.float() * self.get_buffer("std") + self.get_buffer("mean")).mean(dim=1, keepdim=True)
        return self.network.forward_features(images), F.adaptive_avg_pool2d(grey, SIDE).flatten(1)

    def forward_head(self, maps: tuple[Tensor, Tensor], pre_logits: bool = False) -> Tensor:
        outputs: Tensor = self.network.forward_head(maps[0], pre_logits=pre_logits)
        return torch.cat([outputs.flatten(1).float(), maps[1]], dim=1) if pre_logits else outputs


def examine(stages: "StageRunner", name: str) -> None:
    """Run the stage on all ranks."""
    world, run = stages.ctx.world, stages.run
    index, labels = stages.data.train, stages.data.labels
    store, keys = open_store(stages), content_keys(index, labels.ids)
    network: nn.Module = NoNetwork()
    if runs_network(stages.recipe):
        network = build_network(stages.recipe, index.num_classes, stages.recipe.seed, stages.data.weights)
    image = stages.recipe.image
    module = to_device(WithThumbnails(network, image.mean, image.std), world.device)

    def run_pass(ids: Ids, path: Path) -> SampleTable:
        return stages.passes(name).run(module, ids, (), doing="features", features_to=path)

    missing = store.fill(keys, labels.ids, run_pass)
    others = _fill_others(stages, name, store, module)
    _log.info("features: %s of %s images were computed before", f"{len(keys) - missing:,}", f"{len(keys):,}")
    _, found = store.read(keys, _NOTHING)
    features = _read_features(stages, store, labels.ids, keys)
    found &= torch.isfinite(features).all(dim=1).numpy()  # beyond the range of float16
    ids = labels.ids[found]
    if not len(ids):
        raise DataError("no image has finite features: all are unreadable, or the weights do not suit the network")
    stages.ctx.heartbeat.update("features: neighbours", 0, 0)
    features = features[torch.from_numpy(found)]
    centred = centre(features.to(world.device))
    neighbours = _find_neighbours(stages, centred)
    stages.ctx.heartbeat.update("features: examining", 0, 0)
    if world.is_rank0:
        thumbnails, _ = store.read(keys[found], _THUMBNAILS)
        table, facts = _examine_images(stages, ids, keys[found], features, centred, thumbnails, neighbours)
        del centred  # its memory on the device
        if others is not None:
            leaks, counted = _find_leaks(stages, store, others, keys[found], features, thumbnails, neighbours)
            table, facts = table.append_column("leak", leaks), facts | {"leaks": counted}
        write_array(run.neighbours, neighbours)
        write_json(run.examination_facts, facts | {"images": len(labels.ids), "computed": missing})
        write_parquet(run.examination, table)
    world.barrier()


def _fill_others(stages: "StageRunner", name: str, store: FeatureStore, module: nn.Module) -> tuple[Ids, Keys] | None:
    """Compute what the store lacks of the set `incv.against`; return its samples. None if there is no such set."""
    recipe = stages.recipe
    assert recipe.incv is not None
    if (against := recipe.incv.against) is None:
        return None
    index = stages.data.eval[against]
    ids = limit_ids(index, recipe.data.eval[against].limit)
    keys = content_keys(index, ids)
    with ExitStack() as opened:
        open_set = cache(lambda: opened.enter_context(closing(stages.evaluation_set(against))))

        def run_pass(part: Ids, path: Path) -> SampleTable:
            passes = stages.passes(name, against, open_set())
            return passes.run(module, part, (), doing=f"features of {against}", features_to=path)

        store.fill(keys, ids, run_pass)
    return ids, keys


def runs_network(recipe: Recipe) -> bool:
    """Whether the stage runs the initial weights over the images; otherwise it makes thumbnails alone."""
    assert recipe.incv is not None
    return recipe.incv.features_file is None and recipe.model.has_initial_weights


def open_store(stages: "StageRunner") -> FeatureStore:
    """Return the features of the run's network and input."""
    recipe, weights = stages.recipe, stages.data.weights
    keys: dict[str, Any] = {}
    if runs_network(recipe):
        assert weights is not None
        keys = {"weights": weights.checksum, "model": [recipe.model.name, recipe.model.options]}
    keys |= {
        "image": [recipe.image.size, recipe.image.resize, recipe.image.pad, recipe.image.mean, recipe.image.std],
        "precision": recipe.precision,
        "thumbnail": SIDE,
    }
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()
    folder = Path(recipe.execution.features or stages.run.features)
    return FeatureStore(folder / digest[:16], stages.ctx.world)


def _read_features(stages: "StageRunner", store: FeatureStore, ids: Ids, keys: Keys) -> Tensor:
    """Return the features of samples by which they are compared: of the file, the network or, without both, the
    thumbnails: [ids, features]."""
    assert stages.recipe.incv is not None
    if (file := stages.recipe.incv.features_file) is not None:
        return torch.from_numpy(read_features(Path(file), stages.data.train, ids))
    return store.read(keys, _NETWORK if runs_network(stages.recipe) else _THUMBNAILS)[0]


def load_examined(stages: "StageRunner") -> Examined:
    """Return what the stage has found, and the predictions that the recipe names, on every rank."""
    incv, index = stages.recipe.incv, stages.data.train
    assert incv is not None
    table = read_parquet(stages.run.examination, "examination", ["sample_id", "group"])
    ids, groups = (table[name].to_numpy().copy() for name in ("sample_id", "group"))  # writable, as torch wants it
    neighbours = np.load(stages.run.neighbours, allow_pickle=False)
    if incv.predictions_file is not None:
        given = read_predictions(Path(incv.predictions_file), index, ids, stages.labels_by_id()[ids])
        return Examined(ids, torch.empty(len(ids), 0), neighbours, groups, given)
    store, keys = open_store(stages), content_keys(index, ids)
    _, found = store.read(keys, _NOTHING)
    if not found.all():
        raise DataError(
            f"{store.folder} lacks features of {int((~found).sum()):,} images: compute them with `--redo features`"
        )
    return Examined(ids, _read_features(stages, store, ids, keys), neighbours, groups)


def _find_neighbours(stages: "StageRunner", centred: Tensor) -> npt.NDArray[np.int32]:
    """Return the rows of the most similar samples, on every rank, each of which searches for a part: [rows, k]."""
    world, count = stages.ctx.world, len(centred)
    share = rank_share(count, world)
    near, _ = nearest(centred, NEIGHBOURS, rows=range(share.start, share.stop))
    own = torch.arange(share.start, share.stop, device=world.device)
    table = gather_table(world, own, {"near": near.int()}, np.arange(count), "the neighbours")
    return table["near"].cpu().numpy()


def _find_off_topic(stages: "StageRunner", features: Tensor, labels: npt.NDArray[np.int64]) -> OffTopic:
    """Find images far from every class; none without features, since thumbnails do not show what an image is."""
    recipe = stages.recipe
    assert recipe.incv is not None
    if recipe.incv.features_file is not None or runs_network(recipe):
        return find_off_topic(features, labels)
    unknown = np.full(len(labels), np.nan, np.float32)
    return OffTopic(unknown, None, np.zeros(len(labels), np.bool_), "not looked for: it needs features")


def _find_leaks(
    stages: "StageRunner",
    store: FeatureStore,
    others: tuple[Ids, Keys],
    keys: Keys,
    features: Tensor,
    thumbnails: Tensor,
    neighbours: npt.NDArray[np.int32],
) -> tuple[pa.Array, dict[str, Any]]:
    """Return the key of the most similar image of the other set in which each image is found, and counts."""
    assert stages.recipe.incv is not None
    against, device = stages.recipe.incv.against, stages.ctx.world.device
    assert against is not None
    by_network = runs_network(stages.recipe)  # a file has no features of the other set
    own = features if by_network else thumbnails
    other, readable = store.read(others[1], _NETWORK if by_network else _THUMBNAILS)
    readable &= torch.isfinite(other).all(dim=1).numpy()
    other_ids, other_keys = others[0][readable], others[1][readable]
    if not len(other_ids):
        raise DataError(f"no image of {against} has finite features", field=f"data.eval.{against}.root")
    other = other[torch.from_numpy(readable)]
    mean = own.mean(dim=0, dtype=torch.float32)
    pairs = find_leaks(
        (own.float() - mean).to(device),
        _grey(thumbnails).expand(-1, 3, -1, -1).to(device),
        (other.float() - mean).to(device),
        _grey(store.read(other_keys, _THUMBNAILS)[0]).expand(-1, 3, -1, -1).to(device),
        torch.from_numpy(neighbours).to(device).long(),
    )
    found = np.full(len(keys), -1)
    ascending = np.argsort(pairs.correlations, kind="stable")
    found[pairs.pairs[ascending, 0]] = pairs.pairs[ascending, 1]  # the last, which is the most similar, stays
    unique, first = np.unique(other_keys, return_index=True)
    places = np.searchsorted(unique, keys).clip(max=len(unique) - 1)
    equal = unique[places] == keys
    found[equal] = first[places[equal]]
    names = pa.array(stages.data.eval[against].keys(other_ids), pa.string())
    leaks = names.take(pa.array(found, pa.int64(), mask=found < 0))
    _log.info("features: %s images are also in %s", f"{int((found >= 0).sum()):,}", against)
    return leaks, {
        "set": against,
        "images": len(other_ids),
        "found": int((found >= 0).sum()),
        "equal": int(equal.sum()),
        "threshold": pairs.threshold,
        "why": pairs.why,
    }


def _grey(thumbnails: Tensor) -> Tensor:
    """Return thumbnails of the store as grey pictures: uint8 [n, 1, h, w]."""
    return (thumbnails.float() * 255).round().clamp(0, 255).to(torch.uint8).view(-1, 1, SIDE, SIDE)


def centre(features: Tensor) -> Tensor:
    """Subtract the mean of the features: float32 [rows, features]."""
    return features.float() - features.mean(dim=0, dtype=torch.float32)


def _examine_images(
    stages: "StageRunner",
    ids: Ids,
    keys: npt.NDArray[np.uint64],
    features: Tensor,
    centred: Tensor,
    thumbnails: Tensor,
    neighbours: npt.NDArray[np.int32],
) -> tuple[pa.Table, dict[str, Any]]:
    """Look for duplicates, off-topic images and bad pictures. centred: the features, on the device."""
    index, device = stages.data.train, stages.ctx.world.device
    labels = stages.labels_by_id()[ids]
    grey = _grey(thumbnails)
    equal = checksum_groups(keys)
    near = torch.from_numpy(neighbours).to(device).long()
    pairs = find_near_duplicates(centred, grey.expand(-1, 3, -1, -1).to(device), near)
    groups = connect_groups(len(ids), np.concatenate([group_pairs(equal), pairs.pairs]))
    off_topic = _find_off_topic(stages, features.to(device), labels)
    checks = check_images(grey.expand(-1, 3, -1, -1).numpy(), index.width[ids], index.height[ids])
    columns: dict[str, Any] = {
        "sample_id": ids,
        "group": groups,
        "equal_group": equal,
        "off_topic_score": off_topic.scores,
        "off_topic": off_topic.found,
    }
    columns |= {check.name: check.found for check in checks.values()}
    facts = {
        "near_duplicates": {"pairs": len(pairs.pairs), "threshold": pairs.threshold, "why": pairs.why},
        "off_topic": {"threshold": off_topic.threshold, "why": off_topic.why},
        "checks": {check.name: {"threshold": check.threshold, "why": check.why} for check in checks.values()},
    }
    return pa.table(columns), facts
