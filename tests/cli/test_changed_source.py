"""Images that are added, removed, moved or changed after packing: refused, and packed again with --redo pack."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from shards.durable import read_json
from shards.pack import pack
from shards.sample_index import SampleIndex
from shards.source_files import SOURCE_FILES
from shards.sources import open_source
from tests.support.command_line import TINY, Answer, unchanged
from tests.support.pictures import contents, picture

Incv = Callable[..., Answer]
SMALL = (
    *("labels.noise=none", "labels.ratio=0", "execution.threads=1", "batch.global=4", "methods=[standard]"),
    *("standard.epochs=1", "incv=null", "image.size=8"),
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/{train,val}/{cat,dog}/<i>.png in the current folder."""
    monkeypatch.chdir(tmp_path)
    for seed, split in enumerate(("train", "val")):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                (folder / f"{number}.png").write_bytes(picture(100 * seed + 10 * label + number, 8, 8))
    return tmp_path / "photos"


def command(root: Path | str = "photos", *more: str, verb: str = "run") -> list[str]:
    splits = {
        name: f"{{source: image_folder, split: {name}, root: '{root}', shards: packed/{name}}}"
        for name in ("train", "val")
    }
    data = f"data={{train: {splits['train']}, eval: {{val: {splits['val']}}}}}"
    return [verb, "-c", TINY, "--run-dir", "run", data, *SMALL, *more]


@pytest.fixture
def finished(root: Path, incv: Incv) -> Path:
    answer = incv(*command())
    assert answer.code == 0, answer.err
    return root


def refused(incv: Incv, *named: str, arguments: list[str] | None = None) -> Answer:
    """The run ends with exit code 2, a message with these words, and nothing written; the dry run says the same."""
    arguments = arguments or command()
    with unchanged(Path.cwd()):
        answer = incv(*arguments)
        plan = incv(*arguments, "--dry-run")
    assert answer.code == 2, answer.err
    for words in named:
        assert words in answer.err
        assert words in plan.out
    assert "would be refused" in plan.out
    return answer


def test_an_unchanged_source_is_accepted(finished: Path, incv: Incv) -> None:
    again = incv(*command())
    assert again.code == 0, again.err
    assert "standard: already done" in again.err
    assert "refused" not in incv(*command(), "--dry-run").out


def _edit(name: str, photos: Path) -> None:
    cats, dogs = photos / "train" / "cat", photos / "train" / "dog"
    if name == "added":
        (cats / "new.png").write_bytes(picture(77, 8, 8))
    elif name == "moved":
        (cats / "2.png").rename(dogs / "from_cat.png")
    elif name == "changed":
        (cats / "1.png").write_bytes(picture(78, 8, 8))
    elif name == "emptied class":
        for file in cats.iterdir():
            file.unlink()


EDITS = {
    "added": "1 file added (train/cat/new.png)",
    "moved": "1 file added (train/dog/from_cat.png), 1 file removed (train/cat/2.png)",
    "changed": "1 file changed (train/cat/1.png)",
    "emptied class": "it can no longer be packed",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_source_is_refused(edit: str, finished: Path, incv: Incv) -> None:
    _edit(edit, finished)
    answer = refused(incv, EDITS[edit], "data.train.root: photos has changed", "packed/train", "--redo pack")
    assert "data.eval.val" not in answer.err


def test_redo_packs_into_a_new_folder_and_redoes_what_reads_it(finished: Path, incv: Incv) -> None:
    old = contents(Path("packed/train"))
    _edit("added", finished)
    plan = incv(*command(), "--redo", "pack", "--dry-run")
    assert "refused" not in plan.out
    assert re.search(r"^  pack +redo", plan.out, re.MULTILINE)
    answer = incv(*command(), "--redo", "pack")
    assert answer.code == 0, answer.err
    assert contents(Path("packed/train")) == old, "other runs may use it"
    pack(open_source("image_folder", finished, "train"), Path("fresh"))
    assert contents(Path("packed/train-2")) == contents(Path("fresh"))
    assert len(SampleIndex.load(Path("packed/train-2"))) == 9
    assert not Path("packed/val-2").exists(), "the evaluation set has not changed"
    assert read_json(Path("packed/train.latest.json")) == {"folder": "train-2"}
    assert read_json(Path("run/manifest.json"))["dataset"]["samples"] == 9
    resolved = yaml.safe_load(Path("run/config.resolved.yaml").read_text())
    assert resolved["data"]["train"]["shards"] == "packed/train-2"
    for again in (command(), [*command(), "--redo", "pack"]):  # as after an interruption
        answer = incv(*again)
        assert answer.code == 0, answer.err
        assert "standard: already done" in answer.err
    assert not Path("packed/train-3").exists()
    other = incv(*[word if word != "run" or not place else "other" for place, word in enumerate(command())])
    assert other.code == 0, other.err
    assert read_json(Path("other/manifest.json"))["dataset"]["samples"] == 9, "a new run uses the latest folder"


def test_a_changed_evaluation_set_redoes_only_the_evaluation(finished: Path, incv: Incv) -> None:
    (finished / "val" / "cat" / "new.png").write_bytes(picture(77, 8, 8))
    refused(incv, "data.eval.val.root: photos has changed", "1 file added (val/cat/new.png)")
    answer = incv(*command(), "--redo", "pack")
    assert answer.code == 0, answer.err
    assert "standard: already done" in answer.err
    assert "evaluate: done in" in answer.err
    assert Path("packed/val-2").is_dir()
    assert not Path("packed/train-2").exists()


def test_an_older_run_goes_on_with_its_own_folder(finished: Path, incv: Incv) -> None:
    shutil.copytree("run", "older")
    _edit("added", finished)
    assert incv(*command(), "--redo", "pack").code == 0
    older = [word if word != "run" or not place else "older" for place, word in enumerate(command())]
    refused(incv, "packed/train: 1 file added", arguments=older)
    answer = incv(*older, "data.train.root=null")
    assert answer.code == 0, answer.err
    assert "standard: already done" in answer.err
    switched = incv(*older, "--redo", "pack")
    assert switched.code == 0, switched.err
    assert read_json(Path("older/manifest.json"))["dataset"]["samples"] == 9
    assert not Path("packed/train-3").exists(), "train-2 was up to date"


def test_an_interrupted_redo_resumes_in_its_folder(finished: Path, incv: Incv) -> None:
    _edit("added", finished)
    partly = Path("packed/train-2/.parts")
    assert incv(*command(), "--redo", "pack").code == 0
    for name in ("train-2", "train.latest.json"):
        path = Path("packed") / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    plan = {"class_names": ["cat"], "source": "other"}
    partly.mkdir(parents=True)
    (partly / "plan.json").write_text(json.dumps(plan))  # of something else: it is left alone
    assert incv(*command(), "--redo", "pack").code == 0
    assert json.loads((partly / "plan.json").read_text()) == plan
    assert read_json(Path("packed/train.latest.json")) == {"folder": "train-3"}


def test_restored_images_are_not_packed_a_third_time(finished: Path, incv: Incv) -> None:
    """The run is moved to the folder that was packed from them, whichever it is, and so are new runs."""
    _edit("added", finished)
    assert incv(*command(), "--redo", "pack").code == 0
    new = finished / "train" / "cat" / "new.png"
    kept = new.read_bytes()
    for edit, latest, samples in (("remove", "train", 8), ("restore", "train-2", 9)):
        new.unlink() if edit == "remove" else new.write_bytes(kept)
        refused(incv, f"1 file {'removed' if edit == 'remove' else 'added'} (train/cat/new.png)")
        plan = incv(*command(), "--redo", "pack", "--dry-run")
        assert "refused" not in plan.out
        answer = incv(*command(), "--redo", "pack")
        assert answer.code == 0, answer.err
        assert f"packed/{latest} is up to date and is not packed again" in answer.err
        assert read_json(Path("run/manifest.json"))["dataset"]["samples"] == samples
        assert "standard: already done" in incv(*command()).err
        other = [word if word != "run" or not place else "other" for place, word in enumerate(command(verb="labels"))]
        assert incv(*other).code == 0
        assert read_json(Path("other/manifest.json"))["dataset"]["samples"] == samples
        shutil.rmtree("other")
    assert sorted(path.name for path in Path("packed").iterdir()) == ["train", "train-2", "train.latest.json", "val"]


def test_other_settings_for_the_same_folder_are_refused_or_packed_anew(finished: Path, incv: Incv) -> None:
    resized = [one.replace("split: train,", "split: train, resize: 6,") for one in command()]
    refused(incv, "packed with resize null; the recipe asks for 6", "--redo pack", arguments=resized)
    answer = incv(*resized, "--redo", "pack")
    assert answer.code == 0, answer.err
    assert SampleIndex.load(Path("packed/train-2")).dataset.resize == 6


def test_another_root_is_refused_only_if_its_files_differ(finished: Path, incv: Incv) -> None:
    shutil.copytree("photos", "copy", copy_function=shutil.copyfile)  # with new times
    same = incv(*command("copy"))
    assert same.code == 0, same.err
    assert "standard: already done" in same.err
    _edit("changed", Path("copy"))
    named = (
        f"packed/train was packed from {finished.resolve()}",
        "data.train.root: ",
        "copy has other files: 1 file changed",
    )
    refused(incv, *named, arguments=command("copy"))


@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_a_root_that_is_not_here_is_only_a_note(kind: str, finished: Path, incv: Incv) -> None:
    finished.rename("away")
    if kind == "empty":
        Path("photos").mkdir()  # a mount point
    answer = incv(*command())
    assert answer.code == 0, answer.err
    assert "data.train.root = photos is not on this machine" in answer.err


def test_touched_files_are_compared_by_content(finished: Path, incv: Incv) -> None:
    for file in finished.rglob("*.png"):
        os.utime(file)
    with unchanged(Path.cwd()):
        assert "refused" not in incv(*command(), "--dry-run").out
    assert incv(*command()).code == 0


def test_a_large_source_is_compared_on_request(finished: Path, incv: Incv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run.source_check.MOST_COMPARED", 5)
    _edit("added", finished)
    answer = incv(*command())
    assert answer.code == 0, answer.err
    assert "--check-source" in answer.err
    refused(incv, "1 file added", arguments=[*command(), "--check-source"])
    shutil.copytree("photos", "copy")
    refused(incv, "was packed from", "--check-source", arguments=command("copy"))


def test_shards_without_a_record_of_their_files_are_used_with_a_note(finished: Path, incv: Incv) -> None:
    for split in ("train", "val"):
        (Path("packed") / split / SOURCE_FILES).unlink()
    _edit("added", finished)
    answer = incv(*command())
    assert answer.code == 0, answer.err
    assert "packed/train has no record of its source files" in answer.err
    assert incv(*command(), "--redo", "pack").code == 0
    assert Path("packed/train-2", SOURCE_FILES).exists()


def test_recipes_that_pack_otherwise_do_not_share_a_folder_by_default(root: Path, incv: Incv) -> None:
    folders = set()
    for more in ("", ", resize: 6", ", classes: 2", ", split: val"):
        data = f"data={{train: {{source: image_folder, root: photos{more}}}, eval: {{}}}}"
        run = ("labels", "-c", TINY, data, *SMALL)
        answer = incv(*run)
        assert answer.code == 0, answer.err
        key, folder, *pack_arguments = shlex.split(incv(*run, "--print-splits").out)
        assert key == "data.train.shards"
        assert incv("shards", "pack", *pack_arguments, "--workers=1").code == 0
        folders.add(folder)
    assert len(folders) == len(list(Path("data/shards").iterdir())) == 4


def test_scripts_are_told_the_folder_that_a_run_would_use(finished: Path, incv: Incv) -> None:
    _edit("added", finished)
    assert incv(*command(), "--redo", "pack").code == 0
    printed = incv(*command(), "--print-splits").out.splitlines()
    assert [shlex.split(line)[1] for line in printed] == ["packed/train-2", "packed/val"]
    assert "--out=packed/train-2" in printed[0]


def test_the_advice_to_continue_as_packed_works_for_the_default_folder(root: Path, incv: Incv) -> None:
    data = "data={train: {source: image_folder, root: photos}, eval: {}}"
    run = ("run", "-c", TINY, "--run-dir", "run", data, *SMALL)
    assert incv(*run).code == 0
    _edit("added", root)
    answer = refused(incv, "1 file added", arguments=list(run))
    advice = answer.err.rpartition("as they were packed: ")[2].split()
    assert [word.partition("=")[0] for word in advice] == ["data.train.root", "data.train.shards"]
    answer = incv(*run, *advice)
    assert answer.code == 0, answer.err
    assert "standard: already done" in answer.err


def test_a_list_of_labels_is_compared_with_what_was_packed(root: Path, incv: Incv) -> None:
    rows = [f"train/{name}/{number}.png,{name}" for name in ("cat", "dog") for number in range(4)]
    table = root / "train.csv"
    table.write_text("\n".join(["path,label", *rows]))
    data = "data={train: {source: image_csv, root: photos, csv: photos/train.csv}, eval: {}}"
    run = ["run", "-c", TINY, "--run-dir", "run", data, *SMALL]
    answer = incv(*run)
    assert answer.code == 0, answer.err
    assert "standard: already done" in incv(*run).err
    table.write_text("\n".join(["path,label", rows[0].replace(",cat", ",dog"), *rows[1:]]))
    refused(incv, "1 file given another label (train/cat/0.png)", arguments=run)
    assert incv(*run, "--redo", "pack").code == 0
    (root / "train" / "cat" / "1.png").unlink()
    refused(incv, "it can no longer be packed", "1.png", arguments=run)
    (root / "train" / "cat" / "1.png").write_bytes(picture(55, 8, 8))
    refused(incv, "1 file changed (train/cat/1.png)", arguments=run)
