"""`incv doctor` without a run: examines the machine, one subject after the other, and goes on after each problem."""

from collections.abc import Callable, Iterable
from pathlib import Path

from shards.errors import ConfigError
from trainer.distributed.launch import Launch, detect_launch
from trainer.doctor.finding import Finding, format_findings
from trainer.doctor.libraries import examine_libraries
from trainer.doctor.storage import examine_folder, examine_memory, examine_shared_memory


def examine_machine(folder: Path, shards: Path | None) -> tuple[str, bool]:
    """Return the report, which is empty on ranks above 0, and whether there is no problem.

    folder: where runs will be written; shards: a packed data set to load from, if any.
    """
    launch = _read_launch()
    is_first = isinstance(launch, Finding) or launch.local_rank == 0
    findings = _guard("libraries", lambda: examine_libraries(imports=is_first))
    has_torch = any(finding.subject == "torch" and finding.level == "ok" for finding in findings)
    findings += _guard("memory", lambda: [examine_memory()])
    findings += _guard("disk", lambda: examine_folder(folder))
    if isinstance(launch, Finding):
        return format_findings([*findings, launch]), False
    if not has_torch:
        return _report(launch, findings), False
    # Imported here: they import torch, whose installation may be broken.
    from trainer.distributed.devices import count_visible_gpus
    from trainer.doctor.collective import examine_collectives, examine_lone_process
    from trainer.doctor.shard_probe import examine_shards

    gpus = count_visible_gpus()
    findings += _guard("shared memory", lambda: examine_shared_memory(max(gpus, launch.local_size)))
    if shards is not None and is_first:
        findings += _guard("shards", lambda: [examine_shards(shards)])
    if launch.master_address is None:
        findings.append(examine_lone_process(launch, gpus))
    else:
        findings = examine_collectives(launch, findings)
    return _report(launch, findings), all(finding.level != "problem" for finding in findings)


def _read_launch() -> Launch | Finding:
    try:
        return detect_launch()
    except ConfigError as error:
        return Finding("launcher", "problem", str(error), "start the doctor as you would start `incv run`")


def _report(launch: Launch, findings: list[Finding]) -> str:
    """Return the report; a rank above 0 speaks only if it could not reach rank 0."""
    if launch.rank == 0:
        return format_findings(findings)
    alone = [each for each in findings if each.subject in ("torch", "collective") and each.level == "problem"]
    return format_findings(alone) if alone else ""


def _guard(subject: str, examine: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Collect findings; an unexpected error becomes one too, since the doctor must go on."""
    found: list[Finding] = []
    try:
        for finding in examine():
            found.append(finding)
    except Exception as error:  # whatever is broken on this machine
        words = f"could not be examined: {type(error).__name__}: {error}"
        found.append(Finding(subject, "problem", words, "report it with the output of `incv env`"))
    return found
