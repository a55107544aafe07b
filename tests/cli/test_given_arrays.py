"""An audit with features or predictions of the user's own, on real digits, some of them in the wrong folder."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from safetensors.torch import save_file

from trainer.models.factory import create_model
from trainer.records.run_directory import RunDirectory
from trainer.run.examination import SIDE

PER_CLASS = 40
REVIEW = ["key", "given_label", "predicted_label", "label_quality", "loss", "state", "is_label_issue", "duplicates"]


@pytest.fixture(scope="session")
def pictures() -> dict[str, np.ndarray]:
    """Images of three digits by key, in the order of the data set; every eighth is in the wrong folder."""
    from sklearn.datasets import load_digits

    digits, found = load_digits(), {}
    for label in range(3):
        for place, row in enumerate(np.flatnonzero(digits.target == label)[:PER_CLASS]):
            said = (label + (place % 8 == 0)) % 3
            found[f"digit {said}/{label}-{place:02d}.png"] = (digits.images[row] * 15.9).astype(np.uint8)
    return dict(sorted(found.items()))


@pytest.fixture
def digits(pictures, playground) -> Path:
    for key, pixels in pictures.items():
        path = Path("digits", key)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((32, 32)).convert("RGB").save(path)
    return Path("digits")


@pytest.fixture
def features(pictures) -> np.ndarray:
    return np.stack([pixels.ravel() for pixels in pictures.values()]).astype(np.float32)


@pytest.fixture
def probabilities(pictures) -> np.ndarray:
    """Held-out probabilities of a fair model, by the digit that the image shows."""
    random = np.random.default_rng(0)
    true = np.array([int(Path(key).name[0]) for key in pictures])
    scores = random.normal(size=(len(true), 3))
    scores[np.arange(len(true)), true] += 4
    return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


def wrong(key: str) -> bool:
    folder, file = key.split("/")
    return folder.removeprefix("digit ") != file[0]


def review(run: str) -> pa.Table:
    return pq.read_table(Path("runs", run, "labels_review.parquet"))


def audit(incv, *arguments: object):
    return incv("audit", "digits", "execution.threads=1", *arguments)


def test_embeddings_are_judged_without_a_network(digits, features, incv):
    np.save("features.npy", features)
    answer = audit(incv, "--embeddings", "features.npy")
    assert answer.code == 0, answer.err
    keys = review("audit-digits")["key"].to_pylist()
    assert np.mean([wrong(key) for key in keys[:12]]) >= 0.9
    resumed = audit(incv)  # without --embeddings
    assert resumed.code == 0, resumed.err
    assert "incv: already done" in resumed.err
    again = incv("run", "-c", "runs/audit-digits/config.resolved.yaml", "--run-dir", "runs/again")
    assert again.code == 0, again.err
    assert review("again").equals(review("audit-digits"))
    np.save("features.npy", features * 2)
    changed = audit(incv)
    assert changed.code == 2
    assert "--redo features" in changed.err
    assert audit(incv, "--redo", "features").code == 0


def test_the_order_of_parquet_rows_does_not_matter(digits, pictures, features, incv):
    np.save("features.npy", features)
    rows = np.random.default_rng(0).permutation(len(features))
    keys = pa.array(list(pictures)).take(rows)
    pq.write_table(pa.table({"key": keys, "embedding": list(features[rows])}), "lists.parquet")
    columns = {f"f{column}": features[rows, column] for column in range(features.shape[1])}
    pq.write_table(pa.table({"key": keys} | columns), "columns.parquet")
    for name in ("features.npy", "lists.parquet", "columns.parquet"):
        answer = audit(incv, "--embeddings", name, "--run-dir", f"runs/{name}")
        assert answer.code == 0, answer.err
    assert review("lists.parquet").equals(review("features.npy"))
    assert review("columns.parquet").equals(review("features.npy"))


def test_embeddings_of_the_network_give_the_list_of_the_network(digits, pictures, incv):
    save_file(create_model("digits_cnn", 10, 0).state_dict(), "digits.safetensors")
    size = ["image.size=16", "image.resize=18", "data.train.resize=18"]
    first = audit(
        incv, "--weights", "digits.safetensors", "--model", "digits_cnn", *size, "--run-dir", "runs/network"
    )
    assert first.code == 0, first.err
    (store,) = Path("runs/network/features").iterdir()
    stored = np.fromfile(store / "00000.features", np.float16).reshape(len(pictures), -1)[:, : -SIDE * SIDE]
    np.save("features.npy", stored)
    image = yaml.safe_load(Path("runs/network/config.resolved.yaml").read_text())["image"]
    same = [f"image.{name}={image[name]}" for name in ("mean", "std")]
    second = audit(incv, "--embeddings", "features.npy", *size, *same, "--run-dir", "runs/file")
    assert second.code == 0, second.err
    assert review("file").equals(review("network"))


def test_predictions_judge(digits, pictures, probabilities, incv):
    np.save("p.npy", probabilities)
    answer = audit(incv, "--predictions", "p.npy")
    assert answer.code == 0, answer.err
    table = review("audit-digits")
    assert np.mean([wrong(key) for key in table["key"].to_pylist()[:12]]) >= 0.9
    assert not any(table["off_topic"].to_pylist())
    held = np.load("runs/audit-digits/probabilities.npy")
    assert held.argmax(axis=1).tolist() == probabilities.argmax(axis=1).tolist()
    written = pq.read_table("runs/audit-digits/probabilities.parquet")
    assert written.column_names == ["key", "digit 0", "digit 1", "digit 2"]
    assert written["key"].to_pylist() == list(pictures)
    assert np.array_equal(np.stack([written[name] for name in written.column_names[1:]], axis=1), held)
    report = json.loads(Path("runs/audit-digits/report.json").read_text())
    assert report["noise"]["combined"] == pytest.approx(0.125, abs=0.05)
    names = {f"digit {label}": probabilities[:, label] for label in (2, 0, 1)}  # in any order
    pq.write_table(pa.table({"key": list(pictures)} | names), "p.parquet")
    other = audit(incv, "--predictions", "p.parquet", "--run-dir", "runs/parquet")
    assert other.code == 0, other.err
    assert review("parquet").equals(table)


def test_predictions_judge_and_embeddings_find_duplicates(digits, features, probabilities, incv):
    path = RunDirectory(Path("runs/both"))
    (digits / "digit 1" / "9-copy.png").write_bytes((digits / "digit 0" / "0-01.png").read_bytes())
    keys = sorted(str(file.relative_to(digits)) for file in digits.rglob("*.png"))
    at, source = keys.index("digit 1/9-copy.png"), keys.index("digit 0/0-01.png")
    np.save("features.npy", np.insert(features, at, features[source], axis=0))
    np.save("p.npy", np.insert(probabilities, at, probabilities[source], axis=0))
    answer = audit(incv, "--embeddings", "features.npy", "--predictions", "p.npy", "--run-dir", "runs/both")
    assert answer.code == 0, answer.err
    table = review("both").to_pydict()
    assert table["key"][0] == "digit 1/9-copy.png"
    assert table["conflicting_duplicate"][0]
    assert np.isfinite(pq.read_table(path.examination)["off_topic_score"].to_numpy()).all()
    assert np.load(path.probabilities)[at].argmax() == probabilities[source].argmax()


@pytest.fixture
def tests_folder(digits) -> Path:
    """One class of other digits, with an equal file and a resized copy of training images."""
    from sklearn.datasets import load_digits

    data, folder = load_digits(), Path("tests/all")
    folder.mkdir(parents=True)
    for row in np.flatnonzero(data.target == 7)[:30]:
        Image.fromarray((data.images[row] * 15.9).astype(np.uint8)).resize((32, 32)).save(folder / f"{row}.png")
    (folder / "equal.png").write_bytes((digits / "digit 0" / "0-01.png").read_bytes())
    with Image.open(digits / "digit 1" / "1-02.png") as image:
        image.resize((48, 48)).save(folder / "resized.png")
    return folder.parent


def test_images_of_a_test_set_are_found(tests_folder, features, incv):
    np.save("features.npy", features)
    answer = audit(incv, "--embeddings", "features.npy", "--against", tests_folder)
    assert answer.code == 0, answer.err
    table = review("audit-digits").to_pydict()
    leaks = {key: leak for key, leak in zip(table["key"], table["leak"], strict=True) if leak}
    assert leaks["digit 0/0-01.png"] == "all/equal.png"
    assert leaks["digit 1/1-02.png"] == "all/resized.png"
    assert len(leaks) <= 4
    facts = json.loads(Path("runs/audit-digits/examination.json").read_text())["leaks"]
    assert (facts["found"], facts["equal"], facts["images"]) == (len(leaks), 1, 32)
    assert "Also in test" in Path("runs/audit-digits/report.html").read_text()
    assert "leak" in Path("runs/audit-digits/labels_review.csv").read_text().splitlines()[0]
    resumed = audit(incv)  # without --against
    assert resumed.code == 0
    assert "incv: already done" in resumed.err
    (tests_folder / "all" / "equal.png").unlink()
    changed = audit(incv, "--redo", "pack")
    assert changed.code == 0, changed.err
    assert json.loads(Path("runs/audit-digits/examination.json").read_text())["leaks"]["equal"] == 0


def test_leaks_are_found_by_the_features_of_a_network(tests_folder, incv):
    save_file(create_model("digits_cnn", 10, 0).state_dict(), "digits.safetensors")
    options = ["--weights", "digits.safetensors", "--model", "digits_cnn", "image.size=16", "--against", tests_folder]
    answer = audit(incv, *options)
    assert answer.code == 0, answer.err
    table = review("audit-digits").to_pydict()
    assert "all/equal.png" in table["leak"]
    assert "all/resized.png" in table["leak"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder.mkdir(), "contains no images"),
        (lambda folder: folder.mkdir() or Image.new("RGB", (8, 8)).save(folder / "a.png"), "1 images, but no folder"),
        (lambda folder: folder.symlink_to("digits"), "is the audited folder itself"),
        (lambda folder: None, "there is no folder"),
    ],
)
def test_a_folder_that_cannot_be_searched_is_refused(make, words, digits, features, incv):
    np.save("features.npy", features)
    make(Path("other"))
    answer = audit(incv, "--embeddings", "features.npy", "--against", "other")
    assert answer.code in (2, 3)
    assert words in answer.err
    assert not Path("runs").exists()


def spoil(array: np.ndarray, row: int, value: float) -> np.ndarray:
    array = array.copy()
    array[row, 0] = value
    return array


@pytest.mark.parametrize(
    ("option", "change", "words"),
    [
        ("--embeddings", lambda f, p: f[:-1], "119 rows, but the data set has 120 images"),
        ("--embeddings", lambda f, p: spoil(f, 3, np.nan), "NaN or infinity"),
        ("--embeddings", lambda f, p: np.ones_like(f), "all rows are equal"),
        ("--embeddings", lambda f, p: f[:, 0], "not [images, columns]"),
        ("--embeddings", lambda f, p: f.astype(str), "of the type <U"),
        ("--embeddings", lambda f, p: f.astype(object), "save one array of numbers"),
        ("--predictions", lambda f, p: p[:, :1], "1 columns, but the data set has 3 classes"),
        ("--predictions", lambda f, p: np.tile(p, 80)[:, :200] / 67, "200 columns, but the data set has 3 classes"),
        ("--predictions", lambda f, p: p * 2, "sum to 2"),
        ("--predictions", lambda f, p: spoil(p, 3, -0.1), "negative, NaN or infinite"),
        ("--predictions", lambda f, p: np.eye(3)[np.repeat(range(3), 40)], "agreement 1.0"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(option, change, words, digits, features, probabilities, incv):
    np.save("given.npy", change(features, probabilities), allow_pickle=True)
    answer = audit(incv, option, "given.npy")
    assert answer.code == 3
    assert words in answer.err
    assert f"{option}: " in answer.err
    assert len([line for line in answer.err.splitlines() if "error" in line]) == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.slice(1), "lacks 1 keys (digit 0/0-01.png)"),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), "repeats 1 keys (digit 0/0-01.png)"),
        (lambda t: t.set_column(0, "key", [["x.png", *t["key"].to_pylist()[1:]]]), "has unknown 1 keys (x.png)"),
        (lambda t: t.drop(["key"]), "needs a column `key`"),
        (lambda t: t.append_column("note", [["good"] * len(t)]), "column note"),
    ],
)
@pytest.mark.parametrize("option", ["--embeddings", "--predictions"])
def test_tables_that_cannot_be_used_are_refused(option, change, words, digits, pictures, probabilities, incv):
    columns = {f"digit {label}": probabilities[:, label] for label in range(3)}
    pq.write_table(change(pa.table({"key": list(pictures)} | columns)), "given.parquet")
    answer = audit(incv, option, "given.parquet")
    assert answer.code == 3
    assert words in answer.err
    assert not Path("runs").exists()


def test_files_that_are_none_are_refused_before_anything_is_packed(digits, incv):
    os.mkfifo("fifo.npy")
    Path("text.npy").write_text("0 1 2")
    Path("folder.npy").mkdir()
    Path("list.txt").write_text("0 1 2")
    before = set(Path("data/shards").iterdir())
    for name, words in {
        "fifo.npy": "a FIFO",
        "/dev/zero": "not a .npy or .parquet",
        "folder.npy": "it is a folder",
        "none.npy": "there is no such file",
        "list.txt": "not a .npy or .parquet",
    }.items():
        answer = audit(incv, "--embeddings", name)
        assert answer.code == 3, answer.err
        assert words in answer.err
    assert set(Path("data/shards").iterdir()) == before
    assert "no .npy file" in audit(incv, "--embeddings", "text.npy").err


def test_options_that_exclude_each_other(digits, features, incv):
    np.save("features.npy", features)
    assert audit(incv, "--embeddings", "features.npy", "--model", "digits_cnn").code == 2
    assert audit(incv, "--embeddings", "features.npy", "--train").code == 2


def test_constant_columns_are_named(digits, features, incv):
    np.save("features.npy", np.concatenate([features, np.ones((len(features), 2), np.float32)], axis=1))
    answer = audit(incv, "--embeddings", "features.npy")
    assert answer.code == 0
    assert "columns are the same for all images" in answer.err
