"""Loads complete recipes: the base sections, and the sections of all registered methods."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import create_model, model_validator

from shards.errors import ConfigError
from trainer.config.recipe_file import read_recipe, validate_recipe
from trainer.config.schema import Recipe, TrainingConfig
from trainer.methods.method import Method
from trainer.methods.registry import get_method, method_names, methods_of, usable_methods
from trainer.run.noise_kinds import validate_noise

_IMAGE_KEYS = ("size", "mean", "std")
"""Image keys that a recipe may leave to its initial weights."""


class _CheckedRecipe(Recipe):
    """Base class of the complete schema, with the checks that need the methods and the kinds of noise."""

    @model_validator(mode="after")
    def _check_methods(self) -> "_CheckedRecipe":
        validate_noise(self.labels)
        if not self.methods and self.incv is None:
            raise ValueError("the recipe has nothing to do: list training methods under `methods`, or add `incv:`")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError("methods lists a method twice")
        for name in self.methods:
            try:
                inherits = get_method(name).inherits
            except ConfigError as error:  # it is unknown, or its package cannot be imported
                raise ValueError(str(error)) from None
            if self.section(name) is None:
                inherited = "" if inherits is None else f" or `{inherits}:`"
                raise ValueError(f"methods lists {name}, so the recipe needs a section `{name}:`{inherited}")
        for method in methods_of(self):
            self._check_method(method)
        return self

    def _check_method(self, method: Method) -> None:
        method.validate(self)
        if method.config(self).mixup.alpha > 0 and not method.supports_mixup:
            raise ValueError(_refuse_mixup(method))
        for needed in method.reads_methods(self):
            if needed not in self.methods:
                raise ValueError(
                    f"the method {method.name} reads the network that the method {needed} trains: add {needed} "
                    f"to `methods` (and a section `{needed}:`, if there is none)"
                )
        if method.reads_incv(self) and self.incv is None:
            raise ValueError(
                f"the recipe needs a section `incv:`, because the method {method.name} reads the "
                f"{'selection' if method.reads_selection(self) else 'noise estimate'} of INCV"
            )


def _refuse_mixup(method: Method) -> str:
    inherited = "" if method.inherits is None else f" (keys that it leaves unset come from `{method.inherits}`)"
    supporting = ", ".join(other.name for other in usable_methods() if other.supports_mixup)
    return (
        f"{method.name}.mixup.alpha is above 0{inherited}, but {method.name} does not support mixup: its loss "
        f"needs images with one label. Set it to 0; {supporting} and the folds of INCV "
        "(incv.mixup) support it"
    )


@cache
def recipe_schema() -> type[Recipe]:
    """Return the recipe schema: the base sections and an optional section for each usable method."""
    sections: dict[str, Any] = {name: (section | None, None) for name, section in method_sections().items()}
    return create_model("Recipe", __base__=_CheckedRecipe, **sections)


def method_sections() -> dict[str, type[TrainingConfig]]:
    """Return the sections of all usable methods by name."""
    return {method.name: method.section for method in usable_methods()}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply the overrides and validate; raises ConfigError."""
    return check_recipe(read_recipe(path, overrides), str(path), overrides)


def check_recipe(content: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Recipe:
    """Validate the content of a recipe; raises ConfigError.

    origin: where the content comes from, for errors; overrides: those that it contains, which errors name instead.
    """
    for name in method_names():
        if name in content:
            get_method(name)  # unusable: raises an error that names its package, not "unknown key"
    whole = _inherit_sections(content)
    # Checked before `fill_image_keys` imports timm, which takes seconds.
    assumed = assume_image_keys(whole)
    recipe = validate_recipe(assumed, recipe_schema(), origin, overrides)
    return recipe if assumed is whole else validate_recipe(fill_image_keys(whole), recipe_schema(), origin, overrides)


def _inherit_sections(content: dict[str, Any]) -> dict[str, Any]:
    """Fill unset keys of a method's section from the section it inherits."""
    filled = dict(content)
    for method in usable_methods():
        source = None if method.inherits is None else content.get(method.inherits)
        own = content.get(method.name)
        listed = isinstance(content.get("methods"), list) and method.name in content["methods"]
        if isinstance(source, dict) and (isinstance(own, dict) or (own is None and listed)):
            known = {field.alias or name for name, field in method.section.model_fields.items()}
            shared = {key: value for key, value in source.items() if key in known}
            filled[method.name] = _merge(shared, own or {})
    return filled


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; keys that `above` does not set come from `below`.

    A loss of a kind of its own is taken as it is, because the options of one kind do not fit another.
    """
    merged = dict(below)
    for key, value in above.items():
        inner = below.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and not (key == "loss" and "kind" in value):
            value = _merge(inner, value)
        merged[key] = value
    return merged


def fill_image_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Set `image.size`, `mean` and `std`, where unset, to the values of the recipe's initial weights.

    Malformed sections are returned as they are, for the schema to refuse.
    """
    given = _partial_keys(content)
    if given is None:
        return content
    # Imported here: only recipes with initial weights need timm, which takes seconds to import.
    from trainer.models.pretrained import input_settings

    model = content["model"]
    weights = model.get("weights")
    file = Path(weights).expanduser() if isinstance(weights, str) else None
    return content | {"image": input_settings(model["name"], file) | given}


def assume_image_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Set `image.size`, where `fill_image_keys` would, to a value that contradicts no other key."""
    given = _partial_keys(content)
    return content if given is None else content | {"image": {"size": 1} | given}


def _partial_keys(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the image keys of a recipe that leaves some to its initial weights; None for any other recipe."""
    model, image = content.get("model"), content.get("image") or {}
    if not isinstance(model, dict) or not isinstance(image, dict) or not isinstance(model.get("name"), str):
        return None
    pretrained, weights = model.get("pretrained"), model.get("weights")
    given = {key: value for key, value in image.items() if key not in _IMAGE_KEYS or value is not None}
    named = (pretrained is True) != isinstance(weights, str)
    return given if named and not given.keys() >= set(_IMAGE_KEYS) else None
