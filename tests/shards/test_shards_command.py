"""`incv shards ...` from its arguments to its exit code."""

import argparse

import pytest

from shards.command import add_commands
from shards.errors import ConfigError


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["shards", *arguments])
    return parsed.func(parsed)


def test_digits_are_packed_and_verified(tmp_path, capsys):
    out = str(tmp_path / "digits")
    pack = ("pack", "digits", "--out", out, "--split", "test", "--workers", "1", "--samples-per-shard", "150")
    assert _run(*pack) == 0
    line = capsys.readouterr().out
    assert "digits/test, 400 images of 10 classes in 3 shards" in line
    assert "0 rejected" in line
    assert _run(*pack) == 0
    assert capsys.readouterr().out == line
    assert _run("verify", out) == 0
    assert "400 samples in 3 shards" in capsys.readouterr().out
    (tmp_path / "digits" / "shard-000001.tar").unlink()
    assert _run("verify", out, "--workers", "2") == 3
    assert "shard-000001.tar is missing" in capsys.readouterr().err


def test_an_unknown_source_is_a_mistake_of_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match="did you mean digits"):
        _run("pack", "digit", "--out", str(tmp_path))
