"""`incv compare` on real run directories and recorded runs, and on what is neither."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.command_line import THREADS, TINY, Answer, unchanged

Incv = Callable[..., Answer]
RECORD = REPOSITORY / "results" / "runs" / "cifar10_sym50-standard-seed0.json"


def test_two_runs_of_one_recipe_side_by_side(incv: Incv, finished: Path) -> None:
    assert incv("run", "-c", TINY, "--run-dir", "other", THREADS, "incv.rounds=1").code == 0
    with unchanged(finished):
        answer = incv("compare", finished, "other", "--html", "page.html")
    assert (answer.code, answer.err) == (0, "")
    assert "incv.rounds" in answer.out
    assert "training loss" in answer.out
    report = json.loads((finished / "report.json").read_text())
    for method, accuracy in report["accuracy"]["test"].items():
        assert method in answer.out
        assert f"{accuracy['top1']:.2f} (1)" in answer.out
    assert f"{100 * report['rounds'][-1]['label_precision']:.2f} (1)" in answer.out
    page = Path("page.html").read_text()
    assert "incv.rounds" in page
    assert page.count("<svg") >= 2


def test_a_run_and_its_record_count_once(incv: Incv, finished: Path) -> None:
    assert incv("record", finished, "--results", "results").code == 0
    records = sorted(Path("results", "runs").glob("*.json"))
    answer = incv("compare", finished, *records)
    assert answer.code == 0
    words = " ".join(answer.out.split())  # notes are wrapped
    assert words.count("does not count: another run of group") == len(records)
    assert "no recipe key differs" in answer.out or len(records) > 1


def test_an_unfinished_run_shows_what_is_known(incv: Incv, finished: Path) -> None:
    manifest = json.loads((finished / "manifest.json").read_text())
    for stage in ("evaluate", "export", "report"):
        del manifest["stages"][stage]
    manifest["starts"][-1]["ended"] = None
    (finished / "manifest.json").write_text(json.dumps(manifest))
    (finished / "evaluation.json").unlink()
    (finished / "report.json").unlink()
    with (next((finished / "methods").glob("*/metrics.jsonl"))).open("a") as file:
        file.write('{"step": 9')  # a line that is being written
    answer = incv("compare", finished)
    assert (answer.code, answer.err) == (0, "")
    assert "has not finished" in " ".join(answer.out.split())
    assert "accuracy on test" not in answer.out
    assert "label precision" in answer.out


@pytest.mark.parametrize(
    ("name", "damage", "code", "words"),
    [
        ("no manifest", lambda run: (run / "manifest.json").unlink(), 2, "no manifest.json"),
        ("cut manifest", lambda run: (run / "manifest.json").write_text('{"stages": '), 3, "manifest.json"),
        ("another file", lambda run: (run / "manifest.json").write_text("[1]"), 3, "manifest.json"),
        (
            "other types",
            lambda run: (run / "manifest.json").write_text('{"recipe": 1, "stages": {"incv": 3}, "starts": "x"}'),
            3,
            "damaged",
        ),
        ("no config", lambda run: (run / "config.resolved.yaml").unlink(), 3, "config.resolved.yaml"),
        ("odd config", lambda run: (run / "config.resolved.yaml").write_text("[a"), 3, "config.resolved.yaml"),
        ("no report", lambda run: (run / "report.json").write_text("{}"), 3, "damaged"),
        ("gone", shutil.rmtree, 2, "no such file or folder"),
    ],
)
def test_missing_and_damaged_runs_are_named(
    name: str, damage: Callable[[Path], object], code: int, words: str, incv: Incv, finished: Path
) -> None:
    damage(finished)
    answer = incv("compare", RECORD, finished)
    assert (answer.code, answer.out) == (code, "")
    assert str(finished) in answer.err
    assert words in answer.err


@pytest.mark.parametrize("content", ["{", "[1]", '{"name": "x"}', "\x00"])
def test_damaged_records_are_named(content: str, incv: Incv, playground: Path) -> None:
    Path("odd.json").write_text(content)
    answer = incv("compare", "odd.json", RECORD)
    assert (answer.code, answer.out) == (3, "")
    assert "odd.json" in answer.err


def test_a_record_without_keys_is_named(incv: Incv, playground: Path) -> None:
    record = json.loads(RECORD.read_text())
    del record["keys"]
    Path("old.json").write_text(json.dumps(record))
    answer = incv("compare", "old.json")
    assert (answer.code, answer.out) == (3, "")
    assert "old.json is not a recorded run: `keys`" in answer.err


def test_a_page_that_cannot_be_written_is_an_error(incv: Incv, playground: Path) -> None:
    Path("file").touch()
    answer = incv("compare", RECORD, "--html", "file/page.html")
    assert answer.code == 3
    assert "file" in answer.err


def test_it_does_not_wait_for_torch(finished: Path) -> None:
    words = ["compare", str(finished), str(RECORD), "--html", "page.html"]
    code = f"import sys; from trainer.cli import main; main({words!r}); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("False\n")
