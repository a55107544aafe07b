"""The commands meet devices, FIFOs, sockets, links, folders and files of others where they write and read."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.test_compare_command import RECORD
from tests.support.hostile_files import FOREIGN, IRREGULAR, nothing_lost
from trainer.compare.command import _PAGE_START
from trainer.outputs.clean import MARK

pytestmark = pytest.mark.timeout(60)
COMMANDS = {
    "predict": ["predict", "photos", "--run", "run", "-o", "OUT", "--force"],
    "clean": ["clean", "run", "--out", "OUT", "--force"],
    "clean --as shards": ["clean", "run", "--as", "shards", "--out", "OUT", "--force"],
    "clean --as list": ["clean", "run", "--as", "list", "--out", "OUT", "--force"],
    "compare": ["compare", str(RECORD), "--html", "OUT"],
    "cp": ["cp", "tiny", "OUT"],
}
"""How each command writes to a file or folder that the user names."""


@pytest.fixture
def photos(playground: Path) -> Path:
    folder = playground / "photos"
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (40 * number, 80, 120)).save(folder / label / f"{number}.png")
    return folder


def call(incv, command: str, out: object):
    return incv(*(str(out) if word == "OUT" else word for word in COMMANDS[command]))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_replaces_only_what_it_wrote(command, finished, photos, incv, tmp_path):
    for number, (kind, make) in enumerate(IRREGULAR.items()):
        folder = tmp_path / f"irregular{number}"
        folder.mkdir()
        make(folder / "out")
        with nothing_lost(folder):
            answer = call(incv, command, folder / "out")
        assert answer.code in (2, 3), (kind, answer.err)
        assert "out" in answer.err
    for kind, content in FOREIGN.items():
        folder = tmp_path / f"foreign-{kind}"
        folder.mkdir()
        (folder / "out").write_bytes(content)
        (folder / "out").chmod(0o444)
        with nothing_lost(folder):
            answer = call(incv, command, folder / "out")
        assert answer.code == 2, (kind, answer.err)
        assert "choose another" in answer.err
    assert not list(tmp_path.rglob(".*tmp*"))


def test_clean_lists_what_was_added_to_its_output_or_changed(finished, incv):
    again = ("clean", finished, "--out", "cleaned", "--force")
    assert incv(*again).code == 0
    (first, second, *_) = sorted(path for path in Path("cleaned").rglob("*") if path.is_file())
    ours = first.read_bytes()
    changes = {
        "added.jpg": lambda: Path("cleaned/added.jpg").write_bytes(b"mine"),
        "0/.hidden": lambda: Path("cleaned/0").mkdir(exist_ok=True) or Path("cleaned/0/.hidden").touch(),
        "link": lambda: Path("cleaned/link").symlink_to("../photos"),
        "fifo": lambda: os.mkfifo("cleaned/fifo"),
        "deep/er/notes.txt": lambda: (
            Path("cleaned/deep/er").mkdir(parents=True) or Path("cleaned/deep/er/notes.txt").touch()
        ),
        str(first.relative_to("cleaned")): lambda: first.write_bytes(b"edited"),
    }
    for name, change in changes.items():
        change()
        with nothing_lost(Path("cleaned")):
            answer = incv(*again)
        assert answer.code == 2
        assert name in answer.err
        first.write_bytes(ours) if name == str(first.relative_to("cleaned")) else Path("cleaned", name).unlink()
    mark = Path("cleaned", MARK)
    os.utime(mark)  # the first file has the time of its edit
    second.unlink()  # what is gone cannot be lost
    assert incv(*again).code == 0
    assert second.is_file()
    mark.write_text(json.dumps(["not", "ours"]))
    with nothing_lost(Path("cleaned")):
        assert incv(*again).code == 2


def test_what_is_added_while_clean_writes_is_kept(finished, incv, monkeypatch):
    from trainer.outputs import clean

    assert incv("clean", finished, "--out", "cleaned").code == 0
    write = clean._write_packed

    def write_while_the_user_does(*arguments: object) -> None:
        write(*arguments)
        Path("cleaned/mine.jpg").write_bytes(b"mine")

    monkeypatch.setattr(clean, "_write_packed", write_while_the_user_does)
    assert incv("clean", finished, "--out", "cleaned", "--force").code == 2
    assert Path("cleaned/mine.jpg").read_bytes() == b"mine"
    assert not list(Path.cwd().glob(".cleaned*"))


@pytest.mark.parametrize("command", ["predict", "clean --as list"])
def test_force_replaces_an_earlier_table(command, finished, photos, incv):
    for _ in range(2):
        assert call(incv, command, "out.csv").code == 0
    assert not list(Path.cwd().glob(".out*"))


def test_a_page_is_replaced_and_another_file_only_by_force(incv, playground):
    page = Path("page.html")
    for _ in range(2):
        assert call(incv, "compare", page).code == 0
    assert page.read_bytes().startswith(_PAGE_START)
    page.write_text("mine")
    Path(".page.html.tmp4711").touch()
    answer = call(incv, "compare", page)
    assert (answer.code, "--force" in answer.err, page.read_text()) == (2, True, "mine")
    assert incv("compare", RECORD, "--html", page, "--force").code == 0
    assert page.read_bytes().startswith(_PAGE_START)
    assert [path.name for path in Path.cwd().iterdir() if path.name.startswith(".")] == []


def test_predict_names_what_is_no_file(finished, photos, incv):
    for number, make in enumerate(IRREGULAR.values()):
        (photos / f"irregular{number}").mkdir()
        make(photos / f"irregular{number}" / "x.jpg")
    with nothing_lost(photos):
        assert incv("predict", photos, "--run", finished, "-o", "out.csv").code == 0
    table = Path("out.csv").read_text()
    assert table.count("a FIFO, not a regular file") >= 2  # and a link to one
    assert "a socket, not a regular file" in table
    assert table.count(".png") == 4


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b"[]\n", b"{}\n", b'{"path": 1, "problem": 2}\n', b'{"path": "x", "problem": null}\n']
)
def test_a_damaged_partial_file_is_started_over(damage, finished, photos, incv, monkeypatch):
    with monkeypatch.context() as stopping:
        stopping.setattr("trainer.cli._listen", lambda: lambda: True)
        assert incv("predict", photos, "--run", finished, "-o", "out.csv").code == 75
    (partial,) = Path.cwd().glob(".out.csv.*.partial")
    partial.write_bytes(damage)
    Path(f".out.csv.{'0' * 12}.partial").touch()  # of other networks
    Path(".out.csv.tmp4711").touch()
    answer = incv("predict", photos, "--run", finished, "-o", "out.csv")
    assert answer.code == 0, answer.err
    assert "is damaged" in answer.err
    assert "classified again" in answer.err
    assert Path("out.csv").read_text().count(".png") == 4
    assert not list(Path.cwd().glob(".out.csv*"))


@pytest.mark.parametrize("kind", [kind for kind in IRREGULAR if kind != "link to a folder"])
def test_a_partial_file_that_is_none_is_refused(kind, finished, photos, incv, monkeypatch):
    with monkeypatch.context() as stopping:
        stopping.setattr("trainer.cli._listen", lambda: lambda: True)
        assert incv("predict", photos, "--run", finished, "-o", "out.csv").code == 75
    (partial,) = Path.cwd().glob(".out.csv.*.partial")
    partial.unlink()
    IRREGULAR[kind](partial)
    with nothing_lost(Path.cwd()):
        assert incv("predict", photos, "--run", finished, "-o", "out.csv").code == 3


def test_packing_names_the_photos_that_are_no_files(incv, photos):
    for kind in ("FIFO", "socket", "link to a FIFO"):
        place = photos / "cat" / kind
        place.mkdir()
        IRREGULAR[kind](place / "x.jpg")
    with nothing_lost(photos):
        answer = incv("shards", "pack", "image_folder", "--root", photos, "--split", "", "--out", "packed")
    assert answer.code == 0, answer.err
    for kind, what in {"FIFO": "a FIFO", "socket": "a socket", "link to a FIFO": "a FIFO"}.items():
        assert f"cat/{kind}/x.jpg is left out: it is {what}, not a regular file" in answer.err


def test_no_report_is_written_into_the_folder_of_another_program(incv, playground):
    Path("site").mkdir()
    Path("site/manifest.json").write_text('{"name": "an app"}')
    Path("site/report.html").write_text("mine")
    with nothing_lost(Path("site")):
        assert incv("report", "site").code == 2
