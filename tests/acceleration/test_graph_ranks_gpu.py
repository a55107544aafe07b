"""Several graphs per step with all-reduces between them match DDP and one process. `make test-gpu` runs these."""

import os
import subprocess
import sys
import time
from itertools import chain

import pytest
import torch

from tests.support import REPOSITORY
from tests.support.fast_steps import KINDS
from tests.support.processes import free_ports

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
PROGRAM = REPOSITORY / "tests" / "support" / "graph_ranks_program.py"
LIMIT = 300
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "ACCELERATE_", "SLURM_", "TORCHELASTIC_")


def told_by(ranks, folder):
    """What each of so many processes on this machine wrote, by rank."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # Packages may lie where only PYTHONPATH tells of them.
    paths = [str(REPOSITORY), *filter(None, [plain.get("PYTHONPATH")])]
    plain |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*free_ports(1)), "WORLD_SIZE": str(ranks)}
    world |= {"LOCAL_WORLD_SIZE": str(ranks)}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            own = {} if ranks == 1 else world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                command = [sys.executable, str(PROGRAM), str(folder)]
                processes.append(subprocess.Popen(command, env=plain | own, stdout=output, stderr=subprocess.STDOUT))
        limit = time.monotonic() + LIMIT
        codes = [process.wait(max(1.0, limit - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text() for log in logs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (told,) = told_by(1, tmp_path_factory.mktemp("alone"))
    return told


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return told_by(2, tmp_path_factory.mktemp("ranks"))


def furthest(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def ids_of(stories):
    """By step and network, all ranks' chosen ids."""
    steps = zip(*(story["chosen"] for story in stories), strict=True)
    return [[sorted(chain(*parts)) for parts in zip(*of_ranks, strict=True)] for of_ranks in steps]


def assert_same_values(ours, theirs, rel):
    for one, other in zip(ours["values"], theirs["values"], strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_two_ranks_do_what_ddp_does(kind, ranks):
    for told in ranks:
        replayed, ddp = told[f"{kind} graphs"], told[f"{kind} eager"]
        assert replayed["chosen"] == ddp["chosen"]
        assert replayed["guard"] == ddp["guard"] == {"skipped": 1, "in_a_row": 0}
        assert furthest(replayed["first"], ddp["first"]) == 0.0
        assert furthest(ddp["last"], ddp["first"]) > 0.01  # it did learn
        assert furthest(replayed["last"], ddp["last"]) < 1e-5
        assert_same_values(replayed, ddp, rel=1e-5)


@pytest.mark.parametrize("way", ["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_hold_the_same_weights(kind, way, ranks):
    one, other = (told[f"{kind} {way}"] for told in ranks)
    assert furthest(one["last"], other["last"]) == 0.0
    assert_same_values(one, other, rel=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_graphs_do_what_one_process_does(kind, alone, ranks):
    """One process with the same global batch, eagerly; its graphs are one a step."""
    single, stories = alone[f"{kind} eager"], [told[f"{kind} graphs"] for told in ranks]
    assert ids_of(stories) == ids_of([single])
    assert furthest(stories[0]["last"], single["last"]) < 1e-4
    assert_same_values(stories[0], single, rel=1e-4)
    if kind != "standard":
        assert all(story["chosen"][0][0] for story in stories)  # both ranks had rows to learn from
        assert len({values["kept"] for values in single["values"]}) > 3  # n(e) did change


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_one_process_do_the_same(kind, alone):
    assert alone[f"{kind} graphs"]["chosen"] == alone[f"{kind} eager"]["chosen"]
    assert furthest(alone[f"{kind} graphs"]["last"], alone[f"{kind} eager"]["last"]) < 1e-5
