"""A method of another package that looks at the data before every epoch: passes, new labels, votes, soft targets."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shards.durable import read_json
from tests.support import REPOSITORY, processes, relabel_package_folder
from tests.support.relabel_package.incv_relabel import (
    balance_classes,
    neighbours_agree,
    soft_targets,
    vote_on_ranks,
)
from tests.support.untimed import untimed
from tests.support.world_runs import Planned, launch, traced, world_size
from trainer.distributed.world import SINGLE_PROCESS
from trainer.run.export import load_network
from trainer.training.checkpoint import read_checkpoint

SECTION = "epochs: 5, warm_epochs: 2, threshold: 0.5, neighbours: 5, mixup: {alpha: 0.5}"
KEYS = (
    "incv=null",
    "methods=[relabel]",
    "data.train.limit=200",
    "image.rand_augment={operations: 2, magnitude: 2}",
    "execution.threads=1",
    "execution.predict_batch=64",
    "execution.checkpoint_every=3",
    f"relabel={{{SECTION}, optimizer: {{kind: adam, learning_rate: 0.005}}}}",
)
STEPS_PER_EPOCH = 7
"""200 samples in steps of 32."""


def test_it_is_one_file_of_under_200_lines() -> None:
    files = [file for file in relabel_package_folder().iterdir() if file.suffix == ".py"]
    assert [file.name for file in files] == ["incv_relabel.py"]
    assert len(files[0].read_text().splitlines()) < 200


@given(
    st.integers(0, 2**32),
    st.integers(0, 50),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 99),
)
def test_classes_are_balanced(stream: int, epoch: int, labels: list[int], count: int) -> None:
    ids, classes = np.arange(len(labels)) * 3 + 1, np.array(labels)
    dealt = balance_classes(stream, epoch, ids, classes, count)
    assert len(dealt) == count
    assert set(dealt) <= set(ids)
    found = [int((classes[(dealt - 1) // 3] == one).sum()) for one in np.unique(classes)]
    assert max(found) - min(found) <= 1
    for one in np.unique(classes):  # no sample is shown twice more often than another of its class
        times = [int((dealt == sample).sum()) for sample in ids[classes == one]]
        assert max(times) - min(times) <= 1
    assert np.array_equal(dealt, balance_classes(stream, epoch, ids[::-1], classes[::-1], count))


def test_votes_are_those_of_the_nearest_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (60,), generator=generator)
    features = torch.randn(60, 5, generator=generator) + 2 * torch.eye(5)[labels]
    features[31] = features[30] = features[12]  # equally near: the first counts
    directions = features.double() / features.double().norm(dim=1, keepdim=True)
    expected = []
    for row in range(60):
        order = sorted(
            set(range(60)) - {row}, key=lambda one: (-round(float(directions[row] @ directions[one]), 5), one)
        )
        votes = [sum(int(labels[one]) == label for one in order[:7]) for label in range(3)]
        expected.append(votes[labels[row]] == max(votes))
    assert vote_on_ranks(SINGLE_PROCESS, features, labels, 7).tolist() == expected
    assert 10 < sum(expected) < 60
    asked = torch.tensor([44, 2])
    assert neighbours_agree(features, labels, asked, 7).tolist() == [expected[44], expected[2]]
    assert neighbours_agree(features[:1], labels[:1], torch.tensor([0]), 7).tolist() == [True]


def test_sure_samples_get_a_new_label_and_others_a_mixture() -> None:
    given_labels = torch.eye(3)[[0, 1]]
    probabilities = torch.tensor([[0.05, 0.05, 0.9], [0.25, 0.25, 0.5]])
    expected = torch.tensor([[0.0, 0.0, 1.0], [0.125, 0.625, 0.25]])
    torch.testing.assert_close(soft_targets(given_labels, probabilities, 0.8), expected)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(relabel_package_folder(), folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", folder / "source"], check=True, timeout=120)
    return folder / "site"


def incv(
    site: Path, folder: Path, *arguments: str, killed_at: str | None = None
) -> "subprocess.CompletedProcess[str]":
    program = ["-m", "trainer"] if killed_at is None else [str(processes.DRIVER), killed_at, "--"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY)])}
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def arguments(run_dir: str) -> list[str]:
    return ["run", "-c", str(processes.RECIPE), *KEYS, "--run-dir", run_dir]


@pytest.fixture(scope="module")
def finished(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = processes.pack_digits(tmp_path_factory.mktemp("runs"))
    done = incv(site, folder, *arguments("whole"))
    assert done.returncode == 0, done.stderr
    assert "Re-labelling" in done.stdout
    return folder


def border_lines(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "methods/relabel/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "kept" in line]


@pytest.mark.slow
def test_labels_and_rows_change_between_epochs(finished: Path) -> None:
    lines = border_lines(finished / "whole")
    assert [line["step"] for line in lines] == [epoch * STEPS_PER_EPOCH for epoch in range(6)]
    assert [(line["relabelled"], line["kept"]) for line in lines[:2]] == [(0.0, 1.0)] * 2
    assert all(0 < line["relabelled"] < 1 for line in lines[2:])
    assert all(0 < line["kept"] < 1 for line in lines[2:])
    assert len({line["kept"] for line in lines[2:5]}) > 1


@pytest.mark.slow
def test_it_is_evaluated_exported_and_reported(finished: Path) -> None:
    run = finished / "whole"
    evaluation = read_json(run / "evaluation.json")["test"]
    assert len(evaluation["relabel"]["networks"]) == 1
    (exported,) = (run / "methods/relabel/export").rglob("model.safetensors")
    assert not load_network(exported.parent).training
    assert '"Re-labelling"' in (run / "report.json").read_text()
    assert "Re-labelling" in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_dry_run_estimates_it(site: Path, finished: Path) -> None:
    done = incv(site, finished, *arguments("planned"), "--dry-run", "--gpus", "1,8", "execution.device=auto")
    assert done.returncode == 0, done.stderr
    assert "1 network, 5 epochs" in done.stdout
    assert any("relabel" in line for line in done.stdout.partition("estimate")[2].splitlines()), done.stdout
    assert not (finished / "planned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["relabelling_pass", "relabelled_epoch"])
def test_a_killed_run_resumes_bit_for_bit(point: str, site: Path, finished: Path) -> None:
    """Killed in the pass before the fourth epoch, and within the third."""
    killed = incv(site, finished, *arguments(point), killed_at=point)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = incv(site, finished, *arguments(point))
    assert done.returncode == 0, done.stderr
    ours, theirs = finished / point, finished / "whole"
    assert read_json(ours / "manifest.json")["starts"][1]["resumed_from"]["step"] in (
        15,
        18,
    )  # within the third epoch
    last = [processes.step_folders(run / "methods/relabel")[-1] for run in (ours, theirs)]
    assert last[0].name == last[1].name
    for file in ("tensors.safetensors", "state.json"):
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes(), file
    assert untimed(ours / "methods/relabel/metrics.jsonl") == untimed(theirs / "methods/relabel/metrics.jsonl")
    assert (ours / "evaluation.json").read_bytes() == (theirs / "evaluation.json").read_bytes()


RANKS = (
    *KEYS,
    "model.name=plain64",
    "relabel.threshold=0.3",
    "relabel.optimizer={kind: adam, learning_rate: 0.01}",
)


@pytest.mark.cluster
def test_two_ranks_plan_and_train_as_one(site: Path, finished: Path) -> None:
    for size in (1, 2):
        launch(finished, size, [Planned(f"ranks{size}", RANKS)], packages=[site])
        assert world_size(finished / f"ranks{size}") == size
    runs = [finished / f"ranks{size}" for size in (1, 2)]
    keys = ("step", "relabelled", "kept")
    lines = [[{key: line[key] for key in keys} for line in border_lines(run)] for run in runs]
    assert lines[0] == lines[1]
    assert 0 < lines[0][-1]["kept"] < 1
    assert 0 < lines[0][-1]["relabelled"] < 1
    shown = [{at: rows_of(step) for at, step in traced(run).items()} for run in runs]
    assert len(shown[0]) == 5 * STEPS_PER_EPOCH
    assert shown[0] == shown[1]
    last = [processes.step_folders(run / "methods/relabel")[-1] for run in runs]
    plans = [read_checkpoint(folder).values["plan"] for folder in last]
    assert plans[0] == plans[1]
    tensors = [read_checkpoint(folder).tensors for folder in last]
    assert torch.equal(*(found["table.keep"] for found in tensors))
    for name, tensor in tensors[0].items():
        if name.startswith(("model.", "table.targets")) and tensor.is_floating_point():
            torch.testing.assert_close(tensors[1][name], tensor, rtol=0, atol=1e-6, msg=name)


def rows_of(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What a step showed on all ranks, in one order: id, crop, flip, operations, partner and its share."""
    fields = ("ids", "boxes", "flips", "operations", "partners", "shares")
    rows = [row for line in lines for row in zip(*(line[field] for field in fields), strict=True)]
    assert len(rows) == 64  # two views of each id
    return sorted(rows, key=repr)
