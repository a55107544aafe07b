"""Runs of earlier versions: their manifests record keys in format 1, and their checkpoints another hash."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from shards.durable import read_json, write_json
from tests.support import RECIPES
from trainer.config.schema import Recipe
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import default_keys
from trainer.run.runner import run_recipe

pytestmark = pytest.mark.slow
KEYS = ("execution.threads=1", "data.train.limit=200", "incv.rounds=1", "methods=[coteaching,coteaching_incv]")
HEIR, SOURCE = "coteaching_incv", "coteaching"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(RECIPES / "tiny.yaml", KEYS)


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root.parent)
        assert run_recipe(recipe, "tiny", root) == 0
    return root


def downgrade(root: Path, recipe: Recipe) -> None:
    """Rewrite a run as format 1 left it: every key, defaults too, and no section for the method that inherits."""
    manifest = read_json(root / "manifest.json")
    for stage, record in manifest["stages"].items():
        sections = {key.rpartition(".")[0] for key in record["keys"]}
        defaults = {key: value for key, value in default_keys(recipe).items() if key.rpartition(".")[0] in sections}
        full = {**defaults, **record["keys"]}
        old = {key.replace(f"{HEIR}.", f"{SOURCE}."): value for key, value in full.items()}
        digest = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
        for state in (root / "methods" / stage).glob("checkpoints/*/state.json"):
            content = read_json(state)
            content["values"]["identity"] = digest
            state.write_text(json.dumps(content))
        del record["format"]
        record.update(keys=old, hash=digest)
    write_json(root / "manifest.json", manifest)


def last_weights(root: Path) -> bytes:
    newest = max((root / "methods" / HEIR / "checkpoints").glob("step-*"))
    return (newest / "tensors.safetensors").read_bytes()


def test_a_finished_run_skips_every_stage(recipe, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(finished.parent)
    shutil.copytree(finished, tmp_path / "old")
    downgrade(tmp_path / "old", recipe)
    assert run_recipe(recipe, "tiny", tmp_path / "old") == 0
    lines = capsys.readouterr().err
    for stage in ("labels", "incv", SOURCE, HEIR, "evaluate", "export"):
        assert f"{stage}: already done" in lines


def test_a_half_done_stage_resumes_to_the_same_weights(recipe, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(finished.parent)
    root = tmp_path / "old"
    shutil.copytree(finished, root)
    downgrade(root, recipe)
    manifest = read_json(root / "manifest.json")
    manifest["stages"][HEIR]["state"] = "running"
    for stage in ("evaluate", "export", "report"):
        del manifest["stages"][stage]
    write_json(root / "manifest.json", manifest)
    shutil.rmtree(max((root / "methods" / HEIR / "checkpoints").glob("step-*")))
    assert run_recipe(recipe, "tiny", root) == 0
    assert f"{HEIR}: resuming from step" in capsys.readouterr().err
    assert last_weights(root) == last_weights(finished)


def test_other_keys_are_still_refused(finished, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.parent)
    shutil.copytree(finished, tmp_path / "old")
    downgrade(tmp_path / "old", recipe)
    changed = load_recipe(RECIPES / "tiny.yaml", [*KEYS, "coteaching_incv.ramp_epochs=4"])
    with pytest.raises(Exception, match=r"coteaching_incv\.ramp_epochs \(3 -> 4\)"):
        run_recipe(changed, "tiny", tmp_path / "old")
