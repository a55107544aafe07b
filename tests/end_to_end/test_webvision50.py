"""recipes/webvision50.yaml from raw files to the report: the real layout, the real network, on a CPU."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shards.sample_index import SampleIndex
from tests.support import REPOSITORY
from tests.support.thinned_webvision import thinned_ilsvrc12, thinned_webvision
from tests.support.webvision_tree import as_tars, ilsvrc12_tree, webvision_tree

SPLITS = ("train", "eval.webvision_val", "eval.ilsvrc12_val")
WHOLE = ("standard", "coteaching", "coteaching_incv")


def overrides(webvision: Path, ilsvrc12: Path, shards: Path, classes: int, batch: int) -> list[str]:
    """Where the data is and how much of everything: nothing that the recipe stands for."""
    roots = dict(zip(SPLITS, (webvision, webvision, ilsvrc12), strict=True))
    of_data = [f"data.{split}.root={root}" for split, root in roots.items()]
    of_data += [f"data.{split}.shards={shards / split}" for split in SPLITS]
    of_data += [f"data.{split}.classes={classes}" for split in SPLITS]
    size = ["image.size=75", "image.resize=85", f"batch.global={batch}", "execution.workers=2", "execution.threads=1"]
    short = [
        "incv.rounds=1",
        "incv.epochs=1",
        "standard.epochs=1",
        "coteaching.epochs=2",
        "coteaching_incv.warmup_epochs=1",
    ]
    return [*of_data, *size, *short]


def incv(*arguments: object) -> None:
    command = [sys.executable, "-m", "trainer", *(str(argument) for argument in arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr


def pack_all(webvision: Path, ilsvrc12: Path, shards: Path, classes: int, *further: str) -> None:
    common = ("--classes", classes, "--resize", 256, "--workers", 2, *further)
    incv("shards", "pack", "webvision", "--root", webvision, "--subset", "google", "--out", shards / "train", *common)
    for source, root, split in (("webvision", webvision, SPLITS[1]), ("ilsvrc12", ilsvrc12, SPLITS[2])):
        incv("shards", "pack", source, "--root", root, "--split", "val", "--out", shards / split, *common)
    for split in SPLITS:
        incv("shards", "verify", shards / split)


def bytes_of(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".verified.json"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def check_run(run: Path, methods: tuple[str, ...], shards: Path) -> dict:
    """Every part of the run is there and says what the shards say."""
    assert (run / "report.html").stat().st_size > 10_000
    report = json.loads((run / "report.json").read_text())
    evaluated = json.loads((run / "evaluation.json").read_text())
    for split in SPLITS[1:]:
        counted = evaluated[split.removeprefix("eval.")]
        assert set(counted) == set(methods)
        usable = len(SampleIndex.load(shards / split).usable_ids())
        for method, counts in counted.items():
            assert counts["count"] == usable
            assert len(counts["networks"]) == (1 if method == "standard" else 2)
            assert all(net["top1"] <= net["top5"] <= usable for net in counts["networks"])
    selected = json.loads((run / "incv.json").read_text())
    assert selected["rounds"][0]["predicted"] == len(SampleIndex.load(shards / "train").usable_ids())
    exported = json.loads((run / "methods" / methods[-1] / "export" / "model_a" / "config.json").read_text())
    assert exported["architecture"] == "inception_resnet_v2"
    return report


@pytest.mark.slow
def test_the_recipe_runs_from_raw_files_to_the_report(tmp_path):
    """A small version of the test below, of pictures made here; both ways of holding the raw files."""
    webvision = webvision_tree(
        tmp_path / "webvision", google=26, flickr=4, val=10, classes=3, side=100, plant={("google", 4): "truncated"}
    )
    ilsvrc12 = ilsvrc12_tree(tmp_path / "ilsvrc12", count=6, classes=3, side=100)
    tars = as_tars(webvision, tmp_path / "tars")
    pack_all(webvision, ilsvrc12, tmp_path / "shards", 2, "--max-rejected", "0.1")
    pack_all(tars, ilsvrc12, tmp_path / "from_tars", 2, "--max-rejected", "0.1")
    assert bytes_of(tmp_path / "from_tars") == bytes_of(tmp_path / "shards")
    few = [*overrides(webvision, ilsvrc12, tmp_path / "shards", 2, 8), "methods=[coteaching_incv]"]
    incv("run", "-c", "recipes/webvision50.yaml", "--run-dir", tmp_path / "run", *few)
    check_run(tmp_path / "run", ("coteaching_incv",), tmp_path / "shards")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_recipe_on_the_real_lists(tmp_path):
    """INCV, the three methods, both validation sets and the report, on rows of WebVision's own lists.

    INCV_LISTS and INCV_JPEGS name the folders that thinned_webvision.py describes.
    """
    if "INCV_LISTS" not in os.environ or "INCV_JPEGS" not in os.environ:
        pytest.skip("INCV_LISTS and INCV_JPEGS do not say where WebVision's lists and some JPEGs are")
    lists, jpegs = Path(os.environ["INCV_LISTS"]), Path(os.environ["INCV_JPEGS"])
    webvision = thinned_webvision(lists, jpegs, tmp_path / "webvision", train=300, val=200)
    ilsvrc12 = thinned_ilsvrc12(lists, jpegs, tmp_path / "ilsvrc12", val=200)
    pack_all(webvision, ilsvrc12, tmp_path / "shards", 10)
    tars = as_tars(webvision, tmp_path / "tars")
    pack_all(tars, ilsvrc12, tmp_path / "from_tars", 10)
    assert bytes_of(tmp_path / "from_tars") == bytes_of(tmp_path / "shards")
    some = overrides(webvision, ilsvrc12, tmp_path / "shards", 10, 32)
    run = Path(os.environ.get("INCV_KEEP", tmp_path / "run"))
    incv("run", "-c", "recipes/webvision50.yaml", "--run-dir", run, *some)
    check_run(run, WHOLE, tmp_path / "shards")
