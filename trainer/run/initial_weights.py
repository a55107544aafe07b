"""The weights that the networks of a run start from: found, downloaded if necessary, and shared by all ranks."""

import logging
from pathlib import Path

from shards.errors import DataError
from trainer.config.schema import ModelConfig
from trainer.distributed.launch import hostname
from trainer.distributed.world import World
from trainer.models.pretrained import find_pretrained
from trainer.models.weights import Weights, load_weights

_log = logging.getLogger(__name__)


def find_weights(model: ModelConfig, download: bool = True) -> Weights | None:
    """Find and check the initial weights of a recipe; None if it starts from random ones.

    download: if false, also return None for timm's weights that are not in the cache.
    """
    if model.pretrained:
        path = find_pretrained(model.name, download)
    else:
        path = Path(model.weights).expanduser() if model.weights is not None else None
    return _load(path, model) if path is not None else None


def share_weights(world: World, model: ModelConfig) -> Weights | None:
    """Return the initial weights on every rank. Only rank 0 looks for them, so that no two ranks download them."""
    if not model.has_initial_weights:
        return None
    found = world.run_on_rank0(lambda: find_weights(model))
    path = Path(world.broadcast_from_rank0(lambda: str(found.path) if found is not None else ""))
    if found is None and not path.is_file():
        raise DataError(
            f"{hostname()} cannot access the weights {path}: put them on storage that every node mounts, and set "
            "model.weights to the file, or HF_HUB_CACHE to the cache, there"
        )
    _log.info("initial weights: %s", path)
    return found or _load(path, model)


def _load(path: Path, model: ModelConfig) -> Weights:
    return load_weights(path, model.name, model.options, model.pretrained)
