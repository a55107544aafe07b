"""metrics.jsonl without the times, which differ between two runs that are otherwise bitwise identical."""

import json
from pathlib import Path

from trainer.records.pace import remove_times


def untimed(path: Path) -> bytes:
    """The content of a file; a metrics.jsonl without its times. A last line that a kill has torn is kept."""
    content = path.read_bytes()
    return remove_times_of_lines(content) if path.name == "metrics.jsonl" else content


def remove_times_of_lines(content: bytes) -> bytes:
    lines = []
    for line in content.splitlines(keepends=True):
        try:
            lines.append(json.dumps(remove_times(json.loads(line))).encode() + b"\n")
        except json.JSONDecodeError:
            lines.append(line)
    return b"".join(lines)
