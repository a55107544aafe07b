"""`python -m tests.support.nccl_hosts [CASE ...]`: runs on several hosts that share one GPU, over real NCCL.

NCCL refuses two ranks on one GPU of one host, and knows hosts by NCCL_HOSTID. Each rank has one of its own here and
a host name of its own, in a UTS namespace: NCCL connects them by sockets as it connects machines. A line a case: ok,
FAIL or skip (reason); the exit code is the number of failures. This shows correctness, not speed, and neither a real
network nor NVLink. `--cpu` tries the cases with gloo on CPUs. Only the command line and files of run directories
are used, so that any commit can be tested with this file.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 420
"""Seconds a run may take."""
LAUNCHERS = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "ACCELERATE_",
    "SLURM_",
    "TORCH",
    "GROUP_",
    "ROLE_",
    "INCV_LAU",
)
EXACT, CLOSE = 1e-9, 1e-5
"""Largest difference of a weight after a training: in fp64, and in fp32 between two engines."""

NETWORK = "nccl_hosts_network"
STAGES = ("incv", "standard", "coteaching")
KEYS = (
    f"model.name={NETWORK}",
    "model.options={bits: 64}",
    "batch.global=16",
    "data.train.limit=160",
    "incv.min_per_class=8",
    "incv.epochs=20",
    "standard.epochs=5",
    "coteaching.epochs=10",
    "execution.threads=1",
    "execution.log_every=2",
    "execution.lost_after=15",
    "execution.deterministic=true",
    *(f"{stage}.optimizer.{key}" for stage in STAGES for key in ("learning_rate=0.01", "milestones=[]")),
)
# Few weights, plain SGD: rounding does not grow beyond the tolerance within the steps of a training.
ZERO_KEYS = (
    "model.options={bits: 32}",
    "methods=[standard,coteaching]",
    "incv=null",
    "coteaching.forget_rate=0.3",
    "coteaching_incv.noise_of_selected=formula",
    *(f"{stage}.optimizer.{key}" for stage in STAGES[1:] for key in ("kind=sgd", "learning_rate=0.02")),
)
EAGER, CAPTURED = "execution.graphs=false", "execution.graphs=true"


@dataclass(frozen=True)
class Run:
    """A run of recipes/tiny.yaml on one host or several, one rank each."""

    hosts: int
    keys: tuple[str, ...] = ()
    launcher: str = "torchrun"
    kill: tuple[int, str] | None = None
    """A rank that gets SIGKILL, and the file of metrics that tells when."""


RUNS = {
    "alone": Run(1, (EAGER,)),
    "beside": Run(2, (EAGER, "execution.folds=side_by_side")),
    "fold_groups": Run(4, (EAGER, "execution.folds=side_by_side", "methods=[]")),
    "captured": Run(2, (CAPTURED, "execution.folds=in_turn")),
    "killed_in_fold": Run(
        2,
        (EAGER, "execution.folds=side_by_side", "execution.checkpoint_every=5"),
        kill=(1, "rounds/0/fold1/metrics.jsonl"),
    ),
    "killed_in_training": Run(
        2,
        (EAGER, "execution.folds=side_by_side", "execution.checkpoint_every=5"),
        kill=(1, "methods/coteaching/metrics.jsonl"),
    ),
    "ddp": Run(2, (EAGER, *ZERO_KEYS)),
    "zero2": Run(2, (EAGER, *ZERO_KEYS), launcher="deepspeed_zero2"),
}


class Missing(Exception):
    """Why a case cannot be tried here."""


class Place:
    """A folder for the runs of all cases, each made once."""

    def __init__(self, folder: Path, cpu: bool) -> None:
        self.folder, self._cpu = folder, cpu

    def make(self, name: str) -> Path:
        """Carry a run out; returns its directory."""
        run, run_dir = RUNS[name], self.folder / name
        port = _free_port()
        logs = [self.folder / f"{name}-host{host}.log" for host in range(run.hosts)]
        commands = [self._command(name, run, host, port) for host in range(run.hosts)]
        processes = []
        try:
            for host, (command, log) in enumerate(zip(commands, logs, strict=True)):
                with log.open("w") as output:
                    processes.append(
                        subprocess.Popen(
                            command,
                            cwd=self.folder,
                            env=_environment(host),
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            deadline = time.monotonic() + LIMIT
            if run.kill is not None:
                _kill_rank(run_dir, *run.kill, processes, deadline)
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["no end"]
        finally:
            _end(processes)
        if any(codes):
            tails = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
            raise AssertionError(f"run {name} ended with {codes}\n{tails}")
        return run_dir

    def _command(self, name: str, run: Run, host: int, port: int) -> list[str]:
        tree = REPOSITORY
        device = ["execution.device=cpu"] if self._cpu else ["execution.device=cuda"]
        if run.hosts > 1:
            device += ["execution.backend=" + ("gloo" if self._cpu else "nccl")]
        own = [key for key in run.keys if not (self._cpu and key == CAPTURED)]
        trainer = ["-m", "tests.support.nccl_hosts", "--rank", "run", "-c", str(tree / "recipes" / "tiny.yaml")]
        trainer += ["--run-dir", str(self.folder / name), *KEYS, *device, f"execution.world={run.hosts}", *own]
        if run.launcher == "deepspeed_zero2":
            launcher = ["-m", "accelerate.commands.launch", "--config_file", str(self._zero2_settings())]
            launcher += ["--num_machines", str(run.hosts), "--num_processes", str(run.hosts)]
            launcher += ["--machine_rank", str(host), "--main_process_ip", "127.0.0.1"]
            launcher += ["--main_process_port", str(port)]
        elif run.hosts > 1:
            launcher = ["-m", "torch.distributed.run", f"--nnodes={run.hosts}", "--nproc-per-node=1"]
            launcher += ["--local-addr=127.0.0.1"]
            if run.kill is None:
                launcher += [f"--node-rank={host}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            else:
                launcher += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
                launcher += [f"--rdzv-conf=is_host={int(host == 0)}", f"--rdzv-id={name}", f"--node-rank={host}"]
        else:
            launcher = []
        inner = shlex.join([sys.executable, *launcher, *trainer])
        return ["unshare", "--uts", "bash", "-c", f"hostname host{host} && exec {inner}"]

    def _zero2_settings(self) -> Path:
        """The shipped file; that for CPUs does not say what several hosts need."""
        folder = REPOSITORY / "recipes" / "accelerate"
        if not self._cpu:
            return folder / "deepspeed_zero2.yaml"
        settings = self.folder / "cpu_deepspeed.yaml"
        text = (folder / "cpu_deepspeed.yaml").read_text()
        settings.write_text(text + "  deepspeed_multinode_launcher: standard\n")
        return settings


def _environment(host: int) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    paths = [str(REPOSITORY), *filter(None, [plain.get("PYTHONPATH")])]
    return plain | {
        "PYTHONPATH": os.pathsep.join(paths),
        "NCCL_HOSTID": f"host{host}",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTHONUNBUFFERED": "1",
    }


def _kill_rank(
    run_dir: Path, rank: int, metrics: str, processes: "Sequence[subprocess.Popen[bytes]]", deadline: float
) -> None:
    """SIGKILL for a rank, as soon as a training has made a few steps."""
    file = run_dir / metrics
    while not (file.exists() and file.read_bytes().count(b"\n") >= 8):
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            return  # `make` reports how they ended
        time.sleep(0.005)
    os.kill(json.loads((run_dir / "logs" / f"heartbeat-rank{rank}.json").read_text())["pid"], signal.SIGKILL)


def _end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Launchers end their workers when they are told to end."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def last_weights(training: Path) -> dict[str, Any]:
    """The weights in the last checkpoint of a training, or of one of INCV's folds."""
    from safetensors.torch import load_file

    folder = sorted((training / "checkpoints").glob("step-*"))[-1]
    tensors = load_file(folder / "tensors.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items() if name.startswith("model.")}


def trainings(run_dir: Path) -> dict[str, Path]:
    folders = [*run_dir.glob("rounds/*/fold*"), *run_dir.glob("methods/*")]
    return {str(folder.relative_to(run_dir)): folder for folder in sorted(folders)}


def require_same_weights(run_dir: Path, other: Path, within: float, only: str = "") -> str:
    """Return the largest difference in words. only: the beginning of the names of the trainings to compare."""
    ours, theirs = trainings(run_dir), trainings(other)
    names = sorted(name for name in theirs if name.startswith(only))
    assert names, f"no training below {only}"
    assert names == sorted(name for name in ours if name.startswith(only)), sorted(ours)
    furthest = 0.0
    for name in names:
        weights, expected = last_weights(ours[name]), last_weights(theirs[name])
        assert weights, f"no weights in the checkpoint of {name}"
        assert weights.keys() == expected.keys(), name
        found = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
        assert found <= within, f"{name}: weights differ by {found:.1e}"
        furthest = max(furthest, found)
    return f"{len(names)} trainings, largest difference of a weight {furthest:.1e}"


def require_same_selection(run_dir: Path, other: Path) -> str:
    """The same decisions, and predictions of each sample that agree."""
    import numpy as np
    import pyarrow.parquet as pq

    files = [Path("selection.parquet")]
    files += sorted(file.relative_to(other) for file in other.glob("rounds/**/predictions.parquet"))
    assert len(files) > 1, "no predictions"
    for file in files:
        ours, theirs = pq.read_table(run_dir / file), pq.read_table(other / file)
        assert ours.column_names == theirs.column_names, file
        for name in theirs.column_names:
            one, two = (table.column(name).to_numpy() for table in (ours, theirs))
            if np.issubdtype(two.dtype, np.floating):
                np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5, err_msg=f"{file}: {name}")
            else:
                np.testing.assert_array_equal(one, two, err_msg=f"{file}: {name}")
    states = pq.read_table(other / "selection.parquet").column("state").to_pylist()
    assert len(set(states)) > 2, "nothing was selected"
    return f"{len(files) - 1} tables of predictions and the selection agree"


def require_same_files(run_dir: Path, other: Path) -> str:
    """Bitwise: checkpoints, selection and predictions."""
    files = [file for folder in ("methods", "rounds") for file in (other / folder).glob("**/predictions.parquet")]
    files += [
        sorted(each.glob("checkpoints/step-*"))[-1] / "tensors.safetensors" for each in trainings(other).values()
    ]
    for file in [*files, other / "selection.parquet"]:
        again = run_dir / file.relative_to(other)
        assert again.read_bytes() == file.read_bytes(), f"{again} differs"
    return f"{len(files) + 1} files are bitwise equal"


def starts(run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run_dir / "manifest.json").read_text())["starts"]
    return found


def judge_fold_groups(place: Path) -> str:
    """Two ranks in each fold group; each fold's weights and the gathered predictions are those of one process."""
    assert starts(place / "fold_groups")[-1]["world"] == 4
    said = require_same_weights(place / "fold_groups", place / "alone", EXACT, "rounds")
    return f"{said}; {require_same_selection(place / 'fold_groups', place / 'alone')}"


def judge_beside(place: Path) -> str:
    assert starts(place / "beside")[-1]["world"] == 2
    said = require_same_weights(place / "beside", place / "alone", EXACT)
    return f"{said}; {require_same_selection(place / 'beside', place / 'alone')}"


def judge_captured(place: Path) -> str:
    said = require_same_weights(place / "captured", place / "alone", EXACT)
    return f"{said}; {require_same_selection(place / 'captured', place / 'alone')}"


def judge_zero2(place: Path) -> str:
    assert {starts(place / name)[-1]["world"] for name in ("ddp", "zero2")} == {2}
    return require_same_weights(place / "zero2", place / "ddp", CLOSE)


def judge_killed(name: str) -> Callable[[Path], str]:
    def judge(place: Path) -> str:
        first, *_, last = starts(place / name)
        resumed = last["resumed"]
        assert first["ended"] != "finished"
        assert last["ended"] == "finished"
        assert any(resumed.values()), f"nothing was resumed: {resumed}"
        return f"resumed {resumed}; {require_same_files(place / name, place / 'beside')}"

    return judge


@dataclass(frozen=True)
class Case:
    """What is compared when the runs have been made."""

    runs: tuple[str, ...]
    judge: Callable[[Path], str]


CASES = {
    "fold_groups": Case(("alone", "fold_groups"), judge_fold_groups),
    "coteaching_eager": Case(("alone", "beside"), judge_beside),
    "coteaching_captured": Case(("alone", "captured"), judge_captured),
    "killed_in_fold": Case(("beside", "killed_in_fold"), judge_killed("killed_in_fold")),
    "killed_in_training": Case(("beside", "killed_in_training"), judge_killed("killed_in_training")),
    "zero2": Case(("ddp", "zero2"), judge_zero2),
}


def require_means(cpu: bool) -> None:
    """Raise Missing unless this machine can play several hosts."""
    import torch

    if not cpu and not torch.cuda.is_available():
        raise Missing("no GPU here")
    if shutil.which("unshare") is None:
        raise Missing("there is no program `unshare` (util-linux)")
    done = subprocess.run(["unshare", "--uts", "hostname", "host0"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"UTS namespaces are forbidden here: {done.stderr.strip()}")


def reason_to_skip(name: str, cpu: bool) -> str | None:
    if name == "zero2" and find_spec("deepspeed") is None:
        return "pip install 'incv[deepspeed]'"
    if name == "coteaching_captured" and cpu:
        return "CUDA graphs need a GPU"
    return None


def check(names: Sequence[str], folder: Path, cpu: bool = False, jobs: int = 1) -> dict[str, str]:
    """The outcome of each case: what begins with ok, FAIL or skip."""
    try:
        require_means(cpu)
    except Missing as missing:
        return dict.fromkeys(names, f"skip ({missing})")
    outcomes = {name: f"skip ({why})" for name in names if (why := reason_to_skip(name, cpu))}
    tried = [name for name in names if name not in outcomes]
    place = Place(folder, cpu)
    needed = sorted({run for name in tried for run in CASES[name].runs}, key=lambda run: "killed" not in run)
    _pack_digits(folder)
    began = time.monotonic()

    def attempt(run: str) -> str | None:
        try:
            place.make(run)
        except Exception as error:
            return str(error)
        print(f"  run {run}: made after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return None

    with ThreadPoolExecutor(jobs) as pool:
        errors = dict(zip(needed, pool.map(attempt, needed), strict=True))
    for name in tried:
        broken = [error for run in CASES[name].runs if (error := errors[run])]
        try:
            outcomes[name] = f"FAIL {broken[0]}" if broken else f"ok {CASES[name].judge(folder)}"
        except Exception as error:
            outcomes[name] = f"FAIL {type(error).__name__}: {error}"
    return {name: outcomes[name] for name in names}


def _pack_digits(folder: Path) -> None:
    """Pack them once; runs that begin together would wait for each other."""
    command = [sys.executable, "-m", "trainer", "labels", "-c", str(REPOSITORY / "recipes" / "tiny.yaml")]
    keys = ["--run-dir", str(folder / "packing"), "execution.device=cpu"]
    subprocess.run([*command, *keys], cwd=folder, env=_environment(0), check=True, capture_output=True, timeout=LIMIT)


def rank_main() -> int:
    """A rank: `incv` with one more network, known to timm."""
    import torch
    from timm.models import register_model
    from torch import nn

    class Network(nn.Module):
        """Without BatchNorm, and smooth: at the tie of a maximum, rounding would lead the gradient."""

        def __init__(self, num_classes: int, dtype: "torch.dtype") -> None:
            super().__init__()
            self.dtype, self.num_classes = dtype, num_classes
            layers = [nn.Conv2d(3, 12, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(12, 16, 3), nn.Tanh()]
            self.layers = nn.Sequential(*layers, nn.Flatten())
            self.fc = nn.Linear(16 * 2 * 2, num_classes)
            self.to(dtype)

        def forward(self, images: "torch.Tensor") -> "torch.Tensor":
            logits: torch.Tensor = self.fc(self.layers(images.to(self.dtype)))
            return logits

    def nccl_hosts_network(num_classes: int = 10, bits: int = 64, **_: Any) -> nn.Module:
        return Network(num_classes, {64: torch.float64, 32: torch.float32}[bits])

    register_model(nccl_hosts_network)
    from trainer.__main__ import main

    return main()


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        del sys.argv[1]
        return rank_main()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--cpu", action="store_true", help="gloo on CPUs, to try the cases")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on the GPU; default: 1")
    parser.add_argument("--keep", type=Path, help="a new folder in which the run directories are kept")
    given = parser.parse_args()
    if unknown := sorted(set(given.cases) - CASES.keys()):
        parser.error(f"no case is called {', '.join(unknown)}: choose from {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = check(given.cases or list(CASES), folder, given.cpu, given.jobs)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}", flush=True)
    return sum(outcome.startswith("FAIL") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
