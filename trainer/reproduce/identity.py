"""The identities of planned runs, from today's recipes and methods."""

from collections.abc import Sequence
from functools import cache

from shards.errors import ConfigError
from trainer.config.shipped import RECIPES
from trainer.methods.registry import method_names
from trainer.reproduce.matching import Identity
from trainer.reproduce.planning import PlannedRun
from trainer.run.recipe import load_recipe
from trainer.run.stage_graph import numerics_behind, stage_keys

CIFAR10_TRAIN = "ab99971fbd2db7beecfecea8fa315767ee985619d2753a81333efda40bafeae2"
"""Checksum of the packed training images of CIFAR-10, the same for the binary and the Python version."""


def find_unavailable(run: PlannedRun) -> str | None:
    """Return why a run cannot be executed with this version of incv; None if it can."""
    if run.stage != "incv" and run.stage not in method_names():
        return f"no method {run.stage}"
    if not (RECIPES / f"{run.recipe}.yaml").exists():
        return f"no recipe {run.recipe}"
    try:
        _identify(run.recipe, run.stage, run.overrides)
    except ConfigError as error:
        return str(error)
    return None


def identify_plan(run: PlannedRun, checksum: str | None = CIFAR10_TRAIN) -> Identity:
    """Return the identity that a planned run would have today. checksum: of CIFAR-10's `train`; None: any."""
    identity = _identify(run.recipe, run.stage, run.overrides)
    data = (identity.keys.get("data.train.source"), identity.keys.get("data.train.split", "train"))
    is_known = checksum is not None and data == ("cifar10", "train")
    facts = {"data.train.checksum": checksum} if is_known else {}
    return Identity({**identity.keys, **facts}, identity.numerics)


@cache
def _identify(recipe: str, stage: str, overrides: Sequence[str]) -> Identity:
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", overrides)
    keys = stage_keys(loaded, {})
    if stage not in keys:
        raise ConfigError(f"a run of {recipe} with {' '.join(overrides)} has no stage {stage}")
    return Identity(keys[stage], numerics_behind(stage, loaded))
