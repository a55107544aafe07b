"""Worlds of 1, 2, 3 and 4 processes agree on batches, chosen rows, weights and selection, and resume each other."""

import shutil
from pathlib import Path

import pytest
import torch

from shards.durable import read_json
from tests.support import processes
from tests.support.twin_training import distance
from tests.support.untimed import untimed
from tests.support.world_runs import Planned, arguments, joined, launch, selected_ids, traced, world_size
from trainer.distributed.flat_tensors import unflatten_bytes
from trainer.incv.selection_index import SelectionIndex
from trainer.training.checkpoint import read_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]  # all runs are in the set-up of the first test
STAGES = ("incv", "standard", "coteaching")
LEAST_STEPS = 50


def rates(rate: float, kind: str = "adam") -> tuple[str, ...]:
    keys = (f"kind={kind}", f"learning_rate={rate}", "milestones=[]")
    return tuple(f"{stage}.optimizer.{key}" for stage in STAGES for key in keys)


# 5 steps an epoch or more in every training: a fold has half of the samples or more, and half of them at least are
# selected.
SMALL = ("batch.global=16", "data.train.limit=160", "incv.min_per_class=8")
SMALLER = ("batch.global=8", "data.train.limit=80", "incv.min_per_class=4", "methods=[coteaching_incv]")
LENGTH = ("incv.epochs=10", "standard.epochs=5", "coteaching.epochs=10", "execution.checkpoint_every=1000")
NETWORKS = {
    "plain64": ("model.name=plain64", *SMALL, *LENGTH, *rates(0.01)),
    "plain64_eval_first": (
        "model.name=plain64",
        "incv.rounds=1",
        "incv.folds=4",
        "methods=[coteaching_incv]",
        "coteaching.rank=eval_first",
        *SMALL,
        *LENGTH,
        *rates(0.01),
    ),
    "frozen64": (
        "model.name=frozen64",
        "incv.rounds=1",
        "coteaching.rank=eval_first",
        *SMALLER,
        *LENGTH,
        *rates(0.002),
    ),
    "plain32": (
        "model.name=plain32",
        "incv.rounds=1",
        "methods=[standard,standard_incv,coteaching_incv]",
        "standard_incv={candidates: limited, epochs: 10}",
        *SMALL,
        *LENGTH,
        *rates(0.002),
    ),
    # Small steps: with larger ones this network amplifies fp32's rounding beyond the tolerance within 50 steps, while
    # the same recipe in float64 still agrees to 1e-14.
    "frozen32": ("model.name=frozen32", "incv.rounds=1", *SMALLER, *LENGTH, *rates(0.001, "sgd")),
}
IN_TURN, BESIDE = "in_turn", "side_by_side"
COMPARED = [
    (2, "plain64", IN_TURN),
    (2, "plain64", BESIDE),
    (2, "plain64_eval_first", BESIDE),
    (2, "frozen64", IN_TURN),
    (2, "plain32", IN_TURN),
    (2, "frozen32", BESIDE),
    (3, "plain64_eval_first", IN_TURN),
    (4, "plain64", IN_TURN),
    (4, "plain64_eval_first", BESIDE),
    (4, "frozen64", BESIDE),
    (4, "plain32", BESIDE),
    (4, "frozen32", BESIDE),
]
# Runs that are handed over: a network whose BatchNorm learns, and a stop in the middle of an epoch of 10 steps.
ALIVE = ("batch.global=16", "data.train.limit=160", "standard.epochs=4", "coteaching.epochs=4", "incv.epochs=4")
HANDED = (
    "batch.global=16",
    "data.train.limit=160",
    "standard.epochs=4",
    "standard.ema={decay: 0.9, use_buffers: true}",
    "methods=[standard]",
    "incv=null",
)
STOPPED = (
    *ALIVE,
    "incv.rounds=1",
    "methods=[coteaching]",
    "coteaching.forget_rate=estimate",
    "coteaching.ema={decay: 0.9, use_buffers: true}",
    "execution.folds=in_turn",
)


def name_of(size: int, network: str, folds: str = IN_TURN) -> str:
    return f"{network}-{size}-{folds}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are, in the order in which some of them follow each other."""
    folder = tmp_path_factory.mktemp("equality")
    processes.pack_digits(folder)
    alone = [Planned(name_of(1, network), overrides) for network, overrides in NETWORKS.items()]
    launch(folder, 1, [*alone, Planned("calm1", HANDED), Planned("from1to2", HANDED, ("standard", 15))])
    for size in (2, 3, 4):
        plan = [
            Planned(
                name_of(of, network, folds), (*NETWORKS[network], f"execution.folds={folds if of != 3 else 'auto'}")
            )
            for of, network, folds in COMPARED
            if of == size
        ]
        if size == 2:
            plan += [Planned("from1to2", HANDED), Planned("from2to1", HANDED, ("standard", 15))]
        if size == 4:
            stops = (("incv/0/1", 7), ("coteaching", 13), None)
            plan += [Planned("calm4", STOPPED), *(Planned("stopped4", STOPPED, stop) for stop in stops)]
        launch(folder, size, plan)
    return folder


@pytest.fixture(params=COMPARED, ids=lambda each: name_of(*each))
def pair(request: pytest.FixtureRequest, place: Path) -> tuple[Path, Path]:
    """The run of one process, and the one of several."""
    size, network, folds = request.param
    one, several = place / name_of(1, network), place / name_of(size, network, folds)
    assert world_size(one) == 1
    assert world_size(several) == size
    return one, several


def test_the_same_batches(pair: tuple[Path, Path]) -> None:
    """Each rank's ids are its own, and in the order of ranks they are the ids and boxes of one process."""
    one, several = (traced(run) for run in pair)
    selected = selected_ids(pair[0])
    assert one.keys() == several.keys()
    beside = "side_by_side" in pair[1].name
    for (training, step), (alone,) in one.items():
        lines = several[training, step]
        fold = training.startswith("incv/")
        assert len(lines) == world_size(pair[1]) // (2 if fold and beside else 1)
        ids = [number for line in lines for number in line["ids"]]
        assert len(set(ids)) == len(ids)
        assert max(len(line["ids"]) for line in lines) - min(len(line["ids"]) for line in lines) <= 2
        with_candidates = selected if training.endswith("_incv") else None
        assert joined(lines, with_candidates) == joined([alone], None), (training, step)


def test_the_same_rows_are_chosen(pair: tuple[Path, Path]) -> None:
    one, several = (traced(run) for run in pair)
    forgot = set()
    for (training, step), (alone,) in one.items():
        lines = several[training, step]
        if alone["chosen"] is None:
            assert all(line["chosen"] is None for line in lines)
            continue
        for network in (0, 1):
            chosen = [number for line in lines for number in line["chosen"][network]]
            assert all(set(line["chosen"][network]) <= set(line["ids"]) for line in lines)
            assert sorted(chosen) == sorted(alone["chosen"][network]), (training, step, network)
            if len(chosen) < len(alone["ids"]):
                forgot.add(training)
    assert "coteaching_incv" in forgot


def test_the_same_weights(pair: tuple[Path, Path]) -> None:
    tolerance = 1e-9 if "64" in pair[1].name else 1e-5
    one, several = (processes.trainings(run) for run in pair)
    assert one.keys() == several.keys()
    for name in one:
        last = [processes.step_folders(each[name])[-1] for each in (one, several)]
        assert processes.step_of(last[0]) == processes.step_of(last[1]) >= LEAST_STEPS, name
        weights = [_weights(folder) for folder in last]
        assert {t.dtype for t in weights[0].values()} <= {torch.float64 if "64" in pair[1].name else torch.float32}
        assert distance(*weights) < tolerance, name
        before = _weights(processes.step_folders(one[name])[-2])
        assert distance(weights[0], before) > 10 * tolerance, f"{name} was hardly trained"


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = read_checkpoint(checkpoint).tensors
    return {name: t for name, t in tensors.items() if name.startswith("model.") and t.is_floating_point()}


def test_the_same_selection(pair: tuple[Path, Path]) -> None:
    checksums = {SelectionIndex.read(run / "selection.parquet").checksum() for run in pair}
    assert len(checksums) == 1
    assert len(selected_ids(pair[0])) > 0


def test_one_process_hands_a_run_to_two(place: Path) -> None:
    require_same_order(place, place / "from1to2", [1, 2])


def test_two_processes_hand_a_run_to_one(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = shutil.copytree(place / "from2to1", tmp_path / "run")
    monkeypatch.chdir(place)
    code, error = processes.run_here(arguments(run_dir, "execution.world=1", *HANDED))
    assert code == 0, error
    require_same_order(place, run_dir, [2, 1])


def require_same_order(place: Path, run_dir: Path, sizes: list[int]) -> None:
    """Begun by sizes[0] processes, stopped, and finished by sizes[1]."""
    starts = read_json(run_dir / "manifest.json")["starts"]
    assert [start["world"] for start in starts] == sizes
    resumed = starts[1]["resumed"]["standard"]
    assert 15 < resumed < 40
    calm, handed = traced(place / "calm1"), traced(run_dir)
    assert calm.keys() == handed.keys()
    for key, (alone,) in calm.items():
        assert len(handed[key]) == sizes[int(key[1] >= resumed)]
        assert joined(handed[key], None) == joined([alone], None), key


def test_statistics_of_every_rank_are_kept(place: Path) -> None:
    """Those of a checkpoint in the middle of an epoch differ; a world of another size begins with their mean."""
    newest = processes.step_folders(place / "from2to1" / "methods" / "standard")[-1]
    assert processes.step_of(newest) % 10, "the stop was to be in the middle of an epoch"
    tensors = read_checkpoint(newest).tensors
    own = tensors["ranks.buffers"]
    assert len(own) == 2
    assert not torch.equal(own[0], own[1])
    names = sorted(name for name in tensors if name.endswith(("running_mean", "running_var")))
    averaged = [name for name in names if name.startswith("ema.")]
    assert len(averaged) == len(names) / 2
    means = [tensors[name] for name in [*(name for name in names if name not in averaged), *averaged]]
    rows = [unflatten_bytes(row, means) for row in own]
    for mean, of_ranks in zip(means, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(mean, torch.stack(of_ranks).mean(0))


def test_four_ranks_resume_bit_for_bit(place: Path) -> None:
    """Stopped inside a fold and inside Co-teaching; sums over more than two ranks depend on their order."""
    calm, stopped = place / "calm4", place / "stopped4"
    assert world_size(calm) == world_size(stopped) == 4
    starts = read_json(stopped / "manifest.json")["starts"]
    assert [start["ended"] for start in starts] == ["stopped", "stopped", "finished"]
    assert 7 < starts[1]["resumed"]["incv/0/1"] < 20
    assert 13 < starts[2]["resumed"]["coteaching"] < 40
    ours, theirs = processes.trainings(stopped), processes.trainings(calm)
    assert ours.keys() == theirs.keys() == {"incv/0/0", "incv/0/1", "coteaching"}
    for name in ours:
        last = [processes.step_folders(each[name])[-1] for each in (ours, theirs)]
        for file in ("tensors.safetensors", "state.json"):
            assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes(), f"{name}: {file}"
    for file in ("evaluation.json", "selection.parquet", "methods/coteaching/metrics.jsonl"):
        assert untimed(stopped / file) == untimed(calm / file), file
