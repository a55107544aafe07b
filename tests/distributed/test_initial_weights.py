"""Initial weights on several ranks: rank 0 finds them, the others read the same file."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import REPOSITORY, processes
from tests.support.saved_weights import fill_hub_cache, lived_in, save
from tests.support.world_runs import arguments, finish
from trainer.models.factory import create_model

pytestmark = pytest.mark.cluster
LAUNCHER = REPOSITORY / "tests" / "support" / "forked_ranks.py"
NAME = "test_resnet.r160_in1k"
SHORT = (
    *("methods=[standard]", "standard.epochs=1", "incv=null", "data.eval={}", "data.train.limit=100"),
    *("standard.optimizer={kind: sgd, learning_rate: 1.0e-30, momentum: 0.0}", f"model.name={NAME}"),
)


@dataclass(frozen=True)
class Rank:
    """Where a rank is started, and with which environment."""

    cwd: Path
    environ: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return processes.pack_digits(tmp_path_factory.mktemp("weights"))


def launch(place: Path, name: str, ranks: list[Rank], *overrides: str) -> tuple[list[int], str]:
    """Run the same command on all ranks; returns their exit codes and all that they printed."""
    shards = f"data.train.shards={place}/data/shards/digits-train"
    told = arguments(place / name, shards, *SHORT, *overrides)
    each = [{"arguments": told, "cwd": str(rank.cwd), "environ": rank.environ} for rank in ranks]
    file = place / f"{name}.json"
    file.write_text(json.dumps([{"name": name, "port": processes.free_ports(1)[0], "ranks": each}]))
    process = subprocess.Popen([sys.executable, str(LAUNCHER), str(file)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert finish(process, 120) == 0
    codes: list[int] = json.loads(file.with_suffix(".out.json").read_text())[name]["codes"]
    return codes, "".join((place / f"{name}-rank{rank}.log").read_text() for rank in range(len(ranks)))


def test_only_rank_0_looks_for_the_weights_and_all_ranks_start_from_them(place: Path) -> None:
    saved = lived_in("test_resnet", 1000)
    fill_hub_cache(place / "hub", NAME, saved)
    caches = [{"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(place / cache)} for cache in ("hub", "empty")]
    codes, printed = launch(place, "run", [Rank(place, environ) for environ in caches], "model.pretrained=true")
    assert codes == [0, 0], printed
    newest = max((place / "run/methods/standard/checkpoints").glob("step-*")) / "tensors.safetensors"
    trained, start = load_file(newest), saved.state_dict()
    body = [name for name, _ in create_model(NAME, 10, 0).named_parameters() if not name.startswith("fc.")]
    for name in body:
        torch.testing.assert_close(trained[f"model.{name}"], start[name], rtol=0, atol=1e-20)


def test_two_ranks_train_the_classifier_alone_and_agree(place: Path) -> None:
    saved = save(lived_in("test_resnet", 7), place / "head" / "w.safetensors")
    told = (f"model.weights={saved}", "model.trainable=classifier", "standard.optimizer={learning_rate: 0.01}")
    codes, printed = launch(place, "head-run", [Rank(place), Rank(place)], *told)
    assert codes == [0, 0], printed
    newest = max((place / "head-run/methods/standard/checkpoints").glob("step-*")) / "tensors.safetensors"
    trained, start = load_file(newest), load_file(saved)
    body = [name for name in start if not name.startswith("fc.")]
    assert all(torch.equal(trained[f"model.{name}"], start[name]) for name in body)
    fresh = create_model(NAME, 10, 0).state_dict()["fc.bias"]
    assert not torch.equal(trained["model.fc.bias"], fresh)


def test_other_weights_at_the_same_path_are_refused(place: Path) -> None:
    """As on two nodes without shared storage."""
    for folder, seed in (("one", 1), ("other", 2)):
        save(lived_in("test_resnet", 7, seed), place / folder / "w.safetensors")
    ranks = [Rank(place / folder) for folder in ("one", "other")]
    codes, printed = launch(place, "differ", ranks, "model.weights=w.safetensors")
    assert 2 in codes, printed
    assert 0 not in codes
    assert "differ in the initial weights" in printed


def test_a_node_that_cannot_see_the_weights_is_named(place: Path) -> None:
    (place / "bare").mkdir()
    save(lived_in("test_resnet", 7), place / "one" / "w.safetensors")
    codes, printed = launch(
        place, "unseen", [Rank(place / "one"), Rank(place / "bare")], "model.weights=w.safetensors"
    )
    assert 0 not in codes, printed
    assert "cannot access the weights w.safetensors" in printed
    assert "storage that every node mounts" in printed
