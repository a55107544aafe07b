"""The command `incv`: run and single stages; other folders add their own commands."""

import argparse
import logging
import os
import select
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shards.command import add_commands as add_shards_commands
from shards.durable import read_json
from shards.errors import CommandStopped, ConfigError, InputError
from trainer.auditing.command import add_command as add_audit_command
from trainer.commands.parser import CommandParser, ShowVersion, add_completion
from trainer.commands.recipes import PRINTED, add_run_arguments, take_estimate_options, take_recipe
from trainer.commands.recipes import add_commands as add_recipe_commands
from trainer.compare.command import add_command as add_compare_command
from trainer.config.schema import Recipe
from trainer.config.shipped import recipe_name, recipe_path, run_name
from trainer.config.sweep import AT_ONCE, Variant, combinations, command_alone, sweep_file
from trainer.distributed.launch import detect_launch, let_waiting_threads_sleep
from trainer.distributed.stop import StopRequest
from trainer.doctor.command import add_commands as add_doctor_commands
from trainer.outputs.command import add_commands as add_output_commands
from trainer.records.logs import configure_logging, report_error
from trainer.records.run_directory import RunDirectory
from trainer.report.sections.images import describe_counts
from trainer.report.sections.next_steps import format_steps, next_steps
from trainer.report.summary import summary_table
from trainer.report.sweep_table import SweepRun, format_sweep, summarise_sweep, write_sweep
from trainer.reproduce.command import add_commands as add_reproduce_commands
from trainer.run.stage_graph import all_stages, stages_of

_log = logging.getLogger(__name__)

_STDOUT = 1
_EXIT_UNHEARD = 141  # 128 + SIGPIPE, as a shell reports it


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; reports a user's mistake as one line and an exit code."""
    configure_logging()
    let_waiting_threads_sleep(os.environ)
    parsed = build_parser().parse_args(arguments)
    try:
        code: int = parsed.func(parsed)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if _is_heard():
            raise  # another pipe broke: an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        return _EXIT_UNHEARD
    except (CommandStopped, InputError) as error:
        return report_error(error)


def _is_heard() -> bool:
    """Whether stdout still has a reader; in `incv ... | head` it may have exited."""
    output = select.poll()
    output.register(_STDOUT, 0)  # an empty mask still reports errors and hang-ups
    return not output.poll(0)


def _listen() -> Callable[[], bool]:
    """Listen for signals, which stop commands without a run directory; returns a function that tells of one."""
    stop = StopRequest()
    stop.listen()
    return stop.requested


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets `func`, which takes the parsed arguments."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="incv",
        description="Train image classifiers on noisy labels with INCV and Co-teaching.",
        epilog="To begin: `incv run -c demo` shows the method on handwritten digits, `incv audit FOLDER` finds wrong "
        "labels in your own images. `incv COMMAND --help` describes a command.",
    )
    parser.add_argument("--version", action=ShowVersion)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands to begin with")
    run = commands.add_parser(
        "run", help="run all stages of a recipe; skip finished stages and resume interrupted ones"
    )
    add_run_arguments(run)
    run.set_defaults(func=_run, stage=None)
    add_audit_command(commands, _tell)
    add_output_commands(commands, _listen)
    add_compare_command(commands)
    add_doctor_commands(commands)
    add_recipe_commands(commands)
    add_shards_commands(commands, _listen)
    add_reproduce_commands(commands)
    add_completion(commands, parser)
    for stage in all_stages()[1:]:
        of_directory = "; of a run directory, as it is: incv report RUN_DIR" if stage == "report" else ""
        alone = commands.add_parser(stage, help=f"run only the `{stage}` stage of a recipe{of_directory}")
        add_run_arguments(alone, stage)
        alone.set_defaults(func=_run, stage=stage)
    return parser


def _report_directory(parsed: argparse.Namespace) -> int:
    """Write the report of a run directory as it is, finished or not, and print its summary."""
    if parsed.overrides or parsed.run_dir is not None or parsed.redo:
        raise ConfigError("incv report RUN_DIR takes no other argument: it reports what is in the directory")
    # Imported here: methods import torch, which takes seconds.
    from trainer.run.run_report import report_directory

    run = RunDirectory(Path(parsed.recipe))
    print(summary_table(report_directory(run.root)))
    print(f"\nreport: {run.report_html}")
    return 0


def _run(parsed: argparse.Namespace) -> int:
    take_recipe(parsed)
    if parsed.stage == "report" and Path(parsed.recipe).is_dir():
        return _report_directory(parsed)
    path = recipe_path(parsed.recipe)
    variants = _variants(path, parsed)
    asked = take_estimate_options(parsed)
    if _prints(parsed):
        for one in variants:
            _print_facts(parsed, one.recipe, one.root)
        return 0
    if parsed.dry_run:
        return _describe_plans(variants, parsed, asked)
    if parsed.vary:
        return _run_side_by_side(variants, parsed)
    (one,) = variants
    if parsed.run_dir is None and detect_launch().rank == 0:
        _note_same_run(path, one)
    # Imported here: torch takes seconds to import, and `incv ls` or a wrong key need not wait for it.
    from trainer.run.runner import run_recipe

    code = run_recipe(
        one.recipe,
        one.recipe_name,
        one.root,
        only=parsed.stage,
        profile=parsed.profile,
        **_options_of_stages(parsed),
    )
    _tell(one.root, code, parsed.stage)
    return code


def _options_of_stages(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a plan, a run and runs side by side have in common."""
    return {"redo": parsed.redo, "check_source": parsed.check_source, "incv_from": parsed.incv_from}


def _describe_plans(variants: Sequence[Variant], parsed: argparse.Namespace, asked: Mapping[str, Any]) -> int:
    """Print what each run would do. asked: the options of the estimate."""
    from trainer.estimate.dry_run import describe_plan
    from trainer.estimate.table import EstimateOptions
    from trainer.run.shared_incv import find_incv_sources

    sources = find_incv_sources(variants, parsed.redo, parsed.stage, parsed.incv_from)
    for one in variants:
        plan = describe_plan(
            one.recipe,
            one.recipe_name,
            one.root,
            options=EstimateOptions(**asked),
            shares_incv=one.root in sources,
            **_options_of_stages(parsed),
        )
        shared = f"takes INCV over from {sources[one.root].name}\n" if one.root in sources else ""
        print(f"{one.name}:\n{shared}{plan}\n" if parsed.vary else plan)
    return 0


def _variants(path: Path, parsed: argparse.Namespace) -> list[Variant]:
    """A variant for each combination of the values of --vary, each with its own directory; without it, one."""
    if parsed.vary and parsed.run_dir is not None:
        raise ConfigError("--run-dir names one directory, and each variant of --vary has its own: leave it out")
    if parsed.vary and parsed.profile:
        raise ConfigError("--profile traces one run at a time: leave out --vary, or --profile")
    if parsed.at_once is not None and not parsed.vary:
        raise ConfigError("--at-once says how many runs of --vary go at a time: add --vary, or leave it")
    # Imported here: methods import torch, which takes seconds.
    from trainer.run.default_directory import default_directory
    from trainer.run.recipe import load_recipe

    variants = []
    for varied in combinations(parsed.vary):
        recipe = load_recipe(path, [*parsed.overrides, *varied])
        # With --vary, --redo must not direct a variant to the plain run's directory.
        root = parsed.run_dir or default_directory(path, recipe, () if parsed.vary else parsed.redo)
        command = command_alone(sys.argv, varied)
        variants.append(Variant(varied, recipe, root, recipe_name(path), command))
    return variants


def _note_same_run(path: Path, one: Variant) -> None:
    """Warn if another directory already holds the run that is about to start: --run-dir may have been forgotten."""
    from trainer.run.default_directory import find_same_run

    if (same := find_same_run(path, one.recipe, one.root)) is not None:
        _log.warning(
            "%s already holds a run of this recipe with the same keys and data, and this command starts another in "
            "%s: to resume that one, add %s",
            same,
            one.root,
            shlex.join(["--run-dir", str(same)]),
        )


def _tell(root: Path, code: int, stage: str | None, recipe: Path | None = None, advise: bool = True) -> None:
    """Print the results of a run that has finished its report. recipe: the one that an audit has written."""
    run = RunDirectory(root)
    if code or run.stopped.exists() or stage not in (None, "report") or detect_launch().rank:
        return
    report = read_json(run.report_json)
    print(summary_table(report))
    print(f"\nreport: {run.report_html}")
    if left_out := describe_counts(report["left_out"]["counts"]):
        print(f"left out: {run.rejected_csv} ({left_out})")
    if run.labels_review_csv.exists():
        print(f"labels: {run.labels_review_csv} (all samples, most suspicious first)")
    if recipe is not None:
        print(f"recipe: {recipe} (what the audit chose; run it with `incv run -c`)")
    if advise and (steps := format_steps(next_steps(report, run))):
        print(f"\n{steps}")


def _run_side_by_side(variants: Sequence[Variant], parsed: argparse.Namespace) -> int:
    from trainer.run.sweep_runner import run_sweep

    codes = run_sweep(variants, only=parsed.stage, at_once=parsed.at_once or AT_ONCE, **_options_of_stages(parsed))
    for one, code in zip(variants, codes, strict=True):
        print(f"\n{one.name}: {one.root}" + (f", exit code {code}" if code else ""))
        _tell(one.root, code, parsed.stage, advise=False)
    if parsed.stage in (None, "report"):
        _tell_together(variants, codes, run_name(recipe_path(parsed.recipe)))
    return next((code for code in codes if code), 0)


def _tell_together(variants: Sequence[Variant], codes: Sequence[int], name: str) -> None:
    """Print and write the table over all runs of --vary."""
    finished = [
        code == 0 and not RunDirectory(one.root).stopped.exists() for one, code in zip(variants, codes, strict=True)
    ]
    runs = [
        SweepRun(one.overrides, one.root, read_json(RunDirectory(one.root).report_json) if done else None)
        for one, done in zip(variants, finished, strict=True)
    ]
    summary = summarise_sweep(runs)
    path = sweep_file(variants, name)
    write_sweep(summary, path)
    print(f"\n{format_sweep(summary)}\n\ntable: {path} and {path.with_suffix('.csv').name}")


def _prints(parsed: argparse.Namespace) -> bool:
    return any(getattr(parsed, f"print_{what.replace('-', '_')}") for what in PRINTED)


def _print_facts(parsed: argparse.Namespace, recipe: Recipe, root: Path) -> None:
    """Print the --print-* facts for scripts, quoted for a shell."""
    if parsed.print_run_dir:
        print(root)
    if parsed.print_stages:
        print(" ".join(stages_of(recipe)[1:]))
    if parsed.print_splits:
        from trainer.run.data_sets import find_folders, pack_arguments, with_folders

        folders = {key: str(folder) for key, folder in find_folders(recipe, RunDirectory(root)).items()}
        for key, split in with_folders(recipe, folders).data.splits().items():
            print(shlex.join([f"{key}.shards", split.shards, *pack_arguments(split, recipe.data.max_rejected)]))
