"""What the scripts in slurm/ query from `incv`: run directory, stages and splits, without importing torch."""

import shlex
from pathlib import Path

import pytest

from tests.support import RECIPES
from trainer.cli import main

TINY = str(RECIPES / "tiny.yaml")


def test_the_run_directory_is_the_one_a_run_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for arguments in ([], ["seed=1"], ["execution.threads=1"], ["--run-dir", "my run"]):
        for command in ("run", "incv"):
            assert main([command, "-c", TINY, *arguments, "--print-run-dir"]) == 0
        once, again = capsys.readouterr().out.splitlines()
        assert once == again
        said.append(once)
    assert said[0] == said[2] == "runs/tiny"
    assert said[1].startswith("runs/tiny-")
    assert said[3] == "my run"
    assert list(tmp_path.iterdir()) == []


def test_the_stages_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-c", TINY, "methods=[standard]", "--print-stages"]) == 0
    assert capsys.readouterr().out == "labels incv standard evaluate export report\n"


def test_what_is_printed_of_a_split_packs_it_as_the_recipe_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ['data.train.shards="it\'s here"', "data.train.classes=5", "data.eval={}"]
    assert main(["run", "-c", TINY, *overrides, "--print-splits"]) == 0
    key, folder, *arguments = shlex.split(capsys.readouterr().out)
    assert (key, folder) == ("data.train.shards", "it's here")
    assert main(["shards", "pack", *arguments, "--workers=1"]) == 0
    assert main(["run", "-c", TINY, *overrides, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "refused" not in plan
    assert "pack             done" in plan


def test_a_wrong_recipe_is_an_error_there_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-c", TINY, "incv.epoch=3", "--print-run-dir"]) == 2
    assert "incv.epochs" in capsys.readouterr().err
