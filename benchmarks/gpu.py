"""The GPU figures, each in its own process; lines are saved as they arrive.

    python benchmarks/gpu.py [FIGURE ...] [--images FOLDER] [--cifar FOLDER] [--results FILE] [--again] [--small]

Without names: the whole table. A figure already recorded for this GPU and this code is skipped unless `--again`. The
time limit per figure is eight minutes. `--small` is a smoke test for any machine: tiny networks, a few steps.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.jsonl"
LIMIT = 8 * 60
"""Seconds a figure may take, compilation from cold caches included."""

Folders = Mapping[str, Path | None]
"""What was given for each of the options that name data."""


@dataclass(frozen=True)
class Script:
    """What measures a figure: a script, its first argument, and the data it reads."""

    file: str
    argument: str | None = None
    folder: str | None = None
    """`images` or `cifar`: which of our options names its data."""
    option: str = "--images"
    """By which the script itself takes that folder."""
    needs_folder: bool = False
    """It cannot make any data up."""
    has_small: bool = True

    def command(self, folders: Folders, small: bool) -> list[str]:
        argument = [] if self.argument is None else [self.argument]
        folder = folders[self.folder] if self.folder else None
        given = [] if folder is None else [self.option, str(folder)]
        return [sys.executable, str(HERE / self.file), *argument, *given, *(["--small"] if small else [])]


TABLE = {
    "coteaching_step_b128": Script("step.py", "coteaching_step_b128"),
    "coteaching_step_b128_eval_first": Script("step.py", "coteaching_step_b128_eval_first"),
    "coteaching_step_b128_c64": Script("step.py", "coteaching_step_b128_c64"),
    "single_step_b128": Script("step.py", "single_step_b128"),
    "single_step_b512": Script("step.py", "single_step_b512"),
    "end_to_end_b256": Script("end_to_end.py", "end_to_end_b256", folder="images"),
    "predict_end_to_end": Script("end_to_end.py", "predict_end_to_end", folder="images"),
    "cifar_side_by_side_8": Script("cifar.py", "cifar_side_by_side_8"),
    "coteaching_memory_b128": Script("step.py", "coteaching_memory_b128"),
}
BY_NAME_ONLY = {
    "predict_long_end_to_end": Script("end_to_end.py", "predict_long_end_to_end", folder="images"),
    "joined_heads_b128": Script("step.py", "joined_heads_b128"),
    "cifar_folds_side_by_side_8": Script("cifar.py", "cifar_folds_side_by_side_8"),
    "cifar_pairs_side_by_side_4": Script("cifar.py", "cifar_pairs_side_by_side_4"),
    "cifar_narrow_convs_8": Script("cifar.py", "cifar_narrow_convs_8"),
    "warm_start_s": Script("warm_start.py"),
    "selection_s": Script("selection.py", "selection_s"),
    "loading_gpu": Script("loading.py", "gpu", folder="images", needs_folder=True, has_small=False),
    "graphs_bf16_agree": Script("agreement.py", folder="cifar", option="--root", needs_folder=True),
}
FIGURES = TABLE | BY_NAME_ONLY


@dataclass(frozen=True)
class Bench:
    """What lines must share to be of the same thing."""

    gpu: str
    code: str
    small: bool

    def has_made(self, line: dict[str, Any]) -> bool:
        code = line["versions"].get("incv_code")
        return (_gpu_of(line["machine"]), code, line.get("small", False)) == (self.gpu, self.code, self.small)


def this_bench(small: bool) -> Bench:
    found = subprocess.run(
        [sys.executable, str(HERE / "record.py")], env=_environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    facts = json.loads(found.stdout.splitlines()[-1])
    return Bench(_gpu_of(facts["machine"]), facts["code"], small)


def _gpu_of(machine: str) -> str:
    return machine.rpartition(", ")[2]


def _environment() -> dict[str, str]:
    """Ours is importable also where it was not installed."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def kept_names(results: Path, bench: Bench) -> set[str]:
    """The figures that this bench has already made."""
    if not results.exists():
        return set()
    lines = [json.loads(text) for text in results.read_text().splitlines() if text.strip()]
    return {line["name"] for line in lines if bench.has_made(line)}


def measure(name: str, folders: Folders, bench: Bench, results: Path) -> bool:
    """Run a figure's script and keep its lines as they come; whether it gave the line of that name."""
    # A group of its own: compilers start processes, and all of them must be gone before the next figure.
    command = FIGURES[name].command(folders, bench.small)
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True, process_group=0)
    alarm = threading.Timer(LIMIT, _end, [process, f"{name} took longer than {LIMIT} s and was ended"])
    alarm.start()
    names = set()
    try:
        assert process.stdout is not None
        for text in process.stdout:
            line = _line_of(text)
            if line is None:
                print(text, end="", file=sys.stderr)
                continue
            names.add(line["name"])
            _keep(line, bench, results)
        process.wait()
    finally:
        alarm.cancel()
        _end(process)
    return name in names


def _line_of(text: str) -> dict[str, Any] | None:
    """A line of record.py; what libraries print is none."""
    with suppress(json.JSONDecodeError):
        found = json.loads(text)
        if isinstance(found, dict) and "name" in found:
            return found
    return None


def _keep(line: dict[str, Any], bench: Bench, results: Path) -> None:
    line["versions"]["incv_code"] = bench.code
    if bench.small:
        line["small"] = True
    text = json.dumps(line)
    print(text, flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(text + "\n")


def _end(process: subprocess.Popen[str], why: str | None = None) -> None:
    if why is not None:
        print(why, file=sys.stderr, flush=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--images", type=Path, help="JPEG files for the figures that read shards; else made-up ones")
    parser.add_argument("--cifar", type=Path, help="folder of the official CIFAR-10, for graphs_bf16_agree")
    parser.add_argument("--results", type=Path, help="where lines are kept; default: results/gpu.jsonl")
    parser.add_argument("--again", action="store_true", help="also figures whose line is already there")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the scripts; needs --results")
    given = parser.parse_args()
    unknown = [name for name in given.figures if name not in FIGURES]
    if unknown:
        parser.error(f"unknown figure {', '.join(unknown)}; choose from {', '.join(FIGURES)}")
    if given.small and given.results is None:
        parser.error("lines of tiny networks do not belong into results/gpu.jsonl: say --results FILE")
    given.figures = given.figures or list(TABLE)
    given.folders = {"images": given.images, "cifar": given.cifar}
    for name in given.figures:
        script = FIGURES[name]
        if given.small and not script.has_small:
            parser.error(f"{name} has no small size: leave it out, or --small")
        if script.folder and script.needs_folder and not given.small and given.folders[script.folder] is None:
            parser.error(f"{name} reads real data: say --{script.folder} FOLDER")
    given.results = given.results or RESULTS
    return given


def main() -> None:
    given = _parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no figure is left running
    bench = this_bench(given.small)
    if bench.gpu == "no GPU" and not given.small:
        sys.exit("there is no GPU here: --small --results FILE tries the scripts without one")
    missing = []
    for name in given.figures:
        if not given.again and name in kept_names(given.results, bench):
            print(f"{name}: already in {given.results}", file=sys.stderr)
        elif not measure(name, given.folders, bench, given.results):
            print(f"{name}: gave no line", file=sys.stderr)
            missing.append(name)
    if missing:
        sys.exit(f"not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main()
