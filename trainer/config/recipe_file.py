"""Read and validate a recipe: safe YAML, `a.b=c` overrides, no unknown keys; errors name the key and near matches.

The caller passes the schema, which `trainer.run.recipe` composes from the base sections and those of the methods.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from shards.errors import ConfigError
from trainer.config.schema import Recipe
from trainer.config.section import Section

_MOST_VALUES = 2_000_000  # a noise matrix of 1000 classes has one million


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads `1e-3` as a number and refuses duplicate keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe file and apply the overrides, without validation; raises ConfigError."""
    try:
        content = _parse(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ConfigError(f"{path} is not a recipe: a recipe is a mapping of keys to values")
        for override in overrides:
            apply_override(content, override)
        _require_plain(content, str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the recipe {path}: {why}; `incv ls` lists recipes") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply or refers to itself") from None
    return content


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Refuse duplicate keys; PyYAML silently keeps the last one."""
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} occurs twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def validate_recipe(
    content: dict[str, Any], schema: type[Recipe], origin: str, overrides: Sequence[str] = ()
) -> Recipe:
    """Validate the content against the schema; raises ConfigError.

    The error names the keys and where they are from: `origin`, or one of the overrides that the content contains.
    """
    _require_plain(content, origin)
    try:
        # Via JSON: in strict mode only JSON input converts lists to tuples.
        return schema.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ConfigError(_explain(error, schema, origin, overrides)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{origin}: {error}") from error


def _require_plain(content: dict[str, Any], origin: str) -> None:
    """Refuse YAML values that no recipe needs: dates, non-finite numbers, aliases that expand without limit."""
    waiting: list[tuple[str, Any]] = [("", content)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{key}.{name}".removeprefix("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{origin}: `{key}`: {value} is not a finite number")
        elif not isinstance(value, str | int | float | bool | None):
            kind = type(value).__name__
            raise ConfigError(f"{origin}: `{key}`: {value!s} is a {kind} in YAML, which no key accepts; quote it")
    raise ConfigError(f"{origin} expands to more than {_MOST_VALUES:,} values, too many for a recipe")


def recipe_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML, with all keys, including those at their default."""
    content: str = yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)
    return content


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # safe: _Loader is a SafeLoader, which builds only plain values


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set the key of an override `a.b=c` in the content of a recipe; raises ConfigError."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form a.b=c")
    *parents, last = key.split(".")
    section = content
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: `{parent}` holds a value, not a section")
    try:
        section[last] = _parse(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: its value is not valid YAML: {error}") from error


def _explain(error: ValidationError, schema: type[Recipe], origin: str, overrides: Sequence[str]) -> str:
    by_origin: dict[str, list[str]] = {}
    for problem in error.errors():
        path = [str(part) for part in problem["loc"] if not _is_union_member(str(part))]
        key = ".".join(path)
        if problem["type"] == "extra_forbidden":
            line = f"unknown key `{key}`{_near_matches(path, schema)}"
        elif problem["type"] == "missing":
            line = f"missing key `{key}`"
        elif problem["type"] == "value_error":
            line = str(problem["ctx"]["error"])
        else:
            given = json.dumps(problem["input"])
            line = f"`{key}`: {problem['msg'][0].lower()}{problem['msg'][1:]}, not {given[:80]}"
        by_origin.setdefault(_origin_of(key, problem["type"], origin, overrides), []).append(line)
    return "\n".join(f"{each}: " + "\n  ".join(dict.fromkeys(lines)) for each, lines in by_origin.items())


def _origin_of(key: str, problem: str, recipe: str, overrides: Sequence[str]) -> str:
    """Return where a key is from: the recipe, the last override that sets it, or both if it is a section of both."""
    for override in reversed(overrides):
        name = override.partition("=")[0]
        if f"{key}.".startswith(f"{name}.") or (problem == "extra_forbidden" and name.startswith(f"{key}.")):
            return f"override {override!r}"
        if name.startswith(f"{key}."):
            return f"{recipe} with override {override!r}"
    return recipe


def _is_union_member(part: str) -> bool:
    """Whether Pydantic added this part of an error location for a union member (`float`, `literal['from_noise']`)."""
    return part in {"float", "int", "str"} or part.startswith(("literal[", "constrained-", "function-"))


def _near_matches(path: Sequence[str], schema: type[Recipe]) -> str:
    """Return a hint: near matches among all keys of a recipe, or else the keys of the section."""
    every = list(all_keys(schema))
    prefix = ".".join(path[:-1])
    siblings = [key for key in every if key.rpartition(".")[0] == prefix]
    by_last = {key.rpartition(".")[2]: key for key in reversed(every)}
    beside = {key.rpartition(".")[2]: key for key in siblings}
    matches = [beside[name] for name in difflib.get_close_matches(path[-1], beside, n=3, cutoff=0.6)]
    matches += [by_last[name] for name in difflib.get_close_matches(path[-1], by_last, n=2, cutoff=0.75)]
    if matches:
        return "; did you mean " + " or ".join(f"`{match}`" for match in dict.fromkeys(matches)) + "?"
    here = ", ".join(key.rpartition(".")[2] for key in siblings)
    return f"; keys here: {here}" if here else ""


def all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield all keys of a section and its subsections, dotted."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Section):
                for each in (inner, *inner.kinds().values()):
                    yield from all_keys(each, f"{key}.")
