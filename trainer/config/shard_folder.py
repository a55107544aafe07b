"""The default folder of a packed split."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_LONGEST_NAME = 40


def default_folder(packing: Mapping[str, Any]) -> str:
    """Return a folder under data/shards whose name depends on every key that packing reads.

    packing: the keys of the split that are not at their default, without `shards`. Two recipes that differ in one of
    them never share a folder; two that agree in all of them do.
    """
    root = packing.get("root")
    keys = {**packing, "root": None if root is None else os.path.abspath(root)}
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]
    name = packing["source"] if root is None else PurePath(keys["root"]).name or packing["source"]
    words = [
        re.sub(r"[^\w.-]+", "_", word).strip(".")[:_LONGEST_NAME] for word in (name, packing.get("split", "train"))
    ]
    return "/".join(["data", "shards", "-".join([*filter(None, words), digest])])
