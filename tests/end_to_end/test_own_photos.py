"""The whole way of own photos as a person goes it: `incv audit`, the gallery in a browser, the printed commands."""

import csv
import json
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageEnhance

from tests.support.backbone import MODEL, fetch_backbone
from tests.support.browser import Browser, open_browser
from tests.support.pretraining import pretrain

CLASSES = ("zero", "one", "two", "three")
EACH, WRONG = 60, 4
Row = dict[str, object]


@pytest.fixture
def weights(tmp_path: Path) -> list[str]:
    """Options of an audit: real weights, or small ones that are trained on other digits in seconds."""
    if (real := fetch_backbone()) is not None:
        return ["--weights", str(real), "--model", MODEL, "image.size=96"]
    digits = [(draw_digit(label, place), label - 4) for label in range(4, 10) for place in range(120)]
    file = tmp_path / "weights" / "model.safetensors"
    pretrain([image for image, _ in digits], [label for _, label in digits], "test_resnet", 32, file, epochs=10)
    return ["--weights", str(file)]


def draw_digit(label: int, place: int) -> Image.Image:
    """A handwritten digit of 64 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.images[np.flatnonzero(digits.target == label)[place]]
    image = Image.fromarray((pixels * 15.9).astype(np.uint8)).convert("RGB")
    return image.resize((64, 64), Image.Resampling.BILINEAR)


def write_photos(root: Path) -> dict[str, str | None]:
    """Write photos with everything that goes wrong in such folders; returns the true class by key, None for no class.

    The name says what an image is. Some are in a folder of their class's folder.
    """
    random, truth = np.random.default_rng(0), dict[str, str | None]()

    def save(image: Image.Image | bytes, said: int, name: str, true: int | None) -> None:
        key = f"{CLASSES[said % 4]}/{name}"
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(image) if isinstance(image, bytes) else image.save(root / key)
        truth[key] = None if true is None else CLASSES[true]

    for label, name in enumerate(CLASSES):
        for place in range(EACH):
            wrong = place < WRONG
            kind = f"wrong-{name}" if wrong else f"more/right-{name}" if place % 10 == 9 else f"right-{name}"
            save(draw_digit(label, place), label + wrong, f"{kind}-{place:02d}.png", label)
        original = (root / name / f"right-{name}-10.png").read_bytes()
        save(original, label + 1, f"conflict-{name}.png", label)
        save((root / name / f"right-{name}-11.png").read_bytes(), label, f"copy-{name}.png", label)
        save(ImageEnhance.Brightness(draw_digit(label, 12)).enhance(0.8), label + 2, f"near-{name}.jpg", label)
    for number in range(3):
        noise = random.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        save(Image.fromarray(noise), number, f"noise-{number}.png", None)
    for number in range(2):
        save(Image.new("RGB", (64, 64), (90, 120, 150)), number, f"blank-{number}.png", None)
    (root / "zero/truncated.png").write_bytes(original[: len(original) // 2])
    (root / "one/page.jpg").write_text("<html>404</html>")
    (root / "two/notes.txt").write_text("not an image")
    return truth


def run_command(folder: Path, words: Sequence[str]) -> str:
    """Run `incv` in a process, as from a shell; return what it prints, errors included."""
    assert words[0] == "incv"
    command = [sys.executable, "-m", "trainer", *words[1:]]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def read_list(run: Path) -> list[Row]:
    rows: list[Row] = pq.read_table(run / "labels_review.parquet").to_pylist()
    return rows


def keys_of(truth: dict[str, str | None], kind: str) -> set[str]:
    return {key for key in truth if Path(key).name.startswith(f"{kind}-")}


def check_findings(run: Path, rows: list[Row], truth: dict[str, str | None], is_real: bool) -> None:
    """What was planted is found, and little else. is_real: whether the weights are."""
    by_key = {row["key"]: row for row in rows}
    contradicted = [row["key"] for row in rows if row["conflicting_duplicate"]]
    assert [row["key"] for row in rows[: len(contradicted)]] == contradicted, "they are on top"
    groups = {row["duplicates"] for row in rows if row["conflicting_duplicate"]}  # either side may be doubted
    assert {by_key[key]["duplicates"] for key in keys_of(truth, "conflict")} <= groups
    assert sum(by_key[key]["duplicates"] in groups for key in keys_of(truth, "near")) >= 3
    assert len(keys_of(truth, "conflict") & set(contradicted)) >= 3
    assert all(by_key[key]["duplicates"] is not None for key in keys_of(truth, "copy"))
    if is_real:  # a small network that has seen digits only takes noise for one
        assert all(by_key[key]["off_topic"] for key in keys_of(truth, "noise"))
    assert all("blank" in str(by_key[key]["image_check"]) for key in keys_of(truth, "blank"))
    off_topic = {row["key"] for row in rows if row["off_topic"]}
    assert len(off_topic - keys_of(truth, "noise") - keys_of(truth, "blank")) <= 3

    flagged = [row for row in rows if row["is_label_issue"]]
    wrong = {key for key, true in truth.items() if true is not None and true != key.split("/")[0]}
    found = wrong & {row["key"] for row in flagged}
    assert len(found) >= 0.8 * len(wrong)
    assert np.mean([row["key"] in wrong or truth[str(row["key"])] is None for row in flagged[:24]]) >= 0.85
    noise = json.loads((run / "report.json").read_text())["noise"]
    assert noise[noise["stated"]] == pytest.approx(len(wrong) / len(truth), abs=0.05)

    with (run / "rejected.csv").open(encoding="utf-8", newline="") as file:
        outcomes = {Path(row["path"]).name: row["outcome"] for row in csv.DictReader(file)}
    assert outcomes == {"truncated.png": "rejected", "page.jpg": "rejected", "notes.txt": "ignored"}


def choose_decisions(rows: list[Row], truth: dict[str, str | None]) -> dict[str, tuple[str, str | None]]:
    """What a person would decide on all that was found: the filter that shows it, and the label, None for none."""
    conflicts = {row["duplicates"] for row in rows if row["conflicting_duplicate"]}
    decisions = {}
    for row in rows:
        found = {
            "conflict": row["duplicates"] in conflicts,
            "blank": "blank" in str(row["image_check"]),
            "off_topic": row["off_topic"],
            "flagged": row["is_label_issue"],
        }
        if shown := [name for name, is_shown in found.items() if is_shown]:
            decisions[str(row["key"])] = shown[0], truth[str(row["key"])]
    return decisions


def decide_in_gallery(browser: Browser, page: Path, decisions: dict[str, tuple[str, str | None]]) -> Path:
    """Press the button of each decision, and return the corrections that the page saves."""
    browser.open(page)
    for key, (shown, label) in decisions.items():
        browser.choose("Show", shown)
        browser.fill('input[aria-label="Part of the key"]', key)
        assert len(browser.find_all("article")) == 1, key
        if label is None:
            browser.click('article [aria-label^="The label is wrong"]')
        elif label == key.split("/")[0]:
            browser.click('article [aria-label^="The label is right"]')
        elif browser.find_all(f'article [aria-label="It is {label}"]'):
            browser.click(f'article [aria-label="It is {label}"]')
        else:
            browser.click('article [aria-label="Another class"]')
            browser.fill('dialog input[aria-label="Another class"]', label)
            browser.press("\ue007")  # Enter
            browser.click("dialog .close")
    browser.click(".save")
    assert browser.errors() == []
    return browser.wait_for_download("corrections.csv")


def write_corrections(file: Path, labels: dict[str, str | None]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([("key", "label"), *((key, label or "") for key, label in labels.items())])


@pytest.mark.cluster
def test_photos_are_audited_corrected_and_cleaned(tmp_path: Path, weights: list[str]) -> None:
    truth = write_photos(tmp_path / "photos")
    printed = run_command(tmp_path, ["incv", "audit", "photos", *weights, "execution.device=cpu"])
    run = tmp_path / "runs/audit-photos"
    rows = read_list(run)
    assert {row["key"] for row in rows} == {*truth, "zero/truncated.png", "one/page.jpg"}
    check_findings(run, rows, truth, is_real=MODEL in weights)

    decisions = choose_decisions(rows, truth)
    labels = {key: label for key, (_, label) in decisions.items()}
    try:
        with open_browser(tmp_path) as browser:
            decide_in_gallery(browser, run / "report.html", decisions)
    except pytest.skip.Exception as reason:  # no Chromium here: the rest does not need it
        warnings.warn(f"the gallery was not used: {reason}", stacklevel=1)
        write_corrections(tmp_path / "corrections.csv", labels)

    again = re.search(r"^ *(incv run .*labels\.corrections=corrections\.csv.*)$", printed, re.MULTILINE)
    assert again is not None, printed
    reprinted = run_command(tmp_path, shlex.split(again[1]))
    corrected = tmp_path / shlex.split(again[1])[-1]
    left = len(truth) - list(labels.values()).count(None)
    assert f"features: {left} of {left} images were computed before" in reprinted
    assert json.loads((corrected / "examination.json").read_text())["computed"] == 0
    checked = {row["key"]: row for row in read_list(corrected) if row["checked"]}
    assert {key: row["given_label"] for key, row in checked.items()} == labels

    clean = re.search(r"^ *(incv clean .*)$", reprinted, re.MULTILINE)
    assert clean is not None, reprinted
    run_command(tmp_path, shlex.split(clean[1]))
    check_cleaned(tmp_path / "photos", tmp_path / "cleaned", truth, labels)


def check_cleaned(photos: Path, cleaned: Path, truth: dict[str, str | None], labels: dict[str, str | None]) -> None:
    """Every image has its own bytes and, but for a few that no one has found, its true class; little is left out."""
    home = {Path(key).name: key for key in truth}
    kept = {home[path.name]: path for path in cleaned.rglob("*") if path.suffix in (".png", ".jpg")}
    assert {folder.name for folder in cleaned.iterdir() if folder.is_dir()} == set(CLASSES)
    assert all(path.read_bytes() == (photos / key).read_bytes() for key, path in kept.items())
    assert all(kept[key].parent.name == label for key, label in labels.items() if label is not None)
    assert not [key for key, label in labels.items() if label is None and key in kept]
    mislabelled = [key for key, path in kept.items() if path.parent.name != truth[key]]
    assert len(mislabelled) <= 2
    right = keys_of(truth, "right") | {key for key in truth if "/more/" in key}
    assert len(right & kept.keys()) >= 0.95 * len(right)
    assert len({path.name for path in cleaned.rglob("*.png")}) + len(list(cleaned.rglob("*.jpg"))) == len(kept)
