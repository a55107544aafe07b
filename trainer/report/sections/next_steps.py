"""What to do after a run, as commands to copy: correct labels and run again, or write the cleaned data set."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.shipped import MANIFEST, RESOLVED
from trainer.records.run_directory import RunDirectory
from trainer.report.run import ReportRun
from trainer.report.section import Report, Section


@dataclass(frozen=True)
class Step:
    """One thing to do: its purpose, and lines for a shell: commands, and comments on what to do between them."""

    title: str
    lines: tuple[str, ...]


def collect(run: ReportRun) -> dict[str, Any]:
    return {}


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    steps = next_steps(report, run.directory)
    return {"steps": steps} if steps else None


def next_steps(report: Report, run: RunDirectory) -> list[Step]:
    """Return what the user can do with the result; nothing if there is none, or none to be trusted.

    Correcting labels makes sense only if the truth is unknown.
    """
    if report["selection"] is None or (report["trust"] or {}).get("level") == "do not use":
        return []
    if report["gaps"].keys() & {MANIFEST, RESOLVED}:  # the commands below need both
        return []
    steps = []
    if report["noise"]["true"] is None and report["labels_review"]:
        steps.append(_correct(report, run))
    command = shlex.join(["incv", "clean", str(run.root), "--out", "cleaned"])
    return [*steps, Step("Write the data set without the flagged images", (command,))]


def _correct(report: Report, run: RunDirectory) -> Step:
    """Return the step that corrects labels in a new file and runs again in a new run directory."""
    earlier = (report["config"].get("labels") or {}).get("corrections")
    if earlier:
        file, root = Path(earlier), run.root
        file, root = file.with_name(count_on(file.stem) + ".csv"), root.with_name(count_on(root.name))
    else:
        file, root = Path("corrections.csv"), run.root.with_name(f"{run.root.name}-corrected")
    kept = ("# Keep the rows with checked = true: they are your earlier decisions.",) if earlier else ()
    again = ["incv", "run", "-c", str(run.config), f"labels.corrections={file}", "--run-dir", str(root)]
    return Step(
        "Correct labels in the gallery or in a copy of the list, and run again",
        (
            "# Decide on labels in the gallery of the report, and move the file that it saves here.",
            "# Or edit a copy of the list:",
            shlex.join(["cp", str(run.labels_review_csv), str(file)]),
            "# In the copy, fill in corrected_label: another label corrects the given one, the",
            "# same label confirms it. To exclude an image, empty its given_label.",
            *kept,
            shlex.join(again),
        ),
    )


def count_on(name: str) -> str:
    """Return the next name in a series: mine, mine-2, mine-3."""
    numbered = re.fullmatch(r"(.+)-([1-9]\d{0,2})", name)
    return f"{numbered[1]}-{int(numbered[2]) + 1}" if numbered else f"{name}-2"


def format_steps(steps: Sequence[Step]) -> str:
    """Format the steps for a terminal: the commands on lines of their own, so that they can be copied."""
    texts = []
    for number, step in enumerate(steps):
        title = f"{'next' if number == 0 else 'or'}: {step.title[0].lower()}{step.title[1:]}"
        texts.append("\n  ".join([title, *step.lines]))
    return "\n".join(texts)


SECTION = Section("next", "Next steps", collect, render, Path(__file__).with_suffix(".html"), link=None, leads=True)
