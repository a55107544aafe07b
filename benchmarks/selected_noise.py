"""ε_S of Co-teaching on own images: as `confident` learning reads it, and measured from the held-out predictions.

    PYTHONPATH=. python benchmarks/audits.py weights OUT --cifar FOLDER      once: pre-train the starting weights
    PYTHONPATH=. python benchmarks/selected_noise.py OUT --cifar FOLDER [--data shapes|cifar] [--jobs N]

Runs `image_folder_finetune` on image folders with known wrong labels, with two values of
`coteaching_incv.noise_of_selected` after the same INCV. Prints and appends to OUT/selected_noise.jsonl: the noise
estimates, both estimates of ε_S, the true shares of wrong labels, and the accuracy on other images.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from audits import Case
from learning_rates import accuracies, describe, describe_machine, run_recipe, write_folder
from record import publish

RECIPE = "image_folder_finetune"
_SIZES = {"shapes": (4, 80), "cifar": (10, 80)}
RULES = ("confident", "held_out")
ESTIMATES = ("paper", "confident", "confidence_curve")


def run_case(case: Case, out: Path, cifar: Path | None) -> dict[str, Any]:
    """Train with the first rule, then with the others on its selection."""
    folder = out / "selected" / case.name
    began = time.monotonic()
    wrong = write_folder(case, folder, cifar)
    first = folder / RULES[0]
    accuracy: dict[str, float] = {}
    for rule in RULES:
        keys = [f"coteaching_incv.noise_of_selected={rule}"]
        if accuracy:
            keys += ["methods=[coteaching_incv]", "--incv-from", str(first)]
        else:
            keys += ["methods=[standard, standard_incv, coteaching_incv]"]
        trained = accuracies(run_recipe(RECIPE, case, folder, out, keys, rule))
        accuracy[f"coteaching_incv, {rule}"] = trained.pop("coteaching_incv")
        accuracy |= trained
    noise = json.loads((first / "incv.json").read_text())["noise"]
    review = pq.read_table(first / "labels_review.parquet", columns=["key", "state"]).to_pylist()
    selected = [wrong[row["key"].removeprefix("train/")] for row in review if row["state"] == "selected"]
    measured = {
        "seed": case.seed,
        "wrong": round(sum(wrong.values()) / len(wrong), 4),
        "noise": {name: round(noise[name], 4) for name in ESTIMATES},
        "selected": len(selected),
        "wrong_of_selected": round(sum(selected) / len(selected), 4),
        "noise_of_selected": {rule: round(noise[f"{rule}_of_selected"], 4) for rule in RULES},
        "accuracy": accuracy,
    }
    return describe(RECIPE, case) | measured | describe_machine(began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar", type=Path, help="cifar-10-batches-bin")
    parser.add_argument("--data", choices=tuple(_SIZES), default="shapes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    classes, each = _SIZES[given.data]
    cases = [
        Case(given.data, classes, each, wrong, "good", 1.0, 6000 + seed)
        for wrong, seed in product((0.2, 0.4), range(given.seeds))
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        lines = pool.map(lambda case: run_case(case, given.out, given.cifar), cases)
        publish(lines, given.out.resolve() / "selected_noise.jsonl")


if __name__ == "__main__":
    main()
