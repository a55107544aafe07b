"""Loads complete recipes: the base sections, and the sections of all registered methods."""

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import create_model, model_validator

from shards.errors import ConfigError
from trainer.config.recipe_file import read_recipe, validate_recipe
from trainer.config.schema import Recipe, TrainingConfig
from trainer.methods.registry import get_method, method_names, methods_of, require_method_name, usable_methods
from trainer.methods.sections import INHERITS, OWN_KEYS_ALSO_THERE, SECTIONS
from trainer.run.image_defaults import assume_image_keys, fill_image_keys
from trainer.run.noise_kinds import validate_noise

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from trainer.methods.method import Method

_log = logging.getLogger(__name__)


class _NamedRecipe(Recipe):
    """Base class of both composed schemas, with the checks that need the names of methods and of noise kinds."""

    @model_validator(mode="after")
    def _check_names(self) -> "_NamedRecipe":
        validate_noise(self.labels)
        if not self.methods and self.incv is None:
            raise ValueError("the recipe has nothing to do: list training methods under `methods`, or add `incv:`")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError("methods lists a method twice")
        for name in self.methods:
            try:
                require_method_name(name)
            except ConfigError as error:
                raise ValueError(str(error)) from None
            if self.section(name) is None:
                inherited = f" or `{INHERITS[name]}:`" if name in INHERITS else ""
                raise ValueError(f"methods lists {name}, so the recipe needs a section `{name}:`{inherited}")
        return self


class _CheckedRecipe(_NamedRecipe):
    """Base class of the complete schema, with the checks that need the methods themselves."""

    @model_validator(mode="after")
    def _check_methods(self) -> "_CheckedRecipe":
        try:
            methods = methods_of(self)
        except ConfigError as error:  # a package's method cannot be imported
            raise ValueError(str(error)) from None
        for method in methods:
            method.validate(self)
            if method.config(self).mixup.alpha > 0 and not method.supports_mixup:
                raise ValueError(_refuse_mixup(method))
            for needed in method.reads_methods:
                if needed not in self.methods:
                    raise ValueError(
                        f"the method {method.name} reads the network that the method {needed} trains: add {needed} "
                        f"to `methods` (and a section `{needed}:`, if there is none)"
                    )
            if method.reads_incv(self) and self.incv is None:
                raise ValueError(
                    f"the recipe needs a section `incv:`: the method {method.name} reads "
                    f"{' and '.join(sorted(method.inputs(self) - {'labels'}))}"
                )
        return self


def _refuse_mixup(method: "Method") -> str:
    inherited = "" if method.inherits is None else f" (keys that it leaves unset come from `{method.inherits}`)"
    supporting = ", ".join(other.name for other in usable_methods() if other.supports_mixup)
    return (
        f"{method.name}.mixup.alpha is above 0{inherited}, but {method.name} does not support mixup: its loss "
        f"needs images with one label. Set it to 0; {supporting} and the folds of INCV "
        "(incv.mixup) support it"
    )


@cache
def _named_schema() -> type[Recipe]:
    """Return the recipe schema without importing torch; it accepts anything in the sections of other packages."""
    own: dict[str, Any] = {name: (section | None, None) for name, section in SECTIONS.items()}
    others: dict[str, Any] = {name: (Any, None) for name in method_names() if name not in own}
    return create_model("Recipe", __base__=_NamedRecipe, **own, **others)


@cache
def recipe_schema() -> type[Recipe]:
    """Return the recipe schema: the base sections and an optional section for each registered method."""
    sections: dict[str, Any] = {method.name: (method.section | None, None) for method in usable_methods()}
    return create_model("Recipe", __base__=_CheckedRecipe, **sections)


def method_sections() -> dict[str, type[TrainingConfig]]:
    """Return the sections of all usable methods by name; only those of installed packages are imported."""
    plugins = [name for name in method_names() if name not in SECTIONS]
    found = dict(SECTIONS)
    for name in plugins:
        try:
            found[name] = get_method(name).section
        except ConfigError as error:
            _log.warning("%s", error)
    return found


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply the overrides and validate; raises ConfigError."""
    return check_recipe(read_recipe(path, overrides), str(path), overrides)


def check_recipe(content: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Recipe:
    """Validate the content of a recipe; raises ConfigError.

    origin: where the content comes from, for errors; overrides: those that it contains, which errors name instead.
    Most errors are found before the methods, and with them torch, are imported, which takes seconds.
    """
    built_in = [_Heir(name, section, INHERITS.get(name)) for name, section in SECTIONS.items()]
    validate_recipe(assume_image_keys(_inherit_sections(content, built_in)), _named_schema(), origin, overrides)
    for name in method_names():
        if name in content:
            get_method(name)  # unusable: raises an error that names its package, not "unknown key"
    methods = [_Heir(method.name, method.section, method.inherits) for method in usable_methods()]
    return validate_recipe(fill_image_keys(_inherit_sections(content, methods)), recipe_schema(), origin, overrides)


class _Heir(NamedTuple):
    """A method's section and the one that it inherits keys from."""

    name: str
    section: type[TrainingConfig]
    inherits: str | None


def _inherit_sections(content: dict[str, Any], methods: Sequence[_Heir]) -> dict[str, Any]:
    """Fill unset keys of a method's section from the section it inherits.

    Keys that only a method in OWN_KEYS_ALSO_THERE has may be set in the inherited section too; they are moved to its
    own one.
    """
    filled, sections = dict(content), {method.name: method.section for method in methods}
    for method in methods:
        source = content.get(method.inherits) if method.inherits is not None else None
        if method.inherits is None or not isinstance(source, dict):
            continue
        known = _keys_of(method.section)
        only_heirs = known - _keys_of(sections[method.inherits]) if method.name in OWN_KEYS_ALSO_THERE else set()
        own = content.get(method.name)
        listed = isinstance(content.get("methods"), list) and method.name in content["methods"]
        if isinstance(own, dict) or (own is None and (listed or only_heirs & source.keys())):
            shared = {key: value for key, value in source.items() if key in known}
            filled[method.name] = _merge(shared, own or {})
        filled[method.inherits] = {key: value for key, value in source.items() if key not in only_heirs}
    return filled


def _keys_of(section: type[TrainingConfig]) -> set[str]:
    return {field.alias or name for name, field in section.model_fields.items()}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; keys that `above` does not set come from `below`."""
    merged = dict(below)
    for key, value in above.items():
        inner = below.get(key)
        merged[key] = _merge(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return merged
