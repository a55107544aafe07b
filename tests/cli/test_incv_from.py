"""`--incv-from`: a run takes over the finished INCV stage of another, and ends as if it had run INCV itself."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shards.durable import read_json, write_json
from tests.support.brief_incv import BRIEF, files_of_incv, files_of_methods
from tests.support.command_line import TINY, Answer, exit_code, unchanged
from trainer.records.stored_labels import read_labels, write_labels
from trainer.records.unreadable import parse_complete_lines
from trainer.reproduce.recording import build_records
from trainer.run import incv_takeover

Incv = Callable[..., Answer]
ALONE = (*BRIEF, "methods=[]")
TRAINED = (*BRIEF, "methods=[coteaching_incv]", "coteaching_incv.epochs=2")
OF_EACH = (
    "time_s",
    "pace",
    "starts",
    "incv_from",
    "config",
)  # entries of report.json that depend on how a run was made


@pytest.fixture(scope="module")
def source_once(tmp_path_factory: pytest.TempPathFactory, packed_digits: Path) -> Path:
    """A run of INCV alone; do not write to it."""
    folder, before = tmp_path_factory.mktemp("source"), Path.cwd()
    (folder / "data").mkdir()
    (folder / "data" / "shards").symlink_to(packed_digits)
    os.chdir(folder)
    try:
        assert exit_code(["run", "-c", TINY, *ALONE, "--run-dir", "first"]) == 0
    finally:
        os.chdir(before)
    return folder / "first"


@pytest.fixture
def first(source_once: Path, playground: Path) -> Path:
    shutil.copytree(source_once, playground / "first")
    return playground / "first"


def start(incv: Incv, *arguments: object, run: str = "second") -> Answer:
    return incv("run", "-c", TINY, "--run-dir", run, *arguments)


def take(incv: Incv, *arguments: object, run: str = "second") -> Answer:
    return start(incv, *arguments, "--incv-from", "first", run=run)


def manifest(run: Path | str) -> dict[str, Any]:
    content: dict[str, Any] = read_json(Path(run) / "manifest.json")
    return content


def test_the_run_ends_as_if_it_had_run_incv_itself(incv: Incv, first: Path) -> None:
    with unchanged(first):
        answer = take(incv, *TRAINED)
    assert answer.code == 0, answer.err
    assert f"incv: taken over from {first}" in answer.err
    assert start(incv, *TRAINED, run="own").code == 0
    assert files_of_incv("second") == files_of_incv("own")
    assert len(files_of_incv("second")) > 15
    assert files_of_methods("second") == files_of_methods("own")
    reports = [read_json(Path(run) / "report.json") for run in ("second", "own")]
    assert reports[0].keys() == reports[1].keys()
    assert all(reports[0][key] == reports[1][key] for key in reports[0] if key not in OF_EACH)
    noted, stage = manifest("second")["incv_from"], manifest("first")["stages"]["incv"]
    assert noted == {"run": str(first), **{key: stage[key] for key in ("hash", "finished", "seconds")}}
    assert manifest("second")["stages"]["incv"]["numerics"] == stage["numerics"]
    assert "incv_from" not in manifest("own")
    pages = [(Path(run) / "report.html").read_text() for run in ("second", "own")]
    assert [f"taken over from <code>{first}</code>" in page for page in pages] == [True, False]
    (record,) = build_records(Path("second"))
    own = manifest("second")["stages"]["incv"]["seconds"]
    assert record["stage_seconds"]["incv"] == pytest.approx(stage["seconds"] + own)


def test_tables_are_links_and_files_that_grow_are_copies(incv: Incv, first: Path) -> None:
    assert take(incv, *ALONE).code == 0
    shared = [path.name for path in Path("second").rglob("*") if path.is_file() and path.stat().st_nlink > 1]
    assert set(shared) == {"predictions.parquet", "selection.parquet"}
    assert not list(Path("second").rglob("checkpoints"))


def test_where_there_are_no_hard_links_files_are_copied(incv: Incv, first: Path, monkeypatch) -> None:
    def refused(*paths: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(incv_takeover.os, "link", refused)
    assert take(incv, *ALONE).code == 0
    assert files_of_incv("second") == files_of_incv(first)
    assert all(path.stat().st_nlink == 1 for path in Path("second").rglob("*") if path.is_file())


@pytest.mark.parametrize("redone", ["first", "second"])
def test_redoing_incv_in_one_run_leaves_the_other_as_it_is(incv: Incv, first: Path, redone: str) -> None:
    assert take(incv, *ALONE).code == 0
    other = {"first": "second", "second": "first"}[redone]
    with unchanged(Path(other)):
        again = start(incv, *ALONE, "incv.epochs=2", "--redo", "incv", run=redone)
    assert again.code == 0, again.err
    assert files_of_incv(redone) != files_of_incv(other)
    assert "incv_from" not in manifest(redone)
    assert list((Path(redone) / "old").iterdir())


def test_later_starts_need_neither_the_option_nor_the_other_run(incv: Incv, first: Path) -> None:
    assert take(incv, *ALONE).code == 0
    shutil.rmtree(first)
    for again in (start(incv, *ALONE), take(incv, *ALONE)):
        assert again.code == 0, again.err
        assert "incv: already done" in again.err
    assert take(incv, *ALONE, "--redo", "incv").code == 2


def killed_after(files: int, arguments: list[str]) -> int:
    """Execute a command in another process, which sends itself SIGKILL before it copies one more file."""
    child = os.fork()
    if child == 0:
        place, copied = incv_takeover._place, [0]

        def dying(source: Path, target: Path) -> None:
            if copied[0] == files:
                os.kill(os.getpid(), signal.SIGKILL)
            copied[0] += 1
            place(source, target)

        incv_takeover._place = dying
        os._exit(exit_code(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("files", "repeats_option"), [(0, False), (5, True), (5, False), (12, False), (13, True), (13, False)]
)
def test_a_killed_copy_is_repeated(incv: Incv, first: Path, files: int, repeats_option: bool) -> None:
    arguments = ["run", "-c", TINY, "--run-dir", "second", *ALONE, "--incv-from", "first"]
    assert killed_after(files, arguments) == -signal.SIGKILL
    assert manifest("second")["stages"]["incv"]["state"] == "running"
    answer = (take if repeats_option else start)(incv, *ALONE)
    assert answer.code == 0, answer.err
    assert f"incv: taken over from {first}" in answer.err
    assert files_of_incv("second") == files_of_incv(first)
    assert not list(Path("second").rglob(".*.tmp*"))


def test_an_interrupted_takeover_whose_source_is_gone_can_be_run_here(incv: Incv, first: Path) -> None:
    arguments = ["run", "-c", TINY, "--run-dir", "second", *ALONE, "--incv-from", "first"]
    assert killed_after(5, arguments) == -signal.SIGKILL
    first.rename("moved")
    refused = start(incv, *ALONE)
    assert refused.code == 2
    assert "is not a run directory" in refused.err
    assert "add `--redo incv`" in refused.err
    moved = start(incv, *ALONE, "--redo", "incv")
    assert moved.code == 0, moved.err
    assert files_of_incv("second") == files_of_incv("moved")
    assert "incv_from" not in manifest("second")


def test_other_keys_after_an_interruption_are_refused_before_incv_begins(incv: Incv, first: Path) -> None:
    assert incv("labels", "-c", TINY, "--run-dir", "second", *ALONE).code == 0
    content = manifest("second")
    content["incv_from"] = {"run": str(first), "hash": "", "finished": "", "seconds": 1.0}
    write_json(Path("second/manifest.json"), content)
    refused = start(incv, *ALONE, "incv.epochs=2")
    assert refused.code == 2
    assert "incv.epochs (1 -> 2)" in refused.err


def test_incv_that_was_begun_here_moves_to_old(incv: Incv, first: Path) -> None:
    shutil.copytree(first, "second")
    content = manifest("second")
    content["stages"]["incv"]["state"] = "running"
    write_json(Path("second/manifest.json"), content)
    Path("second/incv.json").unlink()
    assert take(incv, *ALONE).code == 0
    assert files_of_incv("second") == files_of_incv(first)
    assert next(Path("second/old").glob("*/rounds/0/predictions.parquet")).exists()


def test_redo_takes_over_instead_of_what_is_there(incv: Incv, first: Path) -> None:
    shutil.copytree(first, "second")
    Path("second/rounds/mark").touch()
    answer = take(incv, *ALONE, "--redo", "incv")
    assert answer.code == 0, answer.err
    assert files_of_incv("second") == files_of_incv(first)
    assert list(Path("second/old").glob("*/rounds/mark"))


def test_a_run_that_took_incv_over_can_pass_it_on(incv: Incv, first: Path) -> None:
    assert take(incv, *ALONE).code == 0
    third = start(incv, *ALONE, "--incv-from", "second", run="third")
    assert third.code == 0, third.err
    assert files_of_incv("third") == files_of_incv(first)
    stages = [manifest(run)["stages"]["incv"]["seconds"] for run in ("first", "second")]
    assert manifest("third")["incv_from"]["seconds"] == pytest.approx(sum(stages), abs=0.002)


def test_unreadable_images_of_incv_are_taken_over_once(incv: Incv, first: Path) -> None:
    line = {"sample_id": 3, "key": "3", "split": "train", "stage": "incv", "doing": "training", "round": 0, "fold": 1}
    log = first / "logs" / "unreadable-rank1.jsonl"
    for content in (line, line | {"stage": "standard", "round": None, "fold": None}):
        with log.open("a") as file:
            file.write(f"{content}".replace("'", '"').replace("None", "null") + "\n")
    for redo in ((), ("--redo", "incv")):
        assert take(incv, *ALONE, *redo).code == 0
        assert list(parse_complete_lines(Path("second/logs/unreadable-rank0.jsonl").read_bytes())) == [line]
    assert read_json(Path("second/report.json"))["unreadable"]["count"] == 1


@pytest.mark.parametrize(
    ("overrides", "differences"),
    [
        (("incv.epochs=2",), ["incv.epochs (1 -> 2)"]),
        (("seed=1", "labels.ratio=0.2"), ["seed (0 -> 1)", "labels.ratio (0.3 -> 0.2)"]),
        (("batch.global=16",), ["batch.global (32 -> 16)"]),
        (("data.train.split=test", "data.train.shards=data/shards/digits-test"), ["data.train.checksum"]),
        (("data.eval_fraction=0.1",), ["data.eval_fraction (0.0 -> 0.1)"]),
    ],
)
def test_other_keys_or_data_are_refused(incv: Incv, first: Path, overrides, differences: list[str]) -> None:
    answer = take(incv, *ALONE, *overrides)
    assert answer.code == 2
    assert "--incv-from first: its INCV was run with other values" in answer.err
    assert all(difference in answer.err for difference in differences), answer.err
    assert not Path("second").exists()


def unfinish(run: Path) -> None:
    content = manifest(run)
    content["stages"]["incv"]["state"] = "running"
    write_json(run / "manifest.json", content)


def forget(run: Path) -> None:
    content = manifest(run)
    del content["stages"]["incv"]
    write_json(run / "manifest.json", content)


def raise_numerics(run: Path) -> None:
    content = manifest(run)
    content["stages"]["incv"]["numerics"] = 99
    write_json(run / "manifest.json", content)


def relabel(run: Path) -> None:
    labels = read_labels(run / "labels.parquet")
    write_labels(run / "labels.parquet", labels.ids, 9 - labels.labels)


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (shutil.rmtree, 2, "--incv-from first is not a run directory"),
        (lambda run: (run / "manifest.json").write_text("{"), 2, "--incv-from first is not a run directory"),
        (unfinish, 2, "INCV has not finished: run its command again first"),
        (forget, 2, "this run has not begun its stage incv"),
        (raise_numerics, 2, "other results (numerics 99, now "),
        (relabel, 3, "has other labels than this run"),
        (lambda run: (run / "selection.parquet").unlink(), 3, "first/selection.parquet is missing"),
        (lambda run: (run / "rounds/1/predictions.parquet").unlink(), 3, "first/rounds/1/predictions.parquet is"),
    ],
)
def test_a_run_without_a_usable_incv_stage_is_refused(incv: Incv, first: Path, spoil, code: int, words: str) -> None:
    spoil(first)
    answer = take(incv, *ALONE)
    assert answer.code == code
    assert words in answer.err
    assert not Path("second").exists()


def test_a_selection_that_incv_did_not_write_is_refused(incv: Incv, first: Path) -> None:
    shutil.copy(first / "rounds" / "0" / "selection.parquet", first / "selection.parquet")
    answer = take(incv, *ALONE)
    assert answer.code == 3
    assert "first/selection.parquet is not the selection that INCV wrote" in answer.err


def test_a_run_that_begins_incv_again_during_the_copy_is_noticed(incv: Incv, first: Path, monkeypatch) -> None:
    place = incv_takeover._place

    def redone(source: Path, target: Path) -> None:
        place(source, target)
        unfinish(first)
        content = manifest(first)
        content["stages"]["incv"].pop("finished", None)
        write_json(first / "manifest.json", content)

    monkeypatch.setattr(incv_takeover, "_place", redone)
    answer = take(incv, *ALONE)
    assert answer.code == 3
    assert "was removed or begun again while this run took it over" in answer.err
    assert manifest("second")["stages"]["incv"]["state"] == "running"


def test_the_option_is_refused_where_it_means_nothing(incv: Incv, first: Path) -> None:
    itself = start(incv, *ALONE, "--incv-from", "first", run="first")
    assert itself.code == 0, "its own INCV is done"
    assert (
        "--incv-from first is the directory of this run itself"
        in start(incv, *ALONE, "--incv-from", "first", "--redo", "incv", run="first").err
    )
    none = take(incv, *BRIEF, "incv=null", "methods=[standard]")
    assert none.code == 2
    assert "this recipe has no INCV stage" in none.err
    assert incv("standard", "-c", TINY, "--run-dir", "second", "--incv-from", "first").code == 2


def test_the_stage_can_be_taken_over_alone(incv: Incv, first: Path) -> None:
    assert incv("labels", "-c", TINY, "--run-dir", "second", *ALONE).code == 0
    answer = incv("incv", "-c", TINY, "--run-dir", "second", *ALONE, "--incv-from", "first")
    assert answer.code == 0, answer.err
    assert files_of_incv("second") == files_of_incv(first)


def test_a_plan_says_what_would_be_taken_over(incv: Incv, first: Path) -> None:
    with unchanged(Path.cwd()):
        planned = take(incv, *ALONE, "--dry-run")
        refused = take(incv, *ALONE, "incv.epochs=2", "--dry-run")
    assert "  incv             taken over " in planned.out
    assert "would be refused" not in planned.out
    assert "would be refused: --incv-from first: its INCV was run with other values" in refused.out


def test_a_plan_of_incv_again_does_not_take_it_over(incv: Incv, first: Path) -> None:
    assert take(incv, *ALONE).code == 0
    planned = start(incv, *ALONE, "--redo", "incv", "--dry-run")
    assert "  incv             redo " in planned.out
    assert "  time of incv " in planned.out


def test_each_variant_takes_over_what_fits_it(incv: Incv, first: Path) -> None:
    answer = incv("run", "-c", TINY, *ALONE, "--vary", "incv.epochs=1,2", "--incv-from", "first")
    assert answer.code == 2
    assert "incv.epochs=1: incv: taken over from" in answer.err
    assert "incv.epochs (1 -> 2)" in answer.err
