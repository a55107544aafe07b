"""A real two-node Slurm on this machine, without systemd: all files in one folder, stopped by its pid files."""

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import free_ports

PACKAGES = ("slurm-wlm", "slurmd", "slurmctld", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun", "scontrol", "scancel")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

# A requeued job waits cred_expire: 120 s by default, 5 at least; KillWait is the time between SIGTERM and SIGKILL.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
MinJobAge=3600
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 DefaultTime=30 State=UP OverSubscribe=FORCE:4
"""


@dataclass(frozen=True)
class Job:
    """What `scontrol show job` says: without accounting there is no sacct."""

    state: str
    exit_code: int
    restarts: int
    facts: dict[str, str]


class SlurmCluster:
    """Nodes n1 and n2; commands of Slurm talk to it through SLURM_CONF."""

    def __init__(self, folder: Path, kill_wait: int = 20) -> None:
        self._folder, self._kill_wait = folder, kill_wait
        others = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = {**others, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("munge", "state", "spool-n1", "spool-n2"):
            (self._folder / name).mkdir(parents=True, mode=0o755)
        facts = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "ports": free_ports(3)}
        text = CONFIGURATION.format(folder=self._folder, kill_wait=self._kill_wait, **facts)
        (self._folder / "slurm.conf").write_text(text)
        for name in ("gpu0", "gpu1"):  # Slurm only counts them: a job is granted two on a node, and finds none
            (self._folder / name).touch()
        (self._folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={self._folder}/gpu[0-1]\n")
        munge = self._folder / "munge"
        self._do("mungekey", "--create", f"--keyfile={munge}/key")
        files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "log"}
        files["seed-file"] = "seed"
        self._do("munged", "--force", *(f"--{option}={munge}/{name}" for option, name in files.items()))
        self._do("slurmctld", "-c")
        for node in ("n1", "n2"):
            self._do("slurmd", "-N", node)
        wait_until(self._is_idle, 30, self.logs)

    def stop(self) -> None:
        """What still runs of jobs is killed, then the daemons are ended."""
        with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            self._do("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
        end_processes(
            [int(file.read_text()) for file in [*self._folder.glob("*.pid"), *self._folder.glob("munge/*.pid")]]
        )

    def submit(self, script: Path, *arguments: str, cwd: Path, options: Sequence[str] = (), **variables: str) -> str:
        """The number of the new job. variables: INCV_SETUP=... and the like, on top of the environment."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        return self.answer(*command, cwd=cwd, **variables).strip()

    def answer(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Standard output of a command that must succeed."""
        environment = {**self.environment, **variables}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> Job:
        said = self.answer("scontrol", "show", "job", "--oneliner", number)
        facts = dict(re.findall(r"(\S+?)=(\S*)", said))
        code, _, signal_number = facts["ExitCode"].partition(":")
        return Job(facts["JobState"], int(code) or 128 * bool(int(signal_number)), int(facts["Restarts"]), facts)

    def wait_for_end(self, number: str, seconds: float, said: Callable[[], str]) -> Job:
        """said: what to show where it does not end."""
        wait_until(
            lambda: self.job(number).state in ENDED, seconds, lambda: f"{self.job(number)}\n{said()}", pause=0.5
        )
        return self.job(number)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self._folder.glob("*.log"))

    def _is_idle(self) -> bool:
        said = subprocess.run(
            ["scontrol", "show", "node", "--oneliner"], env=self.environment, capture_output=True, text=True
        )
        return re.findall(r"\bState=(\S+)", said.stdout) == ["IDLE", "IDLE"]

    def _do(self, *command: str) -> None:
        environment = {**self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)


def wait_until(
    condition: Callable[[], bool], seconds: float, said: Callable[[], str] = lambda: "", pause: float = 0.05
) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"the awaited moment did not come in {seconds} s\n{said()}"
        time.sleep(pause)


def end_processes(pids: Sequence[int], seconds: float = 10) -> None:
    """By SIGTERM, and by SIGKILL if that does not help."""
    limit = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < limit:
                os.kill(pid, 0)
                time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
