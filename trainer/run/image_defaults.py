"""Image keys that a recipe leaves to its initial weights."""

from pathlib import Path
from typing import Any

KEYS = ("size", "mean", "std")


def fill_image_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Set `image.size`, `mean` and `std`, where unset, to the values of the recipe's initial weights.

    Malformed sections are returned as they are, for the schema to refuse.
    """
    model, image = content.get("model"), content.get("image") or {}
    if not isinstance(model, dict) or not isinstance(image, dict) or not isinstance(model.get("name"), str):
        return content
    pretrained, weights = model.get("pretrained"), model.get("weights")
    given = {key: value for key, value in image.items() if key not in KEYS or value is not None}
    named = (pretrained is True) != isinstance(weights, str)
    if not named or given.keys() >= set(KEYS):
        return content
    # Imported here: only recipes with initial weights need timm, which takes seconds to import.
    from trainer.models.pretrained import input_settings

    file = Path(weights).expanduser() if isinstance(weights, str) else None
    return content | {"image": input_settings(model["name"], file) | given}
