"""`incv predict` with an audit by features, which trained no network."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from trainer.models.factory import create_model

AUDIT = ["--weights", "digits.safetensors", "--model", "digits_cnn", "image.size=8", "image.resize=null"]
AUDIT += ["data.train.resize=null", "execution.threads=1"]


@pytest.fixture
def audited(playground: Path, incv) -> Path:
    """40 images each of three digits, every eighth in another one's folder."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(3):
        for place, row in enumerate(np.flatnonzero(digits.target == label)[:40]):
            path = Path("digits", f"digit {(label + (place % 8 == 0)) % 3}", f"{label}-{place:02d}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).convert("RGB").save(path)
    save_file(create_model("digits_cnn", 10, 0).state_dict(), "digits.safetensors")
    answer = incv("audit", "digits", *AUDIT)
    assert answer.code == 0, answer.err
    return Path("runs/audit-digits")


def predict(incv, run: Path, out: str = "out.csv", *more: str) -> dict[str, dict[str, str]]:
    answer = incv("predict", "digits", "--run", run, "-o", out, *more)
    assert answer.code == 0, answer.err
    with open(out, encoding="utf-8", newline="") as file:
        return {row["path"].removeprefix("digits/"): row for row in csv.DictReader(file)}


def test_it_classifies_as_the_selected_labels_say(audited, incv) -> None:
    rows = predict(incv, audited)
    table = pq.read_table(audited / "labels_review.parquet").to_pydict()
    given = dict(zip(table["key"], table["given_label"], strict=True))
    selected = [key for key, state in zip(table["key"], table["state"], strict=True) if state == "selected"]
    assert len(rows) == 120
    assert np.mean([rows[key]["predicted_label"] == given[key] for key in selected]) > 0.95
    assert np.mean([rows[key]["predicted_label"][-1] == Path(key).name[0] for key in rows]) > 0.9


def test_probabilities_are_those_of_a_direct_computation(audited, incv) -> None:
    """From the files, without our loaders and the class of the classifier."""
    head = load_file(audited / "classifier" / "head.safetensors")
    described = json.loads((audited / "classifier" / "config.json").read_text())
    network = create_model("digits_cnn", 10, 0).eval()
    network.load_state_dict(load_file("digits.safetensors"))
    for key, row in list(predict(incv, audited).items())[::10]:
        image = Image.open(Path("digits", key)).convert("RGB")
        assert image.size == (8, 8)
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)[None]
        mean, std = (torch.tensor(described["input"][name]).view(3, 1, 1) for name in ("mean", "std"))
        with torch.no_grad():
            features = network.forward_head(network.forward_features((pixels - mean) / std), pre_logits=True)
        centred = features - head["mean"]
        expected = (centred / centred.norm() @ head["weight"] + head["bias"]).softmax(1)[0]
        assert row["predicted_label"] == described["label_names"][int(expected.argmax())]
        assert float(row["probability"]) == pytest.approx(float(expected.max()), abs=1e-4)


def test_weights_that_are_gone_or_changed_are_named(audited, incv) -> None:
    weights = Path("digits.safetensors")
    kept = weights.read_bytes()
    save_file(create_model("digits_cnn", 10, 1).state_dict(), weights)
    changed = incv("predict", "digits", "--run", audited, "-o", "out.csv")
    assert changed.code == 3
    assert "digits.safetensors has changed since the run" in changed.err
    weights.unlink()
    gone = incv("predict", "digits", "--run", audited, "-o", "out.csv")
    assert gone.code == 3
    assert "needs its weights" in gone.err
    assert "digits.safetensors" in gone.err
    assert not Path("out.csv").exists()
    weights.write_bytes(kept)
    refused = incv("predict", "digits", "--run", audited, "-o", "out.csv", "--method", "standard")
    assert refused.code == 2
    assert "leave out --method" in refused.err
    before = (audited / "classifier" / "head.safetensors").read_bytes()
    assert incv("audit", "digits", *AUDIT, "--redo", "classifier").code == 0
    assert (audited / "classifier" / "head.safetensors").read_bytes() == before
