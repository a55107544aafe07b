"""Images with a CSV file of paths and labels: recognised columns, any paths, nothing left out without a word."""

import csv
import io
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError, DataError
from shards.pack import pack
from shards.sources import SourceOptions, open_source
from shards.sources.label_table import LABEL_COLUMNS, PATH_COLUMNS, choose_delimiter, read_label_table
from tests.support.pictures import picture

LABELS = {"a.png": "cat", "b.png": "dog", "deep/c.png": "cat", "deep/d.png": "dog"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for number, name in enumerate(LABELS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(number))
    return root


def _write(root: Path, text: str, name: str = "labels.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def _rows(labels: dict[str, str] = LABELS, header: str = "path,label") -> str:
    return "\n".join([header, *(f"{path},{label}" for path, label in labels.items())]) + "\n"


def _open(root: Path, split: str = "train", **options):
    return open_source("image_csv", root, split, options=SourceOptions(**options))


def _labels(source) -> dict[str, str]:
    return {source.key(row): source.class_names[source.label(row)] for row in range(len(source))}


def test_the_rows_are_sorted_by_path_and_read_from_their_files(root):
    _write(root, _rows(dict(reversed(LABELS.items()))))
    source = _open(root)
    assert (len(source), source.class_names) == (4, ("cat", "dog"))
    assert list(_labels(source).items()) == list(LABELS.items())
    for row in range(4):
        assert source.file(row) == root / source.key(row)
        assert source.sample(row).data == source.file(row).read_bytes()
        assert pickle.loads(pickle.dumps(source)).sample(row) == source.sample(row)
    assert source.origin(0) == "labels.csv line 5"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffFilename;Extra;Class\r\n" + "".join(f"{path};1,5;{label}\r\n" for path, label in LABELS.items()),
        "n\timage\tcategory\n" + "".join(f"{n}\t{path}\t{label}\n" for n, (path, label) in enumerate(LABELS.items())),
        "".join(f"{path},{label}\n" for path, label in LABELS.items()),  # no header
        "".join(f"{label};{path}\n" for path, label in LABELS.items()),
        _rows({f"./{path}": f" {label} " for path, label in LABELS.items()}),
        _rows({path.replace("/", "\\"): label for path, label in LABELS.items()}),
        _rows({path.removesuffix(".png"): label for path, label in LABELS.items()}, "id,label"),
        '"path", "label"\n'.replace(", ", ",") + "".join(f'"{path}","{label}"\n' for path, label in LABELS.items()),
    ],
)
def test_usual_forms_of_the_list_are_understood(root, text):
    _write(root, text)
    assert _labels(_open(root)) == LABELS


def test_named_columns_win(root):
    _write(root, "path,label,breed\n" + "".join(f"{path},x{n},{v}\n" for n, (path, v) in enumerate(LABELS.items())))
    assert _labels(_open(root, label_column="Breed")) == LABELS
    assert len(_open(root).class_names) == 4


@pytest.mark.parametrize(
    ("header", "options", "facts"),
    [
        ("thing,label", {}, "no column is recognised as the path.*Columns: thing, label; name it with --path-column"),
        ("path,thing", {}, "no column is recognised as the label.*Columns: path, thing; name it with --label-column"),
        ("path,label", {"label_column": "lable"}, "no column 'lable'.*did you mean label.*known: label, path"),
        ("path,label", {"path_column": "label"}, "both paths and labels"),
        ("path,path", {"label_column": "path"}, "occurs twice"),
    ],
)
def test_unknown_columns_are_refused_with_those_that_exist(root, header, options, facts):
    _write(root, _rows(header=header))
    with pytest.raises(ConfigError, match=facts):
        _open(root, **options)


def test_two_possible_columns_are_not_guessed(root):
    _write(root, "path,label,class\n" + "".join(f"{path},{label},1\n" for path, label in LABELS.items()))
    with pytest.raises(ConfigError, match="label and class could be the labels"):
        _open(root)


def test_a_partial_list_is_refused_unless_asked_for(root):
    _write(root, _rows({"a.png": "cat", "b.png": "dog", "deep/c.png": ""}))
    (root / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"line 4 \('deep/c.png'\): it has no label.*--partial"):
        _open(root)
    _write(root, _rows({"a.png": "cat", "b.png": "dog", "deep/c.png": "dog"}))
    with pytest.raises(DataError, match=r"does not list 1 images.*deep/d\.png.*--partial"):
        _open(root)
    _write(root, _rows({"a.png": "cat", "b.png": "dog", "deep/c.png": ""}))
    source = _open(root, partial=True)
    assert _labels(source) == {"a.png": "cat", "b.png": "dog"}
    assert sorted(source.ignored) == [
        ("deep/c.png", "no label in labels.csv"),
        ("deep/d.png", "not listed in labels.csv"),
        ("notes.txt", "not an image by its suffix (.txt)"),
    ]


@pytest.mark.parametrize(
    ("extra", "words"),
    [(("a.txt",), ": 1 file was ignored: a.txt ("), (("a.txt", "b.txt"), ": 2 files were ignored, for example ")],
)
def test_the_warning_counts_what_was_ignored(extra, words, root, caplog):
    _write(root, _rows(LABELS))
    for name in extra:
        (root / name).touch()
    _open(root)
    assert words in caplog.text
    _open(root)  # as a command that inspects a folder and then packs it
    assert caplog.text.count(words) == 1


def test_what_was_ignored_is_listed_with_the_shards(root, tmp_path):
    _write(root, _rows({"a.png": "cat", "b.png": "dog"}))
    index = pack(_open(root, partial=True), tmp_path / "out")
    listed = [(row["sample_id"], row["key"], row["reason"]) for row in index.read_rejected().to_pylist()]
    assert listed == [(None, f"deep/{name}.png", "not listed in labels.csv") for name in "cd"]


@pytest.mark.parametrize(
    ("labels", "facts"),
    [
        (LABELS | {"gone.png": "cat", "lost.png": "cat"}, r"lists 2 images that are not in .*'gone.png' \(line 6\)"),
        (LABELS | {"https://x.org/a.png": "cat"}, "URLs must be downloaded"),
        (LABELS | {"./a.png": "cat"}, r"line 6 \('./a.png'\): it occurs twice, first on line 2"),
        (dict.fromkeys(LABELS, "cat"), "all 4 images in .* have the label 'cat'.*--label-column"),
        ({}, "has no rows"),
    ],
)
def test_bad_lists_are_refused(root, labels, facts):
    _write(root, _rows(labels))
    with pytest.raises(DataError, match=facts):
        _open(root)


def test_one_image_in_all_is_refused(root):
    _write(root, _rows({"a.png": "cat"}))
    with pytest.raises(DataError, match="one image only"):
        _open(root, partial=True)


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"path,label\na.png,cat,more\n", "line 2: 3 cells"),
        (b'path,label\n"a.png,cat\n', "line 2: not valid CSV"),
        (b"path,label\na.png,\xff\n", "Save it as CSV in UTF-8"),
        (b"path,label\na\0.png,cat\n", "line 2: it contains a NUL byte"),
    ],
)
def test_damaged_lists_are_refused_with_their_line(root, content, facts):
    (root / "labels.csv").write_bytes(content)
    with pytest.raises(DataError, match=facts):
        _open(root)


def test_paths_outside_the_root_need_leave(root, tmp_path):
    outside = tmp_path / "elsewhere.png"
    outside.write_bytes(picture(9))
    absolute = {str(root / path): label for path, label in LABELS.items()}
    _write(root, _rows(absolute))
    assert _labels(_open(root)) == LABELS  # absolute paths inside the root are as good as relative ones
    for path in (str(outside), "../elsewhere.png"):
        _write(root, _rows(absolute | {path: "dog"}))
        with pytest.raises(DataError, match=r"line 6 .*outside .*--allow-outside"):
            _open(root)
        source = _open(root, allow_outside=True)
        assert _labels(source) == {str(outside): "dog", **LABELS}
        assert source.sample(0).data == outside.read_bytes()
        assert source.file(0) == outside


def test_links_that_leave_the_root_need_leave(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/e.png").write_bytes(picture(9))
    (root / "link").symlink_to(tmp_path / "elsewhere")
    _write(root, _rows(LABELS | {"link/e.png": "dog"}))
    with pytest.raises(DataError, match=r"link that leaves .*--allow-outside"):
        _open(root)
    source = _open(root, allow_outside=True)
    assert _labels(source)["link/e.png"] == "dog"
    assert [source.sample(row) for row in range(5)]
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="leads back"):
        _open(root, allow_outside=True)


def test_a_link_made_after_listing_is_not_followed(root, tmp_path):
    _write(root, _rows())
    source = _open(root)
    (tmp_path / "secret.png").write_bytes(picture(9))
    (root / "a.png").unlink()
    (root / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match="behind a link that leaves"):
        source.sample(0)


def test_a_root_behind_a_link_is_the_same_root(root, tmp_path):
    (tmp_path / "alias").symlink_to(root)
    _write(root, _rows({str(tmp_path / "alias" / path): label for path, label in LABELS.items()}))
    assert _labels(_open(tmp_path / "alias")) == LABELS


def test_the_layout_of_hugging_face(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "images").mkdir(parents=True)
        for number in range(2):
            (tmp_path / split / f"images/{number}.png").write_bytes(picture(number))
        _write(tmp_path / split, "file_name,label\nimages/0.png,cat\nimages/1.png,dog\n", "metadata.csv")
    for split in ("train", "test"):
        assert _labels(_open(tmp_path, split)) == {f"{split}/images/0.png": "cat", f"{split}/images/1.png": "dog"}
    for split in ("train", "test"):
        (tmp_path / split / "metadata.csv").unlink()
    names = {"0": "cat", "1": "dog"}
    rows = {f"{split}/images/{number}.png": names[number] for split in ("train", "test") for number in names}
    _write(tmp_path, _rows(rows, "file_name,label"), "metadata.csv")
    source = _open(tmp_path, "test")
    assert _labels(source) == {"test/images/0.png": "cat", "test/images/1.png": "dog"}
    assert {file.reason for file in source.ignored} == {"outside the split's folder test"}
    assert len(_open(tmp_path, "")) == 4


def test_the_list_is_found_or_named(root, tmp_path):
    with pytest.raises(DataError, match="contains no CSV file"):
        _open(root)
    _write(root, _rows(), "one.csv")
    _write(root, _rows({"a.png": "x", "b.png": "y"}), "two.tsv")
    with pytest.raises(ConfigError, match=r"several lists \(one.csv, two.tsv\).*--csv"):
        _open(root)
    assert _labels(_open(root, csv="one.csv")) == LABELS  # in the root
    outside = _write(tmp_path, _rows(), "lists.csv")
    assert _labels(_open(root, csv=str(outside))) == LABELS
    with pytest.raises(DataError, match=r"--csv: none\.csv is not a file"):
        _open(root, csv="none.csv")
    _write(root, _rows({"a.png": "x", "b.png": "y"}), "val.csv")
    assert _labels(_open(root, "val", partial=True)) == {"a.png": "x", "b.png": "y"}


def test_numbers_are_classes_in_their_order(root):
    _write(root, _rows(dict(zip(LABELS, ("10", "9", "2", "9"), strict=True))))
    assert _open(root).class_names == ("2", "9", "10")


def test_other_data_sets_refuse_the_options(root):
    with pytest.raises(ConfigError, match=r"--csv: digits has no such option \(only image_csv\)"):
        open_source("digits", None, "train", options=SourceOptions(csv="x.csv"))
    with pytest.raises(ConfigError, match=r"--partial: .*\(only image_csv, webdataset\)"):
        open_source("image_folder", root, "train", options=SourceOptions(partial=True))


def test_image_folders_follow_links_out_of_the_root_by_request(root, tmp_path):
    (tmp_path / "set/train").mkdir(parents=True)
    (tmp_path / "set/train/x").symlink_to(root)
    (tmp_path / "set/train/y").symlink_to(root / "deep")
    with pytest.raises(DataError, match="--allow-outside"):
        open_source("image_folder", tmp_path / "set", "train")
    source = open_source("image_folder", tmp_path / "set", "train", options=SourceOptions(allow_outside=True))
    assert [source.key(row) for row in range(len(source))] == [
        *(f"train/x/{path}" for path in LABELS),
        *("train/y/c.png", "train/y/d.png"),
    ]


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=8).filter(
    lambda text: text.strip() == text and not text.startswith(("'", '"'))
)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=6),
    path_name=st.sampled_from(PATH_COLUMNS),
    label_name=st.sampled_from(LABEL_COLUMNS),
    delimiter=st.sampled_from(",;\t"),
    extra=st.booleans(),
    mark=st.booleans(),
)
def test_any_cells_survive_any_form(tmp_path_factory, rows, path_name, label_name, delimiter, extra, mark):
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter)
    writer.writerow([*(["weight"] if extra else []), path_name.upper(), label_name.title()])
    for path, label in rows:
        writer.writerow([*(["1"] if extra else []), path, label])
    path = tmp_path_factory.mktemp("list") / "list.csv"
    path.write_bytes((("\ufeff" if mark else "") + stream.getvalue()).encode())
    read = read_label_table(path, None, None)
    assert [(row.path, row.label) for row in read] == rows
    assert choose_delimiter(stream.getvalue().splitlines()[0]) == delimiter


def test_file_names_that_are_not_utf8_are_refused(root):
    _write(root, _rows())
    with open(os.fsencode(root) + b"/caf\xe9.png", "wb") as file:
        file.write(picture())
    with pytest.raises(DataError, match="not UTF-8"):
        _open(root)
