"""ZeRO-1 and ZeRO-2 train like DistributedDataParallel, and all engines share one format of moments."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.errors import ConfigError
from tests.support import RECIPES, REPOSITORY
from tests.support.twin_training import FURTHER, NOT_FINITE, STEPS, Training, distance, optimizer_of, twin
from trainer.distributed.world import World
from trainer.training.engines.deepspeed import deepspeed_stage
from trainer.training.engines.plain import PlainEngine

PROGRAM = REPOSITORY / "tests" / "support" / "zero_program.py"
CLOSE = 1e-5

Report = dict[str, Any]


def alone(kind: str) -> Training:
    """One process, torch's own optimiser."""
    module = twin(normed=False)
    world = World(0, 1, torch.device("cpu"), 1)
    return Training(PlainEngine(module, optimizer_of(module, kind), world, module), world, kind)


def launched(launcher: list[str], folder: Path, what: str) -> list[Report]:
    """What each rank reports."""
    if find_spec("deepspeed") is None:
        pytest.skip("pip install 'incv[deepspeed]'")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", *launcher, str(PROGRAM), str(folder), what]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert [report["ranks"] for report in reports] == [2, 2]
    return reports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[Report]:
    for kind in ("adam", "sgd"):
        training = alone(kind).steps(0, STEPS)
        save_file(training.state(), folder / f"alone-{kind}-saved.safetensors")
        save_file(training.steps(STEPS, FURTHER).state(), folder / f"alone-{kind}-further.safetensors")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return launched(torchrun, folder, "all")


@pytest.mark.cluster
@pytest.mark.parametrize("networks", ["bare", "normed"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_zero_trains_like_ddp(reports: list[Report], engine: str, kind: str, networks: str) -> None:
    """Weights, BatchNorm's statistics and moments; some steps in two parts, one that is not finite and left out."""
    for report in reports:
        case = report[f"{engine} {kind} {networks}"]
        assert case["engine"] == "DeepSpeedEngine"
        assert case["distance"] < CLOSE
        assert case["skipped"] == [[NOT_FINITE], [NOT_FINITE]]


@pytest.mark.cluster
@pytest.mark.parametrize("networks", ["bare", "normed"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_gradients_added_up_between_graphs_train_like_ddp(reports: list[Report], kind: str, networks: str) -> None:
    """What several ranks do where CUDA graphs leave no room for DDP: all gradients in one sum after the backward."""
    for report in reports:
        case = report[f"meetings {kind} {networks}"]
        assert case["distance"] < CLOSE
        assert case["skipped"] == [[NOT_FINITE], [NOT_FINITE]]


@pytest.mark.cluster
@pytest.mark.parametrize(("engine", "kind"), [("zero1", "sgd"), ("zero2", "adam"), ("zero2", "sgd")])
def test_one_process_continues_what_two_saved_under_zero(
    reports: list[Report], folder: Path, engine: str, kind: str
) -> None:
    saved = load_file(folder / f"{engine}-{kind}-saved.safetensors")
    continued = alone(kind).load(saved).steps(STEPS, FURTHER)
    assert distance(continued.state(), load_file(folder / f"{engine}-{kind}-further.safetensors")) < CLOSE


@pytest.mark.cluster
@pytest.mark.parametrize(("engine", "kind"), [("zero1", "sgd"), ("zero2", "adam"), ("zero2", "sgd")])
def test_zero_continues_what_one_process_saved(reports: list[Report], engine: str, kind: str) -> None:
    for report in reports:
        assert report[f"{engine} {kind} round trips"]["taken_over"] < CLOSE


@pytest.mark.cluster
@pytest.mark.parametrize(("engine", "kind"), [("zero1", "sgd"), ("zero2", "adam"), ("zero2", "sgd")])
def test_a_resumed_training_is_bitwise_the_undisturbed_one(reports: list[Report], engine: str, kind: str) -> None:
    for report in reports:
        assert report[f"{engine} {kind} round trips"]["resumed"] == 0.0


@pytest.mark.cluster
def test_a_training_begins_with_nothing(reports: list[Report]) -> None:
    """No hidden first step; no moments after loading a checkpoint without any; no gradients of a broken-off step."""
    for report in reports:
        assert report["beginnings"] == {"fresh": 0.0, "reused": 0.0, "broken_off": 0.0}


@pytest.mark.cluster
def test_the_callers_autocast_reaches_the_module(reports: list[Report]) -> None:
    for report in reports:
        assert report["autocast"] == {"inside": "torch.bfloat16", "outside": "torch.float32"}


@pytest.mark.cluster
def test_clipping_by_network_is_refused(reports: list[Report]) -> None:
    for report in reports:
        assert "optimizer.clip" in report["clip"]["error"]


@pytest.mark.cluster
@pytest.mark.parametrize(("file", "engine"), [("cpu", "PlainEngine"), ("cpu_deepspeed", "DeepSpeedEngine")])
def test_accelerate_launches_either_engine(tmp_path: Path, file: str, engine: str) -> None:
    settings = ["--config_file", str(RECIPES / "accelerate" / f"{file}.yaml")]
    accelerate = ["accelerate.commands.launch", *settings, "--main_process_port", "0"]
    for report in launched(accelerate, tmp_path, "launcher"):
        for networks in ("bare", "normed"):
            for kind in ("adam", "sgd"):
                case = report[f"launcher {kind} {networks}"]
                assert case["engine"] == engine
                assert case["distance"] < CLOSE
                assert case["skipped"] == [[NOT_FINITE], [NOT_FINITE]]


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("environ", "stage"),
    [
        ({}, None),
        ({"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, None),
        (DEEPSPEED, 2),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1", "ACCELERATE_GRADIENT_CLIPPING": "0.0"}, 1),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_GRADIENT_CLIPPING": "auto"}, 2),
        (DEEPSPEED | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"}, 2),
    ],
)
def test_the_launcher_names_the_stage(environ: dict[str, str], stage: int | None) -> None:
    assert deepspeed_stage(environ) == stage


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "zero_stage"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0", "zero_stage"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "offload_optimizer_device"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme", "offload_param_device"),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.0", "gradient_clipping"),
        ("ACCELERATE_GRADIENT_CLIPPING", "much", "gradient_clipping"),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero.json", "deepspeed_config_file"),
    ],
)
def test_what_we_do_not_do_with_deepspeed_is_refused(variable: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        deepspeed_stage(DEEPSPEED | {variable: value})
    assert value in str(refused.value)


def test_a_missing_deepspeed_is_named_with_its_cure() -> None:
    """Nothing imports it before an engine is made, so that everybody else can do without."""
    program = """
import sys
import torch
import trainer.training.engines.deepspeed as engines
assert "deepspeed" not in sys.modules
sys.modules["deepspeed"] = None
from trainer.distributed.world import World
try:
    engines.DeepSpeedEngine(torch.nn.Linear(1, 1), None, World(0, 1, torch.device("cpu"), 1), 1)
except engines.ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert "pip install 'incv[deepspeed]'" in done.stdout, done.stderr
