"""Copying packed folders: every byte verified, safe under kills, nothing trusted, one copier at a time."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shards import download as download_module
from shards import folder_url
from shards.dali_index import write_dali_index
from shards.download import DownloadReport, download_shards
from shards.durable import read_json, write_json
from shards.errors import CommandStopped, ConfigError, DataError, InputError
from shards.pack import PackOptions, pack
from shards.sample_index import SampleIndex
from shards.verify import require_verified, verify
from tests.support import REPOSITORY
from tests.support.pictures import contents, list_source
from tests.support.small_disk import enlarge, mounted_disk
from tests.support.web_server import WebServer, serving

SHARDS = 6
OWN = {".verified.json"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("download") / "packed"
    pack(list_source(23), folder, PackOptions(samples_per_shard=4))
    return folder


@pytest.fixture
def source(packed, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(packed, tmp_path / "source"))


@pytest.fixture
def target(tmp_path):
    return tmp_path / "node" / "shards"


@pytest.fixture
def web(source, monkeypatch):
    pytest.importorskip("aiohttp", reason="pip install 'incv[http]'")
    monkeypatch.setattr(folder_url, "_SECONDS_BEFORE_RETRY", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(source) as server:
        yield server


def files_of(folder):
    return {name: data for name, data in contents(folder).items() if name not in OWN}


def require_copy(source, target):
    assert files_of(target) == files_of(source)
    assert verify(target).problems == []
    assert not [path for path in target.rglob("*") if ".tmp" in path.name or path.name == ".staging"]


def test_a_copy_is_the_same_and_good(packed, target):
    report = download_shards(str(packed), target)
    nbytes = sum(path.stat().st_size for path in packed.glob("*.tar"))
    assert report == DownloadReport(copied=SHARDS, kept=0, nbytes=nbytes)
    require_copy(packed, target)


@pytest.mark.parametrize("write", ["{}", "{}/", "file://{}", "local://{}"])
def test_a_local_folder_has_several_spellings(packed, target, write):
    assert download_shards(write.format(packed), target).copied == SHARDS
    require_copy(packed, target)


def test_a_run_need_not_check_a_copy_again(packed, target, monkeypatch):
    download_shards(str(packed), target)
    monkeypatch.setattr("shards.verify.verify", lambda *_: pytest.fail("checked again"))
    require_verified(target)


def test_a_second_time_nothing_is_copied_nor_hashed(packed, target, monkeypatch):
    download_shards(str(packed), target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir() if path.name not in OWN}
    monkeypatch.setattr(download_module, "hash_file", lambda _: pytest.fail("hashed again"))
    assert download_shards(str(packed), target) == DownloadReport(copied=0, kept=SHARDS, nbytes=0)
    assert before == {path.name: path.stat().st_mtime_ns for path in target.iterdir() if path.name not in OWN}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.dictionaries(st.integers(0, SHARDS - 1), st.sampled_from(["gone", "cut", "flipped", "touched"])),
    finished=st.booleans(),
    workers=st.integers(1, 5),
)
def test_whatever_was_damaged_is_copied_again_and_nothing_else(packed, tmp_path, damage, finished, workers):
    target = tmp_path / "target"
    shutil.rmtree(target, ignore_errors=True)
    download_shards(str(packed), target)
    for shard, kind in damage.items():
        path = target / f"shard-{shard:06d}.tar"
        if kind == "gone":
            path.unlink()
        elif kind == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif kind == "flipped":
            data = path.read_bytes()
            path.write_bytes(bytes([data[0] ^ 255]) + data[1:])
        else:
            os.utime(path)
    if not finished:
        (target / ".staging").mkdir()
        (target / "dataset.json").rename(target / ".staging" / "dataset.json")
    bad = sum(kind != "touched" for kind in damage.values())
    report = download_shards(str(packed), target, workers)
    assert (report.copied, report.kept) == (bad, SHARDS - bad)
    require_copy(packed, target)


@pytest.mark.parametrize("name", ["index.arrow", "index.parquet", "rejected.parquet", "duplicates.parquet"])
def test_a_damaged_index_is_brought_again(packed, target, name):
    download_shards(str(packed), target)
    os.truncate(target / name, 10)
    assert download_shards(str(packed), target).copied == 0
    require_copy(packed, target)


def test_dataset_json_comes_last(source, target):
    (source / "shard-000005.tar").unlink()
    with pytest.raises(DataError, match=r"shard-000005\.tar cannot be copied: file not found"):
        download_shards(str(source), target)
    assert not (target / "dataset.json").exists()


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("shard-000002.tar", lambda data: data[:-512], "SHA-256"),
        ("shard-000002.tar", lambda data: data + b"x", "more than .* bytes"),
        ("shard-000002.tar", lambda data: bytes([data[0] ^ 1]) + data[1:], "SHA-256"),
        ("index.arrow", lambda data: data[: len(data) // 2], r"index\.arrow"),
        ("index.parquet", lambda data: b"garbage", r"index\.parquet"),
        ("rejected.parquet", lambda data: b"garbage", r"rejected\.parquet"),
        ("duplicates.parquet", lambda data: b"garbage", r"duplicates\.parquet"),
    ],
)
def test_a_source_that_changed_is_refused_by_name(source, target, monkeypatch, name, damage, reason):
    monkeypatch.setattr(folder_url, "_SECONDS_BEFORE_RETRY", 0.0)
    good = (source / name).read_bytes()
    (source / name).write_bytes(damage(good))
    with pytest.raises(DataError, match=reason) as raised:
        download_shards(str(source), target)
    assert str(source) in str(raised.value)
    assert ".staging" not in str(raised.value)
    assert not (target / name).exists()
    assert not (target / "dataset.json").exists()
    (source / name).write_bytes(good)
    download_shards(str(source), target)
    require_copy(source, target)


def test_over_http(web: WebServer, source, target):
    assert download_shards(web.url, target).copied == SHARDS
    require_copy(source, target)
    assert sorted(web.asked) == sorted({*files_of(source), "shard-000000.idx", "source_files.parquet"})
    web.asked.clear()
    assert download_shards(web.url + "/", target).kept == SHARDS
    assert web.asked == ["dataset.json", "shard-000000.idx"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [("shard-000001.tar", fault) for fault in ("cut", "silent_cut", "wrong", "503")] + [("index.arrow", "cut")],
)
def test_trouble_on_the_way_is_met_by_trying_again(web: WebServer, source, target, name, fault):
    web.faults[name] = [fault] * 2
    assert download_shards(web.url, target).copied == SHARDS
    require_copy(source, target)
    assert web.asked.count(name) == 3


@pytest.mark.parametrize("fault", ["cut", "wrong"])
def test_lasting_trouble_names_the_file_and_keeps_the_rest(web: WebServer, source, target, fault):
    web.faults["shard-000003.tar"] = [fault] * 3
    with pytest.raises(DataError, match=r"http://.*/packed/shard-000003\.tar cannot be copied: .*3 attempts"):
        download_shards(web.url, target, workers=1)
    assert not (target / "shard-000003.tar").exists()
    kept = len(list(target.glob("*.tar")))
    assert kept >= 3
    report = download_shards(web.url, target)
    assert (report.copied, report.kept) == (SHARDS - kept, kept)
    require_copy(source, target)


@pytest.mark.parametrize("status", ["403", "404"])
def test_what_is_refused_is_not_asked_for_again(web: WebServer, target, status):
    web.faults["shard-000003.tar"] = [status] * 9
    with pytest.raises(DataError, match=r"shard-000003\.tar cannot be copied: (403|file not found)"):
        download_shards(web.url, target)
    assert web.asked.count("shard-000003.tar") == 1


def test_a_wrong_address_leaves_no_folder(web: WebServer, tmp_path, target):
    web.folder = tmp_path / "elsewhere"
    with pytest.raises(DataError, match=r"dataset\.json cannot be read: file not found.*check the address"):
        download_shards(web.url, target)
    with pytest.raises(DataError, match=r"dataset\.json cannot be read: file not found"):
        download_shards(str(tmp_path / "nothing"), target)
    assert not target.exists()


def test_nobody_listens(web: WebServer, target):
    host = "http://127.0.0.1:1"  # a port nobody may listen on
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1/x/dataset\.json cannot be read: Connection refused .3 att"):
        download_shards(f"{host}/x", target)
    assert not target.exists()


def test_a_password_is_not_shown(web: WebServer, target):
    for source in ("http://user:secret@127.0.0.1:1/x", "ftp://user:secret@127.0.0.1/x", "http://user:secret@host/?x"):
        with pytest.raises(InputError, match=r"://\*\*\*@") as raised:
            download_shards(source, target)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        "memory://packed",
        "pipe:cat /etc/passwd",
        "ssh://host/packed",
        "ftp://host/packed",
        "simplecache::http://host/packed",
        "zip://a::http://host/b.zip",
        "github://a:b@c/",
        "data:text/plain,x",
    ],
)
def test_other_schemes_are_refused(source, target):
    with pytest.raises(ConfigError, match="local, file, s3, gs, gcs, http, https"):
        download_shards(source, target)
    assert not target.exists()


def test_a_chain_behind_an_allowed_scheme_is_a_mere_name(packed, target):
    with pytest.raises(DataError, match="file not found"):
        download_shards(f"file://{packed}::memory://x", target)


@pytest.mark.parametrize("source", ["http://host/packed?token=1", "http://host/a#b", "https://", "s3://"])
def test_an_address_that_is_no_folder(source, target):
    with pytest.raises(ConfigError):
        download_shards(source, target)


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gs"), ("gcs", "gs"), ("https", "http")])
def test_a_missing_backend_is_named(scheme, extra, target, monkeypatch):
    def missing(*_arguments: object) -> None:
        raise ImportError("no such package")

    monkeypatch.setattr(folder_url, "_open_filesystem", missing)
    with pytest.raises(ConfigError, match=rf"{scheme}:// needs .* pip install 'incv\[{extra}\]'"):
        download_shards(f"{scheme}://bucket/packed", target)


def test_source_and_target_must_differ(packed, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(packed)
    for target in (packed, packed / ".." / packed.name, link):
        with pytest.raises(ConfigError, match="same folder"):
            download_shards(str(packed), target)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a folder"):
        download_shards(str(packed), tmp_path / "file")
    with pytest.raises(ConfigError, match="workers"):
        download_shards(str(packed), tmp_path / "new", workers=0)


def hostile(change):
    def apply(source):
        content = read_json(source / "dataset.json")
        change(content)
        write_json(source / "dataset.json", content)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        hostile(lambda content: content["shards"][0].update(file="../../escaped.tar")),
        hostile(lambda content: content["shards"][0].update(file="/tmp/escaped.tar")),
        hostile(lambda content: content["shards"][0].update(nbytes="many")),
        hostile(lambda content: content["shards"][0].update(nbytes=-1)),
        hostile(lambda content: content["shards"][0].update(sha256="../x")),
        hostile(lambda content: content["shards"][0].update(sha256=None)),
        hostile(lambda content: content.update(count=1e9)),
        hostile(lambda content: content.update(format=99)),
        hostile(lambda content: content.update(surprise=1)),
        lambda source: (source / "dataset.json").write_text("[" * 100_000),
        lambda source: (source / "dataset.json").write_text('{"format": ' + "9" * 5000 + "}"),
        lambda source: (source / "dataset.json").write_bytes(b"\xff\xfe"),
    ],
)
def test_a_hostile_dataset_json_is_refused_before_anything_is_copied(source, target, change):
    change(source)
    with pytest.raises(DataError, match=r"dataset\.json.*Nothing was copied") as raised:
        download_shards(str(source), target)
    assert "rm -r" not in str(raised.value)
    assert not target.exists()
    assert not list(target.parent.parent.rglob("escaped.tar"))


def test_index_files_for_dali_are_made_from_the_checked_shards(packed, source, target):
    write_dali_index(SampleIndex.load(source))
    honest = {path.name: path.read_bytes() for path in source.glob("*.idx")}
    assert len(honest) == SHARDS
    for name in honest:
        (source / name).write_text("v1.2 1\njpg 0 10 ../../etc/passwd\n")
    download_shards(str(source), target)
    assert {path.name: path.read_bytes() for path in target.glob("*.idx")} == honest
    (target / "shard-000003.idx").unlink()
    assert download_shards(str(source), target).copied == 0
    assert {path.name: path.read_bytes() for path in target.glob("*.idx")} == honest
    assert not list(packed.glob("*.idx"))


def test_nothing_but_what_dataset_json_lists_is_copied(source, target):
    (source / "shard-000099.tar").write_bytes(b"x")
    (source / "evil.py").write_text("x")
    download_shards(str(source), target)
    assert not (target / "shard-000099.tar").exists()
    assert not (target / "evil.py").exists()


def test_another_data_set_in_the_target_is_left_alone(packed, source, target, tmp_path):
    pack(list_source(5), tmp_path / "other")
    download_shards(str(packed), target)
    before = contents(target)
    with pytest.raises(DataError, match=r"already holds a data set that differs .* rm -r"):
        download_shards(str(tmp_path / "other"), target)
    assert contents(target) == before
    (source / "shard-000005.tar").unlink()
    half = tmp_path / "half"
    with pytest.raises(DataError, match="shard-000005"):
        download_shards(str(source), half)
    with pytest.raises(DataError, match="already holds a data set that differs"):
        download_shards(str(tmp_path / "other"), half)


def test_a_folder_with_other_files_is_left_alone(packed, target):
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match=r"thesis\.tex"):
        download_shards(str(packed), target)
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_a_stop_keeps_what_is_finished(web: WebServer, source, target):
    web.held = "shard-000004.tar"

    def stop() -> bool:
        if len(list(target.glob("*.tar"))) < 4:
            return False
        web.hold.set()
        return True

    with pytest.raises(CommandStopped, match="run the same command again"):
        download_shards(web.url, target, workers=1, stop=stop)
    assert not (target / "dataset.json").exists()
    kept = len(list(target.glob("*.tar")))
    assert 4 <= kept < SHARDS
    assert download_shards(web.url, target).kept == kept
    require_copy(source, target)


PROGRAM = """
import logging
import sys
from pathlib import Path
from shards.download import download_shards
logging.basicConfig(level=logging.INFO)
print(download_shards(sys.argv[1], Path(sys.argv[2])))
"""


def start(source, target):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source), str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def wait_until(condition, process):
    limit = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "the awaited moment did not come"
        time.sleep(0.01)


def test_a_killed_copy_goes_on_where_it_was(web: WebServer, source, target):
    web.held = "shard-000004.tar"
    process = start(web.url, target)
    wait_until(lambda: len(list(target.glob("shard-*.tar"))) == SHARDS - 1, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (target / "dataset.json").exists()
    assert not (target / "shard-000004.tar").exists()
    web.hold.set()
    web.asked.clear()
    report = download_shards(web.url, target)
    assert (report.copied, report.kept) == (1, SHARDS - 1)
    assert [name for name in web.asked if name.endswith(".tar")] == ["shard-000004.tar"]
    require_copy(source, target)


def test_a_signal_ends_the_command_with_75_and_it_goes_on(web: WebServer, source, target):
    web.held = "shard-000004.tar"
    command = [sys.executable, "-m", "trainer", "shards", "stage", web.url, str(target)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    wait_until(lambda: len(list(target.glob("shard-*.tar"))) == SHARDS - 1, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    web.hold.set()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert "run the same command again" in error
    assert not (target / "dataset.json").exists()
    assert download_shards(web.url, target).kept >= SHARDS - 1
    require_copy(source, target)


def test_the_second_of_two_waits_and_finds_it_done(web: WebServer, source, target):
    web.held = "shard-000004.tar"
    first = start(web.url, target)
    wait_until(lambda: web.held in web.asked, first)
    second = start(web.url, target)
    assert "another process is writing to" in second.stderr.readline()
    assert first.poll() is None
    web.hold.set()
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert f"DownloadReport(copied={SHARDS}, kept=0" in outputs[0][0]
    assert f"DownloadReport(copied=0, kept={SHARDS}" in outputs[1][0]
    assert web.asked.count("shard-000000.tar") == 1
    require_copy(source, target)


def test_one_that_waits_can_be_stopped(web: WebServer, target):
    web.held = "shard-000004.tar"
    first = threading.Thread(target=download_shards, args=(web.url, target))
    first.start()
    while web.held not in web.asked:
        time.sleep(0.01)
    with pytest.raises(CommandStopped):
        download_shards(web.url, target, stop=lambda: True)
    web.hold.set()
    first.join()
    assert verify(target).problems == []


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "disk", "64k") as folder:
        yield folder


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_full_disk(packed, small_disk, monkeypatch, asks_first):
    target = small_disk / "target"
    if not asks_first:  # a disk that others fill while we copy
        monkeypatch.setattr(download_module._Download, "_require_room", lambda *_: None)
    with pytest.raises(DataError, match=r"has .* GB of free disk space" if asks_first else "the disk is full"):
        download_shards(str(packed), target)
    assert not (target / "dataset.json").exists()
    assert not list(target.rglob("*.tmp*"))
    for path in target.glob("shard-*.tar"):
        assert path.read_bytes() == (packed / path.name).read_bytes()
    enlarge(small_disk, "4m")
    download_shards(str(packed), target)
    require_copy(packed, target)
