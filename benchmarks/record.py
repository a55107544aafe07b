"""One measured figure as one JSON line, in the same format for every benchmark.

    record("index_open_s", 0.21, unit="s", runs=5, spread=0.03)             an absolute figure
    record("packing", 310.0, 380.0, unit="images/s", runs=3, spread=12.0)   against a reference

`record_runs` computes value, runs and spread from the individual runs; `publish` prints lines and may append them to
a file in `results/`.
"""

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from trainer.records.manifest import installed_versions

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("incv", "torch", "timm", "numpy", "pyarrow", "pillow", "nvidia-dali-cuda130")


def record(
    name: str,
    value: float,
    reference: float | None = None,
    *,
    runs: int,
    spread: float,
    command: str | None = None,
    unit: str | None = None,
    note: str | None = None,
) -> dict[str, Any]:
    """A line; `ratio` is value / reference, `spread` the largest single run minus the smallest."""
    line: dict[str, Any] = {
        "name": name,
        "command": command or this_command(),
        "value": _short(value),
        "reference": None if reference is None else _short(reference),
        "ratio": _short(value / reference) if reference else None,
        "runs": runs,
        "spread": _short(spread),
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": installed_versions(_PACKAGES),
    }
    return line | {key: said for key, said in (("unit", unit), ("note", note)) if said is not None}


def record_runs(
    name: str, values: Sequence[float], references: Sequence[float] | None = None, **said: str | None
) -> dict[str, Any]:
    """The line of several runs: medians, and how far the runs lie apart."""
    reference = median(references) if references else None
    spread = max(values) - min(values)
    return record(name, median(values), reference, runs=len(values), spread=spread, **said)


def publish(lines: Iterable[dict[str, Any]], append_to: str | Path | None = None) -> None:
    """Print each line; with `append_to` ("packing.jsonl", or an absolute path) also keep it, in results/."""
    for line in lines:
        text = json.dumps(line)
        print(text, flush=True)
        if append_to:
            RESULTS.mkdir(exist_ok=True)
            with (RESULTS / append_to).open("a") as file:
                file.write(text + "\n")


def this_command() -> str:
    """How the running script was called, from the root of the repository, whatever folder its data was in."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parent.parent
    shown = script.relative_to(root) if script.is_relative_to(root) else script.name
    arguments = sys.argv[1:]
    for option in {"--images", "--root", "--weights"} & set(arguments):
        arguments[arguments.index(option) + 1] = "FOLDER"
    return " ".join(["python", str(shown), *arguments])


def machine() -> str:
    """Cores this process may use, their kind, and the GPU where the benchmark has one."""
    torch = sys.modules.get("torch")  # a benchmark without torch is not made to import it
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else "no GPU"
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {_processor()}, {gpu}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def _short(number: float) -> float:
    """Four decimals, or four digits where that would leave fewer."""
    return round(number, 4) if abs(number) >= 1 else float(f"{number:.4g}")


def _print_facts() -> None:
    """What lines must share to be of the same thing: for gpu.py, which leaves the GPU itself alone."""
    import torch  # noqa: F401  machine() then names the GPU

    from trainer.run.start_checks import code_hash

    print(json.dumps({"machine": machine(), "code": code_hash()}))


if __name__ == "__main__":
    _print_facts()
