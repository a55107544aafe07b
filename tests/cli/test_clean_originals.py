"""`incv clean` of a folder whose images were packed smaller: the original files, or a refusal."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards.durable import read_json
from tests.support.command_line import THREADS, TINY, exit_code

SIDE, PACKED = 40, 10
RECIPE = (
    "data.eval={}",
    f"data.train={{source: image_folder, split: '', root: photos, shards: packed, resize: {PACKED}}}",
    "labels={noise: none}", "batch.global=8", "methods=[]",
    "incv={rounds: 1, epochs: 1, min_per_class: 6, remove_ratio: 0}", THREADS,
)  # fmt: skip


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos of SIDE pixels, their shards and a finished run; do not write to it."""
    folder = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for label, name in enumerate(("cat", "dog")):
            Path("photos", name).mkdir(parents=True)
            for number in range(12):
                pixels = np.random.default_rng([label, number]).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(Path("photos", name, f"{number:02d}.{'bmp' if number % 2 else 'png'}"))
        assert exit_code(["run", "-c", TINY, *RECIPE, "--run-dir", "run"]) == 0
    return folder


@pytest.fixture
def kept(audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incv) -> list[Path]:
    """The current folder is a copy of `audited`; returns the originals of the selected samples."""
    shutil.copytree(audited, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert incv("clean", "run", "--out", "kept.csv", "--as", "list").code == 0
    rows = Path("kept.csv").read_text().splitlines()[1:]
    return [Path("photos", row.split(",")[0].strip('"')) for row in rows]


def test_a_folder_has_the_original_bytes(kept, incv):
    done = incv("clean", "run", "--out", "cleaned")
    assert done.code == 0, done.err
    assert "shards" not in done.out
    written = sorted(path.read_bytes() for path in Path("cleaned").rglob("*.*") if path.suffix != ".json")
    assert written == sorted(path.read_bytes() for path in kept)


def test_shards_have_the_original_pixels(kept, incv):
    assert incv("clean", "run", "--out", "cleaned", "--as", "shards").code == 0
    (tar,) = Path("cleaned").glob("*.tar")
    with tarfile.open(tar) as file:
        images = [file.extractfile(member).read() for member in file if member.name.endswith((".png", ".jpg"))]
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in images]
    expected = [np.asarray(Image.open(path).convert("RGB")) for path in kept]
    for ours, theirs in zip(pixels, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("form", ["folder", "shards"])
@pytest.mark.parametrize("damage", ["moved", "replaced"])
def test_a_missing_or_changed_original_is_refused(kept, incv, damage, form):
    """Otherwise one photo that was moved by hand would silently turn the whole output into thumbnails."""
    victim = kept[1]
    if damage == "moved":
        victim.rename("elsewhere")
        words = f"{victim.name}: No such file"
    else:
        times = victim.stat()
        victim.write_bytes(kept[0].read_bytes()[:-1] + b"\0")
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        words = f"{victim.name} has changed"
    answer = incv("clean", "run", "--out", "cleaned", "--as", form)
    assert answer.code == 3
    assert words in answer.err
    assert f"1 of the {len(kept)} images" in answer.err
    assert "--from-shards" in answer.err
    assert not Path("cleaned").exists()
    done = incv("clean", "run", "--out", "cleaned", "--as", form, "--from-shards")
    assert done.code == 0, done.err
    assert f"shorter side at most {PACKED} pixels" in done.out
    assert read_json(Path("cleaned/incv_clean.json"))["images"].startswith("packed")


def test_a_touched_original_is_the_same(kept, incv):
    os.utime(kept[0])
    assert incv("clean", "run", "--out", "cleaned").code == 0


def test_without_the_folder_the_shards_are_used_and_this_is_said(kept, incv):
    Path("photos").rename("gone")
    done = incv("clean", "run", "--out", "cleaned")
    assert done.code == 0, done.err
    assert "These are not the original files, but the images as they were packed" in done.out


def test_an_output_among_the_images_is_refused(kept, incv):
    answer = incv("clean", "run", "--out", "photos/cleaned")
    assert answer.code == 2
    assert "would count as a class" in answer.err
    assert not Path("photos/cleaned").exists()
