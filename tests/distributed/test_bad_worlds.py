"""Errors across several ranks: a clear message on rank 0, and all ranks exit within seconds."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import trainer.run.runner
from shards.durable import read_json
from tests.support import REPOSITORY, many_runs, processes
from tests.support.processes import free_ports
from tests.support.world_runs import arguments, finish

pytestmark = pytest.mark.cluster
LAUNCHER = REPOSITORY / "tests" / "support" / "forked_ranks.py"
SECONDS = 20.0
"""From the error on rank 0's terminal to the end of the last rank."""
BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}
ZERO = BY_ACCELERATE | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
SHORT = (
    "methods=[standard]",
    "standard.epochs=4",
    "incv.rounds=1",
    "incv.epochs=1",
    "execution.checkpoint_every=5",
    "execution.predict_batch=64",
)


@dataclass
class Case:
    """Ranks that all get the same, but for what rank 1 gets."""

    overrides: tuple[str, ...] = ()
    of_second: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    elsewhere: bool = False
    """Rank 1 is started in another folder."""
    run_dir: str | None = None
    """As given on the command line, if relative."""
    size: int = 2

    def entry(self, place: Path, name: str, port: int) -> dict[str, Any]:
        run_dir = Path(self.run_dir) if self.run_dir else place / name
        ranks = [
            {
                "arguments": arguments(
                    run_dir,
                    "execution.start_timeout=60",
                    *SHORT,
                    *self.overrides,
                    *(self.of_second if rank == 1 else ()),
                ),
                "cwd": str(place / "elsewhere" if self.elsewhere and rank == 1 else place),
                "environ": self.environ,
            }
            for rank in range(self.size)
        ]
        return {"name": name, "ranks": ranks, "port": port}


SHARDS = (
    "data.train.shards={place}/data/shards/digits-train",
    "data.eval.test.shards={place}/data/shards/digits-test",
)
CASES = {
    "directory_unseen": Case(SHARDS, elsewhere=True, run_dir="unseen"),  # first: a file system is given 15 s
    "more_ranks_than_rows": Case(("batch.global=1",)),
    "fewer_samples_than_ranks": Case(("data.train.limit=1", "batch.global=2")),
    "another_recipe": Case(of_second=("seed=1",)),
    "shards_unseen": Case(elsewhere=True),
    "checkpoint_cut_short": Case(),
    "checkpoints_cut_short": Case(),
    "checkpoint_of_another_recipe": Case(),
    "world_not_as_promised": Case(("execution.world=4",)),
    "precision_of_launcher": Case(environ={"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "clip_with_deepspeed": Case(("standard.optimizer.clip=1.0",), environ=ZERO),
    "ema_with_deepspeed": Case(("standard.ema={decay: 0.9}",), environ=ZERO),
    "fp16_with_deepspeed": Case(("precision=fp16",), environ=ZERO),
    "odd_folds": Case(("execution.folds=side_by_side", "methods=[coteaching_incv]"), size=3),
}
ERRORS = {  # exit code, and a pattern of the facts that the message names
    "more_ranks_than_rows": (2, "2 processes.*batch.global = 1"),
    "fewer_samples_than_ranks": (3, "1 training samples.*batch.global = 2"),
    "another_recipe": (2, "recipe"),
    "directory_unseen": (2, "run directory"),
    "shards_unseen": (3, "data/shards/digits-train"),
    "checkpoints_cut_short": (3, "no readable checkpoint"),
    "checkpoint_of_another_recipe": (3, "another recipe"),
    "world_not_as_promised": (2, "execution.world.* 4.*torchrun.* 2"),
    "precision_of_launcher": (2, "mixed_precision bf16.*precision: fp32"),
    "clip_with_deepspeed": (2, "optimizer.clip"),
    "ema_with_deepspeed": (2, "ema averages the weights"),
    "fp16_with_deepspeed": (2, "precision: fp16"),
    "odd_folds": (2, "side_by_side.* 3"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad_worlds")
    processes.pack_digits(folder)
    (folder / "elsewhere").mkdir()
    return folder


@pytest.fixture(scope="module")
def stopped(place: Path) -> Path:
    """A run that stopped in the middle of a training, with two checkpoints."""
    return stopped_run(place, "stopped")


def stopped_run(place: Path, name: str, *overrides: str) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        patched.setattr(trainer.run.runner, "Trace", many_runs.StoppingTrace)
        patched.setattr(many_runs.StoppingTrace, "at", ("standard", 12))
        code, error = processes.run_here(arguments(place / name, *SHORT, *overrides))
    assert code == 75, error
    checkpoints = processes.step_folders(place / name / "methods" / "standard")
    assert [processes.step_of(folder) for folder in checkpoints] == [10, 13]
    return place / name


def cut(folder: Path) -> None:
    file = folder / "tensors.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def cut_newest(run: Path) -> None:
    cut(processes.step_folders(run / "methods" / "standard")[-1])


def cut_all(run: Path) -> None:
    for folder in processes.step_folders(run / "methods" / "standard"):
        cut(folder)


@pytest.fixture(scope="module")
def results(place: Path, stopped: Path) -> dict[str, Any]:
    def replace_checkpoints(run: Path) -> None:
        other = stopped_run(place, "other", "seed=1")
        shutil.rmtree(run / "methods" / "standard" / "checkpoints")
        shutil.copytree(other / "methods" / "standard" / "checkpoints", run / "methods" / "standard" / "checkpoints")

    damages: dict[str, Callable[[Path], None]] = {
        "checkpoint_cut_short": cut_newest,
        "checkpoints_cut_short": cut_all,
        "checkpoint_of_another_recipe": replace_checkpoints,
    }
    for name, damage in damages.items():
        damage(shutil.copytree(stopped, place / name))
    ports = free_ports(len(CASES))
    entries = [case.entry(place, name, port) for (name, case), port in zip(CASES.items(), ports, strict=True)]
    file = place / "cases.json"
    file.write_text(json.dumps(entries).replace("{place}", str(place)))
    log = place / "cases.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, str(LAUNCHER), str(file)], env=environment(), stderr=output)
    assert finish(process, 240) == 0, log.read_text()
    return dict(read_json(place / "cases.out.json"))


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("name", ERRORS)
def test_all_ranks_end_with_one_clear_error(place: Path, results: dict[str, Any], name: str) -> None:
    code, said = ERRORS[name]
    terminal = (place / f"{name}-rank0.log").read_text()
    assert results[name]["codes"] == [code] * CASES[name].size, terminal
    assert re.search(said, terminal), terminal
    assert terminal.count("error:") == 1, terminal
    assert "Traceback" not in terminal
    assert results[name]["seconds_after_error"] < SECONDS


def test_nothing_is_written_before_all_is_good(place: Path, results: dict[str, Any]) -> None:
    begun = {name for name in CASES if (place / name).exists()}
    assert begun == {"checkpoint_cut_short", "checkpoints_cut_short", "checkpoint_of_another_recipe"}


def test_a_checkpoint_cut_short_is_passed_over(place: Path, results: dict[str, Any]) -> None:
    terminal = (place / "checkpoint_cut_short-rank0.log").read_text()
    assert results["checkpoint_cut_short"]["codes"] == [0, 0], terminal
    assert "step-0000000013 is damaged" in terminal
    start = read_json(place / "checkpoint_cut_short" / "manifest.json")["starts"][-1]
    assert (start["world"], start["ended"]) == (2, "finished")
    assert start["resumed_from"]["step"] == 10


def test_ranks_with_other_code_under_torchrun(place: Path, tmp_path: Path) -> None:
    """A node that was forgotten when the others were updated; torchrun itself ends with 1."""
    for package in ("shards", "trainer", "recipes"):
        shutil.copytree(
            REPOSITORY / package, tmp_path / "old" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    with (tmp_path / "old" / "trainer" / "labels.py").open("a") as file:
        file.write("# a comment\n")
    command = " ".join(["exec", sys.executable, "-m", "trainer", *arguments(tmp_path / "run", *SHORT)])
    worker = f"[ $RANK = 0 ] || export PYTHONPATH={tmp_path}/old; {command}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    code, terminal, lasted = ended(
        [*launcher, "bash", "-c", worker.replace("[standard]", "'[standard]'")], place, tmp_path
    )
    assert code == 1
    assert "differ in the code of incv" in terminal
    assert terminal.count("incv: error:") == 1, terminal
    assert "exitcode  : 2" in terminal
    assert lasted < SECONDS
    assert not (tmp_path / "run").exists()


def test_accelerate_that_silently_starts_one_process(place: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "trainer"]
    code, terminal, lasted = ended([*launcher, *arguments(tmp_path / "run", *SHORT)], place, tmp_path)
    assert code != 0
    assert "incv: error: accelerate was configured for several processes but started one" in terminal
    assert lasted < SECONDS
    assert not (tmp_path / "run").exists()


def ended(command: list[str], cwd: Path, folder: Path) -> tuple[int, str, float]:
    """Exit code, output, and the seconds from the first error in it to the end."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=output, stderr=output)
    limit = time.monotonic() + 120
    while process.poll() is None and "error:" not in log.read_text() and time.monotonic() < limit:
        time.sleep(0.05)
    error = time.monotonic()
    code = finish(process, 60)
    return code, log.read_text(), time.monotonic() - error
