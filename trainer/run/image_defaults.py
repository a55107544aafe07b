"""Image keys that a recipe leaves to its initial weights."""

from pathlib import Path
from typing import Any

KEYS = ("size", "mean", "std")


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
    given = {key: value for key, value in image.items() if key not in KEYS or value is not None}
    named = (pretrained is True) != isinstance(weights, str)
    return given if named and not given.keys() >= set(KEYS) else None
