"""Training methods by name: built-in, and from installed packages (entry point group `incv.methods`).

Listing names does not import a method: that would import torch and slow down `incv ls`.
"""

import logging
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from trainer.methods import BUILT_IN

if TYPE_CHECKING:
    from trainer.config.schema import Recipe
    from trainer.methods.method import Method

PLUGINS = PluginGroup("incv.methods", "training method")
_log = logging.getLogger(__name__)


def method_names() -> tuple[str, ...]:
    """Return the names of all registered methods, in training order."""
    return (*BUILT_IN, *(name for name in PLUGINS.names() if name not in BUILT_IN))


def require_method_name(name: str) -> None:
    """Raise ConfigError, with near matches, unless a method of that name is registered."""
    if name not in method_names():
        raise ConfigError(f"`methods`: unknown method {name!r}; {did_you_mean(name, method_names())}")


@cache
def get_method(name: str) -> "Method":
    """Return the method with this name; raise ConfigError if it is unknown or unusable."""
    require_method_name(name)
    from trainer.methods.method import Method  # deferred: it imports torch

    entry = PLUGINS.find(name, BUILT_IN)
    if entry is not None:
        return PLUGINS.load(entry, Method)
    method: Method = import_module(f"{__package__}.{name}").METHOD
    return method


def title_of(name: str) -> str:
    """A method's title, or its name if it is not registered here, as in a run from another machine."""
    try:
        return get_method(name).title
    except ConfigError:
        return name


@cache
def usable_methods() -> "list[Method]":
    """All registered methods but the unusable ones; logs a warning, once, for each of those."""
    usable = []
    for name in method_names():
        try:
            usable.append(get_method(name))
        except ConfigError as error:
            _log.warning("%s", error)
    return usable


def methods_of(recipe: "Recipe") -> "list[Method]":
    """The methods that a recipe lists, in training order."""
    return [get_method(name) for name in method_names() if name in recipe.methods]
