"""Lists the images that a run could not read, and in which stages."""

from typing import Any

from trainer.records.run_directory import RunDirectory
from trainer.records.unreadable import parse_complete_lines

MOST = 1000  # maximum listed in report.json; the logs list all


def find_unreadable(run: RunDirectory) -> dict[str, Any]:
    """Return {"count", "samples": [{"split", "sample_id", "key", "met": [...]}]} from the logs of all ranks.

    met: where the image could not be read.
    """
    samples: dict[tuple[str, int], dict[str, Any]] = {}
    for path in run.unreadable_logs():
        for line in parse_complete_lines(path.read_bytes()):
            identity = (line["split"], line["sample_id"])
            sample = samples.setdefault(identity, {key: line[key] for key in ("split", "sample_id", "key")})
            places = sample.setdefault("met", [])
            if (words := _words(line)) not in places:
                places.append(words)
    return {"count": len(samples), "samples": list(samples.values())[:MOST]}


def _words(line: dict[str, Any]) -> str:
    """Describe where an image could not be read; rounds and folds count from 1, as throughout the report."""
    where = [line["stage"]]
    where += [f"{name} {line[name] + 1}" for name in ("round", "fold") if line[name] is not None]
    return f"{', '.join(where)}: {line['doing']}"
