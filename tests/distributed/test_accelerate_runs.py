"""`accelerate launch` with the shipped CPU configs, plain and DeepSpeed: each resumes the other's run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import RECIPES, REPOSITORY, processes
from tests.support.saved_weights import lived_in, save
from tests.support.twin_training import distance
from trainer.incv.selection_index import SelectionIndex
from trainer.training.checkpoint import read_checkpoint

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install 'incv[deepspeed]'"),
]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to start commands in: recipes/tiny.yaml finds its shards there."""
    folder = tmp_path_factory.mktemp("accelerate")
    processes.pack_digits(folder)
    return folder


class Started:
    """`incv run` under accelerate with a file of recipes/accelerate, or alone without."""

    def __init__(self, place: Path, run_dir: Path, file: str | None, *overrides: str) -> None:
        settings = ["--config_file", str(RECIPES / "accelerate" / f"{file}.yaml")]
        launcher = ["-m", "accelerate.commands.launch", *settings, "--main_process_port", "0"] if file else []
        ranks = 2 if file else 1
        command = [
            sys.executable,
            *launcher,
            "-m",
            "trainer",
            *processes.command(run_dir),
            f"execution.world={ranks}",
            *overrides,
        ]
        self.run_dir, self.log = run_dir, place / f"{run_dir.name}-{file}.log"
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=place, env=environment, stdout=output, stderr=output)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            processes.finish(self.process, 60)

    def require_end(self, code: int) -> None:
        assert processes.finish(self.process) == code, self.log.read_text()

    def stop_in(self, method: str) -> int:
        """Ask for a stop once a checkpoint after the first step is there; the step it stopped at."""
        folder = self.run_dir / "methods" / method
        begun = "step-0000000005"
        processes.wait_until(lambda: any(f.name >= begun for f in processes.step_folders(folder)), self.process)
        (self.run_dir / "STOP").touch()
        processes.finish(self.process)
        stopped = json.loads((self.run_dir / "stopped.json").read_text())
        assert stopped["stage"] == method, self.log.read_text()
        return int(stopped["step"])


def finished(place: Path, name: str, file: str) -> Path:
    with Started(place, place / name, file) as run:
        run.require_end(0)
    return run.run_dir


def test_plain_and_deepspeed_give_the_same_run(place: Path) -> None:
    plain, zero = finished(place, "plain", "cpu"), finished(place, "zero", "cpu_deepspeed")
    checksums = {SelectionIndex.read(run / "selection.parquet").checksum() for run in (plain, zero)}
    assert len(checksums) == 1
    assert (plain / "evaluation.json").read_bytes() == (zero / "evaluation.json").read_bytes()
    for method in ("standard", "coteaching", "coteaching_incv"):
        last = [processes.step_folders(run / "methods" / method)[-1] for run in (plain, zero)]
        assert last[0].name == last[1].name
        assert distance(*(read_checkpoint(folder).tensors for folder in last)) < CLOSE


def test_deepspeed_trains_the_classifier_alone_as_well(place: Path) -> None:
    weights = save(lived_in("digits_cnn", 7), place / "weights.safetensors")
    frozen = (f"model.weights={weights}", "model.trainable=classifier", "methods=[coteaching_incv]")
    found = []
    for name, file in (("plain-frozen", "cpu"), ("zero-frozen", "cpu_deepspeed")):
        with Started(place, place / name, file, *frozen) as run:
            run.require_end(0)
        found.append(read_checkpoint(processes.step_folders(run.run_dir / "methods/coteaching_incv")[-1]).tensors)
    assert distance(*found) < CLOSE
    features = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith("fc.")}
    assert all(torch.equal(found[1][f"model.{pair}.{name}"], features[name]) for pair in "ab" for name in features)


def test_one_process_and_two_under_zero_hand_a_run_to_each_other(place: Path) -> None:
    run_dir = place / "handed"
    longer = "coteaching.epochs=15"  # or the training may end before it notices the stop
    with Started(place, run_dir, None, longer) as run:
        first = run.stop_in("coteaching")
    with Started(place, run_dir, "cpu_deepspeed", longer) as run:
        second = run.stop_in("coteaching_incv")
    with Started(place, run_dir, None, longer) as run:
        run.require_end(0)
    starts = json.loads((run_dir / "manifest.json").read_text())["starts"]
    assert list(resumed(starts)) == [("coteaching", first), ("coteaching_incv", second)]
    assert first > 0
    assert second > 0


def resumed(starts: list[dict[str, dict[str, object]]]) -> Iterator[tuple[object, object]]:
    for start in starts[1:]:
        yield start["resumed_from"]["stage"], start["resumed_from"]["step"]
