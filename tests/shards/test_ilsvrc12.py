"""ILSVRC12 val: folders, flat folder and tar give the same rows, and labels come from the WordNet id alone."""

import os
import pickle
import shutil
from pathlib import Path

import pytest

from shards.errors import ConfigError, DataError
from shards.sources import RawSample, Source, open_source
from tests.support.webvision_tree import SYNSETS, ilsvrc12_tree, synset_lines, webvision_tree, write_tar

FORMS = ["folders", "flat", "tar"]
LIST, TABLE = "ILSVRC2012_val_label.txt", "LOC_val_solution.csv"


def samples(source: Source) -> list[RawSample]:
    return [source.sample(row) for row in range(len(source))]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_rows_sorted_by_file_name(tmp_path, form):
    root = ilsvrc12_tree(tmp_path / form, count=12, form=form)
    source = open_source("ilsvrc12", root, "val")
    flat = tmp_path / "wanted"
    ilsvrc12_tree(flat, count=12, form="flat")
    wanted = []
    for line in (flat / LIST).read_text().splitlines():
        name, _, found = line.split()
        label = [line.split()[0] for line in SYNSETS].index(found)
        wanted.append(RawSample(f"val/{name[:-5]}", label, "jpg", (flat / "val" / name).read_bytes()))
    assert samples(source) == wanted
    assert samples(pickle.loads(pickle.dumps(source))) == wanted
    assert (source.name, source.split, source.subset, source.class_names) == ("ilsvrc12", "val", "", SYNSETS)


@pytest.mark.parametrize("base", ["", "val", "ILSVRC2012_img_val"])
@pytest.mark.parametrize("form", ["folders", "flat"])
def test_the_images_may_lie_in_the_root_or_in_a_folder_of_it(tmp_path, form, base):
    root = ilsvrc12_tree(tmp_path / "i", form=form)
    wanted = samples(open_source("ilsvrc12", root, "val"))
    os.rename(root / "val", root / "images")
    if base:
        os.rename(root / "images", root / base)
    else:
        for entry in (root / "images").iterdir():
            shutil.move(entry, root)
    assert samples(open_source("ilsvrc12", root, "val")) == wanted


def test_labels_agree_with_webvision_through_the_wordnet_id(tmp_path):
    webvision = open_source("webvision", webvision_tree(tmp_path / "w", classes=7), "val", classes=3)
    root = ilsvrc12_tree(tmp_path / "i", count=20, classes=7, synsets=False)
    (root / "info").mkdir()
    (root / "info/synsets.txt").write_text("\n".join(synset_lines(7)))
    source = open_source("ilsvrc12", root, "val", classes=3)
    assert source.class_names == webvision.class_names
    assert {source.origin(row).split("/")[1]: source.label(row) for row in range(len(source))} == {
        name.split()[0]: label for label, name in enumerate(webvision.class_names)
    }


def test_without_synsets_the_classes_are_the_thousand_that_timm_knows(tmp_path):
    source = open_source("ilsvrc12", ilsvrc12_tree(tmp_path / "i", synsets=False), "val")
    assert len(source.class_names) == 1000
    assert set(SYNSETS) <= set(source.class_names)
    assert list(source.class_names) == sorted(source.class_names)
    named = {source.origin(row).split("/")[1]: source.class_names[source.label(row)] for row in range(len(source))}
    assert set(named.values()) == set(SYNSETS)
    assert all(name.startswith(found) for found, name in named.items())


@pytest.mark.parametrize("form", ["flat", "tar"])
@pytest.mark.parametrize("other", ["two words", "table", "table without its head", "info", "line ends"])
def test_all_known_lists_are_read_alike(tmp_path, form, other):
    root = ilsvrc12_tree(tmp_path / "i", form=form)
    wanted = samples(open_source("ilsvrc12", root, "val"))
    lines = [line.split() for line in (root / LIST).read_text().splitlines()][::-1]
    if other == "info":
        (root / "info").mkdir()
        os.rename(root / LIST, root / "info" / LIST)
    elif other == "line ends":
        (root / LIST).write_text("\r\n".join(" ".join(line) for line in lines))
    elif other == "two words":
        (root / LIST).write_text("\n".join(f"{name} {found}" for name, _, found in lines))
    else:
        (root / LIST).unlink()
        head = ["ImageId,PredictionString"] if other == "table" else []
        boxes = [f"{name[:-5]},{found} 85 131 499 254 {found} 1 2 3 4 " for name, _, found in lines]
        (root / TABLE).write_text("\n".join(head + boxes))
    assert samples(open_source("ilsvrc12", root, "val")) == wanted


def test_a_tar_may_put_its_images_into_a_folder(tmp_path):
    root = ilsvrc12_tree(tmp_path / "i", form="flat")
    wanted = samples(open_source("ilsvrc12", root, "val"))
    images = [(f"./val/{path.name}", path.read_bytes()) for path in sorted((root / "val").iterdir())]
    write_tar(root / "ILSVRC2012_img_val.tar", [*images[::-1], ("./val/.DS_Store", b"")])
    shutil.rmtree(root / "val")
    assert samples(open_source("ilsvrc12", root, "val")) == wanted


@pytest.mark.parametrize("form", FORMS)
def test_a_thinned_set_has_fewer_rows_and_all_classes(tmp_path, form):
    root = ilsvrc12_tree(tmp_path / "i", count=20, form=form)
    whole = samples(open_source("ilsvrc12", root, "val"))
    kept = [sample for sample in whole if sample.label not in (2, 5)]
    if form == "folders":
        for label in (2, 5):
            shutil.rmtree(root / "val" / SYNSETS[label].split()[0])
    elif form == "flat":
        for sample in whole:
            if sample not in kept:
                (root / f"{sample.key}.JPEG").unlink()
    else:
        named = [(f"{sample.key.removeprefix('val/')}.JPEG", sample.data) for sample in kept]
        write_tar(root / "ILSVRC2012_img_val.tar", named)
    source = open_source("ilsvrc12", root, "val")
    assert samples(source) == kept
    assert source.class_names == SYNSETS


def test_a_class_with_a_hole_is_no_thinned_class(tmp_path):
    root = ilsvrc12_tree(tmp_path / "i", count=20, form="flat")
    (root / "val/ILSVRC2012_val_00000003.JPEG").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of its 20 images; .*00000003\.JPEG \(\S+label\.txt line 3"):
        open_source("ilsvrc12", root, "val")


def test_images_in_no_list_are_counted(tmp_path, caplog):
    root = ilsvrc12_tree(tmp_path / "i", form="flat")
    lines = (root / LIST).read_text().splitlines()
    (root / LIST).write_text("\n".join(lines[:6]))
    assert len(open_source("ilsvrc12", root, "val")) == 6
    assert "4 images are not in the list" in caplog.text
    (root / LIST).write_text("other.JPEG n01440764")
    with pytest.raises(DataError, match="contains none of the 1 listed images"):
        open_source("ilsvrc12", root, "val")


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("ILSVRC2012_val_00000003.JPEG 65", "number"),
        ("ILSVRC2012_val_00000003.JPEG", "WordNet id"),
        ("ILSVRC2012_val_00000003.JPEG 1 n01440764 x", "WordNet id"),
        ("ILSVRC2012_val_00000003.JPEG x n01440764", "WordNet id"),
        ("", "WordNet id"),
        ("ILSVRC2012_val_00000003.JPEG n99999999", "n99999999.* 10 "),
        ("../ILSVRC2012_val_00000003.JPEG n01440764", "file name"),
        ("/ILSVRC2012_val_00000003.JPEG n01440764", "file name"),
        ("ILSVRC2012_val_00000003.heic n01440764", "file name"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, fact):
    root = ilsvrc12_tree(tmp_path / "i", form="flat")
    lines = (root / LIST).read_text().splitlines()
    (root / LIST).write_text("\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(DataError, match=rf"ILSVRC2012_val_label\.txt line 3 .*{fact}"):
        open_source("ilsvrc12", root, "val")


def test_an_image_that_is_there_twice_is_named_with_both_places(tmp_path):
    root = ilsvrc12_tree(tmp_path / "i", form="flat")
    with (root / LIST).open("a") as file:
        file.write("ILSVRC2012_val_00000002.JPEG n01440764\n")
    with pytest.raises(DataError, match=r"00000002\.JPEG appears twice: \S+ line 2 and \S+ line 11"):
        open_source("ilsvrc12", root, "val")
    root = ilsvrc12_tree(tmp_path / "f", form="folders")
    shutil.copy(next((root / "val/n01440764").iterdir()), root / "val/n01443537")
    with pytest.raises(DataError, match=r"twice: val/n01440764/\S+ and val/n01443537/"):
        open_source("ilsvrc12", root, "val")


def test_wrong_folders_are_named(tmp_path):
    root = ilsvrc12_tree(tmp_path / "i", form="folders")
    (root / "val/n01443537/notes.txt").touch()
    assert len(open_source("ilsvrc12", root, "val")) == 10
    (root / "val/n99999999").mkdir()
    with pytest.raises(DataError, match="val/n99999999 is not one of the 10 classes"):
        open_source("ilsvrc12", root, "val")
    (root / "val/n99999999").rmdir()
    next((root / "val/n01443537").glob("*.JPEG")).unlink()
    with pytest.raises(DataError, match="val/n01443537 contains no"):
        open_source("ilsvrc12", root, "val")


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    root = ilsvrc12_tree(tmp_path / "i", form="folders")
    (root / "val/n01443537/caf\udce9.JPEG").touch()
    with pytest.raises(DataError, match="name is not UTF-8"):
        open_source("ilsvrc12", root, "val")


def test_links_that_leave_the_root_are_refused(tmp_path):
    for form in ("folders", "flat"):
        root = ilsvrc12_tree(tmp_path / form, form=form)
        path = next(root.rglob("ILSVRC2012_val_00000002.JPEG"))
        os.rename(path, tmp_path / "outside.JPEG")
        path.symlink_to(tmp_path / "outside.JPEG")
        with pytest.raises(DataError, match=r"00000002\.JPEG.* link that leaves"):
            open_source("ilsvrc12", root, "val").sample(1)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"no split 'train'; .*known: val"):
        open_source("ilsvrc12", tmp_path, "train")
    with pytest.raises(DataError, match=r"ILSVRC12 validation set was not found .*ILSVRC2012_img_val\.tar"):
        open_source("ilsvrc12", webvision_tree(tmp_path / "w", 1, 1, 1), "val")
    for form in ("flat", "tar"):
        root = ilsvrc12_tree(tmp_path / form, form=form)
        (root / LIST).write_text("")
        with pytest.raises(DataError, match="is empty"):
            open_source("ilsvrc12", root, "val")
        (root / LIST).unlink()
        (root / "ILSVRC2012_validation_ground_truth.txt").touch()
        with pytest.raises(DataError, match=r"but not their classes: neither .*not the devkit's .*ground_truth\.txt"):
            open_source("ilsvrc12", root, "val")


def test_a_cut_tar_is_refused(tmp_path):
    root: Path = ilsvrc12_tree(tmp_path / "i", form="tar")
    tar = root / "ILSVRC2012_img_val.tar"
    os.truncate(tar, tar.stat().st_size // 2)
    with pytest.raises(DataError, match=r"ILSVRC2012_img_val\.tar is damaged, truncated"):
        open_source("ilsvrc12", root, "val")
