"""Which folds of a round are trained at the same time: each half of the ranks its own, or all in one process."""

from shards.errors import ConfigError
from trainer.config.schema import ExecutionConfig
from trainer.distributed.world import World


def folds_side_by_side(folds: int, execution: ExecutionConfig, world: World) -> bool:
    """Whether each half of the ranks trains every second fold, at the same time as the other half.

    folds: that a round trains.
    """
    if folds == 1:
        return False
    if execution.folds == "side_by_side" and world.size % 2 and world.size > 1:
        raise ConfigError(
            f"`execution.folds: side_by_side` needs a single process or an even number of them, not {world.size}: "
            "set execution.folds to auto"
        )
    if execution.folds == "side_by_side" and folds % 2 and world.size > 1:
        raise ConfigError(
            f"`execution.folds: side_by_side` needs a single process or an even number of folds, not {folds}: "
            "set execution.folds to auto, or incv.folds to an even number"
        )
    return execution.folds != "in_turn" and world.size % 2 == 0 and folds % 2 == 0


def folds_share_device(execution: ExecutionConfig, world: World, small: bool) -> bool:
    """Whether a single process trains all folds of a round at once.

    small: whether the images are small enough to stay on the device. One fold with such images underuses a GPU, while
    large images saturate it.
    """
    if world.size > 1 or execution.folds == "in_turn":
        return False
    return execution.folds == "side_by_side" or (small and world.device.type == "cuda")
