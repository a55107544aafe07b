"""A browser, and reports to open in it: of a fabricated run, and of a real one on images with odd names."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from shards.pack import pack
from shards.sources import open_source
from tests.report.conftest import fabricate
from tests.support.browser import Browser, open_browser, require_chromium
from tests.support.command_line import THREADS, TINY, exit_code
from tests.support.slurm_cluster import NoPrograms
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.sources import find_sources

CLASSES = ('<img src=x onerror="alert(1)">', "=SUM(A1)", 'birds, "small"', "7")
PER_CLASS = 12
SMALL = (
    "data.eval={}", "data.train={source: image_folder, split: '', root: photos, shards: packed}",
    "labels={noise: none}", "batch.global=8", "methods=[standard]", "standard.epochs=1", "standard.optimizer={}",
    "incv={rounds: 1, epochs: 1, min_per_class: 2, remove_ratio: 0.2}", THREADS,
)  # fmt: skip


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        require_chromium()
    except NoPrograms as error:
        pytest.skip(str(error))
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


def write_photos(root: Path) -> None:
    """photos/<class>/<i>.png; one name has a line break, one a script."""
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            pixels = np.random.default_rng(label * PER_CLASS + number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            odd = {0: "<script>alert(2)<\u2215script>", 1: "=cmd\u202e"}.get(number, "")
            Image.fromarray(pixels).save(root / name / f"{odd}{number:02d}.png")


@pytest.fixture(scope="session")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, their shards and a finished run."""
    folder = tmp_path_factory.mktemp("photo run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_photos(Path("photos"))
        pack(open_source("image_folder", Path("photos"), ""), Path("packed"))
        assert exit_code(["run", "-c", TINY, *SMALL, "--run-dir", "run"]) == 0
    return folder
