"""The commands `incv doctor` and `incv env`."""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from shards.errors import ConfigError
from trainer.config.argument_types import path_argument
from trainer.distributed.launch import Launch, detect_launch
from trainer.doctor.environment import describe_environment
from trainer.doctor.machine import (
    Finding,
    examine_folder,
    examine_libraries,
    examine_memory,
    examine_shared_memory,
    format_findings,
)
from trainer.doctor.ranks import describe_durable_point
from trainer.doctor.verdict import examine


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `func`, which takes the parsed arguments and returns an exit code."""
    doctor = subparsers.add_parser(
        "doctor", help="examine this machine, or diagnose a run: which rank is stuck, and where"
    )
    doctor.add_argument("--run-dir", type=path_argument, help="the run directory to diagnose (read-only)")
    doctor.add_argument(
        "--progress", action="store_true", help="print one line that changes when the run has saved new progress"
    )
    doctor.add_argument(
        "--folder", type=path_argument, help="without --run-dir: where runs will be written; default: here"
    )
    doctor.add_argument(
        "--shards",
        type=path_argument,
        help="without --run-dir: a packed data set to load images from for some seconds",
    )
    doctor.set_defaults(func=_doctor)
    env = subparsers.add_parser("env", help="print the versions and facts that a bug report needs")
    env.set_defaults(func=_env)


def _doctor(parsed: argparse.Namespace) -> int:
    """Exit codes: 0: no problem; 1: a problem, or a rank that hangs, is silent or has failed; 2: wrong usage."""
    if parsed.run_dir is None:
        if parsed.progress:
            raise ConfigError("--progress describes a run: name it with --run-dir")
        text, well = examine_machine(parsed.folder or Path.cwd(), parsed.shards)
    elif parsed.folder is not None or parsed.shards is not None:
        raise ConfigError("--folder and --shards examine this machine: leave out --run-dir, or leave them out")
    elif parsed.progress:
        text, well = describe_durable_point(parsed.run_dir), True
    else:
        text, well = examine(parsed.run_dir, time.time())
    if text:
        print(text)
    return 0 if well else 1


def _env(parsed: argparse.Namespace) -> int:
    print(describe_environment())
    return 0


def examine_machine(folder: Path, shards: Path | None) -> tuple[str, bool]:
    """Return the report, which is empty on ranks above 0, and whether there is no problem.

    folder: where runs will be written; shards: a packed data set to load from, if any.
    """
    try:
        launch = detect_launch()
    except ConfigError as error:
        launch = Launch("alone")
        wrong = [Finding("launcher", "problem", str(error), "start the doctor as you would start `incv run`")]
    else:
        wrong = []
    is_first = launch.local_rank == 0
    findings = wrong + _guard("libraries", lambda: examine_libraries(imports=is_first))
    has_torch = any(finding.subject == "torch" and finding.level == "ok" for finding in findings)
    findings += _guard("memory", lambda: [examine_memory()]) + _guard("disk", lambda: examine_folder(folder))
    if has_torch and not wrong:
        # Imported here: they import torch, whose installation may be broken.
        from trainer.distributed.devices import count_visible_gpus
        from trainer.doctor.probes import examine_collectives, examine_launcher, examine_shards

        gpus = count_visible_gpus()
        findings += _guard("shared memory", lambda: examine_shared_memory(max(gpus, launch.local_size)))
        if shards is not None and is_first:
            findings += _guard("shards", lambda: [examine_shards(shards)])
        if launch.master_address is None:
            findings.append(examine_launcher(launch, gpus))
        else:
            findings = examine_collectives(launch, findings)
    well = all(finding.level != "problem" for finding in findings)
    if launch.rank > 0:  # speaks only if it could not reach rank 0
        findings = [each for each in findings if each.subject in ("torch", "collective") and each.level == "problem"]
    return format_findings(findings) if findings else "", well


def _guard(subject: str, examine: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Collect findings; an unexpected error becomes one too, since the doctor must continue."""
    found: list[Finding] = []
    try:
        for finding in examine():
            found.append(finding)
    except Exception as error:  # whatever is broken on this machine
        words = f"could not be examined: {type(error).__name__}: {error}"
        found.append(Finding(subject, "problem", words, "report it with the output of `incv env`"))
    return found
