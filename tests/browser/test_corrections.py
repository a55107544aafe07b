"""Labels that are corrected in the browser feed the next run."""

import csv
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import CLASSES
from tests.support.browser import Browser
from tests.support.command_line import TINY, exit_code
from tests.support.photos import PHOTO_RECIPE


def labels_of(run: str) -> dict[int, int]:
    table = pq.read_table(f"{run}/labels.parquet")
    return dict(zip(table["sample_id"].to_pylist(), table["label"].to_pylist(), strict=True))


def show(browser: Browser, key: str) -> None:
    """Show one sample of the gallery."""
    browser.fill('input[aria-label="Part of the key"]', key)
    assert len(browser.find_all("article")) == 1


def test_decisions_are_saved_and_feed_a_run(
    browser: Browser, photo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(photo_run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    browser.open(Path("run/report.html").resolve())
    assert not browser.find(".save").is_enabled()
    script, formula, birds, seven = CLASSES
    show(browser, f"{script}/05.png")
    browser.click('[aria-label^="The label is right"]')
    show(browser, f"{formula}/04.png")
    browser.click('[aria-label^="The label is wrong"]')
    show(browser, f"{birds}/03.png")
    browser.click('.decide [aria-label="Another class"]')
    browser.fill('dialog input[aria-label="Another class"]', "no such class")
    browser.press(Keys.ENTER)
    assert browser.find("dialog .decision").text == "not decided"
    browser.fill('dialog input[aria-label="Another class"]', formula)
    browser.press(Keys.ENTER)
    assert browser.find("dialog .decision").text == f"→ {formula}"
    browser.click("dialog .close")
    show(browser, f"{seven}/=cmd")
    browser.click('.decide [aria-label="Another class"]')
    browser.fill('dialog input[aria-label="Another class"]', script)
    browser.press(Keys.ENTER)
    browser.click("dialog .close")
    (browser.downloads / "corrections.csv").unlink(missing_ok=True)
    browser.click(".save")
    file = browser.wait_for_download("corrections.csv")
    assert browser.errors() == []

    with file.open(encoding="utf-8", newline="") as text:
        rows = list(csv.reader(text))
    assert rows[0] == ["key", "label"]
    assert sorted(rows[1:]) == sorted(
        [
            [f"{script}/05.png", script],
            [f"'{formula}/04.png", ""],
            [f"{birds}/03.png", f"'{formula}"],
            [f"{seven}/=cmd\u202e01.png", script],
        ]
    )
    shutil.copy(file, "corrections.csv")
    command = ["labels", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=corrections.csv", "--run-dir", "second"]
    assert exit_code(command) == 0
    before, after = labels_of("run"), labels_of("second")
    changed = {number: after.get(number) for number in before if after.get(number) != before[number]}
    names = sorted(CLASSES)  # the order of the classes
    assert sorted(changed.values(), key=str) == sorted([None, names.index(formula), names.index(script)], key=str)


def test_an_off_topic_image_is_left_out_with_a_click(browser: Browser, examined_page: Path) -> None:
    browser.open(examined_page)
    browser.choose("Show", "off_topic")
    assert {text.split(" ")[0] for text in browser.texts("article .badges")} == {"off-topic"}
    key = "photos/10.png"
    browser.fill('input[aria-label="Part of the key"]', key)
    browser.click('article [aria-label^="The label is wrong"]')
    (browser.downloads / "corrections.csv").unlink(missing_ok=True)
    browser.click(".save")
    assert f'"{key}",""' in browser.wait_for_download("corrections.csv").read_text()


def test_odd_names_are_texts(browser: Browser, photo_run: Path) -> None:
    browser.open(photo_run / "run" / "report.html")
    assert browser.errors() == []
    assert browser.find_all("img:not([src^='data:'])") == []
    assert browser.find_all("script:not([type])") == browser.find_all("body > script:not([type])")
    assert len(browser.find_all("script:not([type])")) == 1
    assert set(browser.texts('#by-class td[data-label="class"] > span')) == set(CLASSES)
    browser.fill('input[aria-label="Part of the key"]', "=cmd")
    browser.click("article .look")
    facts = dict(zip(browser.texts("dialog dt"), browser.texts("dialog dd"), strict=True))
    assert "=cmd\\u202e01.png" in facts["key"], "what reorders a text is shown"
    assert facts["path"].endswith(facts["key"])


def test_a_second_correction_repeats_the_first(
    browser: Browser, photo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(photo_run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    Path("first.csv").write_text("key,label\n7/05.png,'=SUM(A1)\n7/06.png,\n")
    command = ["run", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=first.csv", "--run-dir", "second"]
    assert exit_code(command) == 0
    browser.open(Path("second/report.html").resolve())
    assert "2 of earlier corrections" in browser.find(".saving").text
    show(browser, "7/04.png")
    browser.click('[aria-label^="The label is right"]')
    (browser.downloads / "corrections.csv").unlink(missing_ok=True)
    browser.click(".save")
    shutil.copy(browser.wait_for_download("corrections.csv"), "more.csv")
    again = ["labels", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=more.csv", "--run-dir", "third"]
    assert exit_code(again) == 0
    assert labels_of("third") == labels_of("second")
    checked = pq.read_table("third/labels.parquet", filters=[("checked", "=", True)])
    assert len(checked) == 2, "one of the first, and the new one; the excluded one is gone"
