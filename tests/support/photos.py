"""A folder of small photos, one folder per class, and a recipe that packs and trains on it in seconds."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.command_line import THREADS
from tests.support.pictures import picture

PER_CLASS = 12
PHOTO_RECIPE = (
    "data.eval={}", "data.train={source: image_folder, split: '', root: photos, shards: packed}",
    "labels={noise: none}", "batch.global=8", "methods=[standard]", "standard.epochs=1", "standard.optimizer={}",
    "incv={rounds: 1, epochs: 1, min_per_class: 2, remove_ratio: 0.2}", THREADS,
)  # fmt: skip


def write_photos(root: Path, classes: Sequence[str], prefixes: Sequence[str] = ()) -> None:
    """ROOT/<class>/<i>.png, PER_CLASS of them. prefixes: of the names of the first photos of each class."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            prefix = prefixes[number] if number < len(prefixes) else ""
            data = picture(label * PER_CLASS + number, width=8, height=8)
            (root / name / f"{prefix}{number:02d}.png").write_bytes(data)
