"""Create networks by name (timm's and our own) and group their parameters for weight decay."""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from shards.errors import ConfigError
from trainer.models.cifar_resnets import SMALL_NETWORKS, ResidualBlock

DecayScope = Literal["all", "weights", "residual_convs"]

# Options of timm.create_model that would download weights or unpickle a file. A recipe cannot set them, because it
# may be untrusted; model.pretrained and model.weights load weights safely.
WEIGHT_OPTIONS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"})


def create_model(name: str, num_classes: int, seed: int, **options: Any) -> nn.Module:
    """Build a network on the CPU with random weights that depend only on the arguments.

    name: any timm model, or cifar_resnet20, cifar_resnet32, cifar_resnet110, digits_cnn.
    options: passed to the architecture (`in_chans`, ...). The global random state is neither read nor changed.
    """
    require_known_model(name)
    build = SMALL_NETWORKS.get(name) or _timm_builder(name)
    if refused := sorted(WEIGHT_OPTIONS & options.keys()):
        raise ConfigError(
            f"model option {refused[0]!r} loads weights: remove it, and set model.pretrained or model.weights instead"
        )
    with seeded_cpu(seed):
        try:
            return build(num_classes=num_classes, **options)
        except Exception as error:  # a third-party network may raise anything
            raise ConfigError(
                f"model {name!r} cannot be built with {num_classes} classes and model.options = {options}: "
                f"{str(error) or type(error).__name__}"
            ) from error


@contextmanager
def seeded_cpu(seed: int) -> Iterator[None]:
    """Build networks on the CPU with random draws that depend only on the seed, and restore the random state."""
    # Seed the CPU generator only: torch.manual_seed would also reseed every GPU, which fork_rng does not undo here.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def require_known_model(name: str) -> None:
    """Raise ConfigError, with near matches, unless `name` is a timm model or one of our own."""
    if name in SMALL_NETWORKS:
        return
    timm = import_timm()
    if not timm.is_model(name):
        near = difflib.get_close_matches(name.lower(), timm.list_models(), n=5, cutoff=0.6)
        hint = "did you mean " + ", ".join(near) + "?" if near else "choose one of timm.list_models()"
        raise ConfigError(f"unknown model {name!r}; {hint}")


def _timm_builder(name: str) -> Callable[..., nn.Module]:
    return lambda **options: import_timm().create_model(name, pretrained=False, **options)


@cache
def import_timm() -> ModuleType:
    """Import timm and register our networks with it. Called only when needed, because the import takes seconds."""
    import timm
    from timm.models import register_model

    def register(name: str, build: Callable[..., nn.Module]) -> None:
        def entry(**options: Any) -> nn.Module:
            if options.get("pretrained"):
                raise RuntimeError("no pretrained weights exist for this model")
            return build(**{key: value for key, value in options.items() if key not in WEIGHT_OPTIONS})

        entry.__name__, entry.__module__ = name, "trainer.models.cifar_resnets"
        register_model(entry)

    for name, build in SMALL_NETWORKS.items():
        register(name, build)
    module: ModuleType = timm
    return module


def weight_decay_groups(model: nn.Module, weight_decay: float, scope: DecayScope) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser; every trainable parameter of `model` is in exactly one.

    "all" decays every parameter. "weights", as in timm, decays neither biases and normalisation layers (parameters
    with at most one dimension) nor what the network lists in `no_weight_decay`. "residual_convs", as in the released
    code, decays only the convolutions inside residual blocks (shortcuts included), not the stem, the classifier or
    BatchNorm. Keras's l2(λ) has the gradient 2λw, so the released code's l2(1e-4) is a weight_decay of 2e-4 here.
    """
    if scope == "all":
        return [{"params": _trainable(model), "weight_decay": weight_decay}]
    if scope == "weights":
        exempt = _exempt_from_decay(model)
        return _split_by_decay(model, {id(p) for p in model.parameters() if p.ndim > 1} - exempt, weight_decay)
    if scope != "residual_convs":
        raise ConfigError(f"unknown decay scope {scope!r}; choose 'all', 'weights' or 'residual_convs'")
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    decayed = {id(layer.weight) for block in blocks for layer in block.modules() if isinstance(layer, nn.Conv2d)}
    if not decayed:
        raise ConfigError(
            "decay scope 'residual_convs' needs the residual blocks of the cifar_resnet models, which this model "
            "does not have; use 'all' or 'weights'"
        )
    return _split_by_decay(model, decayed, weight_decay)


def _exempt_from_decay(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that timm's networks exempt, such as position embeddings."""
    exempt = set()
    for module in model.modules():
        names = getattr(module, "no_weight_decay", None)
        if callable(names):
            listed = set(names())
            exempt |= {id(parameter) for name, parameter in module.named_parameters() if name in listed}
    return exempt


def _split_by_decay(model: nn.Module, decayed: set[int], weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters into those whose id is in `decayed`, and the others."""
    with_decay = [parameter for parameter in _trainable(model) if id(parameter) in decayed]
    without_decay = [parameter for parameter in _trainable(model) if id(parameter) not in decayed]
    groups = [{"params": with_decay, "weight_decay": weight_decay}, {"params": without_decay, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]  # ZeRO fails on an empty group


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
