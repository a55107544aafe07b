"""The site of `make docs` builds without a warning, its links lead somewhere, and it loads nothing from the web."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support import REPOSITORY
from tests.support.browser import CHROMIUM, PHONE, open_browser, require_chromium

pytest.importorskip("material", reason="the extra `docs` is not installed")


class PageLinks(HTMLParser):
    """The anchors of a page, the links it offers, and the files it loads by itself."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values["href"])


def find_broken_links(site: Path) -> list[str]:
    """Return links and loaded files of the site's pages that lead nowhere, and loads from the web."""
    pages = {page.resolve(): PageLinks(page) for page in sorted(site.rglob("*.html"))}
    broken = []
    for page, content in pages.items():
        if page.name == "404.html":
            continue  # served for any address, so its links are absolute
        broken += [f"{page.name} loads {load}" for load in content.loads if urlsplit(load).netloc]
        for link in content.links + content.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor_exists = (
                target not in pages or not parts.fragment or unquote(parts.fragment) in pages[target].anchors
            )
            if not target.is_file() or not anchor_exists:
                broken.append(f"{page.name}: {link}")
    return broken


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, in another folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_no_link_is_broken_and_nothing_is_loaded_from_the_web(site: Path) -> None:
    assert not find_broken_links(site)


def test_pages_from_outside_docs_and_the_files_they_link_to_are_there(site: Path) -> None:
    assert "How a job ends" in (site / "slurm.html").read_text()
    assert (site / "files/results/figures/figure4.svg").is_file()
    assert "the whole method on a laptop" in (site / "files/recipes/demo.yaml.html").read_text()


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "method.html").read_text()
    assert page.count("<math") >= 50
    assert "arithmatex" not in page
    assert (site / "vendor/stix-two-math.woff2").is_file()


def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    """No table or formula of any page is cut at 390 pixels; only code scrolls."""
    cut = "[...document.querySelectorAll('.md-typeset__scrollwrap')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    tables = "document.querySelectorAll('.md-content table').length"
    # The theme's script wraps each table in an element that scrolls.
    wrapped = f"return document.querySelectorAll('.md-typeset__scrollwrap').length === {tables}"
    pages = [page for page in sorted(site.glob("*.html")) if page.name != "404.html"]
    with open_browser(tmp_path) as browser:
        for page in pages:
            browser.open(page, PHONE, ready=wrapped)
            assert browser.run("return document.documentElement.scrollWidth") <= PHONE, page.name
            assert not browser.run(f"return {cut}.map((e) => e.innerText)"), page.name
        browser.open(site / "getting-started.html", PHONE, ready=wrapped)
        cell = "document.querySelector('td[data-label=recall]')"
        shown = browser.run(f"return getComputedStyle({cell}, '::before').content")
        assert shown == '"recall"'


def test_the_search_works_from_the_disk(site: Path) -> None:
    """In a browser without a server; a search box that cannot load its index finds nothing."""
    require_chromium()
    address = f"{(site / 'index.html').as_uri()}?q=label_smoothing"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom"]
    page = subprocess.run([*command, address], capture_output=True, text=True, timeout=120).stdout
    found = re.findall(r'class="md-search-result__meta">\s*(.+?)\s*<', page)
    assert found, "the page has no search box"
    assert re.fullmatch(r"\d+ matching documents?", found[0])
    assert "fine-tuning.html" in page.split("md-search-result__list")[1]


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="https://example.com/x#y">', None),
        ('<a href="b.html#gone">', "a.html: b.html#gone"),
        ('<a href="c.html">', "a.html: c.html"),
        ('<img src="missing.png">', "a.html: missing.png"),
        ('<script src="https://example.com/x.js">', "a.html loads https://example.com/x.js"),
        ('<link rel="stylesheet" href="//example.com/x.css">', "a.html loads //example.com/x.css"),
    ],
)
def test_broken_links_are_found(tmp_path: Path, link: str, complaint: str | None) -> None:
    (tmp_path / "a.html").write_text(link)
    (tmp_path / "b.html").write_text('<h2 id="there">')
    assert find_broken_links(tmp_path) == ([complaint] if complaint else [])
