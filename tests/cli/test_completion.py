"""`incv completion`: a static script that the shell itself accepts and that completes what it should."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import Answer
from tests.support.debian_programs import require_programs

Incv = Callable[..., Answer]


@pytest.fixture
def script(incv: Incv, tmp_path: Path) -> Path:
    file = tmp_path / "completion.bash"
    answer = incv("completion", "bash")
    assert answer.code == 0, answer.err
    file.write_text(answer.out)
    return file


def completions(script: Path, *words: str) -> list[str]:
    """What bash offers after these words."""
    typed = " ".join(f"'{word}'" for word in ("incv", *words))
    program = f"""
source {script}
COMP_WORDS=({typed}); COMP_CWORD={len(words)}
$(complete -p incv | sed 's/.*-F \\([^ ]*\\).*/\\1/') incv
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], cwd=script.parent, capture_output=True, text=True, check=False)
    return done.stdout.split()


def test_bash_completes_commands_options_recipes_and_files(script: Path) -> None:
    assert set(completions(script, "va")) == {"validate"}
    assert "--dry-run" in completions(script, "run", "--d")
    (script.parent / "tidy.yaml").touch()
    assert {"tiny", "tidy.yaml"} <= set(completions(script, "run", "-c", "ti"))


def test_zsh_accepts_the_script(incv: Incv, tmp_path: Path) -> None:
    require_programs(["zsh"], ["zsh"])
    (tmp_path / "_incv").write_text(incv("completion", "zsh").out)
    subprocess.run(["zsh", "-n", tmp_path / "_incv"], check=True)


def test_without_the_package_the_command_says_what_to_install(incv: Incv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    answer = incv("completion", "zsh")
    assert (answer.code, answer.out) == (2, "")
    assert "pip install shtab" in answer.err
    assert incv("completion", "fish").code == 2
