"""Result keys: the recipe keys that a stage's outputs depend on, as a flat mapping of dotted names, and their hash.

Keys at their default are omitted, so that keys added by later versions do not invalidate existing runs.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trainer.config.schema import Recipe

Keys = dict[str, Any]
WEIGHTS_CHECKSUM = "model.weights_checksum"
"""The fact that represents the initial weights among the keys."""


def result_keys(recipe: Recipe) -> Keys:
    """Return the result keys of a recipe that differ from their default, with their values."""
    return {key: value for key, value, default in _flatten(recipe, "") if value != default}


def default_keys(recipe: Recipe) -> Keys:
    """Return the defaults of those result keys of a recipe that have one."""
    return {key: default for key, _, default in _flatten(recipe, "") if default is not PydanticUndefined}


def _flatten(value: Any, prefix: str, default: Any = PydanticUndefined) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, default) of every result key below `prefix`; values are JSON types."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("execution"):
                continue
            inner = field.get_default(call_default_factory=True)
            yield from _flatten(getattr(value, name), f"{prefix}.{field.alias or name}", inner)
    elif isinstance(value, dict) and any(isinstance(inner, BaseModel) for inner in value.values()):
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}")
    else:
        yield prefix.removeprefix("."), _as_json(value), _as_json(default)


def _as_json(value: Any) -> Any:
    return value if value is PydanticUndefined or isinstance(value, BaseModel) else json.loads(json.dumps(value))


def hash_keys(keys: Keys) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def select_keys(keys: Keys, prefixes: Sequence[str]) -> Keys:
    """Return the keys that equal one of the prefixes or are nested below it."""
    return {
        key: value
        for key, value in keys.items()
        if any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)
    }
