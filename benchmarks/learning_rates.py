"""Learning rates of the recipes for own images, on made-up shapes and CIFAR-10 images with wrong labels.

    PYTHONPATH=. python benchmarks/audits.py weights OUT --cifar FOLDER      once: pre-train the starting weights
    PYTHONPATH=. python benchmarks/learning_rates.py OUT --cifar FOLDER [--jobs N]

Each run is `image_folder` (from scratch) or `image_folder_finetune` (from the weights) on one image folder, with one
learning rate for all of its trainings. Prints and appends to OUT/learning_rates.jsonl: the accuracy of each method on
other images with true labels.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from audits import _NETWORKS, Case, write_images
from record import machine, publish

from trainer.records.manifest import installed_versions

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
CASES = (Case("shapes", 4, 80, 0.18, "good", 1.0, 11), Case("cifar", 10, 80, 0.2, "good", 1.0, 12))


def write_folder(case: Case, folder: Path, cifar: Path | None) -> dict[str, bool]:
    """Write images with wrong labels to train, and others with right ones to val; returns {train path: wrong}."""
    truth = write_images(case, folder / "train", cifar)
    other = replace(case, wrong=0.0, seed=case.seed + 500)
    trained_on = {Path(path).name for path in truth} if case.data == "cifar" else set()
    for path in write_images(other, folder / "val", cifar):
        if Path(path).name in trained_on:
            (folder / "val" / path).unlink()
    return {path: given != true for path, (given, true) in truth.items()}


def run_recipe(recipe: str, case: Case, folder: Path, out: Path, overrides: Sequence[str], run: str = "run") -> Any:
    """Run a recipe for own images on a folder, on one CPU thread; returns the report."""
    model, size = _NETWORKS[case.data]
    start = [f"model.name={model}", f"image.size={size}", f"image.resize={size + size // 8}"]
    start += [f"data.train.resize={size + size // 8}", f"data.eval.val.resize={size + size // 8}", "precision=fp32"]
    if recipe == "image_folder_finetune":
        weights = out / f"{case.data}-{case.weights}" / "model.safetensors"
        start += ["model.pretrained=false", f"model.weights={weights}"]
    command = [sys.executable, "-m", "trainer", "run", "-c", recipe, "--run-dir", str(folder / run)]
    command += [*start, *overrides]
    command += [f"data.train.root={folder}", f"data.eval.val.root={folder}", "execution.device=cpu"]
    command += [
        "execution.workers=1",
        f"data.train.shards={folder}/shards-t",
        f"data.eval.val.shards={folder}/shards-v",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    (folder / f"{run}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{folder.name}: exit {done.returncode}: {done.stderr[-500:]}")
    return json.loads((folder / run / "report.json").read_text())


def accuracies(report: Any) -> dict[str, float]:
    return {method: round(result["top1"], 2) for method, result in report["accuracy"]["val"].items()}


def describe(recipe: str, case: Case) -> dict[str, Any]:
    """What was run, for the beginning of a line."""
    return {"recipe": recipe, "data": f"{case.data}-{case.classes}x{case.each}-wrong{case.wrong:g}"}


def describe_machine(began: float) -> dict[str, Any]:
    """How and how long, for its end. began: by time.monotonic()."""
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "machine": machine(),
        "versions": installed_versions(("incv", "torch", "timm", "numpy")),
    }


def run_one(recipe: str, case: Case, rate: float, out: Path, cifar: Path | None) -> dict[str, Any]:
    """Train on a folder with wrong labels, and evaluate on other images with right ones."""
    folder = out / "rates" / f"{recipe}-{case.name}-rate{rate:g}"
    began = time.monotonic()
    wrong = write_folder(case, folder, cifar)
    rates = [f"{section}.optimizer.learning_rate={rate}" for section in ("incv", "standard", "coteaching")]
    report = run_recipe(recipe, case, folder, out, rates)
    measured = {
        "learning_rate": rate,
        "accuracy": accuracies(report),
        "wrong": sum(wrong.values()) / len(wrong),
    }
    return describe(recipe, case) | measured | describe_machine(began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar", type=Path, required=True, help="cifar-10-batches-bin")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    wanted = list(product(("image_folder_finetune", "image_folder"), CASES, RATES))
    with ThreadPoolExecutor(given.jobs) as pool:
        lines = pool.map(lambda each: run_one(*each, given.out, given.cifar), wanted)
        publish(lines, given.out.resolve() / "learning_rates.jsonl")


if __name__ == "__main__":
    main()
