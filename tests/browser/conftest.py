"""A browser, and reports to open in it: of a fabricated run, and of a real one on images with odd names."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shards.pack import pack
from shards.sources import open_source
from tests.report.conftest import examine, fabricate
from tests.support.browser import Browser, open_browser
from tests.support.command_line import TINY, exit_code
from tests.support.photos import PHOTO_RECIPE, write_photos
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.run import find_sources

CLASSES = ('<img src=x onerror="alert(1)">', "=SUM(A1)", 'birds, "small"', "7")
ODD = ("<script>alert(2)<\u2215script>", "=cmd\u202e")  # names of photos begin like this


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("downloads")) as opened:
        yield opened


@pytest.fixture(scope="session")
def made_up_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 3,000 samples of 40 classes, from two sources."""
    run = RunDirectory(tmp_path_factory.mktemp("made up") / "run")
    names = [f"class {number}" for number in range(39)] + ["<script>alert(1)</script>"]
    fabricate(run.root, names=names, samples=3000, classes=40)
    keys = pa.chunked_array([[f"{('google', 'flickr')[number % 2]}/q{number}" for number in range(3000)]])
    sources = find_sources(keys, np.arange(3000) // 2 % 40)
    write_report(run, lambda number: Image.new("RGB", (8, 8), (number % 256, 99, 9)), keys, "/photos", sources)
    return run.report_html


@pytest.fixture(scope="session")
def examined_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a judge by features: 600 samples, two off-topic ones, and two equal ones with other labels."""
    run = RunDirectory(tmp_path_factory.mktemp("examined") / "run")
    fabricate(run.root)
    labels = pq.read_table(run.labels)["label"].to_numpy()
    examine(run.root, [(100, int(np.flatnonzero(labels != labels[100])[-1]))], off_topic=(10, 11))
    keys = pa.chunked_array([[f"photos/{number}.png" for number in range(600)]])
    write_report(run, lambda number: Image.new("RGB", (8, 8), (number % 256, 99, 9)), keys, "/photos")
    return run.report_html


@pytest.fixture(scope="session")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, their shards and a finished run."""
    folder = tmp_path_factory.mktemp("photo run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_photos(Path("photos"), CLASSES, ODD)
        pack(open_source("image_folder", Path("photos"), ""), Path("packed"))
        assert exit_code(["run", "-c", TINY, *PHOTO_RECIPE, "--run-dir", "run"]) == 0
    return folder
