"""The commands `incv reproduce` and `incv record`."""

import argparse
from pathlib import Path

from shards.errors import ConfigError
from trainer.config.argument_types import TakeWords, count_argument, path_argument
from trainer.config.sweep import AT_ONCE
from trainer.reproduce.experiments import EXPERIMENTS, Experiment, find_experiments, select_cells

_RESULTS = Path("results")
_PAGE = Path("docs") / "results.md"
_SMOKE = Path("runs") / "smoke"


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `func`, which takes the parsed arguments and returns an exit code."""
    reproduce = subparsers.add_parser("reproduce", help="the paper's tables and figures, from recorded runs")
    reproduce.add_argument(
        "experiments",
        action=TakeWords,
        metavar="EXPERIMENT",
        help=f"{', '.join(EXPERIMENTS)}; default: all. Execution keys may follow, as execution.workers=4",
    )
    reproduce.add_argument(
        "--run", action="store_true", help="run what is not recorded, side by side; start again to resume"
    )
    reproduce.add_argument(
        "--write", action="store_true", help=f"write tables and figures, and {_PAGE} from {_RESULTS}/"
    )
    reproduce.add_argument("--smoke", action="store_true", help=f"run tiny versions on a CPU, in {_SMOKE}/")
    reproduce.add_argument(
        "--force", action="store_true", help="replace tables and figures even if `incv reproduce` did not write them"
    )
    reproduce.add_argument("--methods", type=_names, metavar="A,B", help="only these methods")
    reproduce.add_argument(
        "--settings", type=_names, metavar="A,B", help="only these noise settings, as sym50,asym40"
    )
    reproduce.add_argument(
        "--seeds",
        type=_seeds,
        metavar="0,1",
        help="seeds to ask for; default: three of table1 and figure4, one of the others: recorded ones, then 0,1,2",
    )
    reproduce.add_argument(
        "--at-once", type=count_argument, metavar="N", help="maximum number of runs at a time; default: 8"
    )
    reproduce.add_argument(
        "--data", type=path_argument, metavar="FOLDER", help="folder of CIFAR-10; default: data/cifar10"
    )
    _add_results(reproduce)
    reproduce.set_defaults(func=_reproduce)
    record = subparsers.add_parser("record", help="record finished runs for `incv reproduce`")
    record.add_argument("run_dirs", nargs="+", type=path_argument, metavar="RUN_DIR", help="a finished run")
    record.add_argument("--replace", action="store_true", help="replace an earlier record of the same run")
    _add_results(record)
    record.set_defaults(func=_record)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=path_argument, metavar="FOLDER", help=f"folder of the results; default: {_RESULTS}"
    )


def _names(given: str) -> tuple[str, ...]:
    names = tuple(name for name in given.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError(f"{given!r} names nothing")
    return names


def _seeds(given: str) -> tuple[int, ...]:
    names = _names(given)
    if not all(name.isdecimal() for name in names):
        raise argparse.ArgumentTypeError(f"{given!r} is not a list of whole numbers, as 0,1,2")
    return tuple(dict.fromkeys(map(int, names)))


def _reproduce(parsed: argparse.Namespace) -> int:
    experiments = find_experiments([word for word in parsed.experiments if "=" not in word])
    selected = select_cells(experiments, parsed.methods, parsed.settings)
    chosen = [each for each in selected if each.needs == "nothing" or (each.rows and each.settings)]
    runs = parsed.run or parsed.smoke
    local = [word for word in parsed.experiments if "=" in word]
    if (local or parsed.data or parsed.at_once) and not runs:
        raise ConfigError("--data, --at-once and execution keys are for runs: add --run, or leave them")
    # Imported here: methods import torch, which takes seconds.
    from trainer.reproduce.outcome import (
        Outcome,
        collect_outcome,
        describe_outcome,
        find_unrelated,
        require_replaceable_files,
        write_outcomes,
    )
    from trainer.reproduce.records import read_records
    from trainer.reproduce.runs import drop_parts

    results = parsed.results or (_SMOKE / "results" if parsed.smoke else _RESULTS)
    folder, code = results / "runs", 0
    if parsed.write and not runs and not folder.is_dir():
        raise ConfigError(f"--write makes tables and figures from recorded runs, and there is no folder {folder}")
    if runs or parsed.write:
        require_replaceable_files(experiments, results, parsed.force)
    options = ["--smoke" if parsed.smoke else "--run"]
    options += [f"--results={parsed.results}"] * (parsed.results is not None)
    options += [f"--data={parsed.data}"] * (parsed.data is not None)

    def collect(experiment: Experiment) -> Outcome:
        seeds = parsed.seeds or ((0,) if parsed.smoke else None)
        return collect_outcome(experiment, recorded, seeds, parsed.smoke, options)

    recorded = read_records(folder)
    if runs:
        from trainer.reproduce.runner import run_planned

        missing = drop_parts([run for each in chosen for run in collect(each).missing()])
        if missing:
            where = _SMOKE if parsed.smoke else None
            code = run_planned(missing, local, folder, parsed.at_once or AT_ONCE, where, parsed.data)
        recorded = read_records(folder)
    if parsed.smoke:
        print("A smoke test, with a tiny network and 40 images: its numbers say nothing about the methods.\n")
    for each in chosen:
        print(describe_outcome(collect(each), results), end="\n\n")
    if left_out := [each.name for each in selected if each not in chosen]:
        print(f"without any of these methods and settings: {', '.join(left_out)}\n")
    if unrelated := find_unrelated(recorded):
        print(f"not used, because no experiment has their recipe and method: {', '.join(unrelated)}\n")
    if (runs and not code) or parsed.write:
        page = _PAGE if results == _RESULTS else None  # whose figures it shows
        written = write_outcomes([collect(each) for each in experiments], results, page)
        print(f"written: {', '.join(map(str, written)) or 'nothing'}")
    return code


def _record(parsed: argparse.Namespace) -> int:
    # Imported here: it imports torch, which takes seconds.
    from trainer.reproduce.recording import build_records, write_record

    for root in parsed.run_dirs:
        for content in build_records(root):
            print(f"recorded: {write_record((parsed.results or _RESULTS) / 'runs', content, replace=parsed.replace)}")
    return 0
