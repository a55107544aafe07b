"""Check that a recipe's network can be built, takes images of its size, and can be optimised."""

import torch
from torch import nn

from shards.errors import ConfigError
from trainer.config.schema import Recipe
from trainer.methods.networks import build_network
from trainer.methods.registry import methods_of
from trainer.models.factory import create_model
from trainer.models.features import require_features
from trainer.models.weights import Weights
from trainer.training.optim import make_optimizer

_SIZE_OPTION = "img_size"
"""timm's option of networks that are built for one image size, such as vision transformers."""


def check_network(recipe: Recipe, classes: int, weights: Weights | None = None) -> None:
    """Raise ConfigError unless the network can be built and run on an image of the recipe's size, and optimised."""
    if recipe.model.is_none:
        return
    network = build_network(recipe, classes, recipe.seed, weights).eval()
    size = recipe.image.size
    try:
        shape = _output_shape(network, size)
    except Exception as error:  # a third-party network may raise anything
        raise ConfigError(
            f"model {recipe.model.name} does not accept RGB images of image.size = {size}: "
            f"{str(error).rstrip('.') or type(error).__name__}{_advise_on_size(recipe, network, classes)}"
        ) from error
    if shape != (1, classes):
        raise ConfigError(
            f"model {recipe.model.name} has an output of shape {shape}, not one score for each of the {classes} "
            "classes: choose another model, or change model.options"
        )
    for method in methods_of(recipe):
        if method.reads_features(recipe):
            require_features(network, size, f"model {recipe.model.name}", f"the method {method.name}")
    for section in (recipe.incv, *(method.config(recipe) for method in methods_of(recipe))):
        if section is not None:
            optimizer = section.optimizer
            make_optimizer(network, optimizer.kind, optimizer.weight_decay, decay_scope=optimizer.decay_scope)


def _output_shape(network: nn.Module, size: int) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(network(torch.zeros(1, 3, size, size)).shape)


def _advise_on_size(recipe: Recipe, network: nn.Module, classes: int) -> str:
    """Return the end of an error message: the option or the image size with which the network would work."""
    size, own = recipe.image.size, _own_size(network)
    options = recipe.model.options | {_SIZE_OPTION: size}
    advice = []
    try:
        if _output_shape(create_model(recipe.model.name, classes, recipe.seed, **options).eval(), size):
            advice.append(f"set model.options.{_SIZE_OPTION} to {size}")
    except Exception:  # the network has no such option, or does not work at this size at all
        pass
    if own not in (None, size):
        advice.append(f"set image.size to {own}")
    return f"; {', or '.join(advice)}" if advice else ""


def _own_size(network: nn.Module) -> int | None:
    """Return the side of the square images that timm records for a network; None if it is unknown."""
    settings = getattr(network, "default_cfg", None)
    recorded = settings.get("input_size") if isinstance(settings, dict) else None
    return recorded[-1] if recorded and recorded[-1] == recorded[-2] else None
