"""Which layouts of a folder an audit recognises."""

import subprocess

import pytest
from PIL import Image

from shards.errors import ConfigError, DataError, Fix
from shards.sources import SourceOptions
from trainer.auditing.audit import OPTIONS
from trainer.auditing.folder import describe_classes, find_images


def paint(path, colour=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (colour, 0, 0)).save(path)


@pytest.mark.parametrize("split", ["", "train"])
def test_class_folders(tmp_path, split):
    for number in range(24):
        paint(tmp_path / split / ("cat", "dog")[number % 2] / f"{number}.png", number)
    (tmp_path / "val").mkdir()
    found = find_images(tmp_path) if split else _without(tmp_path, "val")
    assert (found.data["source"], found.data["split"]) == ("image_folder", split)
    assert (found.samples, found.classes) == (24, 2)


def _without(folder, name):
    (folder / name).rmdir()
    return find_images(folder)


@pytest.mark.parametrize("given", [True, False])
def test_a_list_of_labels(tmp_path, given):
    rows = []
    for number in range(24):
        paint(tmp_path / "photos" / f"{number}.png", number)
        rows.append(f"{number}.png,{('cat', 'dog')[number % 2]}")
    csv = (tmp_path if given else tmp_path / "photos") / "labels.csv"
    csv.write_text("\n".join(["file,label", *rows]))
    found = find_images(tmp_path / "photos", SourceOptions(csv=str(csv) if given else None))
    assert (found.data["source"], found.samples, found.classes) == ("image_csv", 24, 2)
    assert found.data.get("csv") == (str(csv) if given else None)


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        find_images(tmp_path / "nowhere")
    paint(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match="one class only, 'cat'"):
        find_images(tmp_path)
    paint(tmp_path / "dog" / "1.png")
    with pytest.raises(DataError, match="has 2 images: an audit needs at least 20"):
        find_images(tmp_path)
    (tmp_path / "fox").mkdir()
    with pytest.raises(DataError, match="fox"):
        find_images(tmp_path)


def test_nested_class_folders_are_refused_with_the_inner_folders(tmp_path):
    for number, leaf in enumerate(["animals/cat", "animals/dog", "plants/rose", "plants/oak"] * 6):
        paint(tmp_path / "photos" / leaf / f"{number}.png", number)
    with pytest.raises(DataError, match="animals/cat, animals/dog, ") as refused:
        find_images(tmp_path / "photos")
    command = str(refused.value).split("`")[1].partition(" && incv audit")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    found = find_images(tmp_path / "leaves", SourceOptions(allow_outside=True))
    assert found.counts == {"cat": 6, "dog": 6, "oak": 6, "rose": 6}


def test_classes_are_described_largest_first():
    assert describe_classes({"cat": 1, "dog": 1200}) == "dog (1,200), cat (1)"
    many = describe_classes({f"c{number}": number for number in range(1, 100)})
    assert many == "c99 (99), c98 (98), c97 (97), c96 (96), c95 (95), …, c5 (5), c4 (4), c3 (3), c2 (2), c1 (1)"


def test_errors_name_options_of_an_audit():
    fixes = [Fix("restore {}", "data.train.root"), Fix("name {}", "data.train.csv"), Fix("choose {}", "model.name")]
    error = DataError("photos are missing", field="data.train.root", fix=fixes)
    error.rename_fields(OPTIONS)
    assert str(error) == "photos are missing; name --csv, or choose --model"
    error = DataError("no such file", field="model.weights", fix=Fix("restore {}", "root"))
    error.rename_fields(OPTIONS)
    assert str(error) == "--weights: no such file"
