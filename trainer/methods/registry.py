"""Training methods by name: built-in, and from installed packages (entry point group `incv.methods`).

Listing names does not import a method: that would import torch and slow down `incv ls`.
"""

import difflib
import logging
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from shards.errors import ConfigError
from trainer.methods import BUILT_IN

if TYPE_CHECKING:
    from trainer.config.schema import Recipe
    from trainer.methods.method import Method

GROUP = "incv.methods"
_log = logging.getLogger(__name__)


@cache
def _installed() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in BUILT_IN or entry.name in found:
            raise ConfigError(
                f"the package {_package(entry)} provides a training method named {entry.name!r}, but that name is "
                "already taken: uninstall the package, or rename its entry point"
            )
        found[entry.name] = entry
    return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def method_names() -> tuple[str, ...]:
    """Return the names of all registered methods, in training order."""
    return (*BUILT_IN, *_installed())


@cache
def get_method(name: str) -> "Method":
    """Return the method with this name; raise ConfigError if it is unknown or cannot be imported."""
    from trainer.methods.method import Method  # deferred: it imports torch

    if name in BUILT_IN:
        method: Method = import_module(f"{__package__}.{name}").METHOD
        return method
    if name not in _installed():
        near = difflib.get_close_matches(name, method_names(), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"`methods`: unknown method {name!r}{hint}; registered: {', '.join(method_names())}")
    entry = _installed()[name]
    try:
        loaded = entry.load()
    except Exception as error:  # a third-party module may raise anything
        raise ConfigError(
            f"the training method {name!r} of the package {_package(entry)} cannot be imported "
            f"({type(error).__name__}: {error}): repair or uninstall that package"
        ) from error
    if not isinstance(loaded, Method) or loaded.name != name:
        raise ConfigError(
            f"{entry.value} of the package {_package(entry)} is not a Method named {name!r}, as required of entry "
            f"points in the group {GROUP}: repair or uninstall that package"
        )
    return loaded


def title_of(name: str) -> str:
    """Return a method's title, or its name if it is not registered here (the run may be from another machine)."""
    try:
        return get_method(name).title
    except ConfigError:
        return name


@cache
def usable_methods() -> "list[Method]":
    """Return all registered methods that can be imported; log one warning for each that cannot."""
    usable = []
    for name in method_names():
        try:
            usable.append(get_method(name))
        except ConfigError as error:
            _log.warning("%s", error)
    return usable


def methods_of(recipe: "Recipe") -> "list[Method]":
    """Return the methods that a recipe lists, in training order."""
    return [get_method(name) for name in method_names() if name in recipe.methods]
