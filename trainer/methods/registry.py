"""Training methods by name: ours, and those of installed packages (entry point group `incv.methods`)."""

import logging
from functools import cache

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from trainer.config.schema import Recipe
from trainer.methods.method import Method

METHODS = PluginGroup(
    "incv.methods",
    "training method",
    {
        "standard": "trainer.methods.built_in:STANDARD",
        "forward_correction": "trainer.methods.built_in:FORWARD_CORRECTION",
        "decoupling": "trainer.methods.built_in:DECOUPLING",
        "coteaching": "trainer.methods.built_in:COTEACHING",
        "mentornet": "trainer.methods.built_in:MENTORNET",
        "d2l": "trainer.methods.built_in:D2L",
        "coteaching_incv": "trainer.methods.built_in:COTEACHING_INCV",
        "standard_incv": "trainer.methods.built_in:STANDARD_INCV",
    },
)
"""In training order."""
_log = logging.getLogger(__name__)


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of all registered methods, in training order."""
    return tuple(METHODS.names())


@cache
def get_method(name: str) -> Method:
    """Return the method with this name; raise ConfigError, with near matches, if it is unknown or unusable."""
    entry = METHODS.find(name)
    if entry is None:
        raise ConfigError(f"`methods`: unknown method {name!r}; {did_you_mean(name, method_names())}")
    return METHODS.load(entry, Method)


def title_of(name: str) -> str:
    """A method's title, or its name if it is not registered here, as in a run from another machine."""
    try:
        return get_method(name).title
    except ConfigError:
        return name


@cache
def usable_methods() -> list[Method]:
    """All registered methods but the unusable ones; logs a warning, once, for each of those."""
    usable = []
    for name in method_names():
        try:
            usable.append(get_method(name))
        except ConfigError as error:
            _log.warning("%s", error)
    return usable


def methods_of(recipe: Recipe) -> list[Method]:
    """The methods that a recipe lists, in training order."""
    return [get_method(name) for name in method_names() if name in recipe.methods]
