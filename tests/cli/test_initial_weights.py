"""Runs that start from given weights: where each network starts, what a resumed run asks for, what is refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file

from tests.support.command_line import THREADS, TINY, Answer, unchanged
from tests.support.processes import DRIVER, finish, require_whole, step_folders, trainings
from tests.support.saved_weights import Canary, fill_hub_cache, lived_in, save
from trainer.run.recipe import check_recipe, load_recipe
from trainer.run.result_keys import result_keys

Incv = Callable[..., Answer]
Tensors = dict[str, torch.Tensor]
PRETRAINED = "test_resnet.r160_in1k"
FIXED = "{kind: sgd, learning_rate: 1.0e-30, momentum: 0.0}"  # parameters stay where they start
SHORT = (
    *("data.train.limit=80", "data.eval={}", "labels.noise=none", "labels.ratio=0.0", "incv.rounds=1"),
    *("incv.epochs=1", "incv.round_network=last", "incv.min_per_class=2", "coteaching.epochs=1"),
    *(f"{section}.optimizer={FIXED}" for section in ("incv", "coteaching")),
)
RUN = ("run", "-c", TINY, "--run-dir", "run", THREADS, *SHORT, "methods=[coteaching_incv]")


def of_file(path: Path) -> str:
    return f"model.weights={path}"


def parameters(checkpoints: Path, prefix: str = "model.") -> Tensors:
    """The parameters in the newest checkpoint, by name; BatchNorm's statistics move even at a rate of zero."""
    newest = max(checkpoints.glob("step-*")) / "tensors.safetensors"
    every = {name.removeprefix(prefix): t for name, t in load_file(newest).items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in every.items() if "running_" not in name and "num_batches" not in name}


def same(ours: Tensors, theirs: Tensors, names: Iterator[str] | list[str]) -> bool:
    return all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-20) for name in names)


@pytest.fixture
def weights(playground: Path) -> Path:
    return save(lived_in("digits_cnn", 7), playground / "weights.safetensors")


@pytest.fixture
def hub(playground: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, without a connection to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(playground / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return playground / "hub"


# --- where networks start


@pytest.mark.parametrize("init", ["same", "fresh"])
def test_folds_and_pairs_start_from_the_weights_with_classifiers_of_their_own(
    init: str, incv: Incv, playground: Path, weights: Path
) -> None:
    answer = incv(*RUN, of_file(weights), f"incv.init={init}")
    assert answer.code == 0, answer.err
    folds = [parameters(playground / "run/rounds/0" / f"fold{fold}/checkpoints") for fold in (0, 1)]
    pair = playground / "run/methods/coteaching_incv/checkpoints"
    networks = [*folds, parameters(pair, "model.a."), parameters(pair, "model.b.")]
    body = [name for name in folds[0] if not name.startswith("fc.")]
    saved = load_file(weights)
    assert len(body) == 12
    for network in networks:
        assert network["fc.weight"].shape == (10, 128)
        assert same(network, saved, body)
    assert same(folds[0], folds[1], ["fc.weight", "fc.bias"]) == (init == "same")
    assert not same(networks[2], networks[3], ["fc.weight"])
    assert all(network["fc.weight"].abs().max() < 0.01 for network in networks)
    stages = json.loads((playground / "run/manifest.json").read_text())["stages"]
    assert [stages[stage]["numerics"] for stage in ("incv", "coteaching_incv")] == [2, 2]
    again = incv(*RUN, of_file(weights), f"incv.init={init}", "--run-dir", "b", "--incv-from", "run", "--dry-run")
    assert "would be refused" not in again.out


def test_with_a_trainable_classifier_the_features_stay_those_of_the_file(
    incv: Incv, playground: Path, weights: Path
) -> None:
    """Also BatchNorm's statistics, in folds and in both networks of a pair, at an ordinary learning rate."""
    rates = [f"{section}.optimizer={{kind: sgd, learning_rate: 0.1}}" for section in ("incv", "coteaching")]
    answer = incv(*RUN, *rates, of_file(weights), "model.trainable=classifier")
    assert answer.code == 0, answer.err
    pair = playground / "run/methods/coteaching_incv/checkpoints"
    saved = load_file(weights)
    places = [(playground / f"run/rounds/0/fold{fold}/checkpoints", "model.") for fold in (0, 1)]
    for folder, prefix in (*places, (pair, "model.a."), (pair, "model.b.")):
        tensors = load_file(max(folder.glob("step-*")) / "tensors.safetensors")
        body = [name for name in saved if not name.startswith("fc.")]
        assert all(torch.equal(tensors[prefix + name], saved[name]) for name in body)
        optimised = {name for name in tensors if name.startswith("optimizer.")}
        assert len(optimised) == (4 if "a." in prefix or "b." in prefix else 2)  # the moments of weight and bias
    first = [load_file(max(folder.glob("step-*")) / "tensors.safetensors") for folder, _ in places]
    assert not torch.equal(first[0]["model.fc.weight"], first[1]["model.fc.weight"])


def test_a_trainable_classifier_needs_weights(incv: Incv, playground: Path) -> None:
    answer = incv(*RUN, "model.trainable=classifier")
    assert answer.code == 2
    assert "random features are of no use" in answer.err
    assert "model.pretrained" in answer.err
    assert not (playground / "run").exists()


def test_the_weights_of_timm_start_a_run_and_the_image_keys_follow_them(
    incv: Incv, playground: Path, hub: Path
) -> None:
    saved = lived_in("test_resnet", 1000)
    path = fill_hub_cache(hub, PRETRAINED, saved)
    content = yaml.safe_load(Path(TINY).read_text())
    content["image"] = {"size": 8, "flip": False, "mean": [0.25, 0.25, 0.25]}
    (playground / "mine.yaml").write_text(yaml.safe_dump(content))
    answer = incv(
        *("run", "-c", "mine.yaml", "--run-dir", "run", THREADS, *SHORT),
        *("methods=[standard]", "incv=null", "standard.epochs=1", f"standard.optimizer={FIXED}"),
        *(f"model.name={PRETRAINED}", "model.pretrained=true"),
    )
    assert answer.code == 0, answer.err
    assert f"initial weights: {path}" in answer.err
    trained = parameters(playground / "run/methods/standard/checkpoints")
    assert same(trained, saved.state_dict(), [name for name in trained if not name.startswith("fc.")])
    resolved = yaml.safe_load((playground / "run/config.resolved.yaml").read_text())["image"]
    assert (resolved["size"], resolved["mean"], resolved["std"]) == (8, [0.25] * 3, [0.5] * 3)


# --- resume


def stage_keys(playground: Path, stage: str) -> dict[str, object]:
    manifest = json.loads((playground / "run/manifest.json").read_text())
    keys: dict[str, object] = manifest["stages"][stage]["keys"]
    return keys


def test_a_finished_run_knows_its_weights_by_their_checksum(incv: Incv, playground: Path, weights: Path) -> None:
    (playground / "elsewhere").mkdir()
    assert incv(*RUN, of_file(weights)).code == 0
    checksum = stage_keys(playground, "incv")["model.weights_checksum"]
    assert stage_keys(playground, "coteaching_incv")["model.weights_checksum"] == checksum
    assert "model.weights_checksum" not in stage_keys(playground, "labels")
    moved = weights.rename(playground / "elsewhere" / "moved.safetensors")
    answer = incv(*RUN, of_file(moved))
    assert answer.code == 0
    assert "coteaching_incv: already done" in answer.err
    other = save(lived_in("digits_cnn", 7, seed=9), playground / "other.safetensors")
    for arguments in ([of_file(other)], []):
        answer = incv(*RUN, *arguments)
        assert answer.code == 2
        assert f'model.weights_checksum ("{checksum}" -> ' in answer.err
        assert "--redo incv" in answer.err


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(incv: Incv, playground: Path, weights: Path) -> None:
    shorter = ("data.train.limit=100", "batch.global=8", "incv.rounds=1", "incv.epochs=2", "incv.min_per_class=6")
    method = ("methods=[coteaching_incv]", "execution.checkpoint_every=5")
    arguments = ["run", "-c", TINY, THREADS, *shorter, *method, of_file(weights), "--run-dir"]
    killed = subprocess.Popen([sys.executable, str(DRIVER), "coteaching", "--", *arguments, "killed"])
    assert finish(killed) == -9
    for run_dir in ("killed", "whole"):
        answer = incv(*arguments, run_dir)
        assert answer.code == 0, answer.err
    require_whole(playground / "killed")
    ours, theirs = (trainings(playground / run_dir) for run_dir in ("killed", "whole"))
    assert ours.keys() == theirs.keys() == {"incv/0/0", "incv/0/1", "coteaching_incv"}
    for name in ours:
        ends = [step_folders(each[name])[-1] / "tensors.safetensors" for each in (ours, theirs)]
        assert ends[0].read_bytes() == ends[1].read_bytes(), name


# --- bad files: one clear line, and nothing written


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:1000])
    return path


def with_canary(path: Path) -> Path:
    path = path.with_suffix(".pth")
    torch.save({**lived_in("digits_cnn", 7).state_dict(), "canary": Canary(path.parent / "nest")}, path)
    return path


BAD_FILES: dict[str, tuple[Callable[[Path], Path], int, list[str]]] = {
    "missing": (lambda path: path.with_name("none.pth"), 3, ["none.pth", "no such file"]),
    "another network": (
        lambda path: save(lived_in("test_resnet", 7), path),
        2,
        ["do not fit the network digits_cnn", "tensor(s) missing in the file: body.0.weight", "set model.name"],
    ),
    "truncated": (truncated, 3, ["weights.safetensors", "damaged"]),
    "pickled code": (with_canary, 3, ["weights.pth", "refused"]),
    "unknown type": (lambda path: path.rename(path.with_suffix(".onnx")), 2, ["weights.onnx", ".safetensors"]),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_refused(kind: str, incv: Incv, playground: Path, weights: Path) -> None:
    make, code, named = BAD_FILES[kind]
    path = make(weights)
    with unchanged(playground):
        answer = incv(*RUN, of_file(path))
        plan = incv(*RUN, of_file(path), "--dry-run")
    assert answer.code == code, answer.err
    message = answer.err[answer.err.index("error: ") :]
    for words in named:
        assert words in message
        assert words in plan.out[plan.out.index("would be refused: ") :]


def test_both_keys_or_no_weights_at_all_are_refused(incv: Incv, playground: Path, weights: Path, hub: Path) -> None:
    answers = {
        "exclude each other": incv(*RUN, of_file(weights), "model.pretrained=true"),
        "no weights for digits_cnn": incv(*RUN, "model.pretrained=true"),
        str(hub): incv(*RUN, "model.pretrained=true", f"model.name={PRETRAINED}"),
    }
    for words, answer in answers.items():
        assert answer.code == 2
        assert words in answer.err
        assert "model.weights" in answer.err
    assert not (playground / "run").exists()


# --- plans, names and image keys


def test_a_plan_names_the_weights(incv: Incv, playground: Path, weights: Path, hub: Path) -> None:
    assert f"initial weights: {weights}" in incv(*RUN, of_file(weights), "--dry-run").out
    arguments = (*RUN, "model.pretrained=true", f"model.name={PRETRAINED}", "--dry-run")
    with unchanged(playground):
        waiting = incv(*arguments)
    assert f"to be downloaded (timm/{PRETRAINED} on the Hugging Face hub, cached in {hub})" in waiting.out
    assert "would be refused" not in waiting.out
    path = fill_hub_cache(hub, PRETRAINED, lived_in("test_resnet", 1000))
    assert f"initial weights: {path}" in incv(*arguments).out


def test_a_plan_knows_a_finished_run(incv: Incv, playground: Path, weights: Path) -> None:
    assert incv(*RUN, of_file(weights)).code == 0
    assert "incv             done" in incv(*RUN, of_file(weights), "--dry-run").out
    save(lived_in("digits_cnn", 7, seed=9), weights)
    assert "would be refused" in incv(*RUN, of_file(weights), "--dry-run").out


def test_runs_with_other_weights_have_other_directories(incv: Incv, playground: Path) -> None:
    told = ("run", "-c", TINY, "--print-run-dir")
    extra = [(), ("model.weights=a.pth",), ("model.weights=b.pth",), ("model.pretrained=true",)]
    names = [incv(*told, *overrides).out for overrides in extra]
    assert names[0].strip() == "runs/tiny"
    assert len(set(names)) == 4


def test_a_recipe_without_image_keys_takes_those_of_the_weights(playground: Path) -> None:
    content = yaml.safe_load(Path(TINY).read_text())
    content["model"] = {"name": PRETRAINED, "pretrained": True}
    content["image"] = {"flip": False, "size": None}
    loaded = check_recipe(content, "a test")
    assert (loaded.image.size, loaded.image.mean, loaded.image.std) == (160, (0.5,) * 3, (0.5,) * 3)
    written = check_recipe({**content, "image": {"flip": False, "size": 160}}, "a test")
    assert result_keys(loaded) == result_keys(written)
    del content["image"]
    assert check_recipe(content, "a test").image.size == 160


def test_a_recipe_without_weights_needs_an_image_size(incv: Incv, playground: Path) -> None:
    shutil.copy(TINY, "mine.yaml")
    answer = incv("validate", "-c", "mine.yaml", "image={flip: false}")
    assert answer.code == 2
    assert "missing key `image.size`" in answer.err
    for overrides in (["image={flip: false}", "model.pretrained=maybe"], ["model.name=3", "model.pretrained=true"]):
        assert incv("validate", "-c", "mine.yaml", *overrides).code == 2


def test_weights_are_no_key_of_a_recipe_without_them() -> None:
    assert not [key for key in result_keys(load_recipe(Path(TINY))) if "weights" in key or "pretrained" in key]
