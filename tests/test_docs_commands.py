"""The commands of the documentation are run, page by page, and print what the page shows.

A shell block (```sh) is run by a session below, or all its lines are run by the tests in RUN_BY, or it begins with
"# not run by the tests: REASON". A session runs the blocks of a page in order, in one folder. It may append arguments
to a command, so that it trains a smaller network.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import REPOSITORY
from tests.support.documentation import NOT_RUN, PAGES, Block, read_blocks, shell_blocks
from tests.support.webvision_tree import ilsvrc12_tree, webvision_tree

RUN_BY = {  # commands -> what runs them
    r"make (demo|test)\b.*": ".ci/run",
    r"python3 -m venv \.venv && \. \.venv/bin/activate": "tests/test_dockerfile.py",
    r"pip install -c constraints.txt -e .*": "tests/test_dockerfile.py",
    r"\. \.venv/bin/activate": "tests/test_dockerfile.py",
    r"incv audit photos --weights \S+ --model \S+": "tests/cli/test_audit_command.py",
    r"incv audit photos --(embeddings|predictions|against) \S+": "tests/cli/test_given_arrays.py",
    r"incv predict \S+ --run runs/audit-photos -o \S+": "tests/cli/test_predict_with_audit.py",
    r"incv run -c demo": "docs/tour.md",
    r"incv run -c runs/audit-photos/config\.resolved\.yaml labels\.corrections=.*": "README.md",
}
SMALL_AUDIT = ["--model", "digits_cnn", "--no-download", "image.size=8", "image.resize=9", "data.train.resize=9"]
SMALL_AUDIT += ["incv.epochs=10", "incv.min_steps=0", "incv.optimizer.milestones=[]"]
SMALL_TRAINING = [
    "model={name: digits_cnn}",
    "image.size=8",
    "image.resize=9",
    "data.train.resize=9",
    "image.mean=[0, 0, 0]",
]
SMALL_TRAINING += ["image.std=[1, 1, 1]", "incv.epochs=2", "incv.min_steps=0", "methods=[standard]"]
SMALL_TRAINING += ["standard={epochs: 2, optimizer: {learning_rate: 0.003}}"]
OWN_PHOTOS = ["data.train.root=photos", "data.train.split=''", "data.eval={}", "data.eval_fraction=0.2"]


@dataclass(frozen=True)
class Session:
    """What a page's commands find in their folder, and which arguments make them small."""

    prepare: Callable[[Path], None] = lambda folder: None
    append: dict[str, list[str]] = field(default_factory=dict)
    """A pattern of a command line of `incv`, to the arguments that are appended."""
    compare: bool = False
    """Whether the page shows what each command prints."""


def write_photos(folder: Path) -> None:
    """Digits as images in class folders, some in a wrong one, and a few new ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(3):
        for place, row in enumerate(np.flatnonzero(digits.target == label)[:45]):
            home = f"photos/{(label + (place % 6 == 0)) % 3}" if place < 40 else "new_photos"
            (folder / home).mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).convert("RGB")
            image.save(folder / home / f"{label}-{place}.png")


def write_corrected_photos(folder: Path) -> None:
    """The photos, and what a person saves from the report of their audit."""
    write_photos(folder)
    (folder / "corrections.csv").write_text("key,label\n2/1-0.png,1\n1/1-1.png,1\n")


def write_scans(folder: Path) -> None:
    """The images of `photos` in one folder, with their labels in a CSV file."""
    (folder / "scans").mkdir()
    rows = ["path,label"]
    for image in sorted((folder / "photos").rglob("*.png")):
        shutil.copy(image, folder / "scans" / image.name)
        rows.append(f"{image.name},{image.parent.name}")
    (folder / "scans" / "labels.csv").write_text("\n".join(rows) + "\n")


def copy_results(folder: Path) -> None:
    (folder / "results").symlink_to(REPOSITORY / "results")


def audit_first(folder: Path) -> None:
    """The state after the first three steps of docs/own-data.md."""
    write_corrected_photos(folder)
    write_scans(folder)
    session = SESSIONS["README.md"]
    audit = next(block for block in shell_blocks(REPOSITORY / "README.md") if "incv audit" in block.text)
    run_block(audit, folder, session.append)
    shutil.rmtree(folder / "cleaned")  # the page cleans the set itself


def write_webvision(folder: Path) -> None:
    webvision_tree(folder / "data" / "webvision", google=20, flickr=10, val=10, classes=5)
    ilsvrc12_tree(folder / "data" / "ilsvrc12", count=10, classes=5, form="folders")


def write_tour_files(folder: Path) -> None:
    """The files that docs/tour.md tells its reader to write."""
    code = [block for block in read_blocks(REPOSITORY / "docs" / "tour.md") if block.language in ("python", "toml")]
    look, _, project, method = code
    (folder / "look.py").write_text(look.text)
    (folder / "my_methods").mkdir()
    (folder / "my_methods" / "pyproject.toml").write_text(project.text)
    (folder / "my_methods" / "my_methods.py").write_text(method.text)


SESSIONS = {
    "README.md": Session(
        write_corrected_photos,
        {"audit photos$": SMALL_AUDIT, "run -c mine.yaml": [*OWN_PHOTOS, *SMALL_TRAINING, "--run-dir", "runs/mine"]},
    ),
    "docs/own-data.md": Session(
        audit_first, {"audit (photos$|scans)": SMALL_AUDIT, "run -c mine.yaml": SMALL_TRAINING}
    ),
    "docs/recipes.md": Session(),
    "docs/faq.md": Session(copy_results),
    "docs/results.md": Session(copy_results),
    "docs/running.md": Session(copy_results),
    "docs/webvision.md": Session(write_webvision, {r"shards pack": ["--classes", "5"]}),
    "docs/cloud.md": Session(),
    "docs/doctor.md": Session(),
    "docs/tour.md": Session(write_tour_files, compare=True),
}
# Sessions of `make test`; the others are slow.
FAST = ("docs/recipes.md", "docs/running.md", "docs/cloud.md", "docs/doctor.md")


def is_run_elsewhere(block: Block) -> bool:
    return all(any(re.fullmatch(pattern, command) for pattern in RUN_BY) for command in block.commands())


def run_block(block: Block, folder: Path, append: dict[str, list[str]]) -> str:
    """Run a block in bash; return what it prints, errors included."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    script = f"""#!{sys.executable}
import os, re, sys
arguments = sys.argv[1:]
for pattern, more in {append!r}.items():
    if re.match(pattern, " ".join(sys.argv[1:])):
        arguments += more
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "trainer", *arguments])
"""
    for name, text in {"incv": script, "pip": f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    packages = folder / ".packages"
    environment = os.environ | {
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(packages), str(REPOSITORY)]),
        "PIP_TARGET": str(packages),  # instead of the environment that runs the tests
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's spelling of "yes"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.name}\n{block.text}\n{done.stdout[-3000:]}"
    return done.stdout


def skeleton(line: str) -> str:
    """Return a line without its numbers and with single spaces: what does not differ between machines."""
    return " ".join(re.sub(r"[\d.,]+", "#", line).split())


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a page's output that were not printed, in this order."""
    rest = iter([skeleton(line) for line in printed.splitlines()])
    return [line for line in shown.splitlines() if line.strip() and skeleton(line) not in rest]


def apply_diffs(page: Path, before: int, after: int, file: Path) -> None:
    """Change `file` as the ```diff blocks between two lines of a page say."""
    for block in read_blocks(page):
        if block.language == "diff" and before < block.line < after:
            old, new = (
                "\n".join(line[1:] for line in block.text.splitlines() if line.startswith(sign)) for sign in "-+"
            )
            text = file.read_text()
            assert text.count(old) == 1, f"{block.name}: {old}"
            file.write_text(text.replace(old, new))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SESSIONS]
)
def test_the_commands_of_a_page_work(name: str, tmp_path: Path) -> None:
    session, page = SESSIONS[name], REPOSITORY / name
    session.prepare(tmp_path)
    blocks, before, was_run = read_blocks(page), 0, 0
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "sh" or block.is_marked_as_not_run or (is_run_elsewhere(block) and not session.compare):
            continue
        apply_diffs(page, before, block.line, tmp_path / "my_methods" / "my_methods.py")
        printed = run_block(block, tmp_path, session.append)
        if session.compare and following is not None and not following.language:
            assert not missing_lines(following.text, printed), f"{block.name} printed:\n{printed}"
        before, was_run = block.line, was_run + 1
    assert was_run, "a session without a command to run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_is_run_or_marked_as_not_run(page: Path) -> None:
    if str(page.relative_to(REPOSITORY)) in SESSIONS:
        return
    blocks = [block for block in shell_blocks(page) if not block.is_marked_as_not_run and not is_run_elsewhere(block)]
    assert not blocks, f"{blocks[0].name} is neither run by a test nor marked"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_stand_in_shell_blocks(page: Path) -> None:
    """Blocks without a language are output or drawings, where no command would be noticed."""
    command = re.compile(r"^(incv|make|python3?|pip|torchrun|accelerate|sbatch|srun|docker) [\w-]", re.MULTILINE)
    assert not [block.name for block in read_blocks(page) if not block.language and command.search(block.text)]


def test_a_mark_gives_a_reason_and_what_runs_a_command_exists() -> None:
    marked = [block for page in PAGES for block in shell_blocks(page) if block.is_marked_as_not_run]
    assert len(marked) >= 5
    assert all(len(block.text.splitlines()[0]) > len(NOT_RUN) + 10 for block in marked)
    assert all((REPOSITORY / path).exists() for path in RUN_BY.values())


def test_a_page_that_shows_other_output_is_found() -> None:
    printed = "trained in 3.2 s\naccuracy   98.5 %\nreport: runs/demo/report.html\n"
    assert missing_lines("accuracy 97.0 %\n", printed) == []
    assert missing_lines("accuracy 97.0 %\ntrained in 1 s\n", printed) == ["trained in 1 s"]
    assert missing_lines("precision 97.0 %\n", printed) == ["precision 97.0 %"]
