"""An augmentation from another package: found by its entry point, named in a recipe, treated like a built-in."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import toy_augmentation
from tests.support.command_line import THREADS, TINY
from tests.support.installed_package import install_package, run_python

SHORT = ("data.train.limit=60", "batch.global=8", "incv=null", "methods=[standard]", "standard.epochs=2")
TRACED = (THREADS, "execution.trace=true")


@pytest.fixture
def folder(playground: Path) -> Path:
    module = Path(toy_augmentation.__file__).read_text()
    install_package(playground, "toy", "incv.augmentations", "toy_negative = toy:AUGMENTATION", module)
    return playground


def run(folder: Path, name: str, *keys: str) -> "subprocess.CompletedProcess[str]":
    return run_python(folder, "-m", "trainer", "run", "-c", TINY, *SHORT, *TRACED, "--run-dir", name, *keys)


def trained(folder: Path, name: str, *keys: str) -> tuple[bytes, set[str]]:
    """The exported weights, and the operations that were drawn."""
    done = run(folder, name, *keys)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / name / "logs/trace-rank0.jsonl").read_text().splitlines()]
    drawn = {one for line in lines for row in line.get("operations", []) for one, _ in row}
    (weights,) = (folder / name / "methods" / "standard").rglob("export/**/model.safetensors")
    return weights.read_bytes(), drawn


def test_it_follows_the_built_in_ones_on_every_loader(folder: Path) -> None:
    keys = ("image.augment={toy_negative: {share: 0.9}}", "image.rand_augment.operations=1")
    weights, drawn = trained(folder, "resident", *keys, "execution.loader=resident")
    assert {"toy_negative.negative", "toy_negative.darker"} < drawn
    assert trained(folder, "cpu", *keys, "execution.loader=cpu") == (weights, drawn)
    plain, others = trained(folder, "plain", keys[1])
    assert plain != weights
    assert others == {name for name in drawn if not name.startswith("toy_negative")}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("image.augment.toy_negative.share=1.5", "`image.augment.toy_negative.share`: Input should be less than"),
        ("image.augment.toy_negative.shares=1", "`image.augment.toy_negative.shares`: Extra inputs"),
        ("image.augment.toy_negativ={}", "unknown augmentation 'toy_negativ'; did you mean toy_negative"),
    ],
)
def test_what_it_does_not_offer_is_refused(folder: Path, key: str, words: str) -> None:
    done = run(folder, "refused", key)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (folder / "refused").exists()
