"""The whole way of own images: audit, review, corrections, training, cleaned shards, predictions."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from shards.csv_file import unescape_cell
from trainer.models.factory import import_timm

CLASSES = ("zéro", "one ' 1", "=two")
FORMATS = {".png": {}, ".webp": {"lossless": True}, ".bmp": {}, ".gif": {}, ".tiff": {}, ".jpg": {"quality": 95}}
AUDIT = ["--model", "digits_cnn", "--no-download", "image.size=8", "image.resize=9", "data.train.resize=9"]
AUDIT += ["incv.epochs=40", "incv.optimizer.milestones=[[30, 0.01]]", "execution.threads=1"]
TRAIN = ["model={name: test_resnet}", "image.size=32", "image.resize=null", "data.train.resize=null"]
TRAIN += [
    "incv.epochs=4",
    "incv.optimizer.milestones=[]",
    "methods=[standard]",
    "standard={epochs: 6, optimizer: {learning_rate: 3e-3}}",
    "execution.threads=1",
]


@pytest.fixture
def photos(playground: Path) -> Path:
    """Digits of 32 pixels in six formats, every fifth in a wrong folder; and files that are no images."""
    from sklearn.datasets import load_digits

    digits, folder = load_digits(), playground / "my photos"
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for place, row in enumerate(np.flatnonzero(digits.target == label)[:60]):
            said = CLASSES[(label + (place % 5 == 0)) % 3]
            suffix = list(FORMATS)[place % 6]
            pixels = np.kron((digits.images[row] * 15.9).astype(np.uint8), np.ones((4, 4), np.uint8))
            path = folder / said / f"+{label}, {place:02d}{suffix}"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).convert("RGB").save(path, **FORMATS[suffix])
    (folder / CLASSES[0] / "notes.txt").write_text("not an image")
    (folder / CLASSES[0] / "page.jpg").write_text("<html>404</html>")
    return folder


def read_csv(path: str | Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def true_label(key: str) -> str:
    return CLASSES[int(Path(key).name[1])]


def read_with_dali(tars: list[str], samples: int) -> list[tuple[int, tuple[int, ...]]]:
    """The label and the image shape of each sample, through DALI's own WebDataset reader."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline():
        encoded, label = fn.readers.webdataset(paths=tars, ext=["jpg;png", "cls"])
        return fn.decoders.image(encoded, device="cpu"), label

    built = pipeline()
    built.build()
    found = []
    for _ in range(samples):
        image, label = built.run()
        found.append((int(bytes(label.at(0)).decode()), image.at(0).shape))
    return found


@pytest.mark.slow
def test_from_photos_to_a_cleaned_set(photos, incv):
    audited = incv("audit", photos, *AUDIT, "data.max_rejected=0.1")
    assert audited.code == 0, audited.err
    run = Path("runs/audit-my photos")
    listed = read_csv(run / "labels_review.csv")
    assert len(listed) == 181  # with the page that is no image
    suspicious = [row for row in listed if row["is_label_issue"] == "true"][:24]
    wrong = [row["given_label"].lstrip("'") != true_label(row["key"]) for row in suspicious]
    assert np.mean(wrong) >= 0.9
    left_out = {Path(row["path"]).name: row for row in read_csv(run / "rejected.csv")}
    assert left_out["page.jpg"]["outcome"] == "rejected"
    assert "HTML" in left_out["page.jpg"]["reason"]
    assert left_out["notes.txt"]["outcome"] == "ignored"

    corrections = [{"key": row["key"], "label": row["predicted_label"]} for row in suspicious]
    with open("corrections.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["key", "label"])
        writer.writeheader()
        writer.writerows(corrections)
    recipe = Path("runs/audit-my photos/config.resolved.yaml")
    arguments = [
        "-c",
        recipe,
        *TRAIN,
        "data.train.shards=data/shards/larger",
        "data.max_rejected=0.1",
        "labels.corrections=corrections.csv",
    ]
    trained = incv("run", *arguments, "--run-dir", "runs/mine")
    assert trained.code == 0, trained.err
    assert "24 corrected" in trained.err

    assert incv("clean", "runs/mine", "--out", "cleaned", "--as", "shards").code == 0
    names = Path("cleaned/classes.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(names) == sorted(CLASSES)
    tars = [str(path) for path in sorted(Path("cleaned").glob("*.tar"))]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode("rgb8"))
    report = json.loads(Path("runs/mine/report.json").read_text())
    assert len(samples) == report["selection"]["selected"]
    assert {unescape_cell(row["key"]) for row in corrections} <= {sample["json"]["key"] for sample in samples}
    corrected = {row["key"]: row["label"].lstrip("'") for row in corrections}
    for sample in samples:
        key = sample["json"]["key"]
        given = corrected.get(key) or corrected.get("'" + key) or key.split("/")[0]
        assert names[int(sample["cls"])] == given
    expected = [(int(sample["cls"]), (sample.get("png", sample.get("jpg"))).shape) for sample in samples]
    assert read_with_dali(tars, len(samples)) == expected

    assert incv("predict", photos / CLASSES[1], "--run", "runs/mine", "-o", "predicted.csv").code == 0
    export = Path("runs/mine/methods/standard/export/model_a").resolve()
    network = import_timm().create_model(f"local-dir:{export}", pretrained=True).eval()
    config = json.loads((export / "config.json").read_text())
    mean, std = (np.array(config["pretrained_cfg"][name], np.float32) for name in ("mean", "std"))
    rows = [row for row in read_csv("predicted.csv") if row["path"].endswith(".png")]
    assert len(rows) >= 8
    for row in rows:
        pixels = np.asarray(Image.open(row["path"]).convert("RGB"), np.float32) / 255
        with torch.no_grad():
            chances = network(torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)[None]).softmax(1)[0]
        best = int(chances.argmax())
        assert config["label_names"][best] == row["predicted_label"].lstrip("'")
        assert float(row["probability"]) == pytest.approx(float(chances[best]), abs=2e-5)
