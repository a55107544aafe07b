"""How good an audit on a CPU is: made-up shapes, and weights that were pre-trained on other shapes."""

import json
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.pretraining import pretrain_on_other_shapes
from tests.support.shapes import write_shapes


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_audit_of_320_shapes(playground: Path, incv) -> None:
    torch.set_num_threads(2)
    pretrain_on_other_shapes(playground / "weights/model.safetensors")
    truth = write_shapes(playground / "photos", 80, 0.18, seed=7)
    began = time.monotonic()
    done = incv("audit", "photos", "--weights", "weights/model.safetensors", "execution.device=cpu")
    minutes = (time.monotonic() - began) / 60
    assert done.code == 0, done.err
    run = playground / "runs/audit-photos"
    wrong = [
        truth[key][0] != truth[key][1] for key in pq.read_table(run / "labels_review.parquet")["key"].to_pylist()
    ]
    noise = json.loads((run / "report.json").read_text())["noise"]
    assert np.mean(wrong[:24]) >= 0.9
    assert noise[noise["stated"]] == pytest.approx(np.mean(wrong), abs=0.05)
    assert minutes < 10
