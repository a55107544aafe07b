"""The noise estimates beside the true shares of wrong labels: one JSON line per data set and noise setting.

    python benchmarks/noise_estimates.py digits [--first-seed 0] [--seeds 10] [KEY=VALUE ...]
    python benchmarks/noise_estimates.py cifar10 --seeds 1 precision=bf16

Each line is one round of INCV for each seed, with all labels of the data set taken as true before they are corrupted.
`true`, `paper`, `confident` and `confidence_curve` are about all labels, `of_selected` about those selected:
`formula` is the paper's with its estimate of the noise, `held_out` has the measured confusion matrix.
A run that has finished is read, not run again. `results/noise_estimates.jsonl` holds what was measured.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from record import this_command

from trainer import theory

CLASSES = 10
ESTIMATES = ("paper", "confident", "confidence_curve")
SETTINGS = {
    "digits": [
        ("demo", kind, ratio)
        for kind, ratio in (
            ("none", 0),
            ("symmetric", 0.2),
            ("symmetric", 0.4),
            ("symmetric", 0.6),
            ("asymmetric", 0.3),
        )
    ],
    "cifar10": [
        ("cifar10_sym20", "symmetric", 0.2),
        ("cifar10_sym50", "symmetric", 0.5),
        ("cifar10_sym80", "symmetric", 0.8),
        ("cifar10_asym40", "asymmetric", 0.4),
    ],
}


def run_one(
    data: str, setting: tuple[str, str, float], seed: int, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the report of a run, and the shares of wrong labels among the selected: true and estimated."""
    recipe, kind, ratio = setting
    run = Path("runs") / f"noise-{data}-{kind}{ratio}-seed{seed}"
    command = [sys.executable, "-m", "trainer", "run", "-c", recipe, "--run-dir", str(run), f"seed={seed}"]
    command += ["methods=[]", "incv.rounds=1", f"labels.noise={kind}", f"labels.ratio={ratio}"]
    command += ["labels.source_is_true=true", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    estimated = json.loads((run / "incv.json").read_text())["noise"]
    of_selected = {
        "true": 1.0 - report["rounds"][0]["label_precision"],
        "formula": theory.noise_of_selected(estimated["paper"], CLASSES, _formula_kind(kind)),
        "confident": estimated["confident_of_selected"],
        "held_out": estimated["held_out_of_selected"],
    }
    return report, of_selected


def _formula_kind(kind: str) -> theory.NoiseKind:
    return "asymmetric" if kind == "asymmetric" else "symmetric"


def line(
    data: str, setting: tuple[str, str, float], seeds: Sequence[int], overrides: Sequence[str]
) -> dict[str, Any]:
    runs = [run_one(data, setting, seed, overrides) for seed in seeds]
    noise, selected = [report["noise"] for report, _ in runs], [of_selected for _, of_selected in runs]
    last_start = runs[-1][0]["starts"]["list"][-1]
    errors = {name: [one[name] - one["true"] for one in noise] for name in ESTIMATES}
    return {
        "name": f"noise_{data}_{setting[1]}_{setting[2]}",
        "command": this_command(),
        "seeds": list(seeds),
        "true": round(mean(one["true"] for one in noise), 4),
        **{name: round(mean(one[name] for one in noise), 4) for name in ESTIMATES},
        "error_std": {name: round(stdev(each), 4) if len(each) > 1 else None for name, each in errors.items()},
        "worst_error": {name: round(max(abs(error) for error in each), 4) for name, each in errors.items()},
        "of_selected": {name: round(mean(one[name] for one in selected), 4) for name in selected[0]},
        "worst_error_of_selected": round(max(abs(one["held_out"] - one["true"]) for one in selected), 4),
        "machine": last_start["hardware"],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": last_start["versions"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=SETTINGS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe keys, for all runs")
    given = parser.parse_intermixed_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    for setting in SETTINGS[given.data]:
        print(json.dumps(line(given.data, setting, seeds, given.overrides)), flush=True)


if __name__ == "__main__":
    main()
