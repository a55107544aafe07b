"""Networks by name: timm's, the paper's CIFAR ResNets and a small CNN for digits; weight decay groups."""

import difflib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from shards.errors import ConfigError
from trainer.models.cifar_resnets import SMALL_NETWORKS, ResidualBlock

DecayScope = Literal["all", "residual_convs"]

# Options of timm.create_model that would fetch weights or unpickle a file. We train from scratch, and
# a recipe may come from anywhere: it cannot set them.
WEIGHT_OPTIONS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"})


def create_model(name: str, num_classes: int, seed: int, **options: Any) -> nn.Module:
    """Build the network `name` on the CPU with random weights that depend on the arguments alone.

    Name: any of timm's, or cifar_resnet20, cifar_resnet32, cifar_resnet110, digits_cnn, registered there.
    Options go to the architecture (`in_chans`, ...). The global random state is neither read nor changed.
    """
    require_known_model(name)
    build = SMALL_NETWORKS.get(name) or _built_by_timm(name)
    if refused := sorted(WEIGHT_OPTIONS & options.keys()):
        raise ConfigError(f"model option {refused[0]!r} loads weights; models here start from scratch: remove it")
    # Only the CPU generator is seeded: torch.manual_seed would also reseed every GPU, outside the fork below.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        try:
            return build(num_classes=num_classes, **options)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"model {name!r} cannot be built with {num_classes} classes and options {options}: {error}"
            ) from error


def require_known_model(name: str) -> None:
    if name in SMALL_NETWORKS:
        return
    timm = import_timm()
    if not timm.is_model(name):
        near = difflib.get_close_matches(name.lower(), timm.list_models(), n=5, cutoff=0.6)
        hint = "did you mean " + ", ".join(near) + "?" if near else "choose one of timm.list_models()"
        raise ConfigError(f"unknown model {name!r}; {hint}")


def _built_by_timm(name: str) -> Callable[..., nn.Module]:
    return lambda **options: import_timm().create_model(name, pretrained=False, **options)


@cache
def import_timm() -> ModuleType:
    """timm, with our networks among its own. Imported only when asked for: it takes seconds to load."""
    import timm
    from timm.models import register_model

    def registered(name: str, build: Callable[..., nn.Module]) -> None:
        def entry(**options: Any) -> nn.Module:
            if options.get("pretrained"):
                raise RuntimeError("there are no pretrained weights of this model")
            return build(**{key: value for key, value in options.items() if key not in WEIGHT_OPTIONS})

        entry.__name__, entry.__module__ = name, "trainer.models.cifar_resnets"
        register_model(entry)

    for name, build in SMALL_NETWORKS.items():
        registered(name, build)
    module: ModuleType = timm
    return module


def weight_decay_groups(model: nn.Module, weight_decay: float, scope: DecayScope) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser; every parameter of `model` is in exactly one.

    "all" decays every parameter; "residual_convs", as the released code, only the convolutions inside
    residual blocks (shortcuts included): not the stem, the classifier, nor BatchNorm. Keras's l2(λ) has the
    gradient 2λw, so the released code's l2(1e-4) is a weight_decay of 2e-4 here.
    """
    if scope == "all":
        return [{"params": list(model.parameters()), "weight_decay": weight_decay}]
    if scope != "residual_convs":
        raise ConfigError(f"unknown decay scope {scope!r}; choose 'all' or 'residual_convs'")
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    decayed = {id(layer.weight) for block in blocks for layer in block.modules() if isinstance(layer, nn.Conv2d)}
    if not decayed:
        raise ConfigError(
            "decay scope 'residual_convs' is for the cifar_resnet models, and this model has none of their "
            "residual blocks; use 'all'"
        )
    inside = [parameter for parameter in model.parameters() if id(parameter) in decayed]
    outside = [parameter for parameter in model.parameters() if id(parameter) not in decayed]
    return [{"params": inside, "weight_decay": weight_decay}, {"params": outside, "weight_decay": 0.0}]
