"""Wrong input: one clear message that names key, file or fix; exit code 2 or 3; nothing half-written."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards.sample_index import SampleIndex
from tests.support.command_line import TINY, Answer, contents, unchanged

Incv = Callable[..., Answer]
RUN = ("run", "-c", TINY)


def refused(answer: Answer, code: int, *named: str) -> None:
    """The exit code, and everything a user needs to know in the message."""
    assert answer.code == code, answer.err
    message = answer.err[answer.err.index("error: ") :]
    for words in named:
        assert words in message, f"{words!r} is not in: {message}"


# --- recipes and overrides: exit code 2 ---------------------------------------------------------------------


def _matrix(**entries: float) -> str:
    """The identity of 10 classes as an override, with entries `r3c4=0.5` changed."""
    matrix = np.eye(10)
    for name, value in entries.items():
        row, column = name[1:].split("c")
        matrix[int(row), int(column)] = value
    return f"labels.matrix={matrix.tolist()}"


CONFIG_MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown_key": (["incv.epoch=3"], ["`incv.epoch`", "did you mean `incv.epochs`"]),
    "unknown_key_of_batch": (["batch.globl=3"], ["`batch.globl`", "`batch.global`"]),
    "unknown_key_at_the_top": (["epochs=3"], ["unknown key `epochs`", ".epochs`"]),
    "unknown_section": (["optimiser.kind=sgd"], ["unknown key `optimiser`"]),
    "unlike_any_key": (["xyzzy=1"], ["unknown key `xyzzy`", "seed", "labels"]),
    "text_for_a_number": (["batch.global=many"], ["`batch.global`", "integer", '"many"']),
    "fraction_for_a_count": (["incv.rounds=1.5"], ["`incv.rounds`", "integer", "1.5"]),
    "number_for_a_switch": (["image.flip=1"], ["`image.flip`", "boolean"]),
    "value_for_a_section": (["incv=5"], ["`incv`", "5"]),
    "nothing_for_a_count": (["batch.global="], ["`batch.global`", "null"]),
    "zero_epochs": (["standard.epochs=0"], ["`standard.epochs`", "0"]),
    "date_for_a_seed": (["seed=2020-01-01"], ["seed"]),
    "ratio_above_one": (["labels.ratio=1.5"], ["`labels.ratio`", "1", "1.5"]),
    "ratio_below_zero": (["labels.ratio=-0.1"], ["`labels.ratio`", "0", "-0.1"]),
    "ratio_not_a_number": (["labels.ratio=.nan"], ["`labels.ratio`"]),
    "ratio_without_noise": (["labels.noise=none"], ["labels.ratio", "labels.noise"]),
    "unknown_noise": (["labels.noise=gaussian"], ["`labels.noise`", "symmetric", "asymmetric", "matrix"]),
    "matrix_row_sum": (
        ["labels.noise=matrix", "labels.ratio=0.0", _matrix(r3c4=0.5)],
        ["labels.matrix", "row 3", "1.5", "sum to 1"],
    ),
    "matrix_negative": (
        ["labels.noise=matrix", "labels.ratio=0.0", _matrix(r2c2=1.5, r2c3=-0.5)],
        ["labels.matrix", "row 2"],
    ),
    "matrix_of_other_size": (
        ["labels.noise=matrix", "labels.ratio=0.0", "labels.matrix=[[1.0]]"],
        ["labels.matrix", "10 rows of 10"],
    ),
    "matrix_not_given": (["labels.noise=matrix", "labels.ratio=0.0"], ["labels.matrix"]),
    "unknown_model": (["model.name=digits_cn"], ["'digits_cn'", "digits_cnn"]),
    "unknown_model_option": (["model.options={depht: 3}"], ["digits_cnn", "depht"]),
    "unknown_method": (["methods=[standart]"], ["methods", "standart", "standard"]),
    "nothing_to_do": (["methods=[]", "incv=null"], ["nothing to do", "`methods`"]),
    "method_twice": (["methods=[standard, standard]"], ["methods"]),
    "method_without_its_section": (["standard=null"], ["methods", "`standard:`"]),
    "decay_scope_of_another_network": (
        ["standard.optimizer.decay_scope=residual_convs"],
        ["decay", "residual_convs", "'all'"],
    ),
    "no_gpu": (["execution.device=cuda"], ["execution.device", "auto"]),
    "not_an_override": (["batch.global"], ["'batch.global'", "a.b=c"]),
    "override_without_a_key": (["=3"], ["'=3'", "a.b=c"]),
    "override_below_a_value": (["batch.global.x=3"], ["`global`", "holds a value"]),
    "override_of_broken_yaml": (["batch.global=[1"], ["batch.global=[1", "YAML"]),
    "override_with_a_python_object": (["seed=!!python/object/apply:os.getcwd []"], ["seed=!!python", "YAML"]),
    "unknown_source": (["data.train.source=digit", "data.train.shards=new"], ["'digit'", "did you mean digits"]),
    "unknown_split": (["data.train.split=trian", "data.train.shards=new"], ["'trian'", "did you mean train"]),
    "shards_of_another_source": (["data.train.source=cifar10"], ["digits-train", "digits", "cifar10", "shards"]),
    "shards_of_another_split": (
        ["data.train.shards=data/shards/digits-test"],
        ["digits-test", "digits test", "shards"],
    ),
    "unknown_stage_to_redo": (["--redo", "incvv"], ["--redo incvv", "coteaching_incv"]),
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_a_wrong_recipe_is_refused(mistake: str, incv: Incv, playground: Path) -> None:
    if mistake == "no_gpu" and _has_gpu():
        pytest.skip("this machine has a GPU")
    arguments, named = CONFIG_MISTAKES[mistake]
    with unchanged(playground):
        refused(incv(*RUN, *arguments), 2, *named)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


RECIPE_FILES: dict[str, tuple[bytes | None, list[str]]] = {
    "missing": (None, ["cannot read", "incv ls"]),
    "broken_yaml": (b"seed: [1, 2\n", ["not valid YAML"]),
    "not_text": (b"\xff\xfe\x00", ["cannot read"]),
    "a_list": (b"- seed\n", ["mapping"]),
    "empty": (b"", ["mapping"]),
    "without_sections": (b"seed: 1\n", ["missing key `data`", "missing key `model`"]),
    "python_object": (b"seed: !!python/object/apply:os.getcwd []\n", ["not valid YAML"]),
}


@pytest.mark.parametrize("kind", RECIPE_FILES)
def test_a_recipe_that_cannot_be_read_is_refused(kind: str, incv: Incv, playground: Path) -> None:
    content, named = RECIPE_FILES[kind]
    if content is not None:
        (playground / "mine.yaml").write_bytes(content)
    with unchanged(playground):
        refused(incv("run", "-c", "mine.yaml"), 2, "mine.yaml", *named)


def test_the_name_of_no_recipe_lists_the_shipped_ones(incv: Incv, playground: Path) -> None:
    with unchanged(playground):
        refused(incv("run", "-c", "tinny"), 2, "'tinny'", "tiny", "demo")


def test_a_folder_is_no_recipe(incv: Incv, playground: Path) -> None:
    refused(incv("run", "-c", "data"), 2, "data")


# --- run directories: exit code 2 ---------------------------------------------------------------------------


def test_a_run_directory_of_another_recipe_is_refused(incv: Incv, finished: Path, playground: Path) -> None:
    shutil.copyfile(TINY, playground / "mine.yaml")
    with unchanged(playground):
        refused(incv("run", "-c", "mine.yaml", "--run-dir", "run"), 2, "run", "'tiny'", "'mine'", "--run-dir")


@pytest.mark.parametrize(
    "files",
    [{"notes.txt": "mine"}, {"STOP": ""}, {"manifest.json": '{"name": "app"}'}, {"manifest.json": "[1]"}],
    ids=["notes", "file_named_STOP", "manifest_of_something_else", "manifest_that_is_a_list"],
)
def test_a_folder_of_other_things_is_no_run_directory(files: dict[str, str], incv: Incv, playground: Path) -> None:
    (playground / "other").mkdir()
    for name, text in files.items():
        (playground / "other" / name).write_text(text)
    with unchanged(playground):
        answer = incv(*RUN, "--run-dir", "other")
    assert answer.code in (2, 3), answer.err  # 3 where a file in it claims to be ours and cannot be read
    assert "other" in answer.err


@pytest.mark.parametrize("run_dir", ["notes.txt", "notes.txt/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_made_is_refused(run_dir: str, incv: Incv, playground: Path) -> None:
    (playground / "notes.txt").write_text("mine")
    with unchanged(playground):
        answer = incv(*RUN, "--run-dir", run_dir)
    assert answer.code in (2, 3), answer.err
    assert run_dir in answer.err


def test_an_override_that_would_redo_a_finished_stage_is_refused(
    incv: Incv, finished: Path, playground: Path
) -> None:
    with unchanged(playground):
        answer = incv(*RUN, "--run-dir", "run", "labels.ratio=0.2")
    refused(answer, 2, "labels.ratio", "0.3 -> 0.2", "labels, incv, standard", "--redo labels", "--run-dir")


# --- data: exit code 3 --------------------------------------------------------------------------------------


@pytest.fixture
def own_shards(playground: Path, packed_digits: Path) -> Path:
    """Shards of one's own to damage, in the place of the shared ones."""
    (playground / "data" / "shards").unlink()
    shutil.copytree(packed_digits, playground / "data" / "shards")
    return playground / "data" / "shards" / "digits-train"


def _flip_a_byte(folder: Path) -> None:
    """In the middle of the first image."""
    index, shard = SampleIndex.load(folder), _first_shard(folder)
    content = bytearray(shard.read_bytes())
    content[int(index.offset[0] + index.nbytes[0] // 2)] ^= 1
    shard.write_bytes(content)


def _first_shard(folder: Path) -> Path:
    return min(folder.glob("*.tar"))


def _replace_by_folder(folder: Path) -> None:
    shard = _first_shard(folder)
    shard.unlink()
    shard.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "byte_flipped": (_flip_a_byte, [".tar", "SHA-256", "digits/train/00000", "CRC-32"]),
    "shard_missing": (lambda folder: _first_shard(folder).unlink(), [".tar is missing"]),
    "shard_cut_short": (lambda folder: _first_shard(folder).write_bytes(b"short"), [".tar", "5 bytes"]),
    "shard_is_a_folder": (_replace_by_folder, [".tar"]),
    "index_is_garbage": (lambda folder: (folder / "index.parquet").write_bytes(b"garbage"), ["index.parquet"]),
    "columns_are_garbage": (lambda folder: (folder / "index.arrow").write_bytes(b"garbage"), ["index.arrow"]),
    "index_missing": (lambda folder: (folder / "index.arrow").unlink(), ["index.arrow"]),
    "description_is_garbage": (lambda folder: (folder / "dataset.json").write_text("{"), ["dataset.json"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_refused(damage: str, incv: Incv, playground: Path, own_shards: Path) -> None:
    harm, named = DAMAGES[damage]
    harm(own_shards)
    with unchanged(playground):
        refused(incv(*RUN), 3, "data/shards/digits-train", *named)


def test_damaged_shards_of_a_finished_run_are_refused(
    incv: Incv, finished: Path, playground: Path, own_shards: Path
) -> None:
    _flip_a_byte(own_shards)
    with unchanged(playground):
        refused(incv(*RUN, "--run-dir", "run"), 3, "digits-train", ".tar")


DATA_MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "class_without_a_sample": (["data.train.limit=5", "batch.global=4"], ["class", "no sample"]),
    "fewer_samples_than_a_batch": (["data.train.limit=20"], ["20", "batch.global = 32", "data.train.limit"]),
    "fewer_samples_than_folds": (
        ["data.train.limit=50", "batch.global=8", "incv.folds=64"],
        ["incv.folds = 64", "only 50"],
    ),
    "no_root": (["data.train.source=cifar10", "data.train.shards=new"], ["cifar10", "data.train.root"]),
    "no_root_of_an_evaluation_set": (
        ["data.eval.test.source=cifar10", "data.eval.test.shards=new"],
        ["cifar10", "data.eval.test.root"],
    ),
    "root_does_not_exist": (
        ["data.train.source=cifar10", "data.train.shards=new", "data.train.root=nowhere"],
        ["nowhere does not exist"],
    ),
    "label_file_missing": (
        ["labels.noise=none", "labels.ratio=0", "labels.file=nowhere.csv"],
        ["labels.file", "nowhere.csv"],
    ),
}


@pytest.mark.parametrize("mistake", DATA_MISTAKES)
def test_data_that_cannot_be_used_is_refused(mistake: str, incv: Incv, playground: Path) -> None:
    arguments, named = DATA_MISTAKES[mistake]
    with unchanged(playground):
        refused(incv(*RUN, *arguments), 3, *named)


@pytest.mark.parametrize("place", ["notes.txt", "other"])
def test_a_shard_folder_that_is_something_else_is_refused(place: str, incv: Incv, playground: Path) -> None:
    (playground / "notes.txt").write_text("mine")
    (playground / "other").mkdir()
    (playground / "other" / "notes.txt").write_text("mine")
    with unchanged(playground):
        answer = incv(*RUN, f"data.train.shards={place}")
    assert answer.code in (2, 3), answer.err
    assert place in answer.err
    assert "--out" not in answer.err, "`incv run` has no --out; the key is data.train.shards"


def _label_rows(packed_digits: Path) -> list[str]:
    keys = SampleIndex.load(packed_digits / "digits-train").keys()
    return [f"{key},0" for key in keys]


LABEL_FILES: dict[str, tuple[Callable[[list[str]], list[str]], list[str]]] = {
    "label_above": (lambda rows: [rows[0][:-1] + "10", *rows[1:]], ["label 10", "0..9"]),
    "label_below": (lambda rows: [rows[0][:-1] + "-1", *rows[1:]], ["label -1", "0..9"]),
    "label_beyond_all_bounds": (lambda rows: [rows[0][:-1] + "1" * 30, *rows[1:]], ["1" * 30]),
    "label_not_a_number": (lambda rows: [rows[0][:-1] + "cat", *rows[1:]], ["'cat'"]),
    "keys_missing": (lambda rows: rows[2:], ["lacks 2 of"]),
    "key_unknown": (lambda rows: [*rows, "no/such/key,0"], ["'no/such/key'"]),
    "key_twice": (lambda rows: [*rows, rows[0]], ["twice"]),
    "column_missing": (lambda rows: [*rows[:5], "alone", *rows[6:]], ["line 6", "key,label"]),
    "one_class_only": (lambda rows: rows, ["9 class(es) have no sample"]),
    "empty": (lambda rows: [], ["0 labels"]),
    "too_few_lines": (lambda rows: ["0", "1", "2"], ["3 labels", "key,label"]),
}


@pytest.mark.parametrize("kind", LABEL_FILES)
def test_a_wrong_label_file_is_refused(kind: str, incv: Incv, playground: Path, packed_digits: Path) -> None:
    change, named = LABEL_FILES[kind]
    (playground / "mine.csv").write_text("\n".join(change(_label_rows(packed_digits))))
    with unchanged(playground):
        answer = incv(*RUN, "labels.noise=none", "labels.ratio=0", "labels.file=mine.csv", "data.train.limit=null")
        refused(answer, 3, *named, *([] if kind == "one_class_only" else ["mine.csv"]))


def _pictures(root: Path, **classes: int) -> list[str]:
    """ROOT/train/<class>/<i>.png, and the overrides of a run on them."""
    for name, count in classes.items():
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    overrides = ["data.eval={}", "data.train.source=image_folder", "data.train.limit=null"]
    return [*overrides, f"data.train.root={root}", f"data.train.shards={root}-shards"]


def _nothing_but(shards: str, playground: Path, before: set[str]) -> Iterator[str]:
    yield from (path for path in contents(playground).keys() - before if not path.startswith(shards))


@pytest.mark.parametrize("images", [1, 4])
def test_one_class_is_refused(incv: Incv, playground: Path, images: int) -> None:
    overrides = _pictures(Path("pictures"), cat=images)
    with unchanged(playground):
        answer = incv(*RUN, *overrides, "batch.global=1")
        refused(answer, 3, "data.train has one class only, 'cat'", "data.train.split")


def test_a_class_folder_without_images_is_refused(incv: Incv, playground: Path) -> None:
    overrides = _pictures(Path("pictures"), cat=3, dog=0)
    with unchanged(playground):
        refused(incv(*RUN, *overrides, "batch.global=2"), 3, "train/dog", "contains no image (.jpg")


def test_an_evaluation_set_of_other_classes_is_refused(incv: Incv, playground: Path) -> None:
    overrides = _pictures(Path("pictures"), cat=3, dog=3)
    before = set(contents(playground))
    answer = incv(*RUN, *overrides[1:], "batch.global=2")  # evaluates on digits all the same
    refused(answer, 3, "test", "different classes", "only in training: cat, dog")
    assert list(_nothing_but("pictures-shards", playground, before)) == []


def test_a_broken_image_is_refused_by_name(incv: Incv, playground: Path) -> None:
    overrides = _pictures(Path("pictures"), cat=3, dog=3)
    Path("pictures/train/dog/1.png").write_bytes(b"not an image")
    answer = incv(*RUN, *overrides, "batch.global=2")
    refused(answer, 3, "train/dog/1.png")
    assert not Path("runs").exists()
