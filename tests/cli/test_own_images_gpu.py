"""Own images on a GPU: an audit, and a run with every kind of augmentation that stops and resumes."""

import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.command_line import contents
from tests.support.pretraining import pretrain_on_other_shapes
from tests.support.shapes import write_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

RECIPE = """
seed: 0
data: {train: {source: image_folder, split: train, root: IMAGES, resize: 72}, eval_fraction: 0.2}
labels: {noise: none}
image:
  {size: 64, resize: 72, flip: true, mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25],
   random_resized_crop: {scale: [0.35, 1.0]}, rand_augment: {operations: 2, magnitude: 9},
   color_jitter: {brightness: 0.2, contrast: 0.2, saturation: 0.2, hue: 0.02}}
model: {name: test_resnet, weights: WEIGHTS}
batch: {global: auto}
precision: bf16
methods: [standard, coteaching_incv]
incv:
  {rounds: 2, epochs: 10, label_smoothing: 0.1, mixup: {alpha: 0.2}, ema: {decay: 0.95}, noise_estimate: confident,
   remove_ratio: 0.1, optimizer: &adamw {kind: adamw, learning_rate: 0.001, schedule: cosine, weight_decay: 0.05}}
standard: {epochs: 20, mixup: {alpha: 0.2}, ema: {decay: 0.95}, optimizer: *adamw}
coteaching: {epochs: 20, ema: {decay: 0.95}, noise_of_selected: confident, optimizer: *adamw}
execution: {deterministic: true, graphs: true, workers: 4, checkpoint_every: 5}
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network that knows other shapes."""
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    pretrain_on_other_shapes(file)
    return file


def test_an_audit_finds_the_wrong_labels(weights, playground, incv):
    truth = write_shapes(playground / "photos", 80, 0.18, seed=7)
    done = incv("audit", "photos", "--weights", weights)
    assert done.code == 0, done.err
    keys = pq.read_table("runs/audit-photos/labels_review.parquet")["key"].to_pylist()
    wrong = [truth[key][0] != truth[key][1] for key in keys[:24]]
    assert np.mean(wrong) >= 0.9


def test_a_run_with_every_augmentation_resumes_exactly(weights, playground, incv):
    write_shapes(playground / "photos/train", 80, 0.18, seed=7)
    text = RECIPE.replace("IMAGES", str(playground / "photos")).replace("WEIGHTS", str(weights))
    (playground / "mine.yaml").write_text(text)
    whole = incv("run", "-c", "mine.yaml", "--run-dir", "whole")
    assert whole.code == 0, whole.err

    for stage in ("rounds", "methods"):
        watcher = threading.Thread(target=_stop_in, args=(playground / "parts", stage), daemon=True)
        watcher.start()
        assert incv("run", "-c", "mine.yaml", "--run-dir", "parts").code == 75
        watcher.join()
        (playground / "parts/STOP").unlink(missing_ok=True)
    assert incv("run", "-c", "mine.yaml", "--run-dir", "parts").code == 0

    for method in ("standard", "coteaching_incv"):
        export = f"methods/{method}/export"
        assert contents(playground / "parts" / export) == contents(playground / "whole" / export)


def _stop_in(run: Path, stage: str) -> None:
    """Ask the run to stop as soon as a training of this stage has a checkpoint."""
    while not any(run.glob(f"{stage}/**/checkpoints/step-*")):
        time.sleep(0.02)
    (run / "STOP").touch()
