"""rejected.csv: every file that is not used, and every misnamed image, with the reason."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shards.pack import PackOptions, pack
from shards.sources.source import IgnoredFile
from tests.support.pictures import ListSource, picture
from trainer.records.run_directory import RunDirectory
from trainer.report.sections.images import OUTCOMES, describe_counts, read_left_out, write_left_out

GOOD, MISNAMED, BAD = picture(), picture(kind="WEBP"), b"<html>"


@settings(max_examples=15, deadline=None)
@given(
    images=st.lists(st.sampled_from([GOOD, MISNAMED, BAD]), min_size=1, max_size=8),
    ignored=st.lists(st.sampled_from(["=cmd.txt", "a.txt", "'b", "c,d"]), max_size=3, unique=True),
)
def test_every_file_is_listed_once(tmp_path_factory, images, ignored):
    folder = tmp_path_factory.mktemp("run")
    source = ListSource([(f"-k{row}.png", 0, data) for row, data in enumerate(images)])
    source.ignored = [IgnoredFile(path, "not an image") for path in ignored]
    index = pack(source, folder / "packed", PackOptions(max_rejected=1.0))
    run = RunDirectory(folder)
    write_left_out(run, {"train": index, "val": index})
    expected = [
        (f"-k{row}.png", "rejected", "HTML bytes in a .png, not an image")
        if data is BAD
        else (f"-k{row}.png", "misnamed", "WebP bytes in a .png")
        for row, data in enumerate(images)
        if data is not GOOD
    ]
    expected += [(path, "ignored", "not an image") for path in ignored]
    found = read_left_out(run)
    for name in ("train", "val"):
        files = [file for file in found["files"] if file["set"] == name]
        assert [(file["path"], file["outcome"], file["reason"]) for file in files] == expected
    for outcome in OUTCOMES:
        assert found["counts"].get(outcome, 0) == 2 * sum(line[1] == outcome for line in expected)
    assert run.rejected_csv.exists() == bool(expected)


def test_counts_in_words():
    assert describe_counts({}) == ""
    assert describe_counts({"ignored": 1200, "rejected": 3}) == "3 images rejected, 1,200 files ignored"
    assert describe_counts({"rejected": 1, "misnamed": 1}) == "1 image rejected, 1 image misnamed but used"
