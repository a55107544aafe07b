"""The demo's figures over three seeds: one JSON line per figure.

.venv/bin/python benchmarks/demo.py >> benchmarks/results/demo.jsonl
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

SEEDS = (0, 1, 2)
COMMAND = "incv run -c recipes/demo.yaml seed={0,1,2}"


def report_of(seed: int) -> dict:
    """The report of one seed; a finished run is read, not run again."""
    run = Path("runs") / f"benchmark-demo-{seed}"
    command = [
        sys.executable,
        "-m",
        "trainer",
        "run",
        "-c",
        "recipes/demo.yaml",
        "--run-dir",
        str(run),
        f"seed={seed}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((run / "report.json").read_text())


def line(name: str, values: list[float], references: list[float] | None, reports: list[dict]) -> str:
    value, reference = mean(values), mean(references) if references else None
    return json.dumps(
        {
            "name": name,
            "command": COMMAND,
            "value": round(value, 4),
            "each": [round(one, 4) for one in values],
            "reference": None if reference is None else round(reference, 4),
            "reference_each": None if references is None else [round(one, 4) for one in references],
            "ratio": None if not reference else round(value / reference, 4),
            "runs": len(values),
            "spread": round(max(values) - min(values), 4),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
            "date": datetime.now(UTC).date().isoformat(),
            "versions": reports[-1]["starts"]["list"][-1]["versions"],
        }
    )


def main() -> None:
    reports = [report_of(seed) for seed in SEEDS]
    noise = [report["noise"] for report in reports]
    last = [report["rounds"][-1] for report in reports]
    accuracy = [report["accuracy"]["test"] for report in reports]
    true = [one["true"] for one in noise]
    standard = [one["standard"]["top1"] for one in accuracy]
    print(line("demo_noise_paper", [one["paper"] for one in noise], true, reports))
    print(line("demo_noise_confident", [one["confident"] for one in noise], true, reports))
    for figure in ("label_precision", "label_recall"):
        theory = [one["theory"][figure] for one in last]
        print(line(f"demo_{figure}", [one[figure] for one in last], theory, reports))
    for method in ("coteaching", "coteaching_incv"):
        print(line(f"demo_top1_{method}", [one[method]["top1"] for one in accuracy], standard, reports))


if __name__ == "__main__":
    main()
