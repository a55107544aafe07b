"""An audit by features on two ranks, one of which is killed, lists what one process lists."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from shards.durable import read_json
from tests.support import REPOSITORY
from tests.support.audit_ranks import FINISHED_PARTS, PIECE
from tests.support.processes import free_ports
from tests.support.world_runs import finish
from trainer.cli import main
from trainer.models.factory import create_model

pytestmark = pytest.mark.cluster
PROGRAM = REPOSITORY / "tests" / "support" / "audit_ranks.py"
SMALL = ("image.size=16", "execution.threads=1")
QUICK = ("execution.predict_batch=8", "execution.lost_after=4")
PROBABILITIES = ("label_quality", "predicted_probability", "loss")
COPIES = 3
IMAGES, TEST_IMAGES = 200, 12


def draw_digits(folder: Path) -> None:
    """Write digits of four classes, every eighth in another one's folder; a few twice, and one that is no image."""
    from sklearn.datasets import load_digits

    digits = load_digits()

    def draw(row: int, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).convert("RGB").save(path)

    for label in range(4):
        rows = np.flatnonzero(digits.target == label)
        for place, row in enumerate(rows[: IMAGES // 4]):
            draw(row, folder / "digits" / f"digit {(label + (place % 8 == 0)) % 4}" / f"{label}-{place:02d}.png")
        for place, row in enumerate(rows[: TEST_IMAGES // 4]):  # three quarters of the set are also among the others
            draw(row if label else rows[-1 - place], folder / "test" / f"digit {label}" / f"{place}.png")
        if label < COPIES:
            draw(rows[1], folder / "digits" / f"digit {label}" / "copy.png")
    (folder / "digits" / "digit 0" / "broken.png").write_bytes(b"no image")


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The run of one process, that of two ranks by the recipe of the first, and the log of the second."""
    folder = tmp_path_factory.mktemp("audit")
    draw_digits(folder)
    save_file(create_model("digits_cnn", 10, 0).state_dict(), folder / "digits.safetensors")
    given = ("digits", "--weights", "digits.safetensors", "--model", "digits_cnn", "--against", "test")
    with contextlib.chdir(folder):
        assert main(["audit", *given, *SMALL, "--run-dir", "one"]) == 0
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_ports(1)[0]}")
    told = ("-c", "one/config.resolved.yaml", "--run-dir", "two", "execution.features=null", "execution.world=2")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher, "--max-restarts=1", str(PROGRAM), "run", *told, *QUICK],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    printed = (folder / "log").read_text
    assert finish(process, 120) == 0, printed()
    return folder / "one", folder / "two", printed()


def read_both(audited: tuple[Path, Path, str], name: str) -> tuple[pa.Table, pa.Table]:
    one, two, _ = audited
    return pq.read_table(one / name), pq.read_table(two / name)


def test_both_list_the_same_samples_in_the_same_order(audited) -> None:
    one, two = read_both(audited, "labels_review.parquet")
    assert one.num_rows == IMAGES + COPIES + 1
    assert one.drop_columns(PROBABILITIES).equals(two.drop_columns(PROBABILITIES))
    for name in PROBABILITIES:
        assert one[name].is_null().equals(two[name].is_null())
        np.testing.assert_allclose(one[name].to_numpy(), two[name].to_numpy(), rtol=0, atol=1e-5)
    assert sum(one["is_label_issue"].to_pylist()) >= IMAGES / 16


def test_both_find_the_same_besides_wrong_labels(audited) -> None:
    one, two = read_both(audited, "examination.parquet")
    assert one.num_rows == IMAGES + COPIES
    assert one.column_names == two.column_names
    for name in one.column_names:
        if name == "off_topic_score":
            np.testing.assert_allclose(one[name].to_numpy(), two[name].to_numpy(), rtol=1e-4)
        else:
            assert one[name].equals(two[name]), name
    assert len(set(one["equal_group"].to_pylist())) == IMAGES
    assert one["leak"].null_count < one.num_rows


def test_both_fit_the_same_classifier(audited) -> None:
    one, two = (load_file(run / "classifier" / "head.safetensors") for run in audited[:2])
    for name in ("mean", "weight", "bias"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-3)


def test_the_restarted_ranks_do_not_compute_again_what_was_finished(audited) -> None:
    one, two, log = audited
    facts: list[dict[str, Any]] = [read_json(run / "examination.json") for run in (one, two)]
    assert [each["images"] for each in facts] == [IMAGES + COPIES] * 2
    assert facts[0]["computed"] == IMAGES
    assert facts[1]["computed"] == IMAGES - FINISHED_PARTS * PIECE
    starts = read_json(two / "manifest.json")["starts"]
    assert [(start["world"], start.get("ended") == "finished") for start in starts] == [(2, False), (2, True)]
    assert f"features: {FINISHED_PARTS * PIECE + COPIES} of {IMAGES + COPIES} images were computed before" in log
