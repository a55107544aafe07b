"""Own images that cannot be audited: one clear line in the words of the command, exit code 2 or 3, no files."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.support.command_line import Answer, unchanged
from tests.support.ordinary_user import ordinary_user
from tests.support.pictures import picture
from tests.support.saved_weights import Canary, lived_in, save

Incv = Callable[..., Answer]
FOREIGN = ("--root", "--split", "data.train.", "Errno")
"""Options of other commands, keys of recipes that the user has not written, and raw errors."""
QUICK = (
    *("--model", "digits_cnn", "--no-download", "image.size=8", "image.resize=9", "data.train.resize=9"),
    *("incv.rounds=1", "incv.epochs=1", "incv.optimizer.milestones=[]", "execution.threads=1"),
)


def refused(answer: Answer, code: int, *named: str) -> None:
    """One line, which has these words and none that an audit does not know."""
    assert answer.code == code, answer.err
    message = answer.err[answer.err.index("incv: error: ") :]
    assert message.count("\n") == 1, message
    for words in named:
        assert words in message, f"{words!r} is not in: {message}"
    for words in FOREIGN:
        assert words not in message, message


def put(folder: str, count: int = 12) -> None:
    Path(folder).mkdir(parents=True)
    for number in range(count):
        Path(folder, f"{number}.png").write_bytes(picture(number))


def photos(*classes: str, count: int = 12) -> None:
    for name in classes:
        put(f"photos/{name}", count)


def listed(text: str, count: int = 24) -> None:
    put("photos", count)
    Path("photos/labels.csv").write_text(text)


def rows(count: int, classes: int = 2) -> str:
    return "".join(f"{number}.png,{number % classes}\n" for number in range(count))


def tar(*members: str) -> None:
    Path("photos").mkdir()
    Path("any.png").write_bytes(picture())
    with tarfile.open("photos/a.tar", "w") as file:
        for member in members:
            file.add("any.png", member)


def with_broken_images() -> None:
    photos("cat", "dog")
    Path("photos/cat/0.png").write_bytes(b"<html>")


def with_foreign_name(*path: bytes) -> None:
    photos("cat", "dog")
    os.rename(b"photos/" + path[0], b"photos/" + path[1])


FOLDERS: dict[str, tuple[Callable[[], object], list[str], int, list[str]]] = {
    # name: what makes the folder, the arguments, the exit code, words of the message
    "no_such_folder": (lambda: photos("cat"), ["photo"], 2, ["there is no folder photo", "did you mean photos?"]),
    "removed": (lambda: None, ["photos"], 2, ["there is no folder photos", "name the folder"]),
    "empty": (lambda: Path("photos").mkdir(), ["photos"], 3, ["photos is empty", "FOLDER/<class>/<image>", "--csv"]),
    "an_image": (lambda: photos("cat"), ["photos/cat/0.png"], 2, ["is a file", "the folders of all classes"]),
    "a_list": (lambda: listed("x"), ["photos/labels.csv"], 2, ["is a file", "--csv photos/labels.csv"]),
    "an_archive": (lambda: Path("photos.zip").touch(), ["photos.zip"], 2, ["is a file", "unpack it"]),
    "archives": (lambda: put("photos", 0) or Path("photos/a.zip").touch(), ["photos"], 3, ["a.zip", "unpack it"]),
    "loose_images": (
        lambda: put("photos"),
        ["photos"],
        3,
        ["contains 12 images", "photos/<class>/<image>", "--csv FILE"],
    ),
    "a_class": (lambda: photos("cat", "dog"), ["photos/dog"], 3, ["beside cat", "`incv audit photos`"]),
    "classes": (lambda: photos("cat", "dog"), ["photos/cat", "photos/dog"], 2, ["'photos/dog'", "one folder"]),
    "one_level_above": (lambda: photos("x/cat", "x/dog"), ["photos"], 3, ["cat, dog", "`incv audit photos/x`"]),
    "parts": (
        lambda: photos("new/cat", "new/dog", "old/cat", "old/dog"),
        ["photos"],
        3,
        ["new, old", "each contains cat, dog", "`incv audit photos/new`"],
    ),
    "no_images": (lambda: photos("cat", "dog", count=0), ["photos"], 3, ["photos/cat contains no image"]),
    "a_class_without_images": (
        lambda: photos("cat", "dog") or put("photos/fox", 0),
        ["photos"],
        3,
        ["photos/fox contains no image", "add its images; if not, move the folder"],
    ),
    "one_class": (lambda: photos("cat"), ["photos"], 3, ["photos has one class only, 'cat'", "at least two"]),
    "one_image": (lambda: photos("cat", count=1), ["photos"], 3, ["one class only, 'cat'"]),
    "few_images": (lambda: photos("cat", "dog", count=2), ["photos"], 3, ["photos has 4 images", "at least 20"]),
    "broken_images": (with_broken_images, ["photos", *QUICK], 3, ["cat/0.png: HTML", "data.max_rejected"]),
    "name_of_a_file": (lambda: with_foreign_name(b"cat/0.png", b"cat/\xe4.png"), ["photos"], 3, [r"cat/\xe4.png"]),
    "name_of_a_class": (lambda: with_foreign_name(b"cat", b"\xe4"), ["photos"], 3, [r"\xe4/", "rename it"]),
    "unknown_columns": (
        lambda: listed("a,b,c\n" + "1.png,2,3\n" * 24),
        ["photos"],
        2,
        ["labels.csv: no column is recognised", "--path-column", "a, b, c"],
    ),
    "unknown_column_named": (
        lambda: listed("file,kind\n" + rows(24)),
        ["photos", "--label-column", "kinds"],
        2,
        ["--label-column: ", "no column 'kinds'", "did you mean kind?"],
    ),
    "missing_files": (
        lambda: listed("path,label\n" + rows(26)),
        ["photos"],
        3,
        ["lists 2 images that are not in", "'24.png' (line 26)", "relative to that folder"],
    ),
    "unlisted_files": (lambda: listed("path,label\n" + rows(20)), ["photos"], 3, ["does not list 4", "--partial"]),
    "equal_labels": (
        lambda: listed("path,label\n" + rows(24, 1)),
        ["photos"],
        3,
        ["all 24 images", "have the label '0'", "--label-column"],
    ),
    "no_list": (lambda: put("photos"), ["photos", "--csv", "none.csv"], 3, ["--csv: none.csv is not a file"]),
    "a_folder_as_list": (lambda: photos("cat"), ["photos", "--csv", "photos/cat"], 3, ["--csv: photos/cat is not"]),
    "tar_without_labels": (lambda: tar("a.png"), ["photos"], 3, ["a.png has no label", "a.cls", "--partial"]),
    "tar_without_images": (lambda: tar("a.txt"), ["photos"], 3, ["no image with a label", "cat17.cls"]),
    "not_a_tar": (
        lambda: put("photos", 0) or Path("photos/a.tar").write_bytes(b"x" * 9999),
        ["photos"],
        3,
        ["a.tar is damaged"],
    ),
    "link_that_leaves": (
        lambda: photos("cat", "dog") or Path("photos/cat/x.png").symlink_to("/etc/hostname"),
        ["photos"],
        3,
        ["photos/cat/x.png", "--allow-outside"],
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_cannot_be_audited(kind: str, incv: Incv, playground: Path) -> None:
    make, arguments, code, named = FOLDERS[kind]
    make()
    with unchanged(playground):
        refused(incv("audit", *arguments), code, *named)


def test_a_folder_that_may_not_be_read(incv: Incv, playground: Path) -> None:
    photos("cat", "dog")
    for place in ("photos/cat", "photos"):
        Path(place).chmod(0)
        with ordinary_user(playground):
            answer = incv("audit", "photos")
        Path(place).chmod(0o755)
        refused(answer, 3, f"{place} cannot be read: Permission denied")
    assert not Path("runs").exists()


def of_another_network() -> Path:
    return save(lived_in("test_resnet", 7), Path("weights.safetensors"))


def with_code() -> Path:
    torch.save({**lived_in("digits_cnn", 7).state_dict(), "canary": Canary(Path("nest"))}, "weights.pth")
    return Path("weights.pth")


OPTIONS: dict[str, tuple[Callable[[], object], list[str], int, list[str]]] = {
    # name: what makes the files, further arguments, the exit code, words of the message
    "weights_of_another_network": (
        of_another_network,
        ["--weights", "weights.safetensors"],
        2,
        ["do not fit the network digits_cnn", "tensor(s) missing in the file: body.0.weight", "set --model"],
    ),
    "weights_with_code": (with_code, ["--weights", "weights.pth"], 3, ["weights.pth", "refused", "state_dict"]),
    "missing_weights": (
        lambda: None,
        ["--weights", "w.pth"],
        2,
        ["--weights: the file w.pth", "no such file", "correct"],
    ),
    "a_folder_as_weights": (
        lambda: None,
        ["--weights", "photos"],
        2,
        ["--weights: the file photos", "it is a folder"],
    ),
    "an_unknown_network": (lambda: None, ["--model", "resnet18x"], 2, ["'resnet18x'", "did you mean resnet18"]),
    "another_root": (lambda: None, ["data.train.root=x"], 2, ["takes its images from FOLDER"]),
    "an_unknown_key": (lambda: None, ["incv.epoch=3"], 2, ["`incv.epoch`", "did you mean `incv.epochs`"]),
    "missing_corrections": (lambda: None, ["labels.corrections=c.csv"], 3, ["labels.corrections c.csv", "no such"]),
    "corrections_in_a_folder": (lambda: None, ["labels.corrections=photos"], 3, ["it is a folder; name a file"]),
    "missing_labels": (lambda: None, ["labels.file=l.csv"], 3, ["labels.file l.csv", "correct the path"]),
    "output_not_empty": (lambda: put("other"), ["--run-dir", "other"], 2, ["other is neither empty nor a run"]),
    "output_among_the_images": (lambda: None, ["--run-dir", "photos/x"], 2, ["write photos/x into photos"]),
    "output_is_a_file": (lambda: Path("f").touch(), ["--run-dir", "f/x"], 2, ["cannot create", "--run-dir"]),
    "output_cannot_be_written": (lambda: None, ["--run-dir", "/proc/x"], 2, ["cannot create or write to /proc/x"]),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_that_cannot_be_used(kind: str, incv: Incv, playground: Path) -> None:
    make, arguments, code, named = OPTIONS[kind]
    photos("cat", "dog")
    make()
    with unchanged(playground):
        answer = incv("audit", "photos", *QUICK, *arguments)
    if kind == "another_root":  # the user has written the key
        answer = Answer(answer.code, answer.out, answer.err.replace("'data.train.root=x'", ""))
    refused(answer, code, *named)


def test_a_folder_that_has_changed(incv: Incv, playground: Path) -> None:
    photos("cat", "dog")
    assert incv("audit", "photos", *QUICK).code == 0
    Path("photos/cat/new.png").write_bytes(picture(99))
    with unchanged(playground):
        answer = incv("audit", "photos", *QUICK)
    refused(answer, 2, "photos has changed since it was packed", "1 file added (cat/new.png)", "--redo pack")
    assert incv("audit", "photos", *QUICK, "--redo", "pack").code == 0


def test_an_audit_that_would_write_among_the_images(
    incv: Incv, playground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos("cat", "dog")
    monkeypatch.chdir("photos")
    with unchanged(playground):
        answer = incv("audit", ".", *QUICK)
        refused(answer, 2, "runs/audit-photos and data/shards/photos-", f"cd {playground} && incv audit photos")
        assert incv("audit", ".", *QUICK, "--run-dir", "../runs/x").code == 2
    elsewhere = ("--run-dir", "../runs/x", "data.train.shards=../packed")
    assert incv("audit", ".", *QUICK, *elsewhere).code == 0


def test_without_a_connection_an_audit_says_so_in_one_line(
    incv: Incv, playground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos("cat", "dog")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(playground / "hub"))
    with unchanged(playground):
        answer = incv("audit", "photos", "--model", "test_resnet.r160_in1k", "image.size=32", "--redo", "none")
    (warning,) = (line for line in answer.err.splitlines() if line.startswith("warning: "))
    for words in ("no pretrained weights", "cache", "no connection to 127.0.0.1", "--weights FILE", "from scratch"):
        assert words in warning
    assert "Retrying" not in answer.err
    assert answer.code == 2  # no stage `none`


def test_outputs_of_an_audit_that_cannot_be_written(incv: Incv, playground: Path) -> None:
    photos("cat", "dog")
    Path("f").touch()
    Path("mine").mkdir()
    Path("mine/notes").touch()
    assert incv("audit", "photos", *QUICK).code == 0
    with unchanged(playground):
        refused(incv("clean", "runs/audit-photos", "--out", "f/x"), 3, "cannot write f/x", "choose another")
        refused(incv("clean", "runs/audit-photos", "--out", "/proc/x"), 3, "cannot write /proc/x", "choose another")
        refused(incv("clean", "runs/audit-photos", "--out", "mine", "--force"), 2, "mine is not empty", "--out")
        refused(incv("clean", "runs/audit-photos", "--out", "photos", "--force"), 2, "among the images", "--out")
        refused(incv("predict", "photos", "--run", "runs/audit-photos", "-o", "o.csv"), 2, "no classifier")


def test_a_list_with_columns_of_other_names(incv: Incv, playground: Path) -> None:
    listed("a,b,c\n" + "".join(f"{number}.png,{number % 2},3\n" for number in range(20)))
    columns = ("--path-column", "a", "--label-column", "b")
    refused(incv("audit", "photos", *columns, *QUICK), 3, "does not list 4 images", "--partial")
    answer = incv("audit", "photos", *columns, "--partial", *QUICK)
    assert answer.code == 0, answer.err
    assert "20 images, 2 classes" in answer.err
