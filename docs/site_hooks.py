"""Hooks of the site (mkdocs.yml): pages from outside docs/, links to files of the repository, formulas, tables.

The sources are written for a reader of the repository: links are relative paths, formulas stand between dollar signs.
The site gets the same pages. A link that leaves docs/ leads to a copy in the site: a page for Markdown and code, the
file itself for all else. A table that is too wide for a phone becomes a list of its rows there (docs/site.css).
"""

import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[1]
PAGES = {  # Markdown outside docs/ -> its page in the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "slurm/README.md": "slurm.md",
    "results/README.md": "recorded-runs.md",
    "benchmarks/README.md": "benchmarks.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_CODE = {".yaml": "yaml", ".sh": "sh", ".py": "python", ".toml": "toml", ".cff": "yaml"}  # suffix -> language
_TEXT_FILES = {"Dockerfile": "docker", "LICENSE": "text", "Makefile": "make", "constraints.txt": "text"}
# Code, which is left alone, or a link: its text, its target.
_LINK = re.compile(r"(?:^ *```.*?^ *```$|`[^`\n]+`)|\[([^\[\]]*)\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"[\w/-]+\.md")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_CELL = re.compile(r"<(t[hd])((?: [^>]*)?)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_PHONE = 46  # characters, cell padding included, that stand beside each other at 390 pixels
_PADDING = 3
_SHORT = 28  # characters of a cell that stand beside the head of its column there
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of PAGES and everything that any page links to outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text()))
    for target in sorted({target for file in files.documentation_pages() for target in _linked_files(file)}):
        files.append(_copy_file(target, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def rewrite(match: re.Match[str]) -> str:
        if match[2] is None or _is_elsewhere(match[2]):
            return match[0]
        path, hash_, anchor = match[2].partition("#")
        source = _resolve(page.file, path)
        target = posixpath.relpath(_page_of(source), posixpath.dirname(page.file.src_uri) or ".")
        return f"[{_link_text(match[1], source)}]({target}{hash_}{anchor})"

    return _LINK.sub(rewrite, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def render(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _TABLE.sub(lambda match: _label_cells(match[0]), _FORMULA.sub(render, content))


def _label_cells(table: str) -> str:
    """Give each cell of a wide table the head of its column as data-label, which is shown where the head is not."""
    heads = [_TAG.sub("", match[3]) for match in _CELL.finditer(table) if match[1] == "th"]
    widths = [0] * len(heads)
    place = longest = 0

    def label(match: re.Match[str]) -> str:
        nonlocal place, longest
        column, place = place % len(heads), place + 1
        words = html.unescape(_TAG.sub("", match[3])).split()
        widths[column] = max([widths[column], *map(len, words)])
        if heads[column]:
            longest = max(longest, len(" ".join(words)))
        if match[1] == "th":
            return match[0]
        return f'<td{match[2]} data-label="{html.escape(html.unescape(heads[column]))}">{match[3]}</td>'

    labelled = _CELL.sub(label, table)
    if sum(widths) + _PADDING * len(widths) <= _PHONE:
        return table
    return labelled.replace("<table>", f'<table data-wide="{"short" if longest <= _SHORT else "long"}">', 1)


def _link_text(text: str, source: str) -> str:
    """Return the text of a link; one that names a Markdown file becomes the title of its page."""
    if not _FILE_NAME.fullmatch(text) or not (REPOSITORY / source).is_file():
        return text
    title = _TITLE.search((REPOSITORY / source).read_text())
    return title[1] if title else text


def _linked_files(file: File) -> list[str]:
    """Return the files outside docs/ that a page links to and that have no page of their own, from the root."""
    links = [match[2] for match in _LINK.finditer(file.content_string) if match[2] and not _is_elsewhere(match[2])]
    paths = {_resolve(file, link.partition("#")[0]) for link in links}
    return [path for path in paths if path not in PAGES and not path.startswith("docs/") and _exists(path)]


def _is_elsewhere(link: str) -> bool:
    """Return whether a link leads to the web or to a heading of its own page."""
    return link.startswith("#") or re.match(r"\w+:", link) is not None


def _resolve(file: File, path: str) -> str:
    """Return a link of a page as a path from the root of the repository."""
    source = _SOURCES.get(file.src_uri, "docs/" + file.src_uri)
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _exists(path: str) -> bool:
    if (REPOSITORY / path).is_dir():
        raise PluginError(f"a page links to the folder {path}: link to a file, folders are not part of the site")
    return (REPOSITORY / path).is_file()


def _page_of(path: str) -> str:
    """Return where a file of the repository is in the site's sources."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md" if _language(path) else f"files/{path}"


def _language(path: str) -> str | None:
    return _TEXT_FILES.get(posixpath.basename(path)) or _CODE.get(posixpath.splitext(path)[1])


def _copy_file(path: str, config: MkDocsConfig) -> File:
    language, not_in_menu = _language(path), InclusionLevel.NOT_IN_NAV
    if language is None:
        return File.generated(config, _page_of(path), abs_src_path=str(REPOSITORY / path), inclusion=not_in_menu)
    text = (REPOSITORY / path).read_text()
    page = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n``````{language}\n{text}\n``````\n"
    return File.generated(config, _page_of(path), content=page, inclusion=not_in_menu)
