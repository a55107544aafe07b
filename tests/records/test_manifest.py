"""Each start records its code and packages; a change since the last start is logged and does not stop the run."""

import json
from pathlib import Path

import pytest

from trainer.distributed.world import SINGLE_PROCESS
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    Manifest(RunDirectory(tmp_path)).begin("tiny", SINGLE_PROCESS, {"methods": 32}, "aaaa")
    return RunDirectory(tmp_path)


def begin_again(run: RunDirectory, code: str = "aaaa") -> list[dict[str, object]]:
    """All starts, as the file has them."""
    Manifest(run).begin("tiny", SINGLE_PROCESS, {"methods": 32}, code)
    starts: list[dict[str, object]] = json.loads(run.manifest.read_text())["starts"]
    return starts


def test_the_same_program_again(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    starts = begin_again(run)
    assert [start["code"] for start in starts] == ["aaaa", "aaaa"]
    assert starts[0]["versions"] == starts[1]["versions"]
    assert capsys.readouterr().err == ""


def test_other_code(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    starts = begin_again(run, "bbbb")
    assert [start["code"] for start in starts] == ["aaaa", "bbbb"]
    assert capsys.readouterr().err == "warning: changed since the last start of this run: incv's own code\n"


def test_another_torch(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(run.manifest.read_text())
    now = content["starts"][0]["versions"]["torch"]
    content["starts"][0]["versions"]["torch"] = "2.11.0"
    run.manifest.write_text(json.dumps(content))
    starts = begin_again(run)
    assert [start["versions"]["torch"] for start in starts] == ["2.11.0", now]  # type: ignore[index]
    assert capsys.readouterr().err == f"warning: changed since the last start of this run: torch 2.11.0 -> {now}\n"


def test_a_package_that_came_and_one_that_went(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(run.manifest.read_text())
    versions = content["starts"][0]["versions"]
    timm = versions.pop("timm")
    versions["gone"] = "1.0"
    run.manifest.write_text(json.dumps(content))
    begin_again(run, "bbbb")
    said = capsys.readouterr().err
    assert f"gone 1.0 -> None; timm None -> {timm}; incv's own code" in said


def test_a_start_of_before_codes_were_recorded(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(run.manifest.read_text())
    del content["starts"][0]["code"]
    run.manifest.write_text(json.dumps(content))
    assert begin_again(run)[1]["code"] == "aaaa"
    assert capsys.readouterr().err == ""


def test_the_world_of_each_start(run: RunDirectory) -> None:
    assert [(start["world"], start["launcher"], start["threads"]) for start in begin_again(run)] == [
        (1, "alone", 1)
    ] * 2
