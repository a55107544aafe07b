"""`incv --help`: what a newcomer needs first, and what each command does."""

from collections.abc import Callable

import pytest

from tests.support.command_line import Answer
from trainer.commands.parser import FIRST
from trainer.run.stage_graph import all_stages

Incv = Callable[..., Answer]


def test_the_commands_for_a_start_come_before_the_single_stages(incv: Incv) -> None:
    lines = [line.split() for line in incv("--help").out.splitlines()]
    words = [line[0] for line in lines if line]
    first = words[words.index("run") : words.index("other")]
    assert tuple(word for word in first if word in FIRST) == FIRST
    assert words.index("other") < words.index("compare") < words.index("doctor")
    assert max(words.index(name) for name in ("doctor", "shards")) < min(
        words.index(stage) for stage in all_stages()[1:] if stage not in FIRST
    )


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("predict",), "Classify new images with the networks of a run."),
        (("labels",), "Run only the `labels` stage of a recipe."),
        (("shards", "verify"), "Check the counts and checksums of every file in a packed folder."),
    ],
)
def test_the_help_of_a_command_says_what_it_does(command: tuple[str, ...], line: str, incv: Incv) -> None:
    answer = incv(*command, "--help")
    assert answer.code == 0
    assert line in " ".join(answer.out.split())
