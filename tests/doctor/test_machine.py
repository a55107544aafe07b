"""The doctor without a run: what it says of good and of bad folders, libraries, shards and ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shards.pack import pack
from shards.sources import open_source
from tests.support import REPOSITORY
from tests.support.ordinary_user import ordinary_user
from tests.support.small_disk import mounted_disk
from trainer.distributed.launch import Launch
from trainer.doctor.machine import (
    Finding,
    examine_folder,
    examine_library,
    examine_memory,
    examine_shared_memory,
    explain_missing_gpu,
    find_file_system,
    format_findings,
    judge_machine,
    read_memory,
    try_lock,
)
from trainer.doctor.probes import examine_launcher, examine_shards, merge_reports


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


def test_a_good_folder_is_left_as_it_was(tmp_path: Path) -> None:
    findings = list(examine_folder(tmp_path))
    assert levels(findings)["file system"] == "ok" or find_file_system(tmp_path) in ("tmpfs", "ramfs")
    assert "GiB free" in findings[0].words
    assert not list(tmp_path.iterdir())
    assert levels(list(examine_folder(tmp_path / "not" / "yet"))) == levels(findings)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_write_access_is_a_problem_with_a_fix(tmp_path: Path) -> None:
    folder = tmp_path / "read_only"
    folder.mkdir(mode=0o555)
    with ordinary_user(folder):
        findings = list(examine_folder(folder))
    assert levels(findings)["file system"] == "problem"
    assert "Permission denied" in findings[-1].words
    assert findings[-1].fix


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = examine_folder(tmp_path / "file" / "run")
    assert finding.level == "problem"


def test_a_full_disk_is_a_problem(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "small", "1m") as small:
        assert levels(list(examine_folder(small)))["disk"] == "problem"
        assert [each.level for each in examine_shared_memory(2, small)] == ["problem"]
        assert not list(examine_shared_memory(1, small))


def test_locks_are_tried(tmp_path: Path) -> None:
    assert try_lock(tmp_path / "lock") is None


def test_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    assert examine_memory().words
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    assert read_memory(tmp_path) == (None, None)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 32 kB\nHugePages: 0\n")
    assert read_memory(tmp_path) == (32 * 1024, 64 * 1024)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert read_memory(tmp_path) == (32 * 1024, 64 * 1024)
    (group / "memory.max").write_text("3000\n")
    assert read_memory(tmp_path) == (2000, 3000)


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "a folder"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(
        f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nother {escaped} lustre rw 0 0\nbroken\n"
    )
    assert find_file_system(inner / ".." / "a folder", mounts) == "lustre"
    assert find_file_system(tmp_path, mounts) == "nfs4"
    assert find_file_system(Path("/"), mounts) == "ext4"
    assert find_file_system(tmp_path, tmp_path / "none") == "unknown type"


@pytest.mark.parametrize(
    ("driver", "cuda", "visible", "level", "words"),
    [
        (None, "13.0", None, "note", "no NVIDIA driver"),
        (None, None, None, "note", "no NVIDIA driver"),
        ("580.1", None, None, "problem", "built without CUDA"),
        ("470.1", "13.0", None, "problem", "470.1"),
        ("580.1", "13.0", "", "note", "CUDA_VISIBLE_DEVICES"),
        ("580.1", "13.0", "-1", "note", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_missing_gpu_is_explained(
    driver: str | None, cuda: str | None, visible: str | None, level: str, words: str
) -> None:
    finding = explain_missing_gpu(driver, cuda, visible)
    assert finding.level == level
    assert words in finding.words
    assert finding.fix


def test_broken_and_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libbroken.so: cannot open shared object file')\n")
    (tmp_path / "crashing_package.py").write_text("import os\nos.abort()\n")
    (tmp_path / "incomplete_package.py").write_text("import no_such_package\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    absent = Finding("package", "note", "not installed")
    assert "libbroken.so" in examine_library("broken_package", absent).words
    assert examine_library("crashing_package", absent).level == "problem"
    assert examine_library("incomplete_package", absent).level == "problem"
    assert examine_library("no_such_package", absent) == absent
    assert examine_library("no_such_package.part", absent) == absent
    assert examine_library("json", absent) == Finding("package", "ok", "2.0.9")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "digits"
    pack(open_source("digits", None, "test"), folder)
    return folder


def test_shards_are_loaded_for_a_moment(shards: Path) -> None:
    finding = examine_shards(shards, 0.2)
    assert finding.level == "ok"
    assert "400 images" in finding.words
    assert "images/s" in finding.words


def test_damaged_and_missing_shards_are_problems(shards: Path) -> None:
    assert "dataset.json" in examine_shards(shards / "none").words
    tar = next(shards.glob("*.tar"))
    content = bytearray(tar.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    tar.write_bytes(content)
    finding = examine_shards(shards, 5.0)
    assert finding.level == "problem"
    assert "are damaged" in finding.words
    assert "incv shards verify" in finding.fix


def test_a_lone_process_learns_how_to_test_collectives() -> None:
    assert examine_launcher(Launch("alone"), 0, {}).level == "ok"
    assert "torchrun --nproc-per-node 4" in examine_launcher(Launch("alone"), 4, {}).fix
    assert "srun" in examine_launcher(Launch("alone"), 0, {"SLURM_NTASKS": "8"}).fix
    assert examine_launcher(Launch("srun"), 0, {"SLURM_NTASKS": "8"}).level == "ok"


def test_what_another_rank_alone_has_found_is_reported_with_its_rank() -> None:
    good, note, bad = Finding("torch", "ok", "2"), Finding("GPU", "note", "none"), Finding("disk", "problem", "full")
    merged = merge_reports([[good, note], [good, note], [Finding("torch", "ok", "3"), note, bad], [bad]])
    assert merged == [good, note, Finding("disk", "problem", "rank 2: full")]


def test_the_verdict_follows_the_worst_finding() -> None:
    good, note, bad = Finding("a", "ok", "x"), Finding("b", "note", "x"), Finding("c", "problem", "x", "do it")
    assert judge_machine([good]) == "verdict: all is well."
    assert "the note" in judge_machine([good, note])
    assert "1 problem to solve before a run: c" in judge_machine([good, note, bad])
    text = format_findings([Finding("disk", "problem", "/runs/\x1b[31m" + "word " * 60, "do it")])
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "fix: do it" in text


RANK_PROGRAM = """
import json, sys
from dataclasses import asdict
from trainer.distributed.launch import detect_launch
from trainer.doctor import probes
from trainer.doctor.machine import Finding
probes.JOIN_SECONDS = float(sys.argv[1])
launch = detect_launch()
own = [Finding("disk", "problem" if launch.rank else "ok", f"of rank {launch.rank}")]
print(json.dumps([asdict(each) for each in probes.examine_collectives(launch, own)]))
"""


def start_rank(rank: int, port: int, seconds: float, by_srun: bool = False) -> "subprocess.Popen[str]":
    told: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if by_srun:
        told |= {"SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        told |= {"SLURM_STEP_TASKS_PER_NODE": 2, "SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0}
    else:
        told |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    environment = os.environ | {name: str(value) for name, value in told.items()}
    return subprocess.Popen(
        [sys.executable, "-c", RANK_PROGRAM, str(seconds)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("by_srun", [False, True])
def test_two_ranks_test_a_collective_and_rank_0_reports_for_both(by_srun: bool) -> None:
    port = free_port()
    ranks = [start_rank(rank, port, 60, by_srun) for rank in range(2)]
    first, second = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert [(each["subject"], each["level"]) for each in first] == [
        ("disk", "ok"),
        ("collective", "ok"),
        ("disk", "problem"),
    ]
    assert first[2]["words"] == "rank 1: of rank 1"
    assert f"{'srun' if by_srun else 'torchrun'}, 2 ranks, gloo: all-reduce is right" in first[1]["words"]
    assert len(second) == 2


def test_a_rank_whose_peer_never_comes_says_so() -> None:
    rank = start_rank(0, free_port(), 3)
    *_, finding = json.loads(rank.communicate(timeout=120)[0])
    assert (finding["subject"], finding["level"]) == ("collective", "problem")
    assert "could not join" in finding["words"]
    assert "firewall" in finding["fix"]
