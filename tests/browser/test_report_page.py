"""The report in a real browser: tables, gallery, phone, dark mode, keyboard, no errors, no requests."""

import re
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.support.browser import DESKTOP, PHONE, Browser

FLAGGED, KEPT = ".column.flagged article", ".column.kept article"


def column(browser: Browser, table: str, label: str) -> list[str]:
    return browser.texts(f'{table} td[data-label="{label}"] > span')


def shares(cells: list[str]) -> list[float]:
    return [float(cell.split(" %")[0]) for cell in cells if cell[0].isdigit()]


def count_of(browser: Browser, which: str) -> int:
    return int(re.sub(r"\D", "", browser.find(f".column.{which} h3").text))


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_it_asks_for_nothing_and_makes_no_error(browser: Browser, made_up_page: Path, width: int, dark: bool) -> None:
    browser.open(made_up_page, width, dark)
    browser.click(f"{FLAGGED} .look")
    browser.press(Keys.ESCAPE)
    assert browser.errors() == []
    assert set(browser.requests()) == {made_up_page.as_uri()}


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_nothing_is_cut_or_wider_than_the_screen(browser: Browser, made_up_page: Path, width: int) -> None:
    browser.open(made_up_page, width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    cut = browser.run(
        """return [...document.querySelectorAll("table, td, th, .card, figure, svg, .tile, p, pre, .tools > *")]
        .filter((each) => each.offsetParent || each.ownerSVGElement === null)
        .filter((each) => each.getClientRects().length && !each.closest("figure .scroll"))
        .filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5
          || (each.tagName !== "svg" && each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0
            && !each.matches("select, input")))
        .map((each) => each.tagName + "." + each.className + ": " + each.textContent.slice(0, 60))"""
    )
    assert cut == []


def test_text_on_a_phone_is_large_enough_to_read(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page, PHONE)
    small = browser.run(
        """const scale = ({ a, b }) => Math.hypot(a, b);  // of turned text, too
        return [...document.querySelectorAll("svg text")].filter((each) => each.getClientRects().length)
        .filter((each) => parseFloat(getComputedStyle(each).fontSize) * scale(each.getScreenCTM()) < 9.5)
        .map((each) => each.textContent)"""
    )
    assert small == []


def luminance(colour: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_dark_mode_is_dark_and_has_contrast(browser: Browser, made_up_page: Path) -> None:
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    for dark in (False, True):
        browser.open(made_up_page, dark=dark)
        ground = luminance(browser.run(style, "body", "backgroundColor"))
        assert (ground < 0.05) == dark
        for selector in ("h1", "p", "td", "th", "small", ".decide button", "input", "nav a"):
            text = luminance(browser.run(style, selector, "color"))
            contrast = (max(text, ground) + 0.05) / (min(text, ground) + 0.05)
            assert contrast >= 4.5, (selector, dark)


def test_the_classes_can_be_sorted_and_searched(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page)
    assert len(browser.find_all("#by-class tbody tr")) == 25
    browser.click("#by-class .more")
    assert len(browser.find_all("#by-class tbody tr")) == 40
    head = next(each for each in browser.find_all("#by-class th button") if each.text.startswith("flagged"))
    head.click()
    falling = shares(column(browser, "#by-class", "flagged"))
    assert falling == sorted(falling, reverse=True)
    assert browser.find('#by-class th[aria-sort="descending"]').text.startswith("flagged")
    head.click()
    assert shares(column(browser, "#by-class", "flagged")) == falling[::-1] or sorted(falling) == shares(
        column(browser, "#by-class", "flagged")
    )
    browser.fill("#by-class input", "class 1")
    assert sorted(column(browser, "#by-class", "class")) == sorted(f"class {n}" for n in (1, *range(10, 20)))
    browser.fill("#by-class input", "<script")
    assert column(browser, "#by-class", "class") == ["<script>alert(1)</script>"]
    assert column(browser, "#by-source", "source") == ["google", "flickr"]


def test_a_phone_sorts_by_a_list(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page, PHONE)
    assert len(browser.find_all("#by-class tbody tr")) == 5
    browser.click('#by-class select option[value="1"]')
    counts = [int(cell) for cell in column(browser, "#by-class", "labels")]
    assert counts == sorted(counts, reverse=True)


def test_the_gallery_is_filtered(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page)
    everything = count_of(browser, "flagged"), count_of(browser, "kept")
    assert everything[0] > 1000
    assert everything[1] >= 900
    browser.choose("Show", "removed")
    removed = count_of(browser, "flagged")
    assert not browser.find(".column.kept").is_displayed()
    browser.choose("Show", "candidate")
    assert count_of(browser, "flagged") + removed == everything[0]
    browser.choose("Show", "selected")
    assert not browser.find(".column.flagged").is_displayed()
    browser.choose("Show", "")
    browser.choose("Source", "0")
    google = count_of(browser, "flagged")
    browser.choose("Source", "1")
    assert count_of(browser, "flagged") + google == everything[0]
    browser.choose("Source", "")
    browser.fill('input[aria-label="Class"]', "class 7")
    assert 0 < count_of(browser, "flagged") < everything[0] / 10
    assert all(re.search(r"\bclass 7\b", text) for text in browser.texts(f"{FLAGGED} .labels"))
    browser.fill('input[aria-label="Class"]', "")
    browser.fill('input[aria-label="Part of the key"]', "flickr/q1001")
    assert count_of(browser, "flagged") + count_of(browser, "kept") <= 1


def test_the_opening_sets_the_filters_of_the_gallery(browser: Browser, examined_page: Path) -> None:
    browser.open(examined_page)
    browser.fill('input[aria-label="Part of the key"]', "no such key")
    first = browser.find("#look-first a[data-given]")
    pair, number = first.find_element("css selector", "b").text, int(first.text.split("\n")[1].split()[0])
    browser.click("#look-first a[data-given]")
    assert count_of(browser, "flagged") == number
    assert set(browser.texts(f"{FLAGGED} .labels")) == {pair}
    browser.fill('input[aria-label="Class"]', pair.split(" → ")[0] + " ->")
    assert count_of(browser, "flagged") > number, "all suggestions for a class"
    browser.click('#look-first a[data-show="conflict"]')
    assert browser.texts(f"{FLAGGED} .badges") == ["conflicting duplicate"] * 2
    assert not browser.find(".column.kept").is_displayed()
    browser.click("#look-first a[data-sample]")
    facts = dict(zip(browser.texts("dialog dt"), browser.texts("dialog dd"), strict=True))
    assert facts["found"] == "conflicting duplicate"
    assert facts["same image as"].startswith("photos/")
    assert facts["probability of it"].endswith(" %")
    assert browser.errors() == []


def test_more_images_are_shown_on_demand(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page)
    first = len(browser.find_all(FLAGGED))
    assert first == 36
    browser.click(".column.flagged .more")
    assert len(browser.find_all(FLAGGED)) > 4 * first
    loaded = (
        "return [...document.querySelectorAll('article img')].every((each) => each.complete && each.naturalWidth)"
    )
    browser.wait(loaded)


def test_a_click_shows_all_facts(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page)
    browser.click(f"{FLAGGED} .look")
    facts = dict(zip(browser.texts("dialog dt"), browser.texts("dialog dd"), strict=True))
    assert re.fullmatch(r"(google|flickr)/q\d+", facts["key"])
    assert facts["path"] == f"/photos/{facts['key']}"
    assert facts["key"].startswith(facts["source"])
    assert facts["state"] in ("candidate", "removed")
    assert facts["given label"] != facts["suggested label"]
    assert float(facts["loss"]) > 1
    assert facts["flagged"].startswith("rank ")
    assert " %" not in "".join(facts.values()), "probabilities of networks are not calibrated"
    browser.press(Keys.ARROW_RIGHT)
    assert browser.texts("dialog dd") != list(facts.values())
    browser.press(Keys.ESCAPE)
    browser.wait("return !document.querySelector('dialog').open")


def test_the_keyboard_moves_and_decides(browser: Browser, made_up_page: Path) -> None:
    browser.open(made_up_page)
    browser.run("document.querySelector('.column.flagged article').focus()")
    current = "return Number(document.activeElement.dataset.row)"
    rows = [int(each.get_attribute("data-row")) for each in browser.find_all(FLAGGED)]
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert browser.run(current) == rows[1]
    browser.press(Keys.ARROW_DOWN)
    below = browser.run(current)
    assert below in rows[3:8]
    browser.press(Keys.ARROW_UP, "r", "s", "w")
    assert browser.run(current) == rows[4]
    decisions = [browser.texts(f'article[data-row="{row}"] .decision') for row in rows[1:5]]
    suggested = browser.texts(f'article[data-row="{rows[2]}"] .labels')[0].split(" → ")[1]
    assert decisions == [["✓ right"], [f"→ {suggested}"], ["✗ wrong, left out"], []]
    browser.press(Keys.ARROW_LEFT, "u")
    assert browser.texts(f'article[data-row="{rows[3]}"] .decision') == []
    browser.press(Keys.ENTER)
    assert browser.find("dialog").is_displayed()
    browser.press("w", Keys.ESCAPE)
    browser.wait("return !document.querySelector('dialog').open")
    assert browser.texts(f'article[data-row="{rows[3]}"] .decision') == ["✗ wrong, left out"]
    browser.choose("Decisions", "yes")
    assert count_of(browser, "flagged") == 3
    browser.open(made_up_page, keep=True)
    assert browser.find(".saving").text.startswith("Download corrections.csv\n3 decisions")
