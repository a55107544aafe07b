"""`incv validate`: finds what a run would refuse, and wrong keys without importing torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import TINY, Answer
from trainer.methods import registry
from trainer.models.factory import create_model

Incv = Callable[..., Answer]

_PROGRAM = """
import contextlib, io, json, sys
from trainer.cli import main
for arguments in json.loads(sys.argv[1]):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    slow = [name for name in ("torch", "timm", "torchvision", "torch._dynamo") if name in sys.modules]
    print(json.dumps([code, slow, error.getvalue()]))
"""
WRONG = (
    ["incv.round=3"],
    ["incv.rounds=0"],
    ["labels.noise=symetric"],
    ["methods=[standart]"],
    ["methods=[standard, standard]"],
    ["standard=null"],
    ["image.mean=3"],
    ["model.pretrained=true", "image={resize: -1}"],
    ["coteaching.rank=first"],
    ["model={name: resnet18, options: {num_classes: 3}}"],
)


def run_commands(commands: list[list[str]]) -> list[tuple[int, list[str], str]]:
    """Run them one after the other in a new process: exit code, slow modules imported so far, and stderr of each."""
    program = [sys.executable, "-c", _PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_wrong_key_or_value_is_found_without_importing_torch() -> None:
    commands = [[command, "-c", TINY, *wrong] for command in ("validate", "run") for wrong in WRONG]
    for command, (code, slow, error) in zip(commands, run_commands(commands), strict=True):
        assert (code, slow) == (2, []), command
        assert command[-1].partition("=")[0].partition(".")[0] in error, command


def test_a_command_that_trains_nothing_imports_no_torch() -> None:
    ((code, slow, error),) = run_commands([["run", "-c", TINY, "--print-run-dir"]])
    assert (code, slow) == (0, []), error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model={name: resnet18, options: {foo: 1}}"], ["model.options", "unexpected keyword argument 'foo'"]),
        (["model={name: resnet18, options: {in_chans: 1}}"], ["does not accept RGB images of image.size = 8"]),
        (
            ["model.name=vit_tiny_patch16_224", "image.size=32"],
            ["set model.options.img_size to 32", "image.size to 224"],
        ),
        (["model.name=resnet10x"], ["unknown model", "did you mean"]),
        (["incv.optimizer.decay_scope=residual_convs"], ["residual_convs"]),
        (["data.eval.test.source=digit"], ["did you mean digits"]),
        (["execution.world=64"], ["execution.world = 64", "batch.global = 32"]),
        (["labels={file: absent.csv}"], ["labels.file", "absent.csv"]),
        (["labels.corrections=absent.csv"], ["labels.corrections", "absent.csv"]),
        (["model.weights=absent.safetensors"], ["model.weights", "absent.safetensors"]),
        (["data.train.classes=3", "labels={noise: matrix, matrix: [[1.0]]}"], ["labels.matrix", "3 rows"]),
    ],
)
def test_what_any_run_would_refuse_is_found(
    incv: Incv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = incv("validate", "-c", TINY, *overrides)
    assert answer.code in (2, 3)
    assert answer.out == ""
    assert all(word in answer.err for word in words), answer.err
    plan = incv("run", "-c", TINY, "--dry-run", *overrides)
    assert f"would be refused: {answer.err.strip().removeprefix('incv: error: ')}" in plan.out


def test_the_option_that_validate_names_makes_the_recipe_valid(incv: Incv) -> None:
    answer = incv(
        "validate", "-c", TINY, "image.size=32", "model={name: vit_tiny_patch16_224, options: {img_size: 32}}"
    )
    assert answer.code == 0, answer.err
    network = create_model("vit_tiny_patch16_224", 3, 0, img_size=32)
    assert network.patch_embed.img_size == (32, 32)


def test_an_unknown_method_is_refused_by_name_alone() -> None:
    with pytest.raises(registry.ConfigError, match="did you mean standard"):
        registry.get_method("standart")
