"""`incv report RUN_DIR`: the report of a directory as it is, whatever is missing in it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import RECIPES, processes
from tests.support.command_line import exit_code

Make = Callable[..., Path]


def gaps_of(run_dir: Path) -> dict[str, str]:
    gaps: dict[str, str] = json.loads((run_dir / "report.json").read_text())["gaps"]
    return gaps


@pytest.mark.parametrize("content", [None, b"", b'{"a', b"[]"])
def test_without_a_readable_manifest_the_rest_is_reported(
    make_run: Make, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run()
    (run_dir / "manifest.json").unlink()
    if content is not None:
        (run_dir / "manifest.json").write_bytes(content)
    assert exit_code(["report", str(run_dir)]) == 0
    assert "manifest.json" in gaps_of(run_dir)
    printed = capsys.readouterr().out
    assert "manifest.json " + ("is missing" if content is None else "cannot be read") in printed
    assert f"report: {run_dir / 'report.html'}" in printed
    report = json.loads((run_dir / "report.json").read_text())
    assert (report["samples"], len(report["rounds"])) == (597, 3)
    page = (run_dir / "report.html").read_text()
    assert 'id="gaps"' in page
    assert "incv clean" not in page, "it would refuse this directory"


@pytest.mark.parametrize("left", ["manifest.json", "labels.parquet", "methods", "rounds", "config.resolved.yaml"])
def test_one_part_of_a_run_is_enough(make_run: Make, left: str) -> None:
    run_dir = make_run()
    for path in run_dir.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run_dir / "manifest.json").touch()  # unreadable, unless it is what is left
    assert exit_code(["report", str(run_dir)]) == 0
    assert len(gaps_of(run_dir)) >= 2


def test_a_directory_without_anything_of_a_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photo.jpg").touch()
    assert exit_code(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_other_arguments_are_refused(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run()
    assert exit_code(["report", str(run_dir), "seed=3"]) == 2
    assert "takes no other argument" in capsys.readouterr().err


def test_images_and_class_names_come_from_the_shards(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run()
    processes.pack_digits(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load((RECIPES / "tiny.yaml").read_text())
    (run_dir / "config.resolved.yaml").write_text(yaml.safe_dump(recipe))
    (run_dir / "manifest.json").unlink()
    assert exit_code(["report", str(run_dir)]) == 0
    assert gaps_of(run_dir).keys() == {"manifest.json"}
    assert "data:image/" in (run_dir / "report.html").read_text()
    dataset = tmp_path / recipe["data"]["train"]["shards"] / "dataset.json"
    dataset.write_text("{}")
    assert exit_code(["report", str(run_dir)]) == 0
    assert gaps_of(run_dir).keys() == {"manifest.json", "shards"}


def test_a_run_in_such_a_directory_is_refused_with_the_way_out(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run()
    (run_dir / "manifest.json").unlink()
    processes.pack_digits(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", str(run_dir)]) == 2
    assert f"incv report {run_dir}" in capsys.readouterr().err
