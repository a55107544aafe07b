"""Do two checkouts compute the same numbers? Digests of selections, weights, predictions and metrics of small runs.

    python benchmarks/equal_numbers.py --tree OLD --out old.json [RUN ...]
    python benchmarks/equal_numbers.py --tree NEW --out new.json [RUN ...]
    python benchmarks/equal_numbers.py --compare old.json new.json        # exit code 1 if they differ

Only `python -m trainer run` of a tree and the files of its run directories are used, with the tree's own recipes, so
that any commit can be measured. `--device cuda` runs with `execution.deterministic`. Without `--cifar FOLDER` the
images of `cifar10_smoke` are made up. A CPU's numbers depend on its kind and on the versions of the packages: compare
files of one machine.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
LIMIT = 3600
"""Seconds a run may take."""
TIMES = ("images_per_s", "data_wait", "left_s", "stage_left_s", "run_left_s", "seconds", "time", "eval_s")
"""Keys of metrics.jsonl that differ between two runs of the same tree."""
Digests = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run of a recipe of the tree."""

    recipe: str
    keys: tuple[str, ...] = ()
    spellings: tuple[tuple[str, ...], ...] = ((),)
    """Further keys, in each of the forms that trees know them by; the first that is accepted counts."""
    ranks: int = 1


def _method(name: str, *keys: str) -> Run:
    return Run("tiny", (f"methods=[{name}]", f"{name}.epochs=5", *keys))


_ALONE = ("incv=null", "methods=[standard]")
_CROPS = "{scale: [0.5, 1.0], ratio: [0.75, 1.33]}"
RUNS = {
    "tiny": Run("tiny"),
    "tiny_2_ranks": Run("tiny", ranks=2),
    "tiny_2_ranks_in_turn": Run("tiny", ("execution.folds=in_turn",), ranks=2),
    "tiny_4_folds": Run("tiny", ("incv.folds=4", "incv.rounds=1", "methods=[]")),
    **{f"demo_seed{seed}": Run("demo", (f"seed={seed}",)) for seed in (0, 1, 2)},
    "cifar10_smoke": Run("cifar10_smoke"),
    "standard": _method("standard", "incv=null"),
    "standard_incv": _method("standard_incv"),
    "coteaching": _method("coteaching", "coteaching.rank=eval_first"),
    "coteaching_incv": Run("tiny", ("methods=[coteaching_incv]",)),
    "decoupling": _method("decoupling", "incv=null"),
    "mentornet": _method("mentornet", "incv=null"),
    "d2l": Run("tiny", ("methods=[d2l]", "incv=null", "d2l.epochs=5", "d2l.neighbours=5")),
    "forward_correction": Run(
        "tiny", ("methods=[standard,forward_correction]", "incv=null", "forward_correction.epochs=5")
    ),
    "gce": Run("tiny", _ALONE, (("standard.gce={q: 0.7}",), ("standard.loss={kind: gce, q: 0.7}",))),
    "mixup": Run("tiny", (*_ALONE, "standard.mixup.alpha=0.3", "standard.label_smoothing=0.1")),
    "ema": Run("tiny", (*_ALONE, "standard.ema={decay: 0.9, use_buffers: true}", "batch.micro=16")),
    "crops": Run(
        "tiny", (*_ALONE, f"image.random_resized_crop={_CROPS}", "image.pad=0", "image.flip=true", "image.cutout=3")
    ),
    "windowed": Run("tiny", (*_ALONE, "order.kind=windowed")),
}


def main() -> None:
    given = parse_arguments()
    if given.compare:
        sys.exit(report_differences(*(json.loads(path.read_text()) for path in given.compare)))
    unknown = sorted(set(given.runs) - RUNS.keys())
    if unknown:
        sys.exit(f"no run is called {', '.join(unknown)}: choose from {', '.join(RUNS)}")
    with tempfile.TemporaryDirectory() as scratch:
        place = given.keep.resolve() if given.keep else Path(scratch)
        sys.exit(measure(given, place))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default: all")
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="the checkout to measure; default: this one")
    parser.add_argument("--out", type=Path, help="where the digests go; default: standard output")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; default: 2")
    parser.add_argument("--cifar", type=Path, help="the official CIFAR-10")
    parser.add_argument("--keep", type=Path, help="where run directories are kept; a second call resumes")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two files of digests")
    return parser.parse_args()


def measure(given: argparse.Namespace, place: Path) -> int:
    """Make the runs and write their digests; returns the number of runs that failed."""
    place.mkdir(parents=True, exist_ok=True)
    names = given.runs or list(RUNS)
    if "cifar10_smoke" in names:
        cifar = place / "data" / "cifar10"
        cifar.parent.mkdir(exist_ok=True)
        if given.cifar is not None and not cifar.exists():
            cifar.symlink_to(given.cifar.resolve())
        elif not cifar.exists():
            make_cifar_up(cifar)
    found: dict[str, Digests] = {}
    # The first run packs the digits that others read too.
    first, others = names[:1], sorted(names[1:], key=lambda name: not name.startswith(("demo", "cifar10")))
    for together in (first, others):
        with ThreadPoolExecutor(given.jobs) as pool:
            for name, digests in zip(together, pool.map(lambda n: make_run(given, place, n), together), strict=True):
                found[name] = digests
    text = json.dumps({"device": given.device, "runs": found}, indent=1, sort_keys=True) + "\n"
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text)
    return sum("error" in digests for digests in found.values())


def make_run(given: argparse.Namespace, place: Path, name: str) -> Digests:
    run, began = RUNS[name], time.monotonic()
    for spelling in run.spellings:
        folder = place / name
        try:
            done = start(given, place, run, folder, spelling)
        except subprocess.TimeoutExpired:
            print(f"{name}: no end within {LIMIT} s", file=sys.stderr, flush=True)
            return {"error": f"no end within {LIMIT} s"}
        if done.returncode == 0:
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            return digests_of(folder)
    print(f"{name}: FAILED\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
    return {"error": done.stderr[-2000:]}


def start(
    given: argparse.Namespace, place: Path, run: Run, folder: Path, spelling: Sequence[str]
) -> "subprocess.CompletedProcess[str]":
    tree = given.tree.resolve()
    keys = ["execution.threads=1", f"execution.device={given.device}", f"execution.world={run.ranks}"]
    if given.device == "cuda":
        keys += ["execution.deterministic=true", *(["execution.backend=gloo"] if run.ranks > 1 else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"]
    command = [sys.executable, *(launcher if run.ranks > 1 else []), "-m", "trainer", "run"]
    command += ["-c", str(tree / "recipes" / f"{run.recipe}.yaml"), "--run-dir", str(folder)]
    paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if given.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [*command, *keys, *run.keys, *spelling],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def digests_of(folder: Path) -> Digests:
    """What a run computed; keyed by file and column, tensor or key."""
    found: Digests = {"weights": {}, "selection": {}, "predictions": {}, "metrics": {}, "evaluation": {}}
    for training in [*folder.glob("rounds/*/fold*"), *folder.glob("methods/*")]:
        name = str(training.relative_to(folder))
        steps = sorted((training / "checkpoints").glob("step-*"))
        if steps:
            found["weights"][name] = tensors_digest(steps[-1] / "tensors.safetensors", "model.")
            found["weights"][f"{name} last step"] = steps[-1].name
        for file in training.glob("export/*/*.safetensors"):
            found["weights"][str(file.relative_to(folder))] = tensors_digest(file)
        if (training / "metrics.jsonl").exists():
            found["metrics"][name] = metrics_digests(training / "metrics.jsonl")
    if (folder / "selection.parquet").exists():
        found["selection"] = columns_digests(folder / "selection.parquet")
    for file in sorted(folder.glob("rounds/**/predictions.parquet")):
        found["predictions"][str(file.relative_to(folder))] = columns_digests(file)
    if (folder / "evaluation.json").exists():
        found["evaluation"] = dict(flatten(json.loads((folder / "evaluation.json").read_text())))
    return found


def tensors_digest(file: Path, prefix: str = "") -> str:
    """sha256 of names, shapes, types and bytes of all tensors whose name has the prefix, in the order of names."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        start_of_data = opened.tell()
        for name in sorted(header):
            if name.startswith(prefix) and name != "__metadata__":
                fields = header[name]
                first, last = fields["data_offsets"]
                opened.seek(start_of_data + first)
                digest.update(f"{name} {fields['dtype']} {fields['shape']}".encode())
                digest.update(opened.read(last - first))
    return digest.hexdigest()


def columns_digests(file: Path) -> dict[str, str]:
    import pyarrow.parquet as pq

    table = pq.read_table(file).combine_chunks()
    found = {}
    for name in table.column_names:
        values = table.column(name).to_pylist()
        # -0.0 and the payloads of NaN are not told apart; no number is rounded.
        found[name] = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return found


def metrics_digests(file: Path) -> dict[str, str]:
    """sha256 of the values of each key, line by line; times are left out."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    keys = sorted({key for line in lines for key in line} - set(TIMES))
    return {key: hashlib.sha256(json.dumps([line.get(key) for line in lines]).encode()).hexdigest() for key in keys}


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flatten(each, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from flatten(each, f"{path}/{number}")
    else:
        yield path, value


def report_differences(one: Digests, other: Digests) -> int:
    """Print what differs; 1 if anything does.

    Columns and keys that only one tree writes are named, but do not count; runs, weights and files do.
    """
    differing = 0
    for name in sorted(one["runs"].keys() | other["runs"].keys()):
        if name not in one["runs"] or name not in other["runs"]:
            print(f"{name}: in one file only")
            differing += 1
            continue
        found, notes = compare_run(one["runs"][name], other["runs"][name])
        print(f"{name}: {'DIFFERS in ' + ', '.join(found) if found else 'equal'}")
        for note in notes:
            print(f"  in one tree only: {note}")
        differing += bool(found)
    print(f"{differing} runs differ" if differing else "all runs are equal")
    return int(differing > 0)


def compare_run(one: Digests, other: Digests) -> tuple[list[str], list[str]]:
    """What differs, and what only one of the two has."""
    if "error" in one or "error" in other:
        return ["an error"], []
    found, notes = [], []
    for part in ("weights", "selection", "predictions", "metrics", "evaluation"):
        mine, theirs = (dict(flatten(digests[part])) for digests in (one, other))
        found += [f"{part} {key}" for key in sorted(mine.keys() & theirs.keys()) if mine[key] != theirs[key]]
        lone = [f"{part} {key}" for key in sorted(mine.keys() ^ theirs.keys())]
        must_match = part == "weights" or bool(mine) != bool(theirs)
        (found if must_match else notes).extend(lone)
    if not one["weights"]:
        found.append("no weights were found")
    return found, notes


def make_cifar_up(root: Path) -> None:
    """Write the files of CIFAR-10's binary version, with coarse patterns around a colour of each class."""
    root.mkdir(parents=True)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (root / "batches.meta.txt").write_text("\n".join(names) + "\n")
    random = np.random.default_rng(0)
    colours = random.integers(40, 216, (10, 3, 4, 4))
    for file in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = random.permutation(10_000) % 10
        coarse = colours[labels] + random.integers(-40, 40, (10_000, 3, 4, 4))
        pixels = coarse.astype(np.uint8).repeat(8, axis=2).repeat(8, axis=3).reshape(10_000, -1)
        np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tofile(root / f"{file}.bin")


if __name__ == "__main__":
    main()
