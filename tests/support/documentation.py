"""The pages of the documentation and the fenced blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support import REPOSITORY

PAGES = sorted(
    [
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "slurm" / "README.md",
        REPOSITORY / "benchmarks" / "README.md",
        REPOSITORY / "results" / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
    ]
)
NOT_RUN = "# not run by the tests: "
"""How the first line of a shell block begins if no test runs the block; the reason follows."""

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language (sh, python, ...; empty: output or a drawing) and its text."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def is_marked_as_not_run(self) -> bool:
        return self.text.startswith(NOT_RUN)

    def commands(self) -> list[str]:
        """Return the lines of a shell block, with continued lines joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, match[2], match[3], text.count("\n", 0, match.start()) + 1) for match in _BLOCK.finditer(text)
    ]


def shell_blocks(page: Path) -> list[Block]:
    return [block for block in read_blocks(page) if block.language == "sh"]
