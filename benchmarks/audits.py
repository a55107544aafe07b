"""Audits of made-up and CIFAR-10 image folders with known wrong labels.

    PYTHONPATH=. python benchmarks/audits.py weights OUT [--cifar FOLDER]   pre-train the starting weights
    PYTHONPATH=. python benchmarks/audits.py cases OUT --set choose|check|plain|compare [--cifar FOLDER] [--jobs N]

Each case is a folder of images (shapes or CIFAR-10) of some size and noise, audited with good, poor or no weights and
a long or short schedule. `cases` writes one JSON line per case with what trust reads from the run and the measured
quality of the result. The thresholds of `trainer/report/trust.py` were chosen on the set `choose`; the set `check`
shows how good they are. The set `plain` has three ordinary audits: good weights, and the schedule that the audit
chooses. The set `compare` has ten such audits, each also with networks that are trained as a whole, at two rates.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from record import machine

from tests.support.pretraining import pretrain
from tests.support.shapes import OTHER_SHAPES, SHAPES, draw_shape, write_shapes
from trainer.records.manifest import installed_versions

LISTED = 24
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_AUDITED = 10_000  # CIFAR-10's first batch is for audits; the weights come from the others
_NETWORKS = {"shapes": ("test_resnet", 64), "cifar": ("cifar_resnet20", 32)}


@dataclass(frozen=True)
class Case:
    """One audit: the images, their noise, and how the network starts and trains."""

    data: str
    classes: int
    each: int
    wrong: float
    weights: str
    """good, poor or none."""
    share: float
    """Share of the steps that the audit would choose."""
    seed: int
    whole_rate: float | None = None
    """Learning rate with which the whole network is trained; None: as the audit chooses."""

    @property
    def name(self) -> str:
        return (
            f"{self.data}-{self.classes}x{self.each}-wrong{self.wrong:g}-{self.weights}-steps{self.share:g}"
            f"-seed{self.seed}" + (f"-whole{self.whole_rate:g}" if self.whole_rate is not None else "")
        )


def list_cases(which: str) -> list[Case]:
    """The cases of the set `choose` or `check`, drawn at random with different seeds, or of another set."""
    if which == "compare":
        sizes = [("cifar", 4, 80, 0.2)] * 4 + [("shapes", 4, 80, 0.18)] * 2 + [("cifar", 10, 80, 0.1)] * 2
        sizes += [("cifar", 4, 50, 0.3)] * 2
        rates = (None, 0.003, 0.01)
        return [Case(*size, "good", 1.0, 4000 + n, rate) for n, size in enumerate(sizes) for rate in rates]
    if which == "plain":
        sizes = (("shapes", 4, 80, 0.18), ("cifar", 4, 80, 0.2), ("cifar", 10, 300, 0.2))
        return [Case(*size, "good", 1.0, 2000 + number) for number, size in enumerate(sizes)]
    rng = np.random.default_rng({"choose": 1, "check": 2}[which])
    cases = []
    for number in range(32):
        data = ("shapes", "cifar")[number % 2]
        classes = ((4, 8) if data == "shapes" else (4, 10))[number // 2 % 2]
        each = int(rng.choice([50, 80, 150]))
        weights = ("good", "good", "poor", "none")[int(rng.integers(4))]
        cases.append(
            Case(
                data,
                classes,
                each,
                float(rng.choice([0.1, 0.18, 0.3, 0.45])),
                weights,
                float(rng.choice([0.1, 0.4, 1.0])),
                number + (1000 if which == "check" else 0),
            )
        )
    return cases


def read_cifar(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [50000, 32, 32, 3] and labels [50000] of the binary version."""
    rows = np.concatenate(
        [np.fromfile(folder / f"data_batch_{n}.bin", np.uint8).reshape(-1, 3073) for n in range(1, 6)]
    )
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0].astype(np.int64)


def write_images(case: Case, folder: Path, cifar: Path | None) -> dict[str, tuple[str, str]]:
    """Write the images of a case; returns {path: (given, true)}."""
    if case.data == "shapes":
        return write_shapes(folder, case.each, case.wrong, case.seed, (*SHAPES, *OTHER_SHAPES)[: case.classes])
    assert cifar is not None
    rng = np.random.default_rng(case.seed)
    images, labels = read_cifar(cifar)
    images, labels = images[:_AUDITED], labels[:_AUDITED]
    chosen = rng.permutation(10)[: case.classes]
    rows = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[: case.each] for c in chosen])
    true = np.repeat(np.arange(case.classes), case.each)
    given = true.copy()
    flipped = rng.permutation(len(true))[: round(case.wrong * len(true))]
    given[flipped] = (true[flipped] + rng.integers(1, case.classes, len(flipped))) % case.classes
    written = {}
    for row, is_, said in zip(rows, true, given, strict=True):
        names = [CIFAR_CLASSES[chosen[said]], CIFAR_CLASSES[chosen[is_]]]
        path = folder / names[0] / f"{row:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[row]).save(path)
        written[f"{names[0]}/{row:05d}.png"] = (names[0], names[1])
    return written


def make_weights(out: Path, cifar: Path | None) -> None:
    """Pre-train good and poor weights: on shapes that no four-class audit has, and on CIFAR-10's other batches."""
    rng = np.random.default_rng(99)
    drawn = [(draw_shape(shape, rng), label) for label, shape in enumerate(OTHER_SHAPES) for _ in range(250)]
    sets: dict[str, tuple[list[Image.Image], list[int]]] = {"shapes": ([i for i, _ in drawn], [n for _, n in drawn])}
    if cifar is not None:
        images, labels = read_cifar(cifar)
        sets["cifar"] = ([Image.fromarray(image) for image in images[_AUDITED:]], labels[_AUDITED:].tolist())
    for data, (images, labels) in sets.items():
        model, size = _NETWORKS[data]
        for quality, epochs in (("good", 40 if data == "shapes" else 25), ("poor", 4 if data == "shapes" else 1)):
            began = time.monotonic()
            file = out / f"{data}-{quality}" / "model.safetensors"
            accuracy = pretrain(
                images, labels, model, size, file, epochs=epochs, batch=64 if data == "shapes" else 256
            )
            print(f"{file}: training accuracy {accuracy:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def measure(run: Path, truth: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Precision of the most suspicious samples, error of the stated noise ratio, and the trust with its signals.

    The precision is that of the first LISTED samples, or of as many as there are wrong labels if these are fewer.
    """
    table = pq.read_table(run / "labels_review.parquet", columns=["key"])
    wrong = [truth[key][0] != truth[key][1] for key in table["key"].to_pylist()]
    listed = min(LISTED, sum(wrong))
    report = json.loads((run / "report.json").read_text())
    ratio, estimate = sum(wrong) / len(wrong), report["noise"][report["noise"]["stated"]]
    line = {
        "precision": sum(wrong[:listed]) / listed,
        "listed": listed,
        "wrong": ratio,
        "estimate": estimate,
        "error": abs(estimate - ratio),
        "level": report["trust"]["level"],
    }
    return _rounded(line) | {"signals": _rounded(report["trust"]["signals"])}


def _rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}


def run_case(case: Case, out: Path, cifar: Path | None, threads: int = 1) -> dict[str, Any]:
    """Write the images of a case, audit them with `incv audit`, and measure the result."""
    folder = out / case.name
    truth = write_images(case, folder / "images", cifar)
    model, size = _NETWORKS[case.data]
    if case.weights == "none":
        start = ["--model", model, f"image.size={size}", f"image.resize={size + size // 8}"]
        start.append(f"data.train.resize={size + size // 8}")
    else:
        start = ["--weights", str(out / f"{case.data}-{case.weights}" / "model.safetensors")]
    command = [sys.executable, "-m", "trainer", "audit", str(folder / "images"), "--no-download"]
    command += ["--run-dir", str(folder / "run"), *start, *_shorten(case), "execution.device=cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    (folder / "log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{case.name}: exit {done.returncode}: {done.stderr[-500:]}")
    measured = measure(folder / "run", truth) | {"minutes": round((time.monotonic() - began) / 60, 2)}
    about = {"machine": machine(), "versions": installed_versions(("incv", "torch", "timm", "numpy"))}
    return {"case": case.name} | measured | about


def _shorten(case: Case) -> list[str]:
    """Overrides that cut the schedule of the audit to the case's share of the steps, and set what is trained."""
    from trainer.auditing.settings import FROM_SCRATCH, FROM_WEIGHTS, choose_batch, choose_epochs, choose_optimizer

    schedule = FROM_SCRATCH if case.weights == "none" else FROM_WEIGHTS
    samples = case.classes * case.each
    epochs = max(1, round(choose_epochs(samples, choose_batch(samples), schedule) * case.share))
    rate = schedule.learning_rate if case.whole_rate is None else case.whole_rate
    milestones = choose_optimizer(epochs, rate)["milestones"]
    whole = [] if case.whole_rate is None else ["model.trainable=all", f"incv.optimizer.learning_rate={rate:g}"]
    return [f"incv.epochs={epochs}", f"incv.optimizer.milestones={json.dumps(milestones)}", *whole]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weights", "cases"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", dest="which", choices=("choose", "check", "plain", "compare"), default="check")
    parser.add_argument("--cifar", type=Path, help="cifar-10-batches-bin")
    parser.add_argument("--jobs", type=int, default=1, help="audits at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each audit")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "weights":
        make_weights(given.out, given.cifar)
        return
    cases = [case for case in list_cases(given.which) if case.data != "cifar" or given.cifar is not None]
    results = given.out / f"{given.which}.jsonl"
    seen = {json.loads(line)["case"] for line in results.read_text().splitlines()} if results.exists() else set()
    with ThreadPoolExecutor(given.jobs) as pool, results.open("a") as file:
        waiting = {case.name: case for case in cases if case.name not in seen}
        running = [pool.submit(run_case, case, given.out, given.cifar, given.threads) for case in waiting.values()]
        for line in (audit.result() for audit in as_completed(running)):
            print(json.dumps({"set": given.which} | line), file=file, flush=True)
            print(f"{line['case']}: precision {line['precision']:.2f}, error {line['error']:.3f}", flush=True)


if __name__ == "__main__":
    main()
